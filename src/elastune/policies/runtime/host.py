"""Runs the hooks of one worker's policies, each in a greenlet.

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
from elastune.policies.run import NOTHING, Limits
from elastune.policies.runtime.call import Call, serve
from elastune.policies.runtime.exchange import pack, resolve
from elastune.policies.runtime.state import as_tuples, copied, put_back, state_of

HOOKS = ("before_train", "before_epoch", "before_step", "after_step", "after_epoch", "after_train")
MOST_FAILURES = 3  # of one hook, in a row
_PACKAGE = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Proposal:
    """``policy`` asks for ``decision``, having seen ``cause`` after ``step`` steps. ``before``: its state before."""

    policy: str
    step: int
    decision: Decision
    cause: Snapshot
    before: dict[str, Any] = field(default_factory=dict)


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
    call: Call | None = None


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
        self._idle: list[Any] = []  # lanes
        self._proposals: list[Proposal] = []
        self._failures: list[Failure] = []

    # -- hooks --------------------------------------------------------------------------------------------------------

    def call(self, hook: str, snapshot: Snapshot, limits: Limits, rank: int) -> None:
        """Run ``hook`` of every policy until it ends or waits. What is no ``Exception`` passes through."""
        if hook == "after_train":
            limits = replace(limits, ended=True)
        for seat in self._by_hook[hook]:
            if not seat.off and seat.call is None:
                seat.call = Call(seat.policy, (seat.place, seat.name), hook, snapshot, limits, rank, self._known)
                seat.call.lane = self._idle.pop() if self._idle else greenlet(serve)
                self._go_on(seat, seat.call)

    def _go_on(self, seat: _Seat, call: Call, cancel: bool = False) -> None:
        """Let a hook run until it ends or waits; with ``cancel`` it must end here, where it waits."""
        call.cancelled = cancel
        try:
            call.lane.parent = getcurrent()
            if cancel:
                call.lane.throw(GreenletExit)
            else:
                call.lane.switch(call)
        except BaseException:
            self._undo(seat, call)
            raise
        if not call.ended:
            return
        self._idle.append(call.lane)
        error, call.error = call.error, None
        if isinstance(error, Exception):
            self._fail(seat, call, error)
        elif cancel or error is not None:
            self._undo(seat, call)
            if error is not None and not (cancel and isinstance(error, GreenletExit)):
                raise error
        else:
            self._finish(seat, call)

    def _finish(self, seat: _Seat, call: Call) -> None:
        before = seat.state
        try:
            seat.state = state_of(seat.name, seat.policy)
        except Exception as error:  # noqa: BLE001  a user's state() may raise anything
            self._fail(seat, call, error)
            return
        seat.call = None
        seat.failures.pop(call.hook, None)
        call.run.close()
        decision = call.run.decision
        if decision is not NOTHING and not decision.empty:
            self._proposals.append(Proposal(seat.name, call.run.step, decision, call.run.snapshot, before))

    def _fail(self, seat: _Seat, call: Call, error: Exception) -> None:
        count = seat.failures[call.hook] = seat.failures.get(call.hook, 0) + 1
        seat.off = count >= MOST_FAILURES
        self._failures.append(Failure(seat.name, call.hook, call.run.step, _described(error), seat.off))
        self._undo(seat, call)

    def put_back(self, name: str, before: dict[str, Any]) -> None:
        """What policy ``name`` proposed last came to nothing: it is as before, and may ask again."""
        seat = self._seat(name)
        if seat.call is not None:
            self._go_on(seat, seat.call, cancel=True)
        seat.state = copied(before)
        self._to_state(seat, 0)

    def switch_off(self, name: str) -> None:
        """Policy ``name`` is not called any more."""
        self._seat(name).off = True

    def _seat(self, name: str) -> _Seat:
        return next(seat for seat in self._seats if seat.name == name)

    def _undo(self, seat: _Seat, call: Call) -> None:
        """The call never was: the policy is as before it."""
        seat.call = None
        call.run.close()
        self._to_state(seat, call.run.step)

    def _to_state(self, seat: _Seat, step: int) -> None:
        try:
            put_back(seat.policy, seat.state)
        except Exception as error:  # noqa: BLE001  a policy's own load; what it is now, nobody knows
            seat.off = True
            self._failures.append(Failure(seat.name, "load", step, _described(error), off=True))

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
            if seat.call is not None:
                self._go_on(seat, seat.call, cancel=True)

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
