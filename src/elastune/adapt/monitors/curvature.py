"""How the loss bends: the Hessian's top eigenvalue and trace (see ``hessian``), and the trace of the empirical Fisher.

Source of the last: E |g_i|^2 = tr(Sigma) + |G|^2 over the samples' own gradients at their own labels (the trace of the
empirical Fisher matrix of Kunstner et al. 2019, "Limitations of the Empirical Fisher Approximation for Natural Gradient
Descent"). It costs nothing beside the norms of the noise scale.

Bias and variance: the traces of Fisher matrix and Hessian are unbiased, the eigenvalue is not (see ``hessian``).
Readings are few and far between, so little is smoothed and the standard errors are rough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from elastune.adapt.monitors import base
from elastune.adapt.monitors.base import Monitor, Reading, State
from elastune.core.decisions import Signal
from elastune.core.options import Range, check


@dataclass(frozen=True)
class Curvature(Monitor):
    """Gives the signals ``sharpness`` (top eigenvalue of the Hessian), ``hessian_trace`` and ``fisher_trace``.

    Args:
        every: Steps from one reading to the next.
        memory: The length of the averages, in readings.
    """

    every: Annotated[int, Range(1)] = 100
    memory: Annotated[float, Range(1)] = 4.0

    name = "curvature"
    gives = frozenset({"sharpness", "hessian_trace", "fisher_trace"})
    needs = frozenset({"sharpness", "trace", "norms"})

    def __post_init__(self) -> None:
        check(self.name, self)

    def init(self) -> State:
        return {name: base.empty(2) for name in ("sharpness", "hessian_trace", "fisher_trace")}

    def update(self, state: State, reading: Reading) -> State:
        new = {name: (value, weight) for name, value, weight in _values(reading)}
        return {
            name: base.with_value(old, *new[name], self.memory) if name in new else old for name, old in state.items()
        }

    def signals(self, state: State) -> dict[str, Signal]:
        return {name: signal for name, old in state.items() if (signal := base.mean(old)) is not None}


def _values(reading: Reading) -> Iterator[tuple[str, float, float]]:
    """Name, value and weight of what ``reading`` has."""
    if reading.sharpness is not None:
        yield "sharpness", reading.sharpness, 1.0
    if reading.trace is not None:
        yield "hessian_trace", reading.trace, 1.0
    norms = reading.norms
    if norms is not None and norms.parts >= 2:
        variance = (norms.part_square - norms.square) * norms.batch / (norms.parts - 1)
        yield "fisher_trace", norms.square + variance * (1 - 1 / norms.batch), norms.parts - 1.0
