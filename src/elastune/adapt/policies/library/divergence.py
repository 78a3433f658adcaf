"""The divergence guard: go back to the last good state with a smaller learning rate, instead of training on.

This is practice rather than theory. Chowdhery et al., "PaLM", 2022, section 5.1, went back to a checkpoint before a
loss spike and skipped the data after it; Zhang et al., "OPT", 2022, section 2.5, lowered the learning rate as well.
Here the copy is in memory, the data go on from where they are (so they are skipped too), and the learning rate is
multiplied.

Limits: it cannot distinguish a spike that would have healed from one that would not (``patience`` waits for it). It
cannot save a run whose data or program yield the NaN. It does not know that the copy is good: a decision takes effect
one step after its loss, so training may break between the two. Then every try fails, and the run stops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from elastune.adapt.policies.base import Hook, Policy
from elastune.core.divergence import limit
from elastune.core.errors import UserError

if TYPE_CHECKING:
    from elastune.adapt.policies.base import Run

Action = Literal["remember", "restore", "stop"]
MEMORY = 50  # sane losses that the smoothed one looks back on
DEAF_STEPS = 2  # after a request to go back: these losses still come from the broken state


@dataclass(frozen=True)
class Sanity:
    """The losses so far, and the kept copies.

    Attributes:
        sane: Number of sane losses.
        smooth, spread: The mean of the sane losses, and of their distances from it.
        bad: Number of losses in a row that were too high.
        kept: The step of the newest copy; -1 for none.
        back: The step at which the policy last requested to go back; -1 for never.
        tried: The number of these requests.
    """

    sane: int = 0
    smooth: float = 0.0
    spread: float = 0.0
    bad: int = 0
    kept: int = -1
    back: int = -1
    tried: int = 0

    def limit(self, factor: float) -> float:
        """Return the loss above which a loss is too high."""
        return limit(self.smooth, factor, self.spread)


def advance(sanity: Sanity, step: int, loss: float, rules: DivergenceGuard) -> tuple[Sanity, Action | None]:
    """Return the state after the loss of ``step``, and what to do."""
    if sanity.back >= 0 and step <= sanity.back + DEAF_STEPS:
        return sanity, None
    high = not math.isfinite(loss) or (sanity.sane > 0 and loss > sanity.limit(rules.factor))
    if not high:
        return _sane(sanity, step, loss, rules)
    sanity = replace(sanity, bad=sanity.bad + 1)
    if math.isfinite(loss) and sanity.bad < rules.patience:
        return sanity, None
    if sanity.kept < 0 or sanity.tried >= rules.tries:
        # Without a copy, a decision to go back is refused together with its stop: then only stop
        return replace(sanity, kept=-1, bad=0, back=step), "stop"
    return replace(sanity, bad=0, back=step, tried=sanity.tried + 1), "restore"


def _sane(sanity: Sanity, step: int, loss: float, rules: DivergenceGuard) -> tuple[Sanity, Action | None]:
    calm = sanity.sane == 0 or loss <= sanity.limit(math.sqrt(rules.factor))  # not rising
    share = 1 / min(sanity.sane + 1, MEMORY)
    distance = abs(loss - sanity.smooth) if sanity.sane else 0.0
    sanity = replace(
        sanity,
        sane=sanity.sane + 1,
        smooth=sanity.smooth + share * (loss - sanity.smooth),
        spread=sanity.spread + share * (distance - sanity.spread),
        bad=0,
    )
    # Nor soon after going back: it has to show first that the smaller rate holds.
    if calm and (sanity.kept < 0 or step - max(sanity.kept, sanity.back) >= rules.every):
        return replace(sanity, kept=step), "remember"
    return sanity, None


@dataclass(frozen=True)
class DivergenceGuard(Policy):
    """``divergence``: go back to a copy of the state, with a smaller learning rate, when the loss is broken.

    A loss is broken when it is not finite, or above ``factor`` times its smoothed value for ``patience`` steps in a
    row. After ``tries`` times (in the whole run), or with no copy yet, the run stops with a checkpoint; of the copy,
    where there is one.

    Args:
        factor: Times the smoothed loss.
        patience: Steps in a row.
        every: Keep a copy of model and optimizer every so many steps, while the loss is sane.
        backoff: The factor on the learning rate after going back.
        tries: How often to go back in the whole run.
    """

    monitors: ClassVar[tuple[str, ...]] = ()
    survives_divergence: ClassVar[bool] = True
    hooks: ClassVar[tuple[Hook, ...]] = ("after_step",)

    factor: float = 3.0
    patience: int = 5
    every: int = 100
    backoff: float = 0.5
    tries: int = 3

    def __post_init__(self) -> None:
        for name, good, fix in (
            ("factor", 1 < self.factor < math.inf, "give a number above 1"),
            ("patience", self.patience >= 1, "give 1 or more steps"),
            ("every", self.every >= 1, "give 1 or more steps"),
            ("backoff", 0 < self.backoff < 1, "give a factor between 0 and 1"),
            ("tries", self.tries >= 0, "give how often to go back, 0 or more"),
        ):
            if not good:
                raise UserError(f"divergence cannot work with this {name}", getattr(self, name), fix)

    def init(self) -> Sanity:
        return Sanity()

    def decide(self, hook: Hook, state: Sanity, run: Run) -> Sanity:
        """Judge the step's loss."""
        loss = run.snapshot.loss
        if loss is None:
            return state
        after, action = advance(state, run.step, loss, self)
        if action == "remember":
            run.remember()
        elif action == "restore":
            run.restore()
            run.scale_lr(self.backoff)
        elif action == "stop":
            if state.kept >= 0:
                run.restore()  # so that the checkpoint is worth keeping
            run.stop()
        return after
