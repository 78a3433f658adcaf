"""How a learning rate follows the batch size: the rules people use, as functions of the ratio of batch sizes.

``none`` keeps it. ``sqrt`` keeps the variance of an update equal (Krizhevsky, "One weird trick for parallelizing
convolutional neural networks", 2014). ``linear`` keeps the mean progress per sample equal (Goyal et al.,
"Accurate, Large Minibatch SGD", 2017, section 2.1). None of them is right everywhere: that is what tuning is for.
Rules that need more than the ratio, for changes while training runs, are in ``policies.lr_rules``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from elastune.core.errors import UserError

LR_RULES: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "none": lambda ratio: 1.0,
        "sqrt": math.sqrt,
        "linear": lambda ratio: ratio,
    }
)
"""Rule -> factor on the learning rate, given batch / base batch."""


def scaled_lr(lr: float, batch: int, base_batch: int, rule: str) -> float:
    """The learning rate for ``batch`` where ``lr`` belongs to ``base_batch``.

    Raises ``UserError`` for an unknown rule and for batch sizes below one.
    """
    factor = LR_RULES.get(rule)
    if factor is None:
        raise UserError("unknown learning-rate rule", rule, f"use one of {', '.join(LR_RULES)}")
    if batch < 1 or base_batch < 1:
        raise UserError("a batch holds at least one sample", f"{batch} and {base_batch}", "give batch sizes >= 1")
    return lr * factor(batch / base_batch)
