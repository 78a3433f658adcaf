"""Divergence guard: back to the last good state with a smaller learning rate, instead of training on in ruins.

Practice rather than theory: Chowdhery et al., "PaLM", 2022, section 5.1, went back to a checkpoint before a loss spike
and skipped the data behind it; Zhang et al., "OPT", 2022, section 2.5, lowered the learning rate as well. Here the copy
is in memory, the data go on from where they are (so they are skipped too), and the learning rate is multiplied.

What it cannot do: tell a spike that would have healed from one that would not (``patience`` waits for it); save a run
whose data or program yield the NaN; know that the copy is good: a decision counts one step after the loss
that it rests on, so training may break between the two. Then every try fails, and the run stops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from elastune.core.errors import UserError
from elastune.policies.base import Policy

if TYPE_CHECKING:
    from elastune.policies.run import Run

Action = Literal["remember", "restore", "stop"]
MEMORY = 50  # sane losses that the smoothed one looks back on
DEAF_STEPS = 2  # after asking to go back: these losses are not of the restored state yet


@dataclass(frozen=True)
class Rules:
    """See ``DivergenceGuard``."""

    factor: float
    patience: int
    every: int
    tries: int


@dataclass(frozen=True)
class Guard:
    """``smooth`` and ``spread``: mean of the sane losses and of their distances from it, over ``sane`` of them.

    ``bad``: losses in a row that were too high. ``kept``: the step of the newest copy, -1 for none. ``back``: the step
    at which going back was asked for last, -1 for never; ``tried``: how often it was.
    """

    sane: int = 0
    smooth: float = 0.0
    spread: float = 0.0
    bad: int = 0
    kept: int = -1
    back: int = -1
    tried: int = 0

    def limit(self, factor: float) -> float:
        """Losses above it are too high: ``factor`` x the smoothed loss. Near or below 0 the losses' spread counts."""
        return self.smooth + (factor - 1) * max(abs(self.smooth), self.spread)


def advance(guard: Guard, step: int, loss: float, rules: Rules) -> tuple[Guard, Action | None]:
    """The guard after the loss of ``step``, and what to do."""
    if guard.back >= 0 and step <= guard.back + DEAF_STEPS:
        return guard, None
    high = not math.isfinite(loss) or (guard.sane > 0 and loss > guard.limit(rules.factor))
    if not high:
        return _sane(guard, step, loss, rules)
    guard = replace(guard, bad=guard.bad + 1)
    if math.isfinite(loss) and guard.bad < rules.patience:
        return guard, None
    if guard.kept < 0 or guard.tried >= rules.tries:
        # Where the copy was forgotten, going back is refused and takes the stop with it: then stop where it stands
        return replace(guard, kept=-1, bad=0, back=step), "stop"
    return replace(guard, bad=0, back=step, tried=guard.tried + 1), "restore"


def _sane(guard: Guard, step: int, loss: float, rules: Rules) -> tuple[Guard, Action | None]:
    calm = guard.sane == 0 or loss <= guard.limit(math.sqrt(rules.factor))  # not on its way up
    share = 1 / min(guard.sane + 1, MEMORY)
    distance = abs(loss - guard.smooth) if guard.sane else 0.0
    guard = replace(
        guard,
        sane=guard.sane + 1,
        smooth=guard.smooth + share * (loss - guard.smooth),
        spread=guard.spread + share * (distance - guard.spread),
        bad=0,
    )
    # Nor soon after going back: it has to show first that the smaller rate holds.
    if calm and (guard.kept < 0 or step - max(guard.kept, guard.back) >= rules.every):
        return replace(guard, kept=step), "remember"
    return guard, None


class DivergenceGuard(Policy):
    """Keep a copy of model and optimizer every ``every`` steps while the loss is sane; when it is not finite, or above
    ``factor`` x its smoothed value ``patience`` steps in a row, go back to the copy and multiply the learning rate by
    ``backoff``. After ``tries`` times (in the whole run), or with no copy yet, the run stops with a checkpoint, of the
    copy where there is one.
    """

    monitors: ClassVar[tuple[str, ...]] = ()
    survives_divergence: ClassVar[bool] = True

    def __init__(
        self, factor: float = 3.0, patience: int = 5, every: int = 100, backoff: float = 0.5, tries: int = 3
    ) -> None:
        for name, value, good, fix in (
            ("factor", factor, 1 < factor < math.inf, "give a number above 1"),
            ("patience", patience, patience >= 1, "give 1 or more steps"),
            ("every", every, every >= 1, "give 1 or more steps"),
            ("backoff", backoff, 0 < backoff < 1, "give a factor between 0 and 1"),
            ("tries", tries, tries >= 0, "give how often to go back, 0 or more"),
        ):
            if not good:
                raise UserError(f"divergence cannot work with this {name}", value, fix)
        self.backoff = backoff
        self.rules = Rules(factor, patience, every, tries)
        self.guard = Guard()

    def after_step(self, run: Run) -> None:
        """Judge the step's loss."""
        loss = run.snapshot.loss
        if loss is None:
            return
        before = self.guard
        self.guard, action = advance(before, run.step, loss, self.rules)
        if action == "remember":
            run.remember()
        elif action == "restore":
            run.restore()
            run.scale_lr(self.backoff)
        elif action == "stop":
            if before.kept >= 0:
                run.restore()  # so that the checkpoint is worth keeping
            run.stop()

    def state(self) -> dict[str, Any]:
        """What it has seen and done."""
        return dict(vars(self.guard))

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.guard = Guard(**state)
