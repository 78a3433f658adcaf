"""A gradient scaler (fp16) in a loop that passes several times through a step: it acts once, on the whole sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from elastune.core.errors import UserError
from elastune.sync.statistics import StepStatistics
from elastune.train.program.causes import text_of

UNTRACKED = "No inf checks were recorded"  # torch's words where no parameter has a gradient
FIX = 'scaler = session.track("scaler", torch.amp.GradScaler(...)) behind session.prepare'
_POWERS = {"loss": 1, "trace": 1, "sharpness": 1, "square": 2, "weighted": 2}
_SCALED = "_elastune_scaled"


def scale_at_steps(scaler: GradScaler, ends_step: Callable[[], bool]) -> None:
    """Let ``scaler`` unscale, step and update where a step is complete only; and know what it has scaled.

    The object gets a subclass of its own class, as schedulers do.
    """
    kind = type(scaler)

    def once(name: str) -> Callable[..., Any]:
        act = getattr(kind, name)
        return lambda self, *args, **kwargs: act(self, *args, **kwargs) if ends_step() else None

    def scale(self: GradScaler, outputs: Any) -> Any:
        found = kind.scale(self, outputs)
        if isinstance(found, torch.Tensor) and self.is_enabled():
            setattr(found, _SCALED, True)
        return found

    acts = {name: once(name) for name in ("unscale_", "step", "update")}
    scaler.__class__ = type(kind.__name__, (kind,), {**acts, "scale": scale})


def is_scaled(loss: torch.Tensor) -> bool:
    """Whether a tracked scaler has scaled ``loss``, and nothing was done to it since."""
    return bool(getattr(loss, _SCALED, False))


def unscaled(found: StepStatistics, scale: float) -> StepStatistics:
    """What a step tells of losses and gradients that were ``scale`` times as large as they are."""
    parts = {name: value / scale ** _POWERS.get(name, 0) for name, value in found.parts.items()}
    norms = None if found.norms is None else (found.norms[0] / scale**2, found.norms[1] / scale**2)
    return replace(found, parts=parts, norms=norms)


def untracked_scaler(error: BaseException) -> UserError | None:
    """What to say of a scaler that the session does not know, where ``error`` is of that."""
    if not isinstance(error, AssertionError) or UNTRACKED not in text_of(error):
        return None
    rule = "a gradient scaler acts once a step, when the sum over workers is there"
    return UserError(rule, "one that acts in every batch", FIX)
