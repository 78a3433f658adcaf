"""Files with a ``main()`` in place of a training function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.sessions import lone_session

from elastune.core.errors import UserError
from elastune.core.run import Program
from elastune.train.program.load import as_arguments, current_session, end_program, load

USES = "from elastune.adapters.accelerate import Accelerator\n"


def test_settings_as_arguments() -> None:
    settings = {"lr": 0.1, "fast": True, "slow": False, "names": ["a", "b"], "none": None}
    assert as_arguments(settings) == ["--lr", "0.1", "--fast", "--names", "a", "b"]


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("import sys\ndef main(): print(*sys.argv[1:])", {"lr": 2}, "--lr 2"),
        ("import sys\nconfig = {'lr': 1}\ndef main(): print(config['lr'], *sys.argv[1:])", {"lr": 2}, "2"),
        ("def main(): import elastune; print(elastune.current_session().config)", {}, "{}"),
    ],
)
def test_main_trains_where_there_is_an_adapter(
    text: str, settings: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(USES + text)
    load(Program(path)).train(lone_session(tmp_path, config=settings))
    assert capsys.readouterr().out == f"{message}\n"


@pytest.mark.parametrize("text", ["def main(): ...", f"{USES}def main(x): ...", f"{USES}main = 1"])
def test_other_files_have_no_training(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(UserError, match="must define train"):
        load(Program(path))


def test_a_program_may_end_before_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def train(session):\n    session.config['end']()\n    raise AssertionError\n")
    load(Program(path)).train(lone_session(tmp_path, config={"end": end_program}))
    for outside in (current_session, end_program):
        with pytest.raises(UserError, match="belongs into a run"):
            outside()
