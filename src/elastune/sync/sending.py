"""How the numbers of learners travel where a round ends: which of them are rounded, and to what.

All learners begin a round alike, so a number can travel as the way that it has come since. What is lost of a way is
small beside the way, and not beside the number: a second moment that moves by a thousandth in a round would not move at
all, if it were rounded itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastune.comm.compress.codecs import BLOCK, Blocks, Codec, Half, HalfBytes, ShorterFloat8, ShorterHalf
from elastune.core.errors import UserError
from elastune.core.sync_plan import Send, SyncPlan

_CODECS: dict[Send, tuple[Codec, Codec]] = {
    "bf16": (Half(torch.bfloat16), ShorterHalf()),
    "int8": (Blocks(), ShorterFloat8()),
    "int4": (HalfBytes(), ShorterFloat8()),
}
"""Of parameters' ways, and of those of optimizers' states."""


def codecs_of(send: Send, numbers: Sequence[torch.Tensor], params: int, buffers: int) -> dict[int, Codec]:
    """The codec of each of a learner's ``numbers`` that is rounded, by its place.

    They are ``params`` parameters, ``buffers`` buffers, and the optimizer's state. Buffers, counts of steps and what
    has less than a block of numbers travel as they are: gains and biases are few.
    """
    if send == "whole":
        return {}
    of_params, of_state = _CODECS[send]
    found = dict.fromkeys(range(params), of_params) | dict.fromkeys(range(params + buffers, len(numbers)), of_state)
    return {i: codec for i, codec in found.items() if numbers[i].numel() >= BLOCK and numbers[i].is_floating_point()}


def check_rounding(plan: SyncPlan, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``UserError`` where parts of an optimizer's state have to fit each other more exactly than they would."""
    centred = isinstance(optimizer, torch.optim.RMSprop) and any(group["centered"] for group in optimizer.param_groups)
    if plan.send != "whole" and plan.moments == "mean" and centred:
        rule = "RMSprop(centered=True) takes the root of a difference, which rounded numbers make negative"
        raise UserError(rule, str(plan), "use moments=fresh, or send=whole")
