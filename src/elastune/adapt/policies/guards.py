"""Guards limit what policies may change. They form a chain: each guard sees what the one before it let through.

A guard is a frozen value with a pure ``filter``. Everything that changes is in its state (JSON), which travels with the
state of the policy. Guards look at changes of workers, batch, micro-batch and learning rate. A decision to stop or to
go back to a remembered state is an emergency and passes whole. A decision to remember costs nothing and passes, too. If
the guards drop a decision, the policy keeps its old state (``host``): a schedule then acts late, not never.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from elastune.core.decisions import Decision, Snapshot
from elastune.core.errors import UserError

State = dict[str, Any]
GuardStates = Mapping[str, Any]
"""The states of a policy's guards, by class, and (``_ASKING``) the hook that asked last; JSON values."""
_ASKING = "asking"
GUARD_OPTIONS: Mapping[str, type] = MappingProxyType(
    {
        **dict.fromkeys(("min_batch", "max_batch", "min_workers", "max_workers"), int),
        "hysteresis": float,
        **dict.fromkeys(("patience", "cooldown", "budget"), int),
    }
)
"""What every policy can be given, and the type of its value."""


class Guard(ABC):
    """One reason to hold a decision back.

    Example:
        >>> guards_for({"cooldown": 100, "max_workers": 8})
        (Bounds(...), Cooldown(steps=100))
    """

    def init(self) -> State:
        """Return the state before the first decision."""
        return {}

    @abstractmethod
    def filter(self, decision: Decision, snapshot: Snapshot, state: State) -> tuple[Decision | None, State]:
        """Return what passes of ``decision`` (None: nothing), and the new state. ``decision`` may be empty."""


@dataclass(frozen=True)
class Bounds(Guard):
    """Keeps the global batch and the number of workers within bounds; None leaves a side open.

    A request beyond a bound is cut to the bound. The learning rate's factor is then cut with it, by the same power of
    the ratio of batches. This is exact for none, linear, sqrt and legw, and near for adascale. Where the present value
    is already beyond the bound, a request to grow has no effect.
    """

    min_batch: int | None = None
    max_batch: int | None = None
    min_workers: int | None = None
    max_workers: int | None = None

    def __post_init__(self) -> None:
        for what, low, high in (
            ("batch", self.min_batch, self.max_batch),
            ("workers", self.min_workers, self.max_workers),
        ):
            for value in (low, high):
                _at_least(f"a bound of {what}", value if value is not None else 1, 1)
            if low is not None and high is not None and low > high:
                raise UserError(f"min_{what} must not exceed max_{what}", f"{low} and {high}", "swap them")

    def filter(self, decision: Decision, snapshot: Snapshot, state: State) -> tuple[Decision | None, State]:
        workers, batch = decision.workers, decision.batch_size
        if workers is not None:
            workers = _clamped(workers, snapshot.workers, self.min_workers, self.max_workers)
            decision = replace(decision, workers=workers)
        if batch is not None:
            allowed = _clamped(batch, snapshot.batch_size, self.min_batch, self.max_batch)
            decision = _without_batch(decision) if allowed is None else _rebatched(decision, snapshot, allowed)
        return (None if decision.empty else decision), state


@dataclass(frozen=True)
class Hysteresis(Guard):
    """Drops a change of batch or workers by a factor below ``ratio`` (1.5: half as much again, or a third less)."""

    ratio: float

    def __post_init__(self) -> None:
        _at_least("hysteresis", self.ratio, 1.0)

    def filter(self, decision: Decision, snapshot: Snapshot, state: State) -> tuple[Decision | None, State]:
        if decision.workers is not None and self._small(decision.workers, snapshot.workers):
            decision = replace(decision, workers=None)
        if decision.batch_size is not None and self._small(decision.batch_size, snapshot.batch_size):
            decision = _without_batch(decision)
        return (None if decision.empty else decision), state

    def _small(self, new: int, old: int) -> bool:
        return new < old * self.ratio and old < new * self.ratio


@dataclass(frozen=True)
class Patience(Guard):
    """Lets a change pass once ``looks`` calls of the hook in a row requested the same kind of change.

    The kind is up, down or neither, of workers and of the batch. It helps with noisy signals, and is only for policies
    that look at every call.
    """

    looks: int

    def __post_init__(self) -> None:
        _at_least("patience", self.looks, 1)

    def init(self) -> State:
        return {"kind": [0, 0], "seen": 0}

    def filter(self, decision: Decision, snapshot: Snapshot, state: State) -> tuple[Decision | None, State]:
        if decision.empty:
            return None, self.init()
        kind = [_sign(decision.workers, snapshot.workers), _sign(decision.batch_size, snapshot.batch_size)]
        seen = state["seen"] + 1 if kind == state["kind"] else 1
        if seen < self.looks:
            return None, {"kind": kind, "seen": seen}
        return decision, self.init()


@dataclass(frozen=True)
class Cooldown(Guard):
    """Drops all changes for ``steps`` steps after a change."""

    steps: int

    def __post_init__(self) -> None:
        _at_least("cooldown", self.steps, 0)

    def init(self) -> State:
        return {"changed": None}

    def filter(self, decision: Decision, snapshot: Snapshot, state: State) -> tuple[Decision | None, State]:
        changed = state["changed"]
        if decision.empty or (changed is not None and snapshot.step - changed < self.steps):
            return None, state
        return decision, {"changed": snapshot.step}


@dataclass(frozen=True)
class ChangeBudget(Guard):
    """Lets at most ``changes`` changes pass.

    To repeat the newest allowed wish for workers is free: they may be late.
    """

    changes: int

    def __post_init__(self) -> None:
        _at_least("budget", self.changes, 0)

    def init(self) -> State:
        return {"made": 0, "workers": None}

    def filter(self, decision: Decision, snapshot: Snapshot, state: State) -> tuple[Decision | None, State]:
        if decision.empty:
            return None, state
        repeated = decision == Decision(workers=decision.workers) and decision.workers == state["workers"]
        if repeated:
            return decision, state
        if state["made"] >= self.changes:
            return None, state
        return decision, {"made": state["made"] + 1, "workers": decision.workers}


def guards_for(options: Mapping[str, Any]) -> tuple[Guard, ...]:
    """Return the guards that ``options`` (of ``GUARD_OPTIONS``) describe, in the order in which they apply.

    First come bounds, then whether the change is worth it, then whether it is time, and last the count of changes.
    """
    bounds = {name: value for name, value in options.items() if name.startswith(("min_", "max_"))}
    guards: list[Guard] = [Bounds(**bounds)] if bounds else []
    later: Mapping[str, Callable[..., Guard]] = {
        "hysteresis": Hysteresis,
        "patience": Patience,
        "cooldown": Cooldown,
        "budget": ChangeBudget,
    }
    return (*guards, *(guard(options[name]) for name, guard in later.items() if name in options))


def apply_guards(
    guards: tuple[Guard, ...], hook: str, decision: Decision, snapshot: Snapshot, states: GuardStates
) -> tuple[Decision, GuardStates]:
    """Return the part of ``hook``'s decision that all ``guards`` let through, and the guards' new states.

    After a guard that dropped the decision, the next guards see an empty one. Among hooks without a request, guards see
    only the hook that made the last request: its silence resets patience.
    """
    if not guards or (decision.empty and hook != states.get(_ASKING, "")):
        return decision, states
    after = {**states, _ASKING: hook}
    if decision.stop or decision.restore:
        return decision, after
    left = replace(decision, remember=False)
    for guard in guards:
        name = type(guard).__name__
        passed, after[name] = guard.filter(left, snapshot, states.get(name, guard.init()))
        left = passed or Decision()
    return replace(left, remember=decision.remember), after


def _clamped(new: int, old: int, low: int | None, high: int | None) -> int | None:
    """``new`` within the bounds; None where that is no step from ``old`` towards ``new``."""
    inside = max(new, low) if low is not None else new
    inside = min(inside, high) if high is not None else inside
    return inside if _sign(inside, old) == _sign(new, old) != 0 else None


def _without_batch(decision: Decision) -> Decision:
    """``decision`` without its change of the batch, and without the changes that belong to it."""
    return replace(decision, batch_size=None, lr_factor=None, ramp_steps=0, correct_momentum=False)


def _rebatched(decision: Decision, snapshot: Snapshot, batch: int) -> Decision:
    """``decision`` with another batch size, its factor on the learning rate cut accordingly."""
    wanted, factor = decision.batch_size, decision.lr_factor
    if wanted is None or wanted == batch:
        return decision
    if factor is not None and wanted != snapshot.batch_size:
        factor **= math.log(batch / snapshot.batch_size) / math.log(wanted / snapshot.batch_size)
    return replace(decision, batch_size=batch, lr_factor=factor)


def _sign(new: int | None, old: int) -> int:
    return 0 if new is None else (new > old) - (new < old)


def _at_least(what: str, value: float, least: float) -> None:
    if not least <= value < math.inf:
        raise UserError(f"{what} must be at least {least:g}", value, "give a larger number")
