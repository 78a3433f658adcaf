"""The wheel as users install it: alone, without the repository, with and without the extras."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.installed import Installed, build_wheel, install


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(wheel, tmp_path_factory.mktemp("core"))


def test_a_worker_needs_the_core_alone(core: Installed) -> None:
    assert core.run("elastune", "--version").stdout.startswith("elastune ")
    assert core.run("elastune", "init", "train.py").returncode == 0
    done = core.run("elastune", "run", "train.py", "--workers", "2", "--set", "epochs=1", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert "state   sha256" in done.stdout
    assert "no report was written: reports need plotly" in done.stderr
    assert "elastune[report]" in done.stderr
    assert (core.folder / "out" / "journal.jsonl").exists()
    report = core.run("elastune", "report", "out")
    assert report.returncode == 2
    assert report.stderr == "elastune: pictures need matplotlib (got no such package): pip install 'elastune[report]'\n"
    assert core.run("elastune", "agent", "--help").returncode == 0


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("tune", "train.py", "--trials", "2"), "tune"),
        (("frontier", "train.py", "--workers", "1,2", "--target", "0.9", "--budget", "1m"), "tune"),
    ],
)
def test_a_missing_extra_is_one_line(core: Installed, words: tuple[str, ...], extra: str) -> None:
    core.run("elastune", "init", "train.py")
    done = core.run("elastune", *words)
    assert done.returncode == 2
    assert done.stderr.strip().count("\n") == 0, done.stderr
    assert f"pip install 'elastune[{extra}]'" in done.stderr
    assert not (core.folder / "elastune-out").exists()


def test_python_says_which_extra_is_missing(core: Installed) -> None:
    done = core.run("python", "-c", "import elastune; elastune.tune")
    assert done.stderr.splitlines()[-1].endswith("(got no such package): pip install 'elastune[tune]'")


def test_everything_that_the_readme_uses(wheel: Path, tmp_path: Path) -> None:
    full = install(wheel, tmp_path, "all")
    full.run("elastune", "init", "train.py")
    done = full.run(
        "elastune", "tune", "train.py", "--trials", "2", "--workers", "1", "--set", "epochs=1", "--out", "s"
    )
    assert done.returncode == 0, done.stderr
    assert full.run("elastune", "report", "s").returncode == 0
    assert (full.folder / "s" / "report.html").exists()
