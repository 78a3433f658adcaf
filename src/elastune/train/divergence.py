"""Ends a run whose loss has exploded, by the rule of ``core.divergence``: alike on every worker, in the same step."""

from __future__ import annotations

import math
from collections.abc import Mapping

from elastune.core.divergence import Divergence, LossTrack, follow, follow_reports
from elastune.core.errors import Diverged
from elastune.train.progress import Progress

_TRAINING = ""  # the name of the training loss among those that are followed


class DivergenceWatch:
    """Follows the training loss and the metrics that ``rule`` names; what it remembers is in ``progress``."""

    def __init__(self, rule: Divergence, progress: Progress) -> None:
        self._rule = rule
        self._progress = progress

    def loss(self, value: float, step: int, turn: int = 0) -> None:
        """Judge the mean loss of the global batch of ``step``, counted from 1, by those of the same ``turn``.

        Raises ``Diverged``.
        """
        if not math.isfinite(value):
            raise Diverged(f"loss is {value} at step {step}")
        losses, name = self._progress.losses, f"turn {turn}" if turn else _TRAINING
        losses[name], why = follow(losses.get(name, LossTrack()), value, self._rule.factor)
        if why:
            raise Diverged(f"loss is {value:.4g} at step {step}, {why}")

    def metrics(self, means: Mapping[str, float], step: int, *, again: bool = False) -> None:
        """Judge what was reported after ``step`` steps, or (``again``) is repeated. Raises ``Diverged``."""
        followed, wrong = follow_reports(self._progress.losses, means, self._rule)
        if wrong:
            raise Diverged(f"{wrong} after step {step}")
        if not again:
            self._progress.losses = followed
