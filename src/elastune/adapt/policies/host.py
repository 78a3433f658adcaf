"""Runs the hooks of one worker's policies, and keeps the state, the guards and the failures of each policy.

Policies are pure (``base.Policy.decide``): the host keeps the state of each one, and takes the state that a hook
returns once the hook has ended well. A hook that wants values of other workers runs again after the next exchange
(``collectives``). Until it ends, further hooks of its policy are skipped.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from elastune.adapt.policies.base import HOOKS, Hook, Policy, hooks_of
from elastune.adapt.policies.collectives import HookCall, ResultPending, copied, pack, resolve
from elastune.adapt.policies.guards import Guard, GuardStates, apply_guards
from elastune.adapt.policies.run import Limits, Run
from elastune.core.decisions import Decision, Snapshot
from elastune.core.errors import UserError

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
