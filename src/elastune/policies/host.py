"""Runs the hooks of one worker's policies, each in a greenlet of its own.

A hook that wants a collective's result which is not there yet is suspended: training goes on, the next step boundary
exchanges what all workers' hooks have submitted, and the hook goes on from where it stood. Until it ends, further hooks
of its policy are skipped. A hook that raises changes nothing: what it asked for is dropped, its policy's state is again
as before, and training goes on.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet  # type: ignore[import-untyped]

from elastune.core.errors import UserError
from elastune.core.signals import Decision, Snapshot
from elastune.policies.base import Policy
from elastune.policies.exchange import Name, Op, Round, Submission, Value, hashed, pack, resolve
from elastune.policies.handle import CollectiveFailed, Handle
from elastune.policies.run import NOTHING, Limits, Run
from elastune.policies.state import as_tuples, copied, put_back, state_of

HOOKS = ("before_train", "before_epoch", "before_step", "after_step", "after_epoch", "after_train")
MOST_FAILURES = 3  # of one hook, in a row
_PACKAGE = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Proposal:
    """``policy`` asks for ``decision``, having seen ``cause`` after ``step`` steps."""

    policy: str
    step: int
    decision: Decision
    cause: Snapshot


@dataclass(frozen=True)
class Failure:
    """``hook`` of ``policy`` raised: ``detail`` says what and where. ``off``: the policy is not called any more."""

    policy: str
    hook: str
    step: int
    detail: str
    off: bool = False


@dataclass
class _Seat:
    """One policy of this worker. ``state``: a copy of its own, from before the hook that is under way."""

    place: int
    name: str
    policy: Policy
    state: dict[str, Any]
    failures: dict[str, int] = field(default_factory=dict)
    off: bool = False
    call: _Call | None = None


class _Call:
    """One call of a hook, from its begin to its end; the collectives it waits for, by name."""

    __slots__ = ("_counts", "_handles", "_scope", "_seat", "_waits_for", "greenlet", "hook", "over", "pending", "run")

    def __init__(
        self, seat: _Seat, hook: str, snapshot: Snapshot, limits: Limits, rank: int, known: Collection[str] | None
    ) -> None:
        self.hook = hook
        self.run = Run(snapshot, limits, rank, self, known)
        self.pending: dict[Name, tuple[Submission, Handle[Any], str]] = {}
        self.greenlet = greenlet(self._body)
        self.over = False  # cancelled
        self._seat = seat
        self._counts: dict[Op, int] = {}
        self._scope: int | None = None
        self._waits_for: Handle[Any] | None = None
        self._handles: list[Handle[Any]] = []

    def _body(self) -> None:
        getattr(self._seat.policy, self.hook)(self.run)
        for handle in self._handles:  # a hook ends when all its collectives have
            if not handle.told:
                handle.result()

    @property
    def can_go_on(self) -> bool:
        return self._waits_for is not None and self._waits_for.done

    def submit(self, op: Op, value: Value, root: int, name: str | None) -> Handle[Any]:
        """``Collectives``' part of it."""
        self._check_inside()
        if self._scope is None:
            self._scope = hashed(self._seat.place, self._seat.name, self.hook, self.run.step)
        if name is None:
            name = f"{self._seat.name}/{op}/{self._counts.get(op, 0)}"
            self._counts[op] = self._counts.get(op, 0) + 1
        given = Submission(self._scope, hashed(name), op, value, root)
        if given.name in self.pending:
            raise UserError("a collective of this name is under way", name, "take its result first, or another name")
        handle: Handle[Any] = Handle(self._wait)
        self.pending[given.name] = given, handle, name
        self._handles.append(handle)
        return handle

    def take(self, found: Round) -> None:
        """Give the results that an exchange has brought to those who wait for them."""
        for name in self.pending.keys() & {*found.done, *found.failed}:
            given, handle, text = self.pending.pop(name)
            why = found.failed.get(name)
            failure = None if why is None else CollectiveFailed(f"{given.op} {text!r}: {why}")
            handle.settle(found.done.get(name), failure)

    def _wait(self, handle: Handle[Any]) -> None:
        while not handle.done:
            self._check_inside()
            self._waits_for = handle
            self.greenlet.parent.switch()
        self._waits_for = None

    def _check_inside(self) -> None:
        if self.over:
            raise GreenletExit
        if getcurrent() is not self.greenlet:
            rule = "collectives are for the hook itself"
            raise UserError(rule, "a call from elsewhere", "call them in the hook's own thread")


class PolicyHost:
    """The policies of one worker, in order, each with a name. ``known``: the signals of the run's monitors.

    Raises ``UserError`` where a policy's state cannot be written as JSON.
    """

    def __init__(self, policies: Sequence[tuple[str, Policy]], known: Collection[str] | None = None) -> None:
        self._known = known
        self._seats = [
            _Seat(place, name, policy, state_of(name, policy)) for place, (name, policy) in enumerate(policies)
        ]
        self._by_hook = {
            hook: [seat for seat in self._seats if getattr(type(seat.policy), hook) is not getattr(Policy, hook)]
            for hook in HOOKS
        }
        self._proposals: list[Proposal] = []
        self._failures: list[Failure] = []

    # -- hooks --------------------------------------------------------------------------------------------------------

    def call(self, hook: str, snapshot: Snapshot, limits: Limits, rank: int) -> None:
        """Run ``hook`` of every policy until it ends or waits. What is no ``Exception`` passes through."""
        if hook == "after_train":
            limits = replace(limits, ended=True)
        for seat in self._by_hook[hook]:
            if not seat.off and seat.call is None:
                seat.call = _Call(seat, hook, snapshot, limits, rank, self._known)
                self._go_on(seat, seat.call)

    def _go_on(self, seat: _Seat, call: _Call) -> None:
        try:
            call.greenlet.switch()
            if not call.greenlet.dead:
                return
            after = state_of(seat.name, seat.policy)
        except Exception as error:  # noqa: BLE001  whatever a user's hook raises: training goes on
            self._fail(seat, call, error)
            return
        except BaseException:
            self._undo(seat, call)
            raise
        seat.state, seat.call = after, None
        seat.failures.pop(call.hook, None)
        call.run.close()
        decision = call.run.decision
        if decision is not NOTHING and not decision.empty:
            self._proposals.append(Proposal(seat.name, call.run.step, decision, call.run.snapshot))

    def _fail(self, seat: _Seat, call: _Call, error: Exception) -> None:
        count = seat.failures[call.hook] = seat.failures.get(call.hook, 0) + 1
        seat.off = count >= MOST_FAILURES
        self._failures.append(Failure(seat.name, call.hook, call.run.step, _described(error), seat.off))
        self._undo(seat, call)

    def _undo(self, seat: _Seat, call: _Call) -> None:
        """The call never was: the policy is as before it."""
        call.over, seat.call = True, None
        call.run.close()
        try:
            put_back(seat.policy, seat.state)
        except Exception as error:  # noqa: BLE001  a policy's own load; what it is now, nobody knows
            seat.off = True
            self._failures.append(Failure(seat.name, "load", call.run.step, _described(error), off=True))

    # -- collectives --------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether a hook waits for an exchange, which all workers must then make, at the next boundary."""
        return any(seat.call is not None for seat in self._seats)

    def offer(self) -> list[float]:
        """This worker's row of the exchange; empty where no hook waits."""
        return pack(given for seat in self._seats if seat.call for given, _, _ in seat.call.pending.values())

    def deliver(self, rows: Sequence[Sequence[float]], rank: int) -> None:
        """All workers' rows, by rank: hooks that got what they wait for go on. Raises ``ValueError`` for rubbish."""
        if not 0 <= rank < len(rows):
            raise ValueError(f"there is no row of rank {rank} among {len(rows)}")
        calls = [(seat, seat.call) for seat in self._seats if seat.call is not None]
        if sizes := {call.run.size() for _, call in calls} - {len(rows)}:
            raise ValueError(f"{len(rows)} rows for hooks among {sizes.pop()} workers: cancel them when workers change")
        found = resolve(rows)
        for _, call in calls:
            call.take(found)
        for seat, call in calls:
            if call.can_go_on:
                self._go_on(seat, call)

    def cancel(self) -> None:
        """The workers have changed: hooks that wait end here, as if they had never begun. Their ``finally`` runs."""
        for seat in self._seats:
            if (call := seat.call) is None:
                continue
            call.over = True
            try:
                call.greenlet.throw(GreenletExit)
            except Exception as error:  # noqa: BLE001  raised by the hook's own clearing up
                self._fail(seat, call, error)
            else:
                self._undo(seat, call)

    # -- what came of it ----------------------------------------------------------------------------------------------

    def take_proposals(self) -> list[Proposal]:
        """What the hooks that ended since the last call ask for, in order."""
        taken, self._proposals = self._proposals, []
        return taken

    def take_failures(self) -> list[Failure]:
        """The hooks that raised since the last call."""
        taken, self._failures = self._failures, []
        return taken

    def state(self) -> dict[str, Any]:
        """The states of all policies, as JSON; of one whose hook waits, that from before the hook."""
        return {
            "policies": [
                {"name": seat.name, "state": copied(seat.state), "failures": dict(seat.failures), "off": seat.off}
                for seat in self._seats
            ]
        }

    def load(self, state: Mapping[str, Any], pardon: bool = False) -> None:
        """Go on from ``state``: policies take over what stands under their name, in order; others stay as they are.

        Drops hooks that wait. ``pardon``: policies that were off get another chance (a resumed run may have mended
        them). Raises ``UserError`` where a policy cannot be as ``state`` says.
        """
        self.cancel()
        found = _checked(state)
        for seat in self._seats:
            at = next((i for i, entry in enumerate(found) if entry["name"] == seat.name), None)
            if at is None:
                continue
            entry = found.pop(at)
            try:
                seat.policy.load(as_tuples(entry["state"], vars(seat.policy)))
            except Exception as error:
                fix = "start without the old state, or mend the policy's load"
                raise UserError(f"policy {seat.name} cannot take over its state", _described(error), fix) from error
            seat.state = state_of(seat.name, seat.policy)
            seat.failures = {} if pardon else dict(entry["failures"])
            seat.off = entry["off"] and not pardon


def _checked(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries of what ``PolicyHost.state`` gave, which came from a checkpoint or another worker."""
    entries = state.get("policies") if isinstance(state, Mapping) else None
    shape = {"name": str, "state": dict, "failures": dict, "off": bool}
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict)
        and entry.keys() == shape.keys()
        and all(isinstance(entry[key], kind) for key, kind in shape.items())
        and all(hook in HOOKS and isinstance(count, int) for hook, count in entry["failures"].items())
        for entry in entries
    ):
        raise UserError("this is no state of policies", str(state)[:80], "use what a checkpoint of this version holds")
    return list(entries)


def _described(error: BaseException) -> str:
    """The error's own line, and the place in the user's code (a library policy's, where there is none) it came from."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    frames: list[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    if theirs:  # the last line of the file that was entered first: below it lie libraries
        frames = [frame for frame in theirs if frame.filename == theirs[0].filename]
    return f"{line} ({frames[-1].filename}:{frames[-1].lineno})" if frames else line
