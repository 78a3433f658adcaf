"""A joiner's first passes, before it is a member: everything gets warm, and nothing counts."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import torch

from elastune.sync.base import Sync
from elastune.train.compiling import COMPILED
from elastune.train.control import ControlVector
from elastune.train.data.loading import to_device
from elastune.train.data.source import StepPlan
from elastune.train.transaction import StepTransaction

SLICES = 2


class WarmedUp(BaseException):
    """A joiner has done a few passes that do not count: everything is warm, and training can begin."""


def warm_up(
    plan: StepPlan | None,
    data: Iterator[Any],
    transaction: StepTransaction,
    sync: Sync,
    control: ControlVector,
    device: torch.device,
) -> Generator[Any, None, NoReturn]:
    """Yields the first batches of ``plan`` and throws their gradients away. Raises ``WarmedUp``."""
    COMPILED.listen()
    for part in plan.slices[:SLICES] if plan is not None else ():
        assert plan is not None
        batch = to_device(next(data), device)
        alone = replace(part, ends_step=False, weight=max(part.weight, 1e-9))
        transaction.begin(replace(plan, slices=[alone]), sync, control)
        transaction.begin_slice(alone)
        yield batch
        transaction.abandon()
    raise WarmedUp
