"""What a step's reduction tells beside gradients: sums over the parts of a global batch, from which monitors read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elastune.comm.reducer import Pair, Scalar, scalar

STATISTICS = ("square", "weighted", "count", "loss", "sharpness", "trace")
"""What each part of a global batch (a slot, or what a worker runs) adds to the step's sums, beside its gradients: the
squared norm of its mean gradient and of that times weights, each times the part's weight; 1; its weighted loss; and
what was measured of it (``Sync.record_statistic``)."""
_COUNT, _LOSS = STATISTICS.index("count"), STATISTICS.index("loss")


@dataclass(frozen=True)
class StepStatistics:
    """A step's: sums over parts (``STATISTICS``), and the squared norms of the summed gradient, plain and weighted.

    ``distance``: how far apart learners were where a round ended (``sync.distance``); None where there are none.
    ``staleness``: how many global batches old on average what learners took of others without waiting was, in a round;
    None where nobody took anything so.
    """

    parts: dict[str, float]
    norms: tuple[float, float] | None
    distance: float | None = None
    staleness: float | None = None


def step_statistics(parts: Sequence[Scalar], norms: Pair | None, distance: float | None = None) -> StepStatistics:
    """From the sums, in the order of ``STATISTICS``."""
    named = {name: float(value) for name, value in zip(STATISTICS, parts, strict=True)}
    return StepStatistics(named, None if norms is None else (float(norms[0]), float(norms[1])), distance)


class PartStatistics:
    """What this worker has to say of the parts that it has run since ``clear``."""

    def __init__(self) -> None:
        self.values: list[Scalar] = [0.0] * len(STATISTICS)

    def clear(self) -> None:
        """Nothing yet."""
        self.values = [0.0] * len(STATISTICS)

    def add(self, other: PartStatistics) -> None:
        """All that ``other`` has."""
        self.values = [own + value for own, value in zip(self.values, other.values, strict=True)]

    def tensor(self) -> torch.Tensor:
        """The values, in single precision, on the CPU."""
        return torch.tensor([float(value) for value in self.values], dtype=torch.float32)

    def record(self, name: str, value: float) -> None:
        """One of ``STATISTICS`` that was measured, weighted already."""
        self.values[STATISTICS.index(name)] += value

    def add_loss(self, loss: torch.Tensor, weight: float) -> None:
        """The loss of a pass."""
        value = loss.item() if loss.device.type == "cpu" else scalar(loss.detach().reshape(()))
        self.values[_LOSS] += value * weight

    def add_norms(self, norms: Pair, weight: float) -> None:
        """A part of weight ``weight`` is done: ``norms`` are those of its weighted gradient."""
        for place, norm in enumerate(norms):
            self.values[place] += norm / weight
        self.values[_COUNT] += 1.0


def squared_norms(params: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] | None) -> Pair:
    """The squared norms of what the parameters have for gradients, and of these times ``weights``; as a reducer's."""
    pairs = [(p.grad, i) for i, p in enumerate(params) if p.grad is not None]
    if not pairs:
        return 0.0, 0.0
    grads = [(grad.coalesce().values() if grad.is_sparse else grad).float() for grad, _ in pairs]
    plain = scalar(torch.stack(torch._foreach_norm(grads)).square().sum())
    if weights is None:
        return plain, 0.0
    weighed = [(grad.to_dense() if grad.is_sparse else grad) * weights[i] for grad, i in pairs]
    return plain, scalar(torch.stack(torch._foreach_norm(weighed)).square().sum())
