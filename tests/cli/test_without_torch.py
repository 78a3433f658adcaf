"""Commands that read journals, or only print, import no torch: it takes seconds, and nothing of it is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.torchless import torchless
from tests.fuzz.fuzz_journals import KINDS, lines
from tests.support.studies import stopping_study


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the journals of a study, a run and a frontier."""
    folder = tmp_path_factory.mktemp("results")
    stopping_study(12).write(folder / "study")
    for kind in ("run", "frontier"):
        (folder / kind).mkdir()
        (folder / kind / "journal.jsonl").write_bytes(b"\n".join(lines(KINDS[kind]())) + b"\n")
    return folder


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "command",
    [
        "report study --pick accuracy=0.5 --json",
        "report run",
        "report run --ledger",
        "report frontier",
        "explain study",
        "explain run --json",
        "explain frontier",
        "export study --csv trials.csv --json trials.json --optuna trials.log",
        "init first.py",
        "plan --help",
        "doctor --help",
    ],
)
def test_a_command_needs_no_torch(results: Path, command: str) -> None:
    done = torchless(results, *command.split())
    assert done.returncode == 0, done.stderr


def test_a_command_that_needs_torch_fails_here(results: Path) -> None:
    """So the others would, too, if they needed it."""
    (results / "program.py").write_text("import torch\n\ndef train(session):\n    pass\n")
    done = torchless(results, "run", "program.py", "--workers", "1")
    assert done.returncode != 0
    assert "torch" in done.stderr
