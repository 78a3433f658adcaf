"""The kit of engines, on those of other packages that are installed; and what they cannot do is refused in one line."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings
from elastune.core.slots import BatchSlice
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import replicated
from elastune.parallel.mechanisms.deepspeed import DeepSpeed
from elastune.parallel.mechanisms.fairscale import FairScale
from elastune.parallel.mechanisms.fsdp2 import Fsdp2
from elastune.parallel.mechanisms.horovod import Horovod
from elastune.testing.kits.engine import SLOTS, EngineKit


class TestDeepSpeed(EngineKit):
    mechanism: ClassVar[Any] = DeepSpeed()
    cases = tuple(ExecutionSettings(2, mechanism="deepspeed", mode="fast", zero_stage=stage) for stage in (0, 1, 2, 3))
    dtype = torch.float32  # it keeps state in fp32, whatever parameters are
    rtol = 1e-4


class TestFairScale(EngineKit):
    mechanism: ClassVar[Any] = FairScale()
    cases = (ExecutionSettings(3, mechanism="fairscale", mode="fast"),)


class TestFsdp2(EngineKit):
    mechanism: ClassVar[Any] = Fsdp2()
    cases = (
        ExecutionSettings(3, mechanism="fsdp2", mode="fast"),
        ExecutionSettings(3, mechanism="fsdp2", num_slots=SLOTS),
    )


class TestHorovod(EngineKit):
    mechanism: ClassVar[Any] = Horovod()
    cases = (ExecutionSettings(2, mechanism="horovod", mode="fast"),)


@pytest.mark.parametrize(
    ("parameter", "options", "message"),
    [
        (torch.zeros(4, 2), {"fused": True}, "use fused=False"),
        (torch.zeros(4, 2).t(), {}, "make it contiguous"),
        (torch.tensor(0.0), {}, "is a scalar"),
    ],
)
def test_what_rows_cannot_be_exact_with_is_refused(
    parameter: torch.Tensor, options: dict[str, Any], message: str
) -> None:
    model = nn.ParameterList([nn.Parameter(parameter)])
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    with pytest.raises(UserError, match=message):
        Fsdp2().attach(model, optimizer, replicated(Group()), ExecutionSettings(mechanism="fsdp2"))


def test_a_block_that_runs_twice_in_a_pass_is_refused() -> None:
    from elastune.parallel.mechanisms.fsdp2_replica import OrderedScatter  # it imports FSDP2, which takes long

    scatter = OrderedScatter(Group(), 2)
    rows, gradients, torchs_own = torch.zeros(4), torch.ones(4), (None, None)
    scatter.begin_pass(BatchSlice(range(3), 0, 0.5, ends_slot=True, ends_step=False))
    scatter(rows, gradients, *torchs_own)
    with pytest.raises(UserError, match="a block that ran twice"):
        scatter(rows, gradients, *torchs_own)
