"""State of the user's own that a run goes on with: averaged weights, a replay buffer, the best value so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.swa_utils import AveragedModel

from elastune.core.errors import UserError
from elastune.core.sync_plan import SyncPlan
from elastune.train.checkpoints.tree import to_tree
from elastune.train.compiling import plain
from elastune.train.scaling import scale_at_steps


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
