"""A run that says nothing of slots or workers is the plain loop: the same weights, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tests.parity.programs import plain_loop
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import TensorDataset

from elastune.cli.results import result_of
from elastune.core.run import ExecutionSettings, derive
from elastune.train.checkpoints.tree import fingerprint
from elastune.train.rng import epoch_order

SEED = 5


def plain_sha256() -> str:
    """Plain PyTorch, with the order of samples and the seeds that elastune draws."""
    torch.manual_seed(derive(SEED, "init"))
    model = plain_loop.net()
    optimizer = plain_loop.optimizer_of(model)
    images, labels = plain_loop.data().tensors
    step = 0
    for epoch in range(plain_loop.EPOCHS):
        for batch in epoch_order(len(images), SEED, epoch).split(plain_loop.BATCH):
            torch.manual_seed(derive(SEED, "slot", step, 0, 0))
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return fingerprint({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def test_a_run_is_the_plain_loop(command_here: Callable[..., Any], tmp_path: Path) -> None:
    found = {}
    for name, more in {"as it comes": (), "four slots": ("--slots", "4")}.items():
        done = command_here("run", plain_loop.__file__, "--seed", SEED, "--out", tmp_path / name, *more)
        assert done.code == 0, done.err
        found[name] = result_of(tmp_path / name).data
    assert found["as it comes"]["num_slots"] == 1
    assert found["as it comes"]["sha256"] == plain_sha256()
    assert found["four slots"]["sha256"] != plain_sha256(), "dropout and BatchNorm are a slot's own"


def test_sparse_gradients_stay_sparse(tmp_path: Path) -> None:
    session = lone_session(tmp_path, execution=ExecutionSettings())
    words = nn.Embedding(7, 3, sparse=True)
    words, optimizer = session.prepare(words, torch.optim.SGD(words.parameters(), lr=0.1))
    before, steps = words.weight.detach().clone(), 0
    for _ in session.epochs(1):
        for (x,) in session.batches(TensorDataset(torch.arange(12) % 3), batch_size=4):
            session.backward(words(x).square().mean())
            assert words.weight.grad is not None
            assert words.weight.grad.is_sparse
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    assert steps == 3
    assert [bool(row.any()) for row in words.weight.detach() - before] == [True] * 3 + [False] * 4
