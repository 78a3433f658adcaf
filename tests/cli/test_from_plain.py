"""``elastune init --from``: a plain loop becomes a program that trains to the same losses, line by line."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.support.sessions import lone_session

from elastune.cli.convert.conversion import convert
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
    result = command_here("init", path, "--from", plain, "--no-check")
    assert result.code == 0, result.err
    for line in (
        "for epoch in session.epochs(1 + 1):",
        "for x, y in session.batches(data()):",
        "session.backward(loss)",
        "session.clip_grad_norm_(1.0)",
        "model, optimizer = session.prepare(model, optimizer)",
    ):
        assert f" {line}\n" in result.out
    assert result.out.endswith(f"Next: elastune check {path} --against {plain}\n")
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
        ("x = 1\n", "with loss.backward.. in this file .got none in plain.py"),
        ("for epoch in range(3:\n", "must be Python .got plain.py:1"),
        ("from transformers import Trainer\nTrainer().train()\n", "Trainer has an adapter"),
        (IMPORTS + LOOP.replace("at,", "session,"), "session names elastune's session .got plain.py:17"),
        ("\0", "plain.py:1: source code"),
        ("import torch\nloss = torch.ones(1)\nloss.backward()\n", "no optimizer.step"),
        (f"{IMPORTS}def fit(model):\n    model.loss().backward()\n", "with loss.backward.. in this file"),
        (
            IMPORTS + LOOP.replace("torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)", "made()"),
            "must be seen",
        ),
        (IMPORTS + LOOP.split("for epoch")[0] + "loss = model(x)\nloss.backward()\noptimizer.step()\n", "a loop takes"),
    ],
)
def test_what_holds_no_training_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        convert(text, "plain.py")


def lines_of(text: str) -> list[str]:
    """The lines of a converted script, without their indentation."""
    converted = convert(text, "plain.py").text
    compile(converted, "plain.py", "exec")
    return [line.strip() for line in converted.splitlines()]


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ("range(1 + 1)", "range(1, 2 + 1)", ["for epoch in session.epochs(2):", "epoch += 1"]),
        ("range(1 + 1)", "range(begin, 5)", ["for epoch in session.epochs(5 - begin):", "epoch += begin"]),
        ("range(1 + 1)", "tqdm(range(4), desc='epochs')", ["for epoch in tqdm(session.epochs(4), desc='epochs'):"]),
        ("range(1 + 1)", "trange(4)", ["for epoch in session.epochs(4):"]),
        ("range(1 + 1)", "[3, 1]", ["# elastune: session.epochs takes the number of epochs"]),
        ("in enumerate(data())", "in enumerate(tqdm(data()), start=1)", ["at = session.batch_index + 1"]),
        ("loss.backward()", "loss.sum().backward()", ['session.backward(loss.sum(), reduction="sum")']),
        ("loss.backward()", "(loss * 2).backward()", ["session.backward(loss * 2)"]),
        (
            "        loss.backward()\n",
            "        loss.backward(retain_graph=True)\n        other = loss * 2\n        other.backward()\n",
            ["session.backward(loss + other)"],
        ),
        ("loss.backward()", "loss.backward(retain_graph=True)", ["# elastune: retain_graph has no counterpart"]),
        (
            "        loss.backward()",
            "        if at == 3:\n            break\n        loss.backward()",
            ["# elastune: a batch"],
        ),
        (
            "        optimizer.zero_grad()",
            "        optimizer.zero_grad()\n        if at == 3: break",
            ["if session.ends_step and at == 3: break"],
        ),
        ("model = nn", "model: nn.Module = nn", ["model: nn.Module = nn.Linear(6, 1)"]),
        ("model = nn.Linear(6, 1)", "model = nn.DataParallel(nn.Linear(6, 1))", ["model = nn.Linear(6, 1)"]),
    ],
)
def test_lines_that_change(old: str, new: str, lines: list[str]) -> None:
    converted = lines_of(IMPORTS + "begin = 2\n" + LOOP.replace(old, new))
    for line in lines:
        assert any(each.startswith(line) for each in converted), line


def test_a_call_at_the_end_of_the_file_trains() -> None:
    body = in_function("train").partition("\n\nif __name__")[0]
    converted = lines_of(f"{body}\n\ntrain()\n")
    assert "def train_epoch(session):" in converted
    assert converted[-2:] == ["def train(session):", "train_epoch(session)"]


def test_a_name_that_functions_share_stays_global() -> None:
    guarded = "".join(f"    {line}\n" for line in LOOP.splitlines())
    text = f"{IMPORTS}def show():\n    print(model)\n\n\nif __name__ == '__main__':\n{guarded}"
    converted = lines_of(text.replace("model = nn", "model: nn.Module = nn"))
    at = converted.index("def train(session):")
    assert converted[at + 1 : at + 3] == ["global model", "model = nn.Linear(6, 1)"]


def test_a_range_of_rows_is_no_data_set() -> None:
    text = LOOP.replace("for at, (x, y) in enumerate(data()):", "for at in range(0, 8, 2):\n        x, y = rows(at)")
    converted = lines_of(IMPORTS + text)
    assert "for at in map(int, session.batches(range(0, 8, 2), batch_size=1, shuffle=False)):" in converted


def test_init_says_what_came_of_it(tmp_path: Path, command_here: Any) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text(IMPORTS + LOOP)
    same = command_here("init", tmp_path / "mine.py", "--from", plain)
    assert same.code == 0, same.err
    path = tmp_path / "mine.py"
    verdict = "mine.py: the same to 1e-09 as plain.py over 10 steps"
    assert same.out.splitlines()[-2].startswith(verdict[:16])
    assert same.out.endswith(f"{path} is written. Next: elastune run {path}\n")
    other = tmp_path / "other.py"
    plain.write_text(
        IMPORTS + LOOP.replace("enumerate(data())", "enumerate([(x, x.sum(1, keepdim=True)) for x, _ in data()])")
    )
    differs = command_here("init", other, "--from", plain)
    assert differs.code == 1
    assert f"Next: change that, then elastune check {other} --against {plain}\n" in differs.out
    unchecked = command_here("init", tmp_path / "third.py", "--from", plain, "--no-check", "--", "--lr", "0.1")
    assert unchecked.code == 0
    assert unchecked.out.endswith(f"--against {plain} -- --lr 0.1\n")


def test_a_file_that_is_none_is_refused(tmp_path: Path, command_here: Any) -> None:
    assert "a file that can be read" in command_here("init", tmp_path / "a.py", "--from", tmp_path / "b.py").line
