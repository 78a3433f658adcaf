"""A program beside the plain script that it was made from: the same bits, or the first step that differs, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.program_check import AgainstPlain, by_batch, check_against, judge_against
from elastune.train.proof.compare import Leaf, PassRecord, RunRecord, StepRecord
from elastune.train.proof.plain import PlainOutcome

PLAIN = """
import argparse
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.arange(320.0).reshape(40, 8).sin()
data = TensorDataset(x, (x.sum(1) > 0).long())


def make():
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 2))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)
    for epoch in range(3):
        model.train()
        for b, t in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(b), t)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = sum((model(b).argmax(1) == t).sum() for b, t in DataLoader(data, batch_size=8))
        print(f"epoch {epoch}: {right / 40:.2f}")


if __name__ == "__main__":
    main()
"""
PROGRAM = """
from plain import DataLoader, F, data, make, torch

config = {"lr": 0.1, "scale": 1.0}


def train(session):
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=session.config["lr"])
    model, optimizer = session.prepare(model, optimizer)
    for epoch in session.epochs(3):
        for b, t in session.batches(DataLoader(data, batch_size=8, shuffle=True)):
            optimizer.zero_grad()
            session.backward(F.cross_entropy(model(b), t) * session.config["scale"])
            optimizer.step()
"""
LEAF, OTHER = Leaf(1.0, (1.0,), "1"), Leaf(1.5, (1.5,), "2")


@pytest.fixture
def here(cluster: LocalCluster, forked_from: Callable[[LocalCluster], AbstractContextManager[None]]) -> Iterator[None]:
    """Programs run on the tests' own cluster."""
    with forked_from(cluster):
        yield


def test_a_program_is_held_against_its_plain_script(command_here: Any, tmp_path: Path) -> None:
    script, path = tmp_path / "plain.py", tmp_path / "mine.py"
    script.write_text(PLAIN)
    path.write_text(PROGRAM)
    same = command_here("check", path, "--against", script, "--set", "lr=0.2", "--", "--lr", "0.2")
    assert (same.code, same.out) == (0, "mine.py: the same bits as plain.py over 15 steps\n")
    other = command_here("check", path, "--against", script, "--steps", 2, "--set", "scale=2", "--json")
    assert other.code == 1
    found = other.json
    assert (found["kind"], found["script"], found["steps"]) == ("against", "plain.py", 0)
    assert "first in step 1: the loss differs" in found["problem"]
    assert found["problem"].endswith("2 times the script's")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("nn.Linear(8, 2)", "nn.Linear(8, 3)"), "parameter 3 (2.weight) is (3, 8) there, (2, 8) here"),
        (("    main()\n", "    sys.exit('no data')\n"), "no data"),
        (("for b, t in loader", "for b, t in [(x, data.tensors[1])]"), "it iterates no DataLoader of 40 samples"),
    ],
)
def test_a_script_that_cannot_be_compared_says_why(
    here: None, tmp_path: Path, change: tuple[str, str], problem: str
) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    script, path = tmp_path / "script.py", tmp_path / "mine.py"
    script.write_text(PLAIN.replace(*change))
    path.write_text(PROGRAM)
    found = check_against(Program(path), script, {}, steps=2)
    assert problem in found.problem


def test_a_script_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--against must name an existing"):
        check_against(Program(tmp_path / "mine.py"), tmp_path / "none.py", {})


def run(*steps: StepRecord) -> RunRecord:
    return RunRecord(steps)


def step(number: int = 1, **changes: Any) -> StepRecord:
    one = PassRecord(0, 0, 1.0, (number,), 7, (1.0,))
    return replace(StepRecord(number, 0, (one,), {"lr": "0.1"}, {"w": LEAF}, {"w": LEAF}), **changes)


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (step(gradient={"w": OTHER}), "the loss is the same, and its gradient differs"),
        (step(settings={"lr": "0.2"}), "the optimizer has other settings (lr 0.1, and 0.2)"),
        (step(weights={"w": OTHER}), "the gradient is the same, and the update differs"),
    ],
)
def test_the_first_step_that_differs_is_explained(theirs: StepRecord, why: str) -> None:
    found = judge_against("plain.py", run(step()), run(theirs), PlainOutcome(1))
    assert found.problem.startswith(f"first in step 1: {why}")
    assert found.as_line("mine.py").startswith("mine.py: not the same as plain.py: first in step 1")


def test_a_script_that_accumulates_is_told() -> None:
    found = judge_against("plain.py", run(step(), step(2)), run(step(), step(2)), PlainOutcome(2, without_step=2))
    assert (found.steps, "takes no optimizer step after batch 2" in found.problem) == (1, True)


def test_turns_of_a_batch_are_one_step_of_a_script() -> None:
    turns = run(step(1), step(2, passes=step(1).passes, weights={"w": OTHER}), step(3))
    joined = by_batch(turns)
    assert [(each.step, each.passes[0].losses) for each in joined.steps] == [(1, (1.0, 1.0)), (2, (1.0,))]
    assert joined.steps[0].weights == {"w": OTHER}
    assert AgainstPlain("plain.py", 3, 2e-8).as_line("mine.py") == "mine.py: the same to 2e-08 as plain.py over 3 steps"
