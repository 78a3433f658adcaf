"""How the numbers of learners travel where a round ends: which of them are rounded, and to what."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastune.comm.compress.codecs import Blocks, Codec, Float8, Half, HalfBytes
from elastune.core.sync_plan import Send

_CODECS: dict[Send, tuple[Codec, Codec]] = {
    "bf16": (Half(torch.bfloat16), Half(torch.bfloat16)),
    "int8": (Blocks(), Float8()),
    "int4": (HalfBytes(), Float8()),
}
"""Of parameters' ways, and of optimizers' states: a second moment spans decades, and is divided by."""


def codecs_of(send: Send, numbers: Sequence[torch.Tensor], params: int, buffers: int) -> dict[int, Codec]:
    """The codec of each of a learner's ``numbers`` that is rounded, by its place.

    They are ``params`` parameters, ``buffers`` buffers, and the optimizer's state. Buffers and single numbers (counts
    of steps among them) travel as they are.
    """
    if send == "whole":
        return {}
    of_params, of_state = _CODECS[send]
    state = range(params + buffers, len(numbers))
    return dict.fromkeys(range(params), of_params) | {i: of_state for i in state if numbers[i].numel() > 1}
