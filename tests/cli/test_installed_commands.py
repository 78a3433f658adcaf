"""Commands that other packages offer by entry points."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.fake_package import write_package

from elastune.cli import main

SOURCE = """
import typer
from elastune.core.errors import UserError

def greet(name: str, loud: bool = False) -> None:
    \"\"\"Greet NAME.\"\"\"
    print(f"{'HELLO' if loud else 'hello'} {name}")

def refuse() -> None:
    raise UserError("a greeting has a name", "none", "give one")

def interrupt() -> int:
    raise KeyboardInterrupt

def leave() -> None:
    raise SystemExit("greetings are over")

def text() -> str:
    return "a text is no exit code"

several = typer.Typer(add_completion=False)

@several.command()
def one() -> None:
    print("one")

@several.command()
def two() -> int:
    return 3

seven = 7
empty = typer.Typer()
"""
NAMES = ("greet", "refuse", "interrupt", "leave", "text", "several", "seven", "empty")
POINTS = {
    **{name: f"toy_commands:{name}" for name in NAMES},
    "broken": "toys_nowhere:main",
    "run": "toy_commands:greet",
}


@pytest.fixture(autouse=True)
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = write_package(tmp_path / "site", {"elastune.commands": POINTS}, {"toy_commands": SOURCE})
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("toy_commands", None)
    return folder


@pytest.mark.parametrize(
    ("words", "code", "printed"),
    [
        (["greet", "Ann", "--loud"], 0, "HELLO Ann"),
        (["greet", "--help"], 0, "Greet NAME."),
        (["several", "one"], 0, "one"),
        (["several", "two"], 3, ""),
        (["text"], 0, ""),
        (["run", "--help"], 0, "Train a program once"),  # nobody replaces a command of elastune
    ],
)
def test_a_command_runs(words: list[str], code: int, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == code
    assert printed in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["broken"], 2, "an installed command must load: ModuleNotFoundError"),
        (["broken", "--help"], 2, "(got broken = toys_nowhere:main): mend or uninstall toys 1.0"),
        (["seven"], 2, "an installed command must be a function or a Typer app (got 7)"),
        (["empty"], 2, "Typer must accept an installed command"),
        (["greet"], 2, "Missing argument 'name': see 'elastune greet --help'"),
        (["several", "three"], 2, "No such command 'three'"),
        (["refuse"], 2, "a greeting has a name (got none): give one"),
        (["interrupt"], 130, "interrupted"),
        (["leave"], 1, "greetings are over"),
        (["grett"], 2, "No such command 'grett'"),
    ],
)
def test_an_error_is_one_line(words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == code
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_help_lists_them_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  broken     A command of toys 1.0." in lines
    assert "  greet      A command of toys 1.0." in lines
    assert sum(line.split()[:1] == ["run"] for line in lines) == 1
    assert "toy_commands" not in sys.modules


def test_a_broken_one_harms_no_other_command(toys: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(toys)!r}); from elastune.cli import main; "
        "code = main(['doctor', '--help']); sys.exit(code or 'toy_commands' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
