"""Learning rates and their schedulers: scaled or set while training runs, stepped once a step, and where they end."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from elastune.core.errors import UserError

_GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr")  # a group's learning rate, and rates that schedulers keep there
_SCHEDULER_RATES = ("base_lrs", "max_lrs", "min_lrs", "_last_lr")
UNGATED = "_elastune_ungated"  # in a gated class: the object's own class


# --- schedulers inside a loop that passes several times through a step ---
def ungated(obj: Any) -> Any:
    """The class of ``obj`` without the gate of an earlier session of this process: it was made at import, perhaps."""
    kind = type(obj)
    return kind.__dict__.get(UNGATED, kind)


def gate(scheduler: Any, between_steps: Callable[[], bool], mean: Callable[[Any], float]) -> None:
    """Let ``scheduler.step`` act at step boundaries only; give ``ReduceLROnPlateau`` the mean metric over workers.

    The object gets a subclass of its own class. So ``isinstance`` still holds, and its ``state_dict`` (all of its
    attributes) stays plain data. The gate of an earlier session of this process is dropped.

    Args:
        scheduler: Changed in place.
        between_steps: Whether the program's current batch ends a step.
        mean: The mean of a metric over workers.
    """
    kind = ungated(scheduler)

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        if not between_steps():
            return
        if isinstance(self, ReduceLROnPlateau):
            metric, *rest = args if args else (kwargs.pop("metrics"),)
            kind.step(self, mean(metric), *rest, **kwargs)
        else:
            kind.step(self, *args, **kwargs)

    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, UNGATED: kind})


# --- schedulers that the program did not give to session.prepare ---
class FoundSchedulers:
    """The schedulers of prepared optimizers that the program steps and did not give to ``session.prepare``.

    They are looked for once, before the first step. A state that was loaded earlier waits for them.

    Attributes:
        schedulers: Those that were found, in an order that is the same on all workers and at each start.
    """

    def __init__(self) -> None:
        self.schedulers: tuple[Any, ...] = ()
        self._searched = False
        self._waiting: list[dict[str, Any]] = []
        self._then: Callable[[Sequence[Any]], None] = lambda schedulers: None

    def wait_with(self, kinds: Sequence[str], then: Callable[[Sequence[Any]], None]) -> None:
        """Call ``then`` with the schedulers once they are found, if they are of these ``kinds``."""

        def follow(schedulers: Sequence[Any]) -> None:
            if [_kind(each) for each in schedulers] == list(kinds):
                then(schedulers)

        self._then = follow

    def search(self, optimizers: Sequence[torch.optim.Optimizer], registered: Sequence[Any]) -> tuple[Any, ...]:
        """Look for the schedulers of ``optimizers`` beside the ``registered`` ones; return those that are new.

        Raises:
            UserError: Where the waiting state is that of other schedulers.
        """
        if self._searched:
            return ()
        self._searched = True
        self.schedulers = schedulers_of(optimizers, registered)
        waiting, self._waiting = self._waiting, []
        if waiting:
            self.load(waiting)
        else:
            self._then(self.schedulers)
        return self.schedulers

    def states(self) -> list[dict[str, Any]]:
        """Their states, each with its class under "kind" and the state under "state"."""
        states = [{"kind": _kind(each), "state": each.state_dict()} for each in self.schedulers]
        return states if self._searched else self._waiting

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from ``states``, now or once they are found. Raises ``UserError`` if they are of other schedulers."""
        if not self._searched:
            self._waiting = [dict(each) for each in states]
            return
        kinds, now = [each["kind"] for each in states], [_kind(each) for each in self.schedulers]
        if kinds and kinds != now:
            rule = "a run goes on with the schedulers that its optimizers had"
            value = f"{', '.join(now) or 'none'} before the first epoch, and {', '.join(kinds)} in the saved state"
            raise UserError(rule, value, "make them before session.epochs")
        for scheduler, saved in zip(self.schedulers, states, strict=False):
            scheduler.load_state_dict(saved["state"])


def schedulers_of(optimizers: Sequence[torch.optim.Optimizer], registered: Sequence[Any]) -> tuple[Any, ...]:
    """The living schedulers of ``optimizers`` in a fixed order, without ``registered`` ones and parts of others."""
    places = {id(optimizer): place for place, optimizer in enumerate(optimizers)}
    alive = _living(optimizers)
    if not alive and any(map(_is_scheduled, optimizers)) and gc.get_freeze_count():  # which counts, and is slow
        gc.unfreeze()  # the program made it when it was imported
        alive = _living(optimizers)
        gc.freeze()
    parts = {id(part) for each in (*registered, *alive) for part in [*_all([each])][1:]} | set(map(id, registered))
    schedulers = [each for each in alive if id(each) not in parts]
    return tuple(
        sorted(schedulers, key=lambda each: (places[id(each.optimizer)], _kind(each), repr(each.state_dict())))
    )


def _living(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """The schedulers that have one of ``optimizers``, which does not know them."""
    owners = set(map(id, optimizers))
    users = gc.get_referrers(*optimizers)
    attributes = [each for each in users if type(each) is dict and id(each.get("optimizer")) in owners]
    users += gc.get_referrers(*attributes) if attributes else []  # Python keeps attributes in the object, or in a dict
    living = {id(each): each for each in users if _is_scheduler(type(each)) and id(each.optimizer) in owners}
    return [*living.values()]


def _is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether one of torch's schedulers has wrapped the optimizer's ``step``."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def _is_scheduler(kind: type) -> bool:
    """Whether objects of ``kind`` schedule an optimizer: torch's, or of another package with the same methods."""
    if issubclass(kind, LRScheduler):
        return True
    methods = all(callable(getattr(kind, name, None)) for name in ("step", "state_dict", "load_state_dict"))
    named = "sched" in f"{kind.__module__}.{kind.__name__}".lower() and not kind.__module__.startswith("elastune.")
    return methods and named and not issubclass(kind, torch.optim.Optimizer)


def _kind(scheduler: Any) -> str:
    return type(scheduler).__name__


def learning_rates(optimizer: torch.optim.Optimizer | None) -> list[float]:
    """The learning rate of each parameter group."""
    return [] if optimizer is None else [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


# --- learning rates that change while training runs ---
@dataclass(frozen=True)
class Ramp:
    """A learning-rate factor applied linearly over ``steps`` steps, of which ``done`` are over."""

    factor: float
    steps: int
    done: int = 0
    correct_momentum: bool = False

    def next(self) -> tuple[float, Ramp | None]:
        """The factor of the next step on the present learning rate, and the rest of the ramp; None: it is over."""
        before = 1 + (self.factor - 1) * self.done / self.steps
        after = 1 + (self.factor - 1) * (self.done + 1) / self.steps
        rest = None if self.done + 1 == self.steps else replace(self, done=self.done + 1)
        return after / before, rest


def set_rates(optimizer: torch.optim.Optimizer, schedulers: Iterable[Any], lr: float) -> None:
    """Set every group's learning rate to ``lr``; schedulers go on from there in the proportion they had."""
    factors = [lr / float(group["lr"]) if float(group["lr"]) > 0 else 1.0 for group in optimizer.param_groups]
    scale_rates(optimizer, schedulers, factors)
    for group in optimizer.param_groups:
        _put(group, "lr", lr)


def scale_rates(
    optimizer: torch.optim.Optimizer,
    schedulers: Iterable[Any],
    factors: list[float],
    *,
    correct_momentum: bool = False,
) -> None:
    """Multiply the learning rate of each parameter group, and the rates its schedulers start from, by its factor.

    Args:
        factors: One for each parameter group.
        correct_momentum: Divide momentum buffers by the factor. In torch's form of SGD (velocity v <- m v + g, then
            p <- p - lr v) a larger rate at once multiplies the push of past gradients too, which were meant for the
            smaller rate (Lin et al. 2019, "Dynamic Mini-batch SGD for Elastic Distributed Training").
    """
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        for name in _GROUP_RATES:
            if name in group:
                _put(group, name, float(group[name]) * factor)
        if correct_momentum and factor > 0:
            for p in group["params"]:
                buffer = optimizer.state.get(p, {}).get("momentum_buffer")
                if buffer is not None:
                    buffer.div_(factor)
    for scheduler in _all(schedulers):
        for name in _SCHEDULER_RATES:
            rates = getattr(scheduler, name, None)
            if isinstance(rates, list) and len(rates) == len(factors):
                setattr(scheduler, name, [rate * factor for rate, factor in zip(rates, factors, strict=True)])


def _put(group: dict[str, Any], name: str, value: float) -> None:
    if isinstance(group[name], torch.Tensor):  # a capturable optimizer keeps its rate on the device
        group[name].fill_(value)
    else:
        group[name] = value


def _all(schedulers: Iterable[Any]) -> Iterable[Any]:
    """``schedulers``, and the schedulers that they are made of."""
    for scheduler in schedulers:
        yield scheduler
        yield from _all(getattr(scheduler, "_schedulers", ()))


# Where a learning-rate schedule ends, by its saved state, and what it does beyond.
#
# A training that is made longer may pass the end of its schedule; the user is warned of it.

RISES, KEEPS = "its rate rises again", "it keeps its last rate"
FREE = "the program's own function sets the rate, perhaps below 0"


@dataclass(frozen=True)
class ScheduleEnd:
    """Where a schedule ends.

    Attributes:
        kind: Its class, "OneCycleLR".
        built_for: The calls of its ``step`` that it was built for; None: its state does not have them.
        beyond: What it does after them, in words; "" where torch raises an error.
    """

    kind: str
    built_for: int | None
    beyond: str

    def __str__(self) -> str:
        schedule = self.kind if self.built_for is None else f"{self.kind} was built for {self.built_for} steps"
        return f"{schedule}; beyond, {self.beyond or 'it raises an error'}"


def ends_of(state: Mapping[str, Any]) -> list[ScheduleEnd]:
    """Return where the scheduler with this ``state_dict`` ends; an empty list if it has no end or is not torch's own.

    Schedulers that are joined (``SequentialLR``, ``ChainedScheduler``) end where their last parts do.
    """
    parts = state.get("_schedulers")
    if isinstance(parts, (list, tuple)):
        return _joined(state, [part for part in parts if isinstance(part, Mapping)])
    for kind, names, length, beyond in (
        ("OneCycleLR", {"_schedule_phases"}, "total_steps", ""),
        ("CosineAnnealingLR", {"eta_min"}, "T_max", RISES),
        ("PolynomialLR", {"power"}, "total_iters", KEEPS),
        ("LinearLR", {"start_factor"}, "total_iters", KEEPS),
    ):
        if names <= state.keys() and isinstance(state.get(length), int):
            return [ScheduleEnd(kind, state[length], beyond)]
    return [ScheduleEnd("LambdaLR", None, FREE)] if "lr_lambdas" in state else []


def _joined(state: Mapping[str, Any], parts: list[Mapping[str, Any]]) -> list[ScheduleEnd]:
    milestones = state.get("_milestones")
    if not isinstance(milestones, (list, tuple)) or not milestones:
        return [end for part in parts for end in ends_of(part)]
    last_start = milestones[-1]  # the last part takes its first step there
    return [
        ScheduleEnd(end.kind, None if end.built_for is None else last_start + end.built_for, end.beyond)
        for end in (ends_of(parts[-1]) if parts else [])
    ]


def ended_by(ends: list[ScheduleEnd], calls: int, epoch: float, before: int | None, after: int) -> list[ScheduleEnd]:
    """Return those of ``ends`` that a training passes because it became longer.

    Args:
        ends: Where its schedules end.
        calls: How often the scheduler has stepped so far.
        epoch: Completed epochs so far, with the completed part of the present one.
        before: The epochs that the training was begun for; None: not known.
        after: The epochs that it has now.
    """
    if not epoch or not calls:
        return []
    calls_per_epoch = calls / epoch
    # A warm-up that ended long before the training was to end is no surprise.
    late = [
        end
        for end in ends
        if end.built_for is None or before is None or end.built_for >= 0.9 * calls_per_epoch * before
    ]
    return [end for end in late if end.built_for is None or round(calls_per_epoch * after) > end.built_for]
