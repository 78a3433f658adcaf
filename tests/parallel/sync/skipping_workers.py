"""Learners of a model with a layer that only some samples reach: what ``test_moments.py`` runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from elastune.core.run import ExecutionSettings
from elastune.core.slots import slices_of_round
from elastune.core.sync_plan import SyncPlan
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import replicated
from elastune.parallel.mechanisms.base import Replicated
from elastune.parallel.sync.rounds import RoundSync
from elastune.testing.worker_processes import Worker

PLAN = SyncPlan.parse("local:learners=3,every=2")
BATCH, OWN = 12, 4
REACHES = ((), (2,), (), (0, 1, 2))  # by round: the learners whose samples reach the layer


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.some, self.never, self.last = (nn.Linear(*size) for size in ((6, 8), (8, 8), (2, 2), (8, 4)))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        return self.last(hidden + self.some(hidden) if x[0, 0] > 0 else hidden)  # type: ignore[no-any-return]


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def batch(at: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A global batch of round ``at``: the first number of each sample says whether it reaches the layer."""
    generator = torch.Generator().manual_seed(10 * at + step)
    x = torch.randn(BATCH, 6, generator=generator).double()
    x[:, 0] = torch.tensor([1.0 if i // OWN in REACHES[at] else -1.0 for i in range(BATCH)])
    return x, torch.randint(0, 4, (BATCH,), generator=generator)


def trained(group: Group, name: str) -> dict[str, torch.Tensor]:
    """What one worker comes to."""
    model = Skips()
    optimizer, comms = optimizer_of(model, name), replicated(group)
    sync = RoundSync(
        Replicated().attach(model, optimizer, comms, ExecutionSettings()), comms, PLAN, PLAN.learners, elastic=True
    )
    for at in range(len(REACHES)):
        x, y = map(torch.cat, zip(*(batch(at, step) for step in range(PLAN.every)), strict=True))
        carried = PLAN.carried(group.size, group.rank)
        sync.parts = slices_of_round([BATCH] * PLAN.every, PLAN.learners, PLAN.learners, carried, "exact", None)
        for i, share in enumerate(sync.parts):
            sync.begin(share, starts_step=i == 0)
            part = slice(share.samples.start, share.samples.stop)
            sync.backward(F.cross_entropy(model(x[part]), y[part]), share)
            if share.ends_update:
                optimizer.step()
                optimizer.zero_grad()
        sync.after_step()
    return told(model, optimizer)


def told(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and moments, by name."""
    results = {name: p.detach() for name, p in model.named_parameters()}
    moments = {f"{name}:{key}": value for name, p in model.named_parameters() for key, value in state_of(optimizer, p)}
    return results | moments


def state_of(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [*optimizer.state.get(p, {}).items()]


def work(worker: Worker, name: str) -> None:
    worker.send("came to", trained(worker.form("skips"), name))
    worker.receive()
