"""State of the user's own that a run keeps: averaged weights, a replay buffer, an fp16 gradient scaler.

In a loop that passes several times through a step, the gradient scaler acts once, on the whole sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.swa_utils import AveragedModel

from elastune.core.errors import UserError
from elastune.core.sync_plan import SyncPlan
from elastune.parallel.sync.base import StepStatistics
from elastune.train.checkpoints.tree import to_tree
from elastune.train.compiling import plain
from elastune.train.program.errors import text_of

# [scaling] A gradient scaler (fp16) in a loop that passes several times through a step: it acts once, on the whole sum.

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


# [tracked] State of the user's own that a run goes on with: averaged weights, a replay buffer, the best value so far.


class Tracked:
    """What a program has given to ``session.track``, by name: a part of the run's state, equal on all workers.

    What was saved under a name that the program has not given yet waits for it.
    """

    name = "tracked"

    def __init__(self) -> None:
        self.scaler: GradScaler | None = None
        self._objects: dict[str, Any] = {}
        self._waiting: dict[str, Any] = {}

    def add(self, name: str, obj: Any, ends_step: Callable[[], bool]) -> None:
        """Know ``obj`` by ``name`` from here on; it gets the state that waits for it.

        ``ends_step``: whether the current batch completed a step, for what acts once a step. Raises ``UserError``.
        """
        if not isinstance(name, str) or not name:
            raise UserError("what is tracked has a name", repr(name)[:80], 'session.track("ema", ema)')
        if name in self._objects:
            raise UserError("each name is tracked once", name, "choose another name")
        if not isinstance(obj, MutableMapping) and not (
            callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))
        ):
            fix = "give it state_dict and load_state_dict, or track a dict"
            raise UserError("what is tracked has a state", f"{name}: {type(obj).__name__}", fix)
        if isinstance(obj, nn.Module):
            plain(obj)  # an average of a compiled model, say
        to_tree(_state(obj), {}, f"session.track({name})")  # now, and not when the first checkpoint is due
        self._objects[name] = plain(obj) if isinstance(obj, nn.Module) else obj
        if name in self._waiting:
            _load(name, self._objects[name], self._waiting.pop(name))
        if isinstance(obj, AveragedModel):
            _average_at_steps(obj, ends_step)
        if isinstance(obj, GradScaler):
            scale_at_steps(obj, ends_step)
            self.scaler = obj

    def refuse(self, plan: SyncPlan) -> None:
        """Raise ``UserError`` where learners of ``plan`` would differ, and what is tracked with them."""
        if self._objects and plan.in_rounds:
            rule = "what is tracked is equal on all workers, and learners between their rounds are not"
            raise UserError(rule, f"{plan} with {', '.join(sorted(self._objects))}", "use --sync allreduce")

    def state_dict(self) -> dict[str, Any]:
        return {**self._waiting, **{name: _state(obj) for name, obj in self._objects.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._waiting = {str(name): saved for name, saved in state.items() if name not in self._objects}
        for name, obj in self._objects.items():
            if name in state:
                _load(name, obj, state[name])


def _state(obj: Any) -> dict[str, Any]:
    return dict(obj) if isinstance(obj, MutableMapping) else dict(obj.state_dict())


def _load(name: str, obj: Any, state: Mapping[str, Any]) -> None:
    if isinstance(obj, MutableMapping):
        obj.clear()
        obj.update(state)
        return
    try:
        obj.load_state_dict(dict(state))
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        fix = "resume with the program that wrote it"
        raise UserError("what is tracked takes its own state back", f"{name}: {error}", fix) from None


def _average_at_steps(average: AveragedModel, ends_step: Callable[[], bool]) -> None:
    """With several slots a worker, a loop's body runs several times a step: average once.

    By a subclass of its own class, as for schedulers: a copy of it averages its own weights.
    """
    kind = type(average)

    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        if ends_step():
            kind.update_parameters(self, model)

    average.__class__ = type(kind.__name__, (kind,), {"update_parameters": update_parameters})
