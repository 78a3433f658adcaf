"""Who is in a run: a pure machine. An event comes in, the new state and instructions come out; nothing else happens.

Each event first changes the facts (who is there, what was asked). What follows from the facts is derived alike after
every event, in one order: is the run over, does the version in force have to be replaced, is a new one settled, have
workers to be ended or started, is there something to plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from elastune.elastic.coordinator.membership import Membership, Phase, ProtocolViolation, Worker, begin
from elastune.elastic.protocol.instructions import (
    Confirm,
    Dismiss,
    End,
    GiveUp,
    Instruction,
    Release,
    Start,
    StopRun,
)
from elastune.elastic.protocol.messages import (
    Broken,
    CapacityChanged,
    Connected,
    Done,
    Event,
    InstallView,
    Left,
    Lost,
    Noticed,
    Ready,
    ReplaceAsked,
    ResizeAsked,
    Running,
)
from elastune.elastic.protocol.view import View

Outcome = tuple[Membership, tuple[Instruction, ...]]


def step(state: Membership, worker: int | None, event: Event) -> Outcome:
    """What ``event`` of ``worker`` (None: of the run) makes of ``state``, and what is to be done.

    Late news is ignored: of workers that are gone, of views that were replaced. Raises ``ProtocolViolation``.
    """
    if state.stage == "over":
        return state, ()
    if worker is None:
        facts, told, broken = _OF_RUN[type(event)](state, event)
        return _follow(facts, told, broken, "")
    if worker >= state.next_worker:
        raise ProtocolViolation(f"worker {worker} was never started: {event}")
    if state.find(worker) is None:
        return state, ()
    facts, told, broken = _OF_WORKER[type(event)](state, worker, event)
    return _follow(facts, told, broken, getattr(event, "why", ""))


def replay(
    workers: Sequence[int], low: int, high: int, most_losses: int, events: Iterable[tuple[int | None, Event]]
) -> Membership:
    """The state after ``events``, from the beginning."""
    state = begin(workers, low, high, most_losses)
    for worker, event in events:
        state, _ = step(state, worker, event)
    return state


# -- facts: what an event says (the new state, instructions, whether a version that may train broke) -------------------

Facts = tuple[Membership, tuple[Instruction, ...], bool]


def _connected(state: Membership, worker: int, event: Connected) -> Facts:
    _expect(state, worker, "starting", event)
    return state.put(worker, phase="connected"), (), False


def _ready(state: Membership, worker: int, event: Ready) -> Facts:
    _expect(state, worker, "connected", event)
    return state.put(worker, phase="ready"), (), False


def _running(state: Membership, worker: int, event: Running) -> Facts:
    version = state.proposed
    if event.version >= state.next_version:
        raise ProtocolViolation(f"version {event.version} was never proclaimed: {event}")
    if version is None or event.version != version.number:
        if state.current is not None and event.version == state.current.number:
            raise ProtocolViolation(f"all members had said so before: {event}")
        return state, (), False
    if worker not in version.members or worker in state.running:
        raise ProtocolViolation(f"worker {worker} is no member or said so before: {event}")
    if state.running and event.step != state.first_step:
        raise ProtocolViolation(f"others of this version begin with step {state.first_step}: {event}")
    state = replace(state, running=state.running | {worker}, first_step=event.step)
    if event.step > state.furthest:
        state = replace(state, furthest=event.step, setbacks=0)
    if worker not in version.joiners:
        return state, (), False
    state = replace(state.put(worker, phase="member"), failed_starts=0)
    return state, (Confirm(worker, version.number),), False


def _broken(state: Membership, worker: int, event: Broken) -> Facts:
    if event.version >= state.next_version:
        raise ProtocolViolation(f"version {event.version} was never proclaimed: {event}")
    version = next((v for v in state.live if v.number == event.version), None)
    if version is None:
        return state, (), False
    if worker not in version.members:
        raise ProtocolViolation(f"worker {worker} is no member of version {event.version}: {event}")
    state = replace(state, setbacks=state.setbacks + 1)
    told: tuple[Instruction, ...] = ()
    for joiner in version.joiners:
        # One that the members cannot reach would break every version that takes it in.
        if (found := state.find(joiner)) is not None and found.phase != "member":
            state, told = state.without(joiner), (*told, End(joiner, "it could not be taken in"))
            state = replace(state, failed_starts=state.failed_starts + 1)
    return state, told, True


def _noticed(state: Membership, worker: int, event: Noticed) -> Facts:
    return state.put(worker, noticed=True), (), False


def _replace(state: Membership, worker: int, event: ReplaceAsked) -> Facts:
    _expect(state, worker, "member", event)
    return replace(state.put(worker, slow=True), vacated=False), (), False


def _left(state: Membership, worker: int, event: Left) -> Facts:
    if not state.get(worker).dropped:
        raise ProtocolViolation(f"there was no view without worker {worker}: {event}")
    newest = state.proposed or state.current
    # It may have left before it heard of a newer version that has it.
    broken = newest is not None and worker in newest.members
    return state.without(worker), (), broken


def _lost(state: Membership, worker: int, event: Lost) -> Facts:
    phase = state.get(worker).phase
    was_calm = state.proposed is None or state.proposed.planned
    broken = any(worker in version.members for version in state.live)
    state = state.without(worker)
    if phase != "member":
        state = replace(state, failed_starts=state.failed_starts + 1)
    elif was_calm or not state.members:
        # Several at once count once: before the next version is settled, only so many members are left to be lost.
        state = replace(state, setbacks=state.setbacks + 1)
    return state, (End(worker, event.why, lost=True),), broken


def _done(state: Membership, worker: int, event: Done) -> Facts:
    _expect(state, worker, "member", event)
    return replace(state.put(worker, done=True), stage="finishing"), (), False


def _resize(state: Membership, event: ResizeAsked) -> Facts:
    target = min(max(event.workers, state.low), state.high)
    return replace(state, target=target, failed_starts=0), (), False


def _capacity(state: Membership, event: CapacityChanged) -> Facts:
    return replace(state, free=event.free, vacated=False), (), False


_OF_WORKER: dict[type[Any], Callable[[Membership, int, Any], Facts]] = {
    Connected: _connected,
    Ready: _ready,
    Running: _running,
    Broken: _broken,
    Noticed: _noticed,
    ReplaceAsked: _replace,
    Left: _left,
    Lost: _lost,
    Done: _done,
}
_OF_RUN: dict[type[Any], Callable[[Membership, Any], Facts]] = {
    ResizeAsked: _resize,
    CapacityChanged: _capacity,
}

# -- what follows -----------------------------------------------------------------------------------------------------


def _follow(state: Membership, told: tuple[Instruction, ...], broken: bool, why: str) -> Outcome:
    end = _ending(state, why)
    if end is not None:
        # Who has not come yet would find nobody.
        unborn = tuple(End(worker.number, "the run is over") for worker in state.workers if worker.phase == "starting")
        return replace(state, stage="over"), (*told, end, *unborn)
    for consequence in (_force if broken else _settle, _trim, _fill, _stop, _plan):
        state, more = consequence(state)
        told = (*told, *more)
    return state, told


def _ending(state: Membership, why: str) -> Instruction | None:
    members = state.members
    if state.stage == "finishing" and all(worker.done for worker in members):
        return Dismiss()
    if state.setbacks >= state.most_losses:
        return GiveUp(f"{state.setbacks} times a version broke with no step completed in between; the last: {why}")
    if state.stage == "stopping" and not members:
        return GiveUp(f"all members were lost before they could end; the last: {why}")
    if not state.workers and state.failed_starts >= state.most_losses:
        return GiveUp(f"{state.failed_starts} workers in a row failed to start; the last: {why}")
    return None


def _force(state: Membership) -> Outcome:
    """The version in force broke: go on at once with those who hold the state."""
    members = {worker.number for worker in state.members}
    *_, newest = state.live
    # Who is not in the newest version leaves for good: the others may have completed steps without it by now, which it
    # could not make up for. Only where nobody else is left does it stay.
    ordered = newest.members if members & set(newest.members) else state.current.members if state.current else ()
    staying = tuple(number for number in ordered if number in members)
    fresh = state.current is None
    state = replace(state, proposed=None, running=frozenset())
    if not staying:
        return replace(state, current=None), ()
    state, told = _let_go(state, members - set(staying))
    state, proclaim = _proclaim(state, staying, fresh=fresh)
    return state, (*told, proclaim)


def _settle(state: Membership) -> Outcome:
    """Once all members of a version run, it is the one that counts."""
    version = state.proposed
    if version is None or not state.running.issuperset(version.members):
        return state, ()
    state = replace(state, current=version, proposed=None, running=frozenset())
    if version.fresh:
        state = replace(state, failed_starts=0)
    return _let_go(state, {worker.number for worker in state.members} - set(version.members))


def _trim(state: Membership) -> Outcome:
    """End who is not wanted any more and holds no state."""
    taken = set(state.proposed.members) if state.proposed else set()
    spare = [worker for worker in state.workers if worker.phase != "member" and worker.number not in taken]
    # The least warm first.
    spare.sort(key=lambda worker: (("starting", "connected", "ready").index(worker.phase), -worker.number))
    excess = len(state.wanted) - state.target
    told: list[Instruction] = []
    for worker in spare:
        if worker.noticed or excess > 0:
            excess -= not worker.noticed
            state = state.without(worker.number)
            told.append(End(worker.number, "it was given notice" if worker.noticed else "fewer workers are wanted"))
    return state, tuple(told)


def _fill(state: Membership) -> Outcome:
    """Start what is missing, as far as there is room."""
    count = min(state.target - len(state.wanted), state.free)
    if state.stage != "open" or count <= 0 or state.failed_starts >= state.most_losses:
        return state, ()
    numbers = tuple(range(state.next_worker, state.next_worker + count))
    workers = (*state.workers, *(Worker(number) for number in numbers))
    state = replace(state, workers=workers, next_worker=numbers[-1] + 1, free=state.free - count)
    return state, (Start(numbers),)


def _stop(state: Membership) -> Outcome:
    """Stop in good order before a notice takes more members than the run can spare."""
    noticed = [worker.number for worker in state.members if worker.noticed]
    remaining = sum(not worker.noticed for worker in state.workers)
    if state.stage != "open" or not noticed or remaining >= state.low:
        return state, ()
    why = f"after the notice to worker {noticed[-1]}, {remaining} would remain, and {state.low} are the fewest allowed"
    return replace(state, stage="stopping"), (StopRun(why),)


def _plan(state: Membership) -> Outcome:
    """Propose what the members should be, where that differs from what they are and nothing else is under way."""
    if state.stage != "open" or state.proposed is not None:
        return state, ()
    ready = tuple(worker.number for worker in state.workers if worker.phase == "ready" and not worker.noticed)
    if state.current is None:
        if not ready or len(ready) < len(state.workers):
            return state, ()
        for number in ready:
            state = state.put(number, phase="member")
        state, proclaim = _proclaim(state, ready, fresh=True)
        return state, (proclaim,)
    staying, joiners = _places(state, ready)
    if not staying:  # somebody has to hand the state over: they leave by the version after
        staying = state.current.members
    if (*staying, *joiners) == state.current.members:
        return state, ()
    state, proclaim = _proclaim(state, (*staying, *joiners), planned=True, joiners=joiners)
    return state, (proclaim,)


def _places(state: Membership, ready: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which members stay, and who joins them: a slow member keeps its place until somebody comes for it."""
    assert state.current is not None
    members = [state.get(number) for number in state.current.members if not state.get(number).noticed]
    fit = [worker.number for worker in members if not worker.slow][: state.target]
    joiners = ready[: state.target - len(fit)]
    slow = [worker.number for worker in members if worker.slow][: state.target - len(fit) - len(joiners)]
    if slow and _blocked(state) and len(fit) + len(slow) > state.low:
        slow.pop()
    return tuple(worker.number for worker in members if worker.number in {*fit, *slow}), joiners


def _blocked(state: Membership) -> bool:
    """Whether there is room for another worker only once a member leaves.

    Where somebody has just gone there will be some; and no worker is let go for one that may fail to start again.
    """
    coming = any(worker.phase != "member" for worker in state.workers)
    return not (state.free or coming or state.vacated or state.failed_starts)


# -- small things -----------------------------------------------------------------------------------------------------


def _proclaim(
    state: Membership,
    members: tuple[int, ...],
    *,
    planned: bool = False,
    joiners: tuple[int, ...] = (),
    fresh: bool = False,
) -> tuple[Membership, Instruction]:
    version = View(state.next_version, members, planned, joiners, fresh)
    for worker in state.members:
        if worker.number not in members:
            state = state.put(worker.number, dropped=True)
    state = replace(state, proposed=version, next_version=version.number + 1, running=frozenset())
    return state, InstallView(version)


def _let_go(state: Membership, numbers: set[int]) -> Outcome:
    for number in numbers:
        state = state.without(number)
    return state, tuple(Release(number) for number in sorted(numbers))


def _expect(state: Membership, number: int, phase: Phase, event: Event) -> None:
    found = state.get(number).phase
    if found != phase:
        raise ProtocolViolation(f"worker {number} is {found}, not {phase}: {event}")
