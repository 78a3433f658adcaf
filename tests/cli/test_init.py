"""The first program: written once, and it does what its comments say."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from tests.support.sessions import lone_session

from elastune.core.run import Program
from elastune.train.program.load import load


def test_the_first_program_trains_and_can_be_tuned(
    command_here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command_here("init").out == "train.py is written. Next: elastune run train.py --workers 2\n"
    program = load(Program(Path("train.py")))
    session = lone_session(tmp_path / "out", config=program.config)
    program.train(session)
    assert session.metrics["accuracy"] > 0.8
    assert set(program.objectives) <= {*session.metrics, "seconds"}
    assert program.space is not None
    chosen = program.space(optuna.trial.FixedTrial({"lr": 0.01, "batch_size": 32}))
    assert set(chosen) <= set(program.config)


def test_it_names_the_file_and_overwrites_nothing(command_here, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    assert command_here("init", file).code == 0
    assert f"elastune run {file} --workers 2" in file.read_text()
    assert "train.py" not in file.read_text()
    assert "overwrites nothing" in command_here("init", file).line
    assert "No such file or directory" in command_here("init", tmp_path / "none" / "a.py").line
    assert ".py" in command_here("init", tmp_path / "words").line
