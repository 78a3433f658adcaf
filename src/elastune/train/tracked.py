"""State of the program's own that a run keeps: averaged weights, a replay buffer, an fp16 gradient scaler.

In a loop that passes several times through a step, averages and gradient scalers act once, on the whole sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.swa_utils import AveragedModel

from elastune.core.errors import UserError
from elastune.core.sync_plan import SyncPlan
from elastune.train.checkpoints.tree import to_tree
from elastune.train.compiling import plain
from elastune.train.program.errors import text_of
from elastune.train.schedules import UNGATED, ungated

UNTRACKED = "No inf checks were recorded"  # in torch's error where no parameter has a gradient
FIX = 'scaler = session.track("scaler", torch.amp.GradScaler(...)) behind session.prepare'
_SCALED = "_elastune_scaled"


class Tracked:
    """The objects of ``session.track``, by name: a part of the run's state, equal on all workers.

    State that was saved under a name waits until the program tracks an object of this name.

    Attributes:
        scaler: The program's gradient scaler, if it tracks one.
    """

    name = "tracked"

    def __init__(self) -> None:
        self.scaler: GradScaler | None = None
        self._objects: dict[str, Any] = {}
        self._waiting: dict[str, Any] = {}

    def add(self, name: str, obj: Any, ends_step: Callable[[], bool]) -> None:
        """Track ``obj`` from here on; it gets the state that waits for its name.

        Args:
            name: Its name in checkpoints.
            obj: An object with ``state_dict`` and ``load_state_dict``, or a dict.
            ends_step: Whether the current batch completed a step, for averages and scalers, which act once a step.

        Raises:
            UserError: For a name that is taken or empty, and for an object whose state cannot be saved.
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
        to_tree(_state(obj), {}, f"session.track({name})")  # an error comes now, and not with the first checkpoint
        self._objects[name] = plain(obj) if isinstance(obj, nn.Module) else obj
        if name in self._waiting:
            _load(name, self._objects[name], self._waiting.pop(name))
        if isinstance(obj, AveragedModel):
            _average_at_steps(obj, ends_step)
        if isinstance(obj, GradScaler):
            scale_at_steps(obj, ends_step)
            self.scaler = obj

    def refuse(self, plan: SyncPlan) -> None:
        """Raise ``UserError`` where learners of ``plan`` would differ, and tracked objects with them."""
        if self._objects and plan.in_rounds:
            rule = "what is tracked is equal on all workers, and learners between their rounds are not"
            raise UserError(rule, f"{plan} with {', '.join(sorted(self._objects))}", "use --sync allreduce")

    def refuse_scaler(self) -> None:
        """Raise ``UserError`` where a gradient scaler is tracked: the program does not hold the loss to be scaled."""
        if self.scaler is not None and self.scaler.is_enabled():
            rule, fix = "a loss of the global batch is not scaled", "use --precision bf16 without a gradient scaler"
            raise UserError(rule, "a tracked gradient scaler", fix)

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
    """Let ``average`` average once a step, though the loop's body runs once for each slot.

    The object gets a subclass of its own class, as schedulers do: a copy of it averages its own weights.
    """
    kind = ungated(average)

    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        if ends_step():
            kind.update_parameters(self, model)

    average.__class__ = type(kind.__name__, (kind,), {"update_parameters": update_parameters, UNGATED: kind})


# --- a gradient scaler (fp16) ---


def scale_at_steps(scaler: GradScaler, ends_step: Callable[[], bool]) -> None:
    """Let ``scaler`` unscale, step and update only where a step is complete, and mark the losses that it scales.

    The object gets a subclass of its own class, as schedulers do.
    """
    kind = ungated(scaler)

    def once(name: str) -> Callable[..., Any]:
        method = getattr(kind, name)
        return lambda self, *args, **kwargs: method(self, *args, **kwargs) if ends_step() else None

    def scale(self: GradScaler, outputs: Any) -> Any:
        scaled = kind.scale(self, outputs)
        if isinstance(scaled, torch.Tensor) and self.is_enabled():
            setattr(scaled, _SCALED, True)
        return scaled

    methods = {name: once(name) for name in ("unscale_", "step", "update")}
    scaler.__class__ = type(kind.__name__, (kind,), {**methods, "scale": scale, UNGATED: kind})


def is_scaled(loss: torch.Tensor) -> bool:
    """Whether ``loss`` is what a tracked scaler returned, unchanged."""
    return bool(getattr(loss, _SCALED, False))


def untracked_scaler(error: BaseException) -> UserError | None:
    """The error of a program that does not track its scaler, where ``error`` comes from that; else None."""
    if not isinstance(error, AssertionError) or UNTRACKED not in text_of(error):
        return None
    rule = "a gradient scaler acts once a step, when the sum over workers is there"
    return UserError(rule, "one that acts in every batch", FIX)
