"""The kit of engines, on those of other packages that are installed; and what they cannot do is refused in one line."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from elastune.core.run import Means
from elastune.mechanisms.deepspeed import DeepSpeed
from elastune.mechanisms.fairscale import FairScale
from elastune.mechanisms.fsdp2 import Fsdp2
from elastune.mechanisms.horovod import Horovod
from elastune.testing.kits.engine import EngineKit


class TestDeepSpeed(EngineKit):
    mechanism: ClassVar[Any] = DeepSpeed()
    cases = tuple(Means(2, mechanism="deepspeed", mode="fast", zero_stage=stage) for stage in (0, 1, 2, 3))
    dtype = torch.float32  # it keeps state in fp32, whatever parameters are
    rtol = 1e-4


class TestFairScale(EngineKit):
    mechanism: ClassVar[Any] = FairScale()
    cases = (Means(2, mechanism="fairscale", mode="fast"), Means(3, mechanism="fairscale", mode="fast"))


class TestFsdp2(EngineKit):
    mechanism: ClassVar[Any] = Fsdp2()
    cases = (Means(2, mechanism="fsdp2", mode="fast"), Means(3, mechanism="fsdp2", mode="fast"))


class TestHorovod(EngineKit):
    mechanism: ClassVar[Any] = Horovod()
    cases = (Means(2, mechanism="horovod", mode="fast"),)
