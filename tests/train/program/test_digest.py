"""Which changes of a program's file change what it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastune.core.run import Program
from elastune.train.program.source import program_digest

FILE = '''"""A program."""
import torch
import elastune

EPOCHS = 3
SIZES = [16, 32]
config = {"lr": 0.1}
objectives = {"accuracy": "max"}

def space(trial):
    return {"lr": trial.suggest_float("lr", 0.1, 1.0), "size": trial.suggest_categorical("size", SIZES)}

def model(width):
    return torch.nn.Linear(width, 1)

def train(session):
    config = session.config
    for _ in session.epochs(EPOCHS):
        model(config["width"])

if __name__ == "__main__":
    elastune.tune(train, space, objectives=objectives, trials=3)
'''


def digest(tmp_path: Path, text: str) -> str:
    path = tmp_path / "program.py"
    path.write_text(text)
    return program_digest(Program(path))


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("0.1, 1.0", "0.01, 1.0", True),
        ("trials=3", "trials=30", True),
        ('"lr": 0.1', '"lr": 0.2', True),
        ("[16, 32]", "[16]", True),
        ("EPOCHS = 3", "EPOCHS  =  3  # passes", True),
        ('"""A program."""', "# a program", True),
        ("EPOCHS = 3", "EPOCHS = 4", False),
        ("Linear(width, 1)", "Linear(width, 2)", False),
        ('config["width"]', 'config["width"] + 1', False),
        ("import torch", "import numpy as torch", False),
        ("SIZES =", "torch.set_flush_denormal(True)\nSIZES =", False),
        ("EPOCHS = 3", "EPOCHS = 3\nEPOCHS += 1", False),
    ],
)
def test_only_what_training_uses_counts(tmp_path: Path, old: str, new: str, same: bool) -> None:
    assert FILE.count(old) >= 1
    assert (digest(tmp_path, FILE.replace(old, new)) == digest(tmp_path, FILE)) is same
