"""A plain loop becomes a program that trains to the same losses; what cannot be rewritten for certain is refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.support.sessions import lone_session

from elastune.cli.commands.init import from_plain
from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings, derive
from elastune.train.rng import seed_everything

IMPORTS = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

losses = []


def data():
    x = torch.arange(240.0).reshape(40, 6).sin()
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


"""
LOOP = """model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
for epoch in range(1 + 1):
    for at, (x, y) in enumerate(data()):
        loss = nn.functional.mse_loss(model(x), y)  # größer
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
    losses.append(float(loss.detach()))
"""


def in_function(name: str, arguments: str = "") -> str:
    body = "".join(f"    {line}\n" for line in LOOP.splitlines())
    return f"{IMPORTS}def {name}({arguments}):\n{body}\n\nif __name__ == '__main__':\n    {name}()\n"


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        (IMPORTS + LOOP, lambda module: None),
        (in_function("main"), lambda module: module.main()),
        (in_function("train", "epochs=3"), lambda module: module.train()),
    ],
    ids=["file", "main", "train"],
)
def test_it_trains_to_the_same(
    tmp_path: Path, text: str, runs: Callable[[ModuleType], None], command_here: Any
) -> None:
    plain, path = tmp_path / "plain.py", tmp_path / "mine.py"
    plain.write_text(text)
    result = command_here("init", path, "--from", plain)
    assert result.code == 0, result.err
    for line in (
        "for epoch in session.epochs(1 + 1):",
        "for at, (x, y) in enumerate(session.batches(data())):",
        "session.backward(loss)",
        "session.clip_grad_norm_(1.0)",
        "model, optimizer, scheduler = session.prepare(model, optimizer, scheduler)",
    ):
        assert f" {line}\n" in result.out
    assert result.out.endswith(f"Next: elastune check {path}\n")
    session = lone_session(tmp_path / "out", execution=ExecutionSettings(num_slots=1))
    module = loaded(path)
    module.train(session)
    seed_everything(derive(session.seed, "init"))
    other = loaded(plain)
    runs(other)
    assert len(other.losses) == 2
    assert module.losses == pytest.approx(other.losses, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", "0 of them in plain.py"),
        ("for epoch in range(3:\n", "must be Python .got plain.py:1"),
        (IMPORTS + LOOP + LOOP, "2 of them in plain.py"),
        (IMPORTS + LOOP.replace("range(1 + 1)", "numbers"), "0 of them"),
        (IMPORTS + LOOP.replace("loss.backward()", "loss.backward(); loss.backward()"), "one .backward"),
        (IMPORTS + LOOP.replace("torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)", "made()"), "is built of"),
        (in_function("main", "lr"), "needs no arguments"),
        (IMPORTS.replace("sin()", "sin() * (2 if model else 1)") + LOOP, "data uses model"),
    ],
)
def test_what_is_not_certain_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        from_plain(text, "plain.py")


def test_a_file_that_is_none_is_refused(tmp_path: Path, command_here: Any) -> None:
    assert "a file that can be read" in command_here("init", tmp_path / "a.py", "--from", tmp_path / "b.py").line
