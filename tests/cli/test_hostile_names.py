"""Names and texts of a program that a terminal would obey are shown as escapes, wherever a command tells them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import torch
from torch.utils.data import TensorDataset

config = {"lr": 0.1, "\\x1b[31mred\\u202e": 1}
objectives = {"loss": "min"}

def space(trial):
    red = "\\x1b[31mred\\u202e"
    return {"lr": trial.suggest_categorical("lr", [0.1, 0.2]), red: trial.suggest_int(red, 1, 1)}

def train(session):
    if session.config["lr"] == 0.2:
        raise ValueError("\\x1b]0;title\\x07\\u202e")
    model = torch.nn.Linear(4, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in session.epochs(1):
        for (x,) in session.batches(TensorDataset(torch.ones(16, 4)), batch_size=8):
            session.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        session.report(**{"loss": 1.0, "shift\\x1b[2J\\u202e": 1.0})
"""


def hidden(text: str) -> set[str]:
    """What a terminal would obey or not show."""
    return {c for c in text if not (c.isprintable() or c in "\n\t" or c.isspace())}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "hostile.py"
    path.write_text(PROGRAM)
    return path


def test_a_run_tells_them_as_escapes(program: Path, tmp_path: Path, command_here: Callable[..., Any]) -> None:
    out = tmp_path / "run"
    for said in (
        command_here("run", program, "--out", out, "--workers", "2"),
        command_here("report", out),
        command_here("explain", out),
        command_here("run", program, "--out", tmp_path / "bad", "--set", "lr=0.2"),
        command_here("run", program, "--out", tmp_path / "new", "--set", "\x1b[31mgreen=2"),
    ):
        assert hidden(said.out + said.err) == set()
        assert "\\x1b[" in said.out + said.err or "\\x1b]0;title" in said.err or said.code == 0
    assert "\x1b" not in (tmp_path / "bad" / "journal.jsonl").read_text()


def test_a_study_tells_them_as_escapes(program: Path, tmp_path: Path, command_here: Callable[..., Any]) -> None:
    out, file = tmp_path / "study", tmp_path / "trials.csv"
    results = [command_here("tune", program, "--out", out, "--trials", "2", "--sampler", "grid", "--workers", "2")]
    results += [command_here("report", out), command_here("explain", out), command_here("export", out, "--csv", file)]
    for said in results:
        assert said.code == 0, said.err
        assert hidden(said.out + said.err) == set()
    text = file.read_text()
    assert hidden(text) == set()
    for name in ("\\x1b[31mred\\u202e", "shift\\x1b[2J\\u202e"):
        assert name in text.splitlines()[0]
    assert "\\x1b]0;title\\x07\\u202e" in text
