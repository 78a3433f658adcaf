"""What goes wrong before a command has begun."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

RAISING = """
import sys

class Raising:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise {error}

sys.meta_path.insert(0, Raising())
from elastune.cli import main
sys.exit(main({arguments!r}))
"""


def started(folder: Path, code: str) -> tuple[int, str, list[str]]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=folder)
    return done.returncode, done.stdout, done.stderr.splitlines()


@pytest.mark.parametrize(("module", "arguments"), [("typer", ["doctor"]), ("torch", ["run", "linear.py"])])
@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        ("KeyboardInterrupt", 130, "elastune: interrupted"),
        ("ImportError('libx.so: failed to map segment')", 2, "libraries must load (got ImportError: libx.so: failed"),
        ("OSError('libx.so: cannot open')", 2, "libx.so: cannot open"),
        ("MemoryError('no room')", 2, "no room"),
    ],
)
def test_imports_that_fail_are_one_line(
    here: Path, module: str, arguments: list[str], error: str, code: int, message: str
) -> None:
    result, out, lines = started(here, RAISING.format(module=module, error=error, arguments=arguments))
    assert (result, out) == (code, "")
    (line,) = lines
    assert message in line
    assert line.startswith("elastune: ")


def test_too_little_memory_is_one_line(here: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (300 << 20, 300 << 20))

    command = [sys.executable, "-m", "elastune", "run", "linear.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=here, env=dict(os.environ), preexec_fn=limit
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(("elastune: the libraries must load", "elastune: the system refused"))
