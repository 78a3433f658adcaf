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

# A policy of a run: what it is named and guarded by, what of it changes, and how both go through one hook.


@dataclass(frozen=True)
class PolicyEntry:
    """A policy of a run: its name in journals, and what holds it back."""

    name: str
    policy: Policy
    guards: tuple[Guard, ...] = ()


@dataclass(frozen=True)
class PolicyState:
    """What of a policy changes: its own state, its guards', and how often each of its hooks has failed in a row.

    ``off``: it is not called any more.
    """

    state: Any
    guards: GuardStates = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    off: bool = False


def begin(named: PolicyEntry) -> PolicyState:
    """Before training. Raises ``UserError`` where the policy's attributes cannot be written as JSON."""
    return PolicyState(named.policy.init())


def decide(named: PolicyEntry, policy_state: PolicyState, hook: Hook, run: Run) -> tuple[PolicyState, Decision]:
    """The standing after ``hook``, and what its guards let through of what it asked ``run`` for.

    Where they let nothing through, the policy never decided, and keeps its state: a schedule is late rather than lost.
    """
    after = named.policy.decide(hook, policy_state.state, run)
    asked = run.decision
    decision, guards = apply_guards(named.guards, hook, asked, run.snapshot, policy_state.guards)
    state = policy_state.state if decision.empty and not asked.empty else after
    return replace(policy_state, state=state, guards=guards), decision


def to_json(policy_state: PolicyState) -> dict[str, Any]:
    """For a checkpoint, or another worker."""
    state = policy_state.state
    return {
        "state": asdict(state) if is_dataclass(state) and not isinstance(state, type) else copied(state),
        "guards": copied(policy_state.guards),
        "failures": dict(policy_state.failures),
        "off": policy_state.off,
    }


def from_json(named: PolicyEntry, told: Mapping[str, Any]) -> PolicyState:
    """What ``to_json`` told. Raises ``ValueError`` where the policy has no such state."""
    state = TypeAdapter(type(named.policy.init())).validate_python(told["state"])
    return PolicyState(state, dict(told["guards"]), dict(told["failures"]), told["off"])


# Runs the hooks of one worker's policies.
#
# Policies are pure (``base.Policy.decide``): the host keeps each one's state, and takes the state that a hook returns
# when the hook has ended well. A hook that wants what other workers give is run again after the next exchange
# (``collectives``); until it ends, further hooks of its policy are skipped.

MOST_FAILURES = 3  # of one hook, in a row
_PACKAGE = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Proposal:
    """``policy`` asks for ``decision``, having seen ``cause`` after ``step`` steps.

    Attributes:
        before: The policy's standing before, as JSON: what it goes back to if nothing comes of it.
        note: What was cut from what it asked for, and why.
    """

    policy: str
    step: int
    decision: Decision
    cause: Snapshot
    before: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Failure:
    """``hook`` of ``policy`` raised: ``detail`` says what and where. ``off``: the policy is not called any more."""

    policy: str
    hook: str
    step: int
    detail: str
    off: bool = False


@dataclass(frozen=True)
class _Call:
    """A hook that waits for an exchange, and what it is run again with."""

    hook: Hook
    snapshot: Snapshot
    limits: Limits
    rank: int
    attempts: HookCall


@dataclass
class _PolicySlot:
    """A policy of this worker; ``place``: among the run's, the same on every worker; ``refused``: the rules that it
    was told of.
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
        """A call that has heard nothing yet."""
        attempts = HookCall(self.name, f"{self.place} {self.name} {hook} {snapshot.step}")
        return _Call(hook, snapshot, limits, rank, attempts)


class PolicyHost:
    """The policies of one worker, in order. ``known``: the signals of the run's monitors; None: any name may come.

    Raises ``UserError`` where a policy's attributes cannot be written as JSON.
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
        """Run ``hook`` of every policy until it ends or waits. What is no ``Exception`` passes through."""
        if hook == "after_train":
            limits = replace(limits, ended=True)
        for slot in self._by_hook[hook]:
            if not slot.policy_state.off and slot.call is None:
                self._attempt(slot, slot.begin(hook, snapshot, limits, rank))

    def restart_waiting_hooks(self, workers: int, limits: Limits, rank: int) -> None:
        """The workers have changed: hooks that wait begin again, among ``workers``, since others were heard before."""
        for slot in self._slots:
            if (call := slot.call) is not None:
                snapshot = replace(call.snapshot, workers=workers)
                bounds = replace(limits, ended=call.hook == "after_train")
                self._attempt(slot, slot.begin(call.hook, snapshot, bounds, rank))

    def _attempt(self, slot: _PolicySlot, call: _Call) -> None:
        """Run a hook from its start, with all that exchanges have brought for it so far."""
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
        """What the hook comes to. Raises ``ResultPending`` where it waits, whatever it has made of that."""
        try:
            found = decide(slot.named, slot.policy_state, call.hook, run)
            call.attempts.check_ended()
        except Exception:
            if not call.attempts.missed:
                raise
        except ResultPending:
            pass
        if not call.attempts.missed:
            return found
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
        if isinstance(error, UserError):  # what it asks for cannot be: no reason to switch it off, nor to say it twice
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
        """Nothing came of what policy ``name`` proposed last: it is as before, and may ask again."""
        slot = self._slot_of(name)
        slot.call = None
        then = from_json(slot.named, before)
        slot.policy_state = replace(slot.policy_state, state=then.state, guards=then.guards)

    def switch_off(self, name: str) -> None:
        """Policy ``name`` is not called any more."""
        slot = self._slot_of(name)
        slot.policy_state = replace(slot.policy_state, off=True)

    def _slot_of(self, name: str) -> _PolicySlot:
        return next(slot for slot in self._slots if slot.name == name)

    # -- collectives --------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether a hook waits for an exchange, which all workers must then make, at the next boundary."""
        return any(slot.call is not None for slot in self._slots)

    def waits_among(self, workers: int) -> bool:
        """Whether hooks wait, and all have begun among so many ``workers``."""
        return {slot.call.snapshot.workers for slot in self._slots if slot.call is not None} == {workers}

    def offer(self) -> bytes:
        """This worker's row of the exchange; empty where no hook waits."""
        return pack(given for slot in self._slots if slot.call for given in slot.call.attempts.pending)

    def deliver(self, rows: Sequence[bytes], rank: int) -> None:
        """All workers' rows, by rank: hooks that got something run again. Raises ``ValueError`` for rubbish."""
        if not 0 <= rank < len(rows):
            raise ValueError(f"there is no row of rank {rank} among {len(rows)}")
        calls = [(slot, slot.call) for slot in self._slots if slot.call is not None]
        if sizes := {call.snapshot.workers for _, call in calls} - {len(rows)}:
            raise ValueError(f"{len(rows)} rows for hooks among {sizes.pop()} workers: let them begin again")
        found = resolve(rows)
        for slot, call in calls:
            if call.attempts.hear(found):
                self._attempt(slot, call)

    # -- what came of it ----------------------------------------------------------------------------------------------

    def drain_proposals(self) -> list[Proposal]:
        """What the hooks that ended since the last call ask for, in order."""
        drained, self._proposals = self._proposals, []
        return drained

    def drain_refusals(self) -> list[Proposal]:
        """What hooks that ended since the last call asked for, and the run's bounds leave nothing of."""
        drained, self._refusals = self._refusals, []
        return drained

    def drain_failures(self) -> list[Failure]:
        """The hooks that raised since the last call."""
        drained, self._failures = self._failures, []
        return drained

    def to_json(self) -> list[dict[str, Any]]:
        """What changes of all policies; of one whose hook waits, that from before the hook, and how to begin it."""
        return [{"name": slot.name, **to_json(slot.policy_state), "waits": _told(slot.call)} for slot in self._slots]

    def load(self, told: Any, pardon: bool = False) -> None:
        """Go on from ``to_json``: policies take over what stands under their name, in order; others stay as they are.

        Hooks that waited there are to ``restart_waiting_hooks`` here, and none else. ``pardon``: policies that were off
        get another chance (a resumed run may have fixed them). Raises ``UserError`` where a policy cannot go on from
        it.
        """
        found = _checked(told)
        for slot in self._slots:
            slot.call = None
            at = next((i for i, entry in enumerate(found) if entry["name"] == slot.name), None)
            if at is None:
                continue
            entry = found.pop(at)
            try:
                policy_state = from_json(slot.named, entry)
                waits = entry["waits"] and Snapshot.from_json(entry["waits"]["snapshot"])
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                fix = "start without the old state, or as the policy that it is of"
                raise UserError(f"policy {slot.name} cannot take over its state", _described(error), fix) from error
            slot.policy_state = replace(policy_state, failures={}, off=False) if pardon else policy_state
            if waits is not None:
                slot.call = slot.begin(entry["waits"]["hook"], waits, Limits(), 0)


def _told(call: _Call | None) -> dict[str, Any] | None:
    """What of a hook that waits is equal on all workers."""
    return None if call is None else {"hook": call.hook, "snapshot": asdict(call.snapshot)}


def _checked(told: Any) -> list[dict[str, Any]]:
    """The entries of what ``PolicyHost.to_json`` gave, which came from a checkpoint or another worker."""
    kinds = {"name": str, "state": object, "guards": dict, "failures": dict, "off": bool, "waits": dict | None}
    if not isinstance(told, list) or not all(
        isinstance(entry, dict)
        and entry.keys() == kinds.keys()
        and all(isinstance(entry[key], kind) for key, kind in kinds.items())
        and all(hook in HOOKS and isinstance(count, int) for hook, count in entry["failures"].items())
        and (entry["waits"] is None or entry["waits"].get("hook") in HOOKS)
        for entry in told
    ):
        raise UserError("this is no state of policies", str(told)[:80], "use what a checkpoint of this version holds")
    return list(told)


def _described(error: BaseException) -> str:
    """The error's own line, and the place in the user's code (a library policy's, where there is none) it came from."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    frames: list[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    if theirs:  # the last line of the file that was entered first: below it lie libraries
        frames = [frame for frame in theirs if frame.filename == theirs[0].filename]
    return f"{line} ({frames[-1].filename}:{frames[-1].lineno})" if frames else line
