"""A run that goes on compares its training set with what it had before."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from elastune.core.errors import UserError
from elastune.core.journal.records import ChangesAccepted, DataContext, Record
from elastune.train.data.fingerprint import MOST_DATASET_BYTES as MOST_BYTES
from elastune.train.data.fingerprint import MOST_LOOKS, TrainingDataHistory, data_context


def rows(count: int = 64, seed: int = 0) -> TensorDataset:
    return TensorDataset(torch.randn(count, 4, generator=torch.Generator().manual_seed(seed)))


def trained(out: Path, data: Any, epochs: int, **spec: Any) -> list[Record]:
    told: list[Record] = []
    session = lone_session(out, send=told.append, checkpoint_every_steps=None, **spec)
    model, optimizer = nn.Linear(4, 1), None
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in session.epochs(epochs):
        for (x,) in session.batches(data, 16):
            session.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    session.finish()
    return told


OTHERS = {
    "data: 32 samples, had 64": rows(32),
    "data: a sample is float64[4], was float32[4]": TensorDataset(rows().tensors[0].double()),
    "data: other values": rows(seed=1),
}


@pytest.mark.parametrize("told", OTHERS)
def test_other_data_are_refused_and_the_run_can_go_on_with_its_own(tmp_path: Path, told: str) -> None:
    trained(tmp_path, rows(), 1)
    with pytest.raises(UserError, match="training goes on with the data that it was begun with") as refused:
        trained(tmp_path, OTHERS[told], 2, resume=True)
    assert str(refused.value.value).startswith(told)
    assert not [r for r in trained(tmp_path, rows(), 2, resume=True) if isinstance(r, ChangesAccepted)]


def test_accepted_data_are_told_with_their_place_and_are_the_runs_own_then(tmp_path: Path) -> None:
    trained(tmp_path, rows(), 1)
    told = trained(tmp_path, rows(32), 2, resume=True, accept_changes=True)
    found = [record for record in told if isinstance(record, ChangesAccepted)]
    assert found == [ChangesAccepted(["data: 32 samples, had 64"], step=4, epoch=1)]
    assert not [r for r in trained(tmp_path, rows(32), 3, resume=True) if isinstance(r, ChangesAccepted)]


def test_a_trial_compares_its_data_with_those_of_its_study(tmp_path: Path) -> None:
    seen = {"samples": 64, "digest": data_context(rows()).digest, "sample": "float32[4]"}
    trained(tmp_path / "a", rows(), 1, data_seen=seen)
    with pytest.raises(UserError, match="32 samples, had 64"):
        trained(tmp_path / "b", rows(32), 1, data_seen=seen)


class OwnGenerator(Dataset[torch.Tensor]):
    """Adds noise from generators that it, or its transform, holds."""

    def __init__(self) -> None:
        self.noise = torch.Generator().manual_seed(1)
        self.transforms = [{"flip": random.Random(2)}, np.random.default_rng(3)]

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        flip = self.transforms[0]["flip"].random()  # type: ignore[index]
        return torch.rand(4, generator=self.noise) + flip + float(self.transforms[1].random())  # type: ignore[attr-defined]


def test_generators_of_the_data_set_stand_where_they_stood_and_what_they_change_is_not_compared() -> None:
    data, untouched = OwnGenerator(), OwnGenerator()
    found = data_context(data)
    assert (found.samples, found.sample, found.digest) == (10, "float32[4]", "")
    assert torch.equal(data[0], untouched[0])


def test_no_more_is_read_than_a_megabyte_and_the_sample_that_reaches_it() -> None:
    read: list[int] = []

    class Large(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> torch.Tensor:
            read.append(index)
            return torch.full((MOST_BYTES // 8,), float(index))

    assert data_context(Large()).digest
    assert len(read) == 2 * 2, "two of half a megabyte, each twice"


def test_passes_over_different_data_are_not_compared_and_looked_at_a_few_times() -> None:
    told: list[str] = []
    first = TrainingDataHistory(None, accepts=False, notify=told.append)
    for epoch in range(9):
        first.begin_pass(rows(64 - epoch), epoch)
        kept = first.kept(epoch)
    assert len(kept) == MOST_LOOKS
    later = TrainingDataHistory(None, accepts=False, notify=told.append)
    later.load(kept)
    later.begin_pass(rows(10), 9)
    assert told == []
    assert first.context().samples == 56, "the record of the end is of the newest"
    assert TrainingDataHistory(None, accepts=False, notify=told.append).context() == DataContext()
