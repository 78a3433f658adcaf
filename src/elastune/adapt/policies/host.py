"""Runs the hooks of one worker's policies, and limits what they may change.

``PolicyHost`` keeps the state and the failures of each policy. Guards filter the decisions of a policy.
"""

from __future__ import annotations

import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter

from elastune.adapt.policies.base import HOOKS, Hook, Limits, Policy, Run, hooks_of
from elastune.adapt.policies.collectives import HookCall, ResultPending, copied, pack, resolve
from elastune.core.decisions import Decision, Snapshot
from elastune.core.errors import UserError

# Guards limit what policies may change. They form a chain: each guard sees what the one before it let through.
#
# A guard is a frozen value with a pure ``filter``. Everything that changes is in its state (JSON), which travels with
# the state of the policy. Guards look at changes of workers, batch, micro-batch and learning rate. A decision to stop
# or to go back to a remembered state is an emergency and passes whole. A decision to remember costs nothing and
# passes, too. If the guards drop a decision, the policy keeps its old state (``host``): a schedule then acts late,
# not never.

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


# Runs the hooks of one worker's policies, and keeps the state, the guards and the failures of each policy.
#
# Policies are pure (``base.Policy.decide``): the host keeps the state of each one, and takes the state that a hook
# returns once the hook has ended well. A hook that wants values of other workers runs again after the next exchange
# (``collectives``). Until it ends, further hooks of its policy are skipped.


# A policy of a run: its name and guards, its state, and one call of a hook.
@dataclass(frozen=True)
class PolicyEntry:
    """A policy of a run: its name in journals, and its guards."""

    name: str
    policy: Policy
    guards: tuple[Guard, ...] = ()


@dataclass(frozen=True)
class PolicyState:
    """What changes of a policy: its own state, its guards' states, and the failures in a row of each hook.

    ``off``: the policy is not called any more.
    """

    state: Any
    guards: GuardStates = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    off: bool = False


def begin(named: PolicyEntry) -> PolicyState:
    """Return the state before training. Raises ``UserError`` where the policy's attributes cannot be
    written as JSON.
    """
    return PolicyState(named.policy.init())


def run_hook(named: PolicyEntry, policy_state: PolicyState, hook: Hook, run: Run) -> tuple[PolicyState, Decision]:
    """Return the policy's state after ``hook``, and the part of its requests to ``run`` that its guards let through.

    If they drop the whole decision, the policy keeps its old state: a schedule then acts late, not never.
    """
    after = named.policy.decide(hook, policy_state.state, run)
    requested = run.decision
    decision, guards = apply_guards(named.guards, hook, requested, run.snapshot, policy_state.guards)
    state = policy_state.state if decision.empty and not requested.empty else after
    return replace(policy_state, state=state, guards=guards), decision


def to_json(policy_state: PolicyState) -> dict[str, Any]:
    """Return plain values for a checkpoint or another worker."""
    state = policy_state.state
    return {
        "state": asdict(state) if is_dataclass(state) and not isinstance(state, type) else copied(state),
        "guards": copied(policy_state.guards),
        "failures": dict(policy_state.failures),
        "off": policy_state.off,
    }


def from_json(named: PolicyEntry, saved: Mapping[str, Any]) -> PolicyState:
    """Return the state that ``to_json`` described. Raises ``ValueError`` where the policy cannot have it."""
    state = TypeAdapter(type(named.policy.init())).validate_python(saved["state"])
    return PolicyState(state, dict(saved["guards"]), dict(saved["failures"]), saved["off"])


# All policies of one worker.
MOST_FAILURES = 3  # of one hook, in a row
_PACKAGE = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Proposal:
    """``policy`` requests ``decision`` after ``step`` steps, because of the values in ``cause``.

    Attributes:
        before: The policy's state before, as JSON; it returns to it if the request has no effect.
        note: The parts of the request that were cut, and why.
    """

    policy: str
    step: int
    decision: Decision
    cause: Snapshot
    before: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Failure:
    """``hook`` of ``policy`` raised: ``detail`` has the error and its place. ``off``: the policy is not called any
    more.
    """

    policy: str
    hook: str
    step: int
    detail: str
    off: bool = False


@dataclass(frozen=True)
class _Call:
    """A hook that waits for an exchange, with the values for its next attempt."""

    hook: Hook
    snapshot: Snapshot
    limits: Limits
    rank: int
    attempts: HookCall


@dataclass
class _PolicySlot:
    """A policy of this worker.

    ``place``: its place among the run's policies, the same on every worker. ``refused``: the rules whose errors were
    reported already.
    """

    place: int
    named: PolicyEntry
    policy_state: PolicyState
    call: _Call | None = None
    refused: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return self.named.name

    def begin(self, hook: Hook, snapshot: Snapshot, limits: Limits, rank: int) -> _Call:
        """Return a call before its first exchange."""
        attempts = HookCall(self.name, f"{self.place} {self.name} {hook} {snapshot.step}")
        return _Call(hook, snapshot, limits, rank, attempts)


class PolicyHost:
    """The policies of one worker, in order.

    ``known``: the signals of the run's monitors; None: any name is possible. Raises ``UserError`` where a policy's
    attributes cannot be written as JSON.
    """

    def __init__(self, policies: Sequence[PolicyEntry], known: Collection[str] | None = None) -> None:
        self._known = known
        self._slots = [_PolicySlot(place, named, begin(named)) for place, named in enumerate(policies)]
        self._by_hook = {hook: [slot for slot in self._slots if hook in hooks_of(slot.named.policy)] for hook in HOOKS}
        self._proposals: list[Proposal] = []
        self._refusals: list[Proposal] = []
        self._failures: list[Failure] = []

    # -- hooks --------------------------------------------------------------------------------------------------------

    def call(self, hook: Hook, snapshot: Snapshot, limits: Limits, rank: int) -> None:
        """Run ``hook`` of every policy until it ends or waits. A ``BaseException`` that is no ``Exception`` passes
        through.
        """
        if hook == "after_train":
            limits = replace(limits, ended=True)
        for slot in self._by_hook[hook]:
            if not slot.policy_state.off and slot.call is None:
                self._attempt(slot, slot.begin(hook, snapshot, limits, rank))

    def restart_waiting_hooks(self, workers: int, limits: Limits, rank: int) -> None:
        """Restart hooks that wait, among the changed number of ``workers``: earlier exchanges had other workers."""
        for slot in self._slots:
            if (call := slot.call) is not None:
                snapshot = replace(call.snapshot, workers=workers)
                bounds = replace(limits, ended=call.hook == "after_train")
                self._attempt(slot, slot.begin(call.hook, snapshot, bounds, rank))

    def _attempt(self, slot: _PolicySlot, call: _Call) -> None:
        """Run a hook from its start, with the results of all exchanges so far."""
        slot.call = None
        call.attempts.begin()
        run = Run(call.snapshot, call.limits, call.rank, call.attempts, self._known)
        try:
            after, decision = self._decided(slot, call, run)
        except ResultPending:
            slot.call = call
        except Exception as error:  # noqa: BLE001  a user's hook may raise anything
            self._fail(slot, call, error)
        else:
            self._finish(slot, call, after, decision, run)
        finally:
            run.close()

    def _decided(self, slot: _PolicySlot, call: _Call, run: Run) -> tuple[PolicyState, Decision]:
        """The result of the hook. Raises ``ResultPending`` where it waits, even if the hook caught that."""
        try:
            outcome = run_hook(slot.named, slot.policy_state, call.hook, run)
            call.attempts.check_ended()
        except Exception:
            if not call.attempts.missed:
                raise
        except ResultPending:
            pass
        if not call.attempts.missed:
            return outcome
        call.attempts.check_same()
        raise ResultPending

    def _finish(self, slot: _PolicySlot, call: _Call, after: PolicyState, decision: Decision, run: Run) -> None:
        before = slot.policy_state
        slot.policy_state = replace(
            after, failures={h: count for h, count in before.failures.items() if h != call.hook}
        )
        at = call.snapshot
        if not decision.empty:
            self._proposals.append(Proposal(slot.name, at.step, decision, at, to_json(before), run.note))
        elif not run.refused.empty:
            self._refusals.append(Proposal(slot.name, at.step, run.refused, at, note=run.note))

    def _fail(self, slot: _PolicySlot, call: _Call, error: Exception) -> None:
        if isinstance(error, UserError):  # an impossible request does not switch the policy off, and is reported once
            if error.rule not in slot.refused:
                slot.refused.add(error.rule)
                self._failures.append(Failure(slot.name, call.hook, call.snapshot.step, _described(error)))
            return
        policy_state = slot.policy_state
        count = policy_state.failures.get(call.hook, 0) + 1
        off = count >= MOST_FAILURES
        slot.policy_state = replace(policy_state, failures={**policy_state.failures, call.hook: count}, off=off)
        self._failures.append(Failure(slot.name, call.hook, call.snapshot.step, _described(error), off))

    def revert_proposal(self, name: str, before: Mapping[str, Any]) -> None:
        """Return policy ``name`` to the state before its last proposal, which had no effect."""
        slot = self._slot_of(name)
        slot.call = None
        then = from_json(slot.named, before)
        slot.policy_state = replace(slot.policy_state, state=then.state, guards=then.guards)

    def switch_off(self, name: str) -> None:
        """Stop calling policy ``name``."""
        slot = self._slot_of(name)
        slot.policy_state = replace(slot.policy_state, off=True)

    def _slot_of(self, name: str) -> _PolicySlot:
        return next(slot for slot in self._slots if slot.name == name)

    # -- collectives --------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether a hook waits for an exchange, which all workers must then make at the next boundary."""
        return any(slot.call is not None for slot in self._slots)

    def waits_among(self, workers: int) -> bool:
        """Return whether hooks wait, and all of them began among so many ``workers``."""
        return {slot.call.snapshot.workers for slot in self._slots if slot.call is not None} == {workers}

    def offer(self) -> bytes:
        """Return this worker's row of the exchange; empty where no hook waits."""
        return pack(submission for slot in self._slots if slot.call for submission in slot.call.attempts.pending)

    def deliver(self, rows: Sequence[bytes], rank: int) -> None:
        """Take all workers' rows, by rank, and rerun the hooks that got a result. Raises ``ValueError`` for invalid
        rows.
        """
        if not 0 <= rank < len(rows):
            raise ValueError(f"there is no row of rank {rank} among {len(rows)}")
        calls = [(slot, slot.call) for slot in self._slots if slot.call is not None]
        if sizes := {call.snapshot.workers for _, call in calls} - {len(rows)}:
            raise ValueError(f"{len(rows)} rows for hooks among {sizes.pop()} workers: let them begin again")
        exchange = resolve(rows)
        for slot, call in calls:
            if call.attempts.observe(exchange):
                self._attempt(slot, call)

    # -- results ------------------------------------------------------------------------------------------------------

    def drain_proposals(self) -> list[Proposal]:
        """Return the requests of hooks that ended since the last call, in order."""
        drained, self._proposals = self._proposals, []
        return drained

    def drain_refusals(self) -> list[Proposal]:
        """Return requests since the last call that the run's bounds cut to nothing."""
        drained, self._refusals = self._refusals, []
        return drained

    def drain_failures(self) -> list[Failure]:
        """Return the hooks that raised since the last call."""
        drained, self._failures = self._failures, []
        return drained

    def to_json(self) -> list[dict[str, Any]]:
        """Return the states of all policies. For a waiting hook: the state before it, and how to begin it again."""
        return [
            {"name": slot.name, **to_json(slot.policy_state), "waits": _waiting_json(slot.call)} for slot in self._slots
        ]

    def load(self, saved: Any, pardon: bool = False) -> None:
        """Go on from the ``saved`` result of ``to_json``. Policies take over the states of their names, in order.

        Policies without a saved state stay as they are. Only hooks that waited there may ``restart_waiting_hooks``
        here. ``pardon``: policies that were off get another chance, because a resumed run may have fixed them. Raises
        ``UserError`` where a policy cannot go on from its state.
        """
        entries = _checked(saved)
        for slot in self._slots:
            slot.call = None
            at = next((i for i, entry in enumerate(entries) if entry["name"] == slot.name), None)
            if at is None:
                continue
            entry = entries.pop(at)
            try:
                policy_state = from_json(slot.named, entry)
                waits = entry["waits"] and Snapshot.from_json(entry["waits"]["snapshot"])
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                fix = "start without the old state, or as the policy that it is of"
                raise UserError(f"policy {slot.name} cannot take over its state", _described(error), fix) from error
            slot.policy_state = replace(policy_state, failures={}, off=False) if pardon else policy_state
            if waits is not None:
                slot.call = slot.begin(entry["waits"]["hook"], waits, Limits(), 0)


def _waiting_json(call: _Call | None) -> dict[str, Any] | None:
    """The part of a waiting hook that is equal on all workers."""
    return None if call is None else {"hook": call.hook, "snapshot": asdict(call.snapshot)}


def _checked(saved: Any) -> list[dict[str, Any]]:
    """The entries of a result of ``PolicyHost.to_json``, which came from a checkpoint or another worker."""
    kinds = {"name": str, "state": object, "guards": dict, "failures": dict, "off": bool, "waits": dict | None}
    if not isinstance(saved, list) or not all(
        isinstance(entry, dict)
        and entry.keys() == kinds.keys()
        and all(isinstance(entry[key], kind) for key, kind in kinds.items())
        and all(hook in HOOKS and isinstance(count, int) for hook, count in entry["failures"].items())
        and (entry["waits"] is None or entry["waits"].get("hook") in HOOKS)
        for entry in saved
    ):
        rule = "the state of policies must be one that this version saved"
        raise UserError(rule, str(saved)[:80], "use a checkpoint of this version")
    return list(saved)


def _described(error: BaseException) -> str:
    """The error's own line, and its place in the user's code, or in a library policy's."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    frames: list[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    if theirs:  # the last line of the file that was entered first: below it lie libraries
        frames = [frame for frame in theirs if frame.filename == theirs[0].filename]
    return f"{line} ({frames[-1].filename}:{frames[-1].lineno})" if frames else line
