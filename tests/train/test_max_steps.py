"""``--max-steps`` at the end of an epoch: no epoch without a step follows, and each epoch reports once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from elastune.core.journal.records import Record, Reported
from elastune.core.run import ExecutionSettings
from elastune.core.sync_plan import SyncPlan
from elastune.train.session import Session

DATA = TensorDataset(torch.linspace(0, 1, 64).view(64, 1))
LONGER = TensorDataset(torch.linspace(0, 1, 70).view(70, 1))


class Numbers(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from DATA.tensors[0]


Batches = Callable[[Session], Iterator[Any]]
PASSES: dict[str, Batches] = {
    "data": lambda session: session.batches(DATA, 16),
    "dropped": lambda session: session.batches(LONGER, 16, drop_last=True),
    "sampler": lambda session: session.batches(DATA, 16, sampler=RandomSampler(DATA)),
    "drawn again": lambda session: session.batches(DATA, 16, sampler=RandomSampler(DATA, True, num_samples=64)),
    "batch sampler": lambda session: session.batches(
        DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 16, drop_last=False))
    ),
    "stream": lambda session: session.batches(Numbers(), 16),
    "turns": lambda session: session.batches(DATA, 32, turns=2),
}


def epochs_of(out: Path, batches: Batches, **spec: Any) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Train; for each epoch its number and the steps after it, and for each report its epoch and step."""
    records: list[Record] = []
    session = lone_session(out, send=records.append, checkpoint_every_steps=None, **spec)
    model = nn.Linear(1, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    epochs = []
    for epoch in session.epochs(3):
        for batch in batches(session):
            session.backward(model(batch[0] if isinstance(batch, list) else batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        session.report(loss=1.0)
        epochs.append((epoch, session.step))
    session.finish()
    session.flush()
    return epochs, [(each.epoch, each.step) for each in records if isinstance(each, Reported)]


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("name", PASSES)
def test_no_empty_epoch_follows_the_last_step(tmp_path: Path, name: str, slots: int) -> None:
    execution = ExecutionSettings(num_slots=slots)
    for number, limit in enumerate((4, 8), 1):
        expected = [(epoch, 4 * epoch + 4) for epoch in range(number)]
        reports = [(epoch + 1, step) for epoch, step in expected]
        out = tmp_path / str(limit)
        assert epochs_of(out, PASSES[name], max_steps=limit, execution=execution) == (expected, reports)


@pytest.mark.parametrize("name", ["data", "stream", "turns"])
def test_nor_in_a_run_that_goes_on_to_there(tmp_path: Path, name: str) -> None:
    assert epochs_of(tmp_path, PASSES[name], max_steps=6)[0] == [(0, 4), (1, 6)]
    assert epochs_of(tmp_path, PASSES[name], max_steps=8, resume=True)[0] == [(1, 8)]
    assert epochs_of(tmp_path, PASSES[name], max_steps=8, resume=True) == ([], [])


def test_nor_after_a_round_of_learners(tmp_path: Path) -> None:
    asked = {"sync": SyncPlan.parse("local:learners=4,every=2"), "execution": ExecutionSettings(num_slots=4)}
    assert epochs_of(tmp_path, PASSES["data"], max_steps=4, **asked) == ([(0, 4)], [(1, 4)])
