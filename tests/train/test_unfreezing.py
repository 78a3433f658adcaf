"""Gradual unfreezing: as plain PyTorch freezes, with the same bits on any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import TensorDataset

from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job
from elastune.train.models import unfreezing
from elastune.train.rng import epoch_order

PROGRAM = Program(Path(__file__).parent.parent / "programs" / "unfreezing.py")
SCHEDULE = {"2.*": 0, "0.weight": 1, "*": None}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(50, 6, generator=generator).double()
    return TensorDataset(inputs, torch.randn(50, 3, generator=generator).double())


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_it_is_what_plain_pytorch_does(tmp_path: Path, mode: Any, kind: str) -> None:
    """Momentum and weight decay, too, leave alone what is frozen; clipping does not see it."""
    options = {"SGD": {"momentum": 0.9}, "AdamW": {}}[kind] | {"lr": 0.05, "weight_decay": 0.1}
    ours, plain, data = network(), network(), samples()
    session = lone_session(tmp_path, execution=ExecutionSettings(mode=mode, num_slots=4))
    result = session.unfreeze(ours, SCHEDULE)
    assert result == {"0.weight": 1, "0.bias": None, "2.weight": 0, "2.bias": 0}
    model, optimizer = session.prepare(ours, getattr(torch.optim, kind)(ours.parameters(), **options))
    for _ in session.epochs(3):
        for x, y in session.batches(data, batch_size=16):
            session.backward(F.mse_loss(model(x), y))
            session.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
    optimizer = getattr(torch.optim, kind)(plain.parameters(), **options)
    for epoch in range(3):
        for name, parameter in plain.named_parameters():
            parameter.requires_grad_(name != "0.bias" and (epoch > 0 or name != "0.weight"))
        for index in epoch_order(len(data), session.seed, epoch).split(16):
            x, y = data[index]
            F.mse_loss(plain(x), y).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(plain[0].bias, network()[0].bias)
    assert not torch.equal(plain[0].weight, network()[0].weight)
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-10), name


def test_workers_do_not_show_in_it_nor_does_a_break(cluster: LocalCluster, tmp_path: Path) -> None:
    def digest(name: str, workers: int, **more: Any) -> str:
        return run_job(
            RunSpec(PROGRAM, tmp_path / name, execution=ExecutionSettings(workers=workers, num_slots=4), **more),
            cluster=cluster,
        ).sha256

    whole = digest("one", 1)
    assert digest("two", 2) == whole
    digest("broken", 2, epochs=1)
    assert digest("broken", 1, epochs=3, resume=True) == whole
    assert digest("other", 1, config={"unfreeze": {"*": 0}}) != whole


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({}, "the first epoch of some names"),
        ([], "the first epoch of some names"),
        ({"2.*": 0}, "names every tensor"),
        ({"3.*": 0, "*": 0}, "is a tensor of the model"),
        ({"*": 1}, "trains in the first epoch"),
        ({"*": -1}, "an epoch from 0"),
        ({"*": True}, "an epoch from 0"),
        ({"*": "0"}, "an epoch from 0"),
        ({1: 0}, "an epoch from 0"),
    ],
)
def test_a_schedule_that_cannot_be_meant_is_refused(schedule: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        unfreezing(network(), schedule)


def test_a_model_in_pieces_is_refused(tmp_path: Path) -> None:
    session = lone_session(tmp_path, execution=ExecutionSettings(mechanism="zero", num_slots=4))
    with pytest.raises(UserError, match="whole tensors on every worker"):
        session.unfreeze(network(), SCHEDULE)
