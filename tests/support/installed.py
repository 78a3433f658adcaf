"""Virtual environments as users have them: the wheel and its dependencies, without the repository or anything else.

Installing torch takes half a minute. The environments here link to the packages of the environment that runs the tests:
to those that the wheel requires with the extras in question, and to no others.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]
NO_WHEEL = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"


@dataclass(frozen=True)
class Installed:
    """An environment in which elastune is installed, and a folder outside of the repository to work in."""

    bin: Path
    folder: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run ``command``, whose program stands in the environment's ``bin``."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        words = [str(self.bin / command[0]), *command[1:]]
        return subprocess.run(
            words, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120, check=False
        )


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this repository into ``folder``."""
    subprocess.run([sys.executable, "-c", NO_WHEEL, str(folder)], cwd=REPOSITORY, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path, *extras: str) -> Installed:
    """Make an environment with ``wheel`` and what it requires with ``extras``."""
    root = folder / "venv"
    venv.create(root, symlinks=True, with_pip=False)
    python = root / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True)
    (packages,) = (root / "lib").glob("python*/site-packages")
    (metadata,) = packages.glob("elastune-*.dist-info")
    for name in _required(Distribution.at(metadata), extras, {}):
        _link(distribution(name), packages)
    work = folder / "work"
    work.mkdir()
    return Installed(root / "bin", work)


def _required(package: Distribution, extras: tuple[str, ...], known: dict[str, set[str]]) -> dict[str, set[str]]:
    """The names of what ``package`` requires with ``extras``, and of what these require, each with its own extras."""
    for line in package.requires or ():
        requirement = Requirement(line)
        if requirement.marker and not any(requirement.marker.evaluate({"extra": e}) for e in ("", *extras)):
            continue
        name, wanted = requirement.name.lower(), set(requirement.extras)
        if name == "elastune":
            _required(package, tuple(wanted), known)
        elif name not in known or not wanted <= known[name]:
            known[name] = known.get(name, set()) | wanted
            _required(distribution(name), tuple(known[name]), known)
    return known


def _link(package: Distribution, packages: Path) -> None:
    """Link the files of ``package`` into ``packages``: each entry of its own whole, of a shared folder file by file."""
    for file in package.files or ():
        if ".." in file.parts or "__pycache__" in file.parts:
            continue
        source, target = Path(str(package.locate_file(file.parts[0]))), packages / file.parts[0]
        if not target.exists():
            target.symlink_to(source)
