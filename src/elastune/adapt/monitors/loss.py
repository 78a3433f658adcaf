"""The training loss, smoothed.

Bias and variance: it is the mean over the batches of the last ``memory`` readings, each at its own step's parameters.
So it lags behind while the loss falls. It is weighted by the batch: a short last batch of an epoch counts for what it
holds, and after a change of batch every sample counts alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from elastune.adapt.monitors import base
from elastune.adapt.monitors.base import Monitor, Need, Reading, State
from elastune.core.decisions import Signal
from elastune.core.options import Range, check


@dataclass(frozen=True)
class Loss(Monitor):
    """Gives the signal ``loss``, the smoothed training loss.

    Args:
        every: Steps from one reading to the next.
        memory: The length of the average, in readings; 1 gives the newest batch's loss.
    """

    every: Annotated[int, Range(1)] = 1
    memory: Annotated[float, Range(1)] = 20.0

    name = "loss"
    gives = frozenset({"loss"})
    needs = frozenset[Need]()

    def __post_init__(self) -> None:
        check(self.name, self)

    def init(self) -> State:
        return base.empty(2)

    def update(self, state: State, reading: Reading) -> State:
        return base.with_value(state, reading.loss, reading.batch, self.memory)

    def signals(self, state: State) -> dict[str, Signal]:
        loss = base.mean(state)
        return {} if loss is None else {"loss": loss}
