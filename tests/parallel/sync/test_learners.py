"""Several learners on one worker, and the way back to where their round began."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastune.core.run import ExecutionSettings
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import replicated
from elastune.parallel.mechanisms.base import Replicated
from elastune.parallel.sync.rounds import Learners


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)])
def test_a_learning_rate_that_a_round_has_changed_comes_back(rate: float | torch.Tensor) -> None:
    """A rate that is a tensor is changed in place, as torch's schedulers do."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, foreach=False)
    halves = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    comms = replicated(Group())
    learners = Learners(Replicated().attach(model, optimizer, comms, ExecutionSettings()))
    learners.begin_round()
    learners.enter(0)
    optimizer.step()
    halves.step()
    assert float(optimizer.param_groups[0]["lr"]) == 0.25
    learners.restore()
    assert float(optimizer.param_groups[0]["lr"]) == 0.5
