"""Who is in a run: a pure state machine. An event comes in; the new state and instructions come out.

Each event first changes the facts: which workers are there, and what was requested. The consequences are then
derived in the same way after every event. Read ``Membership``, the instructions, ``transition`` and ``derive`` in
this order. The coordinator carries out some instructions, and the controller the others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.mesh_choice import MeshChoice, assign_ranks, by_host, fitting_workers
from elastune.elastic.wire.messages import (
    Answer,
    Broken,
    CapacityChanged,
    Connected,
    Done,
    Event,
    InstallView,
    LayersFound,
    Left,
    Lost,
    Noticed,
    Progressed,
    Ready,
    ReplaceAsked,
    ReshapeAsked,
    ResizeAsked,
    Running,
    WaitedEnough,
)
from elastune.elastic.wire.view import View

# [instructions] What the membership machine wants done: some of it by the coordinator, some by the controller.


@dataclass(frozen=True)
class Confirm:
    """Tell ``worker``, a joiner, that it is a member of view ``version`` for good."""

    worker: int
    version: int


@dataclass(frozen=True)
class Release:
    """Tell ``worker``, a member until now, that the others go on without it: it may end (and may have ended)."""

    worker: int


@dataclass(frozen=True)
class Start:
    """Start these new workers (numbers never used before)."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class End:
    """End ``worker`` by force. ``lost``: it counts as lost; else it is not needed any more."""

    worker: int
    why: str
    lost: bool = False


@dataclass(frozen=True)
class Dismiss:
    """The run is over: every worker may end."""


@dataclass(frozen=True)
class GiveUp:
    """The run cannot go on."""

    why: str


@dataclass(frozen=True)
class StopRun:
    """Too few members would remain: let the run write a checkpoint and end."""

    why: str


Instruction = InstallView | Confirm | Release | Start | End | Dismiss | GiveUp | StopRun


# [membership] What is known of a run's workers: the state of ``elastic.coordinator.machine``.

Phase = Literal["starting", "connected", "ready", "member"]
Stage = Literal["open", "stopping", "finishing", "over"]


class ProtocolViolation(ValueError):
    """What was said contradicts what happened before: one side has a bug."""


NUMBER = attrgetter("number")


@dataclass(frozen=True)
class Numbers:
    """A set of worker numbers, a bit for each: one more costs next to nothing, however many there are."""

    bits: int = 0

    def __contains__(self, number: int) -> bool:
        return bool(self.bits >> number & 1)

    def __len__(self) -> int:
        return self.bits.bit_count()

    def plus(self, number: int) -> Numbers:
        """As this, with ``number``."""
        return Numbers(self.bits | 1 << number)


@dataclass(frozen=True)
class Worker:
    """A worker that is not gone. ``member``: it holds the run's state, or begins with the others of an initial view.

    ``preempted``: it will be taken away. ``to_replace``: another is to take its place, without hurry. ``excluded``: a
    view without it was installed while it was a member. ``host``: where it runs. ``late``: others of its host have
    waited for it for long enough.
    """

    number: int
    phase: Phase = "starting"
    preempted: bool = False
    to_replace: bool = False
    done: bool = False
    excluded: bool = False
    host: str = ""
    late: bool = False


@dataclass(frozen=True)
class Membership:
    """The state of the machine.

    ``workers``: all that are not gone, in the order of their numbers. ``current``: the newest complete view (all its
    members said Running), None while nobody holds state. ``proposed``: the newest view, as long as it is not complete,
    and ``running``: its members that have said Running. ``free``: how many more workers could be started;
    ``capacity_stale``: a worker has gone since that was told, so there may be more room by now. ``max_first_step``: the
    highest first step of any view; ``consecutive_failures``: breaks since it rose, or since a checkpoint or a report
    told of more steps than any before; ``failed_starts``: workers lost before they became members, since the last one
    that did. ``meshes``: how its workers are to stand.
    """

    low: int
    high: int
    target: int
    most_losses: int
    next_worker: int
    workers: tuple[Worker, ...]
    next_view: int = 1
    current: View | None = None
    proposed: View | None = None
    running: Numbers = Numbers()
    first_step: int = -1
    free: int = 0
    capacity_stale: bool = False
    max_first_step: int = -1
    consecutive_failures: int = 0
    failed_starts: int = 0
    stage: Stage = "open"
    meshes: MeshChoice = field(default_factory=MeshChoice)

    @property
    def members(self) -> tuple[Worker, ...]:
        """Who holds the run's state, by number."""
        return tuple(worker for worker in self.workers if worker.phase == "member")

    @property
    def live(self) -> tuple[View, ...]:
        """The views whose members may train now, oldest first: the one before a scheduled one goes on until that is
        complete."""
        before = self.proposed is None or self.proposed.scheduled
        return tuple(v for v in (self.current if before else None, self.proposed) if v is not None)

    @property
    def wanted(self) -> tuple[Worker, ...]:
        """Who will be there when all that is under way is done."""
        leaving: set[int] = set()
        if self.current is not None and self.proposed is not None:
            leaving = set(self.current.members) - set(self.proposed.members)
        leaving |= {worker.number for worker in self.workers if worker.preempted or worker.to_replace}
        return tuple(worker for worker in self.workers if worker.number not in leaving)

    @property
    def missing(self) -> int:
        """Workers that are to be started once there is room."""
        return max(0, self.target - len(self.wanted)) if self.stage == "open" else 0

    def find(self, number: int) -> Worker | None:
        """Worker ``number``, if it is not gone."""
        at = self._place(number)
        return self.workers[at] if at < len(self.workers) and self.workers[at].number == number else None

    @property
    def by_number(self) -> Mapping[int, Worker]:
        """All that are not gone: for those who look many up."""
        return {worker.number: worker for worker in self.workers}

    def get(self, number: int) -> Worker:
        """Worker ``number``. Raises ``KeyError`` where it is gone."""
        worker = self.find(number)
        if worker is None:
            raise KeyError(number)
        return worker

    def put(self, number: int, **facts: Any) -> Membership:
        """As this, with these facts about worker ``number``."""
        worker = self.find(number)
        if worker is None:
            return self
        at = self._place(number)
        return replace(self, workers=(*self.workers[:at], replace(worker, **facts), *self.workers[at + 1 :]))

    def put_all(self, numbers: Sequence[int], **facts: Any) -> Membership:
        """As this, with these facts about each of ``numbers``."""
        of = set(numbers)
        workers = (replace(worker, **facts) if worker.number in of else worker for worker in self.workers)
        return replace(self, workers=tuple(workers))

    def _place(self, number: int) -> int:
        """Where in ``workers`` a worker of this number stands, or would."""
        return bisect_left(self.workers, number, key=NUMBER)

    def without(self, number: int) -> Membership:
        """As this, with worker ``number`` gone."""
        workers = tuple(worker for worker in self.workers if worker.number != number)
        return replace(self, workers=workers, capacity_stale=True)


def begin(
    workers: Sequence[int], low: int, high: int, most_losses: int = 8, meshes: MeshChoice | None = None
) -> Membership:
    """A run whose ``workers`` are being started; none where they come back. It may have ``low`` to ``high`` of them."""
    numbers = sorted(set(workers))
    if len(numbers) < len(workers) or min(numbers, default=0) < 0:
        raise ValueError(f"a run begins with workers of different numbers, not with {list(workers)}")
    if not 1 <= low <= high or most_losses < 1:
        raise ValueError(f"1 <= low <= high and most_losses >= 1 must hold, not {low}, {high}, {most_losses}")
    target = min(max(len(numbers), low), high)
    started = tuple(Worker(number) for number in numbers)
    next_worker = max(numbers, default=-1) + 1
    return Membership(low, high, target, most_losses, next_worker, started, meshes=meshes or MeshChoice())


# [places] Who has a place in the view to come, who is waited for, which mesh a run may be asked for: questions to its state.


def who_stays(state: Membership, ready: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which members stay, and which workers join. One that is to be replaced stays until another comes for it."""
    assert state.current is not None
    known = state.by_number
    members = [known[number] for number in state.current.members if not known[number].preempted]
    fit = [worker.number for worker in members if not worker.to_replace][: state.target]
    joiners = ready[: state.target - len(fit)]
    slow = [worker.number for worker in members if worker.to_replace][: state.target - len(fit) - len(joiners)]
    if slow and _blocked(state) and len(fit) + len(slow) > state.low:
        slow.pop()
    stay = {*fit, *slow}
    return tuple(worker.number for worker in members if worker.number in stay), joiners


def batched_by_host(state: Membership, ready: tuple[int, ...]) -> tuple[int, ...]:
    """Those of ``ready`` that join now: the first workers of a host come together, as each view costs all a pause.

    Where one that has not connected yet will run nobody knows, so it may be there.
    """
    coming = [worker for worker in state.workers if worker.phase in ("starting", "connected") and not worker.late]
    if not (ready and coming):
        return ready
    known, settled = state.by_number, {worker.host for worker in state.members}
    anywhere, hosts = any(worker.phase == "starting" for worker in coming), {worker.host for worker in coming}
    return tuple(n for n in ready if (host := known[n].host) in settled or not (anywhere or host in hosts))


def waits_for_host(state: Membership) -> bool:
    """Whether somebody who is ready waits for others of its host."""
    if state.current is None:
        return False
    ready = tuple(worker.number for worker in state.workers if worker.phase == "ready")
    return ready != batched_by_host(state, ready)


def waits_for_more(state: Membership, mesh: Mesh) -> bool:
    """Whether ``mesh`` divides layers otherwise than is wanted, and would not if those were there that are coming."""
    coming = any(worker.phase in ("starting", "connected") for worker in state.workers)
    wanted = state.meshes.for_workers(state.target)
    return coming and (mesh.tensor, mesh.pipeline) != (wanted.tensor, wanted.pipeline)


def waits_for_others(state: Membership, event: Event) -> bool:
    """Whether nothing follows from ``event``, which ``state`` has, before others have said the same.

    ``derive`` would find that, too, by looking at every worker: in a run of thousands, when each of them says it.
    """
    match event:
        case Connected():
            return True
        case Ready():
            return state.current is None and any(
                worker.phase != "ready" for worker in reversed(state.workers)
            )  # the last began last
        case Running():
            return state.proposed is None or len(state.running) < len(state.proposed.members)
        case Done():
            return any(worker.phase == "member" and not worker.done for worker in reversed(state.workers))
    return False


def refuse_mesh(state: Membership, text: str) -> None:
    """Raise ``UserError`` where the run cannot stand as the mesh ``text`` says."""
    mesh = Mesh.parse(text)
    state.meshes.refuse(mesh)
    if not state.low <= mesh.workers <= state.high:
        fix = "ask for a mesh of as many, or begin the run with --workers LOW:HIGH"
        raise UserError(f"this run has from {state.low} to {state.high} workers", f"{mesh}: {mesh.workers}", fix)


def _blocked(state: Membership) -> bool:
    """Whether there is room for another worker only once a member leaves.

    Where a worker has just gone there will be room; and no member is let go while replacements fail to start.
    """
    coming = any(worker.phase != "member" for worker in state.workers)
    return not (state.free or coming or state.capacity_stale or state.failed_starts)


# [machine] Who is in a run: a pure machine. An event comes in, the new state and instructions come out; nothing else happens.
#
# Each event first changes the facts (who is there, what was asked). What follows from the facts is derived alike after
# every event, in one order: is the run over, does the view in force have to be replaced, is a new one settled, have
# workers to be ended or started, is there something to plan.

Outcome = tuple[Membership, tuple[Instruction, ...]]


def step(state: Membership, worker: int | None, event: Event) -> Outcome:
    """What ``event`` of ``worker`` (None: of the run) makes of ``state``, and what is to be done.

    Late news is ignored: of workers that are gone, of views that were replaced. Raises ``ProtocolViolation``.
    """
    if state.stage == "over":
        return state, ()
    if worker is None:
        facts, told, broken = _OF_RUN[type(event)](state, event)
        return derive(facts, told, broken, "")
    if worker >= state.next_worker:
        raise ProtocolViolation(f"worker {worker} was never started: {event}")
    if state.find(worker) is None:
        return state, ()
    facts, told, broken = _OF_WORKER[type(event)](state, worker, event)
    if not (told or broken) and waits_for_others(facts, event):
        return facts, ()
    return derive(facts, told, broken, getattr(event, "why", ""))


def replay(
    workers: Sequence[int],
    low: int,
    high: int,
    most_losses: int,
    events: Iterable[tuple[int | None, Event]],
    meshes: MeshChoice | None = None,
) -> Membership:
    """The state after ``events``, from the beginning."""
    state = begin(workers, low, high, most_losses, meshes)
    for worker, event in events:
        state, _ = step(state, worker, event)
    return state


def changes(state: Membership, event: Event) -> bool:
    """Return whether ``event``, which is of the run, says anything that ``state`` does not hold yet."""
    facts, told, broken = _OF_RUN[type(event)](state, event)
    return facts != state or bool(told) or broken


# -- facts: what an event says (the new state, instructions, whether a view that may train broke) -------------------
Facts = tuple[Membership, tuple[Instruction, ...], bool]


def _connected(state: Membership, worker: int, event: Connected) -> Facts:
    _expect(state, worker, "starting", event)
    return state.put(worker, phase="connected", host=event.host), (), False


def _ready(state: Membership, worker: int, event: Ready) -> Facts:
    _expect(state, worker, "connected", event)
    return state.put(worker, phase="ready"), (), False


def _running(state: Membership, worker: int, event: Running) -> Facts:
    view = state.proposed
    if event.version >= state.next_view:
        raise ProtocolViolation(f"view {event.version} was never installed: {event}")
    if view is None or event.version != view.number:
        if state.current is not None and event.version == state.current.number:
            raise ProtocolViolation(f"all members had said so before: {event}")
        return state, (), False
    if worker not in view.ranks or worker in state.running:
        raise ProtocolViolation(f"worker {worker} is no member or said so before: {event}")
    if state.running and event.step != state.first_step:
        raise ProtocolViolation(f"others of this view begin with step {state.first_step}: {event}")
    state = replace(state, running=state.running.plus(worker), first_step=event.step)
    if event.step > state.max_first_step:
        state = replace(state, max_first_step=event.step, consecutive_failures=0)
    if worker not in view.joiners:
        return state, (), False
    state = replace(state.put(worker, phase="member"), failed_starts=0)
    return state, (Confirm(worker, view.number),), False


def _broken(state: Membership, worker: int, event: Broken) -> Facts:
    if event.version >= state.next_view:
        raise ProtocolViolation(f"view {event.version} was never installed: {event}")
    view = next((v for v in state.live if v.number == event.version), None)
    if view is None:
        return state, (), False
    if worker not in view.ranks:
        raise ProtocolViolation(f"worker {worker} is no member of view {event.version}: {event}")
    state = replace(state, consecutive_failures=state.consecutive_failures + 1)
    told: tuple[Instruction, ...] = ()
    for joiner in view.joiners:
        # One that the members cannot reach would break every view that takes it in.
        if (found := state.find(joiner)) is not None and found.phase != "member":
            state, told = state.without(joiner), (*told, End(joiner, "it could not be taken in"))
            state = replace(state, failed_starts=state.failed_starts + 1)
    return state, told, True


def _noticed(state: Membership, worker: int, event: Noticed) -> Facts:
    return state.put(worker, preempted=True), (), False


def _replace(state: Membership, worker: int, event: ReplaceAsked) -> Facts:
    _expect(state, worker, "member", event)
    return replace(state.put(worker, to_replace=True), capacity_stale=False), (), False


def _left(state: Membership, worker: int, event: Left) -> Facts:
    if not state.get(worker).excluded:
        raise ProtocolViolation(f"there was no view without worker {worker}: {event}")
    newest = state.proposed or state.current
    # It may have left before it heard of a newer view that has it.
    broken = newest is not None and worker in newest.ranks
    return state.without(worker), (), broken


def _lost(state: Membership, worker: int, event: Lost) -> Facts:
    phase = state.get(worker).phase
    was_calm = state.proposed is None or state.proposed.scheduled
    broken = any(worker in view.ranks for view in state.live)
    state = state.without(worker)
    if phase != "member":
        state = replace(state, failed_starts=state.failed_starts + 1)
    elif was_calm or not state.members:
        # Several at once count once: before the next view is settled, only so many members are left to be lost.
        state = replace(state, consecutive_failures=state.consecutive_failures + 1)
    return state, (End(worker, event.why, lost=True),), broken


def _done(state: Membership, worker: int, event: Done) -> Facts:
    _expect(state, worker, "member", event)
    return replace(state.put(worker, done=True), stage="finishing"), (), False


def _resize(state: Membership, event: ResizeAsked) -> Facts:
    target = min(max(event.workers, state.low), state.high)
    return replace(state, target=target, failed_starts=0), (), False


def _reshape(state: Membership, event: ReshapeAsked) -> Facts:
    mesh = Mesh.parse(event.mesh)  # whoever hears the request has looked at it: ``refuse_mesh``
    return replace(state, target=mesh.workers, failed_starts=0, meshes=replace(state.meshes, wanted=mesh)), (), False


def _layers(state: Membership, event: LayersFound) -> Facts:
    return replace(state, meshes=state.meshes.widened(event.layers)), (), False


def _capacity(state: Membership, event: CapacityChanged) -> Facts:
    return replace(state, free=event.free, capacity_stale=False), (), False


def _waited(state: Membership, event: WaitedEnough) -> Facts:
    late = [worker.number for worker in state.workers if worker.phase in ("starting", "connected")]
    return state.put_all(late, late=True), (), False


def _progressed(state: Membership, event: Progressed) -> Facts:
    return replace(state, consecutive_failures=0), (), False


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
    ReshapeAsked: _reshape,
    LayersFound: _layers,
    CapacityChanged: _capacity,
    WaitedEnough: _waited,
    Progressed: _progressed,
}


# -- what follows -----------------------------------------------------------------------------------------------------
def derive(state: Membership, told: tuple[Instruction, ...], broken: bool, why: str) -> Outcome:
    """What follows from the facts in ``state``; ``broken``: a view that may train broke, ``why`` says by what."""
    end = _ending(state, why)
    if end is not None:
        # Who has not come yet would find nobody.
        unborn = tuple(End(worker.number, "the run is over") for worker in state.workers if worker.phase == "starting")
        return replace(state, stage="over"), (*told, end, *unborn)
    for consequence in (_replace_broken if broken else _complete, _drop_spares, _start_missing, _stop_early, _propose):
        state, more = consequence(state)
        told = (*told, *more)
    return state, told


def _ending(state: Membership, why: str) -> Instruction | None:
    members = state.members
    if state.stage == "finishing" and all(worker.done for worker in members):
        return Dismiss()
    if state.consecutive_failures >= state.most_losses == 1:
        return GiveUp(f"the run bears no loss of a worker, and can be resumed from its newest checkpoint: {why}")
    if state.consecutive_failures >= state.most_losses:
        return GiveUp(
            f"{state.consecutive_failures} times a view broke, and the run came no further in between; the last: {why}"
        )
    if state.stage == "stopping" and not members:
        return GiveUp(f"all members were lost before they could end; the last: {why}")
    if not state.workers and state.failed_starts >= state.most_losses:
        return GiveUp(f"{state.failed_starts} workers in a row were lost before their first step; the last: {why}")
    return None


def _replace_broken(state: Membership) -> Outcome:
    """The view in force broke: go on at once with those who hold the state."""
    members = {worker.number for worker in state.members}
    *_, newest = state.live
    # Who is not in the newest view leaves for good: the others may have completed steps without it by now, which it
    # could not make up for. Only where nobody else is left does it stay.
    ordered = newest.members if members & set(newest.members) else state.current.members if state.current else ()
    staying = tuple(number for number in ordered if number in members)
    initial = state.current is None
    state = replace(state, proposed=None, running=Numbers())
    if not staying:
        return replace(state, current=None), ()
    places = state.meshes.for_workers(len(staying)).workers
    # It may be that the newest view never came into force; then each holds what the one before it says, copies too.
    staying = fitting_workers(staying, newest.grid, newest.ranks, places)
    state, told = _let_go(state, members - set(staying))
    state, install = _install(state, staying, initial=initial)
    return state, (*told, install)


def _complete(state: Membership) -> Outcome:
    """Once all members of a view run, it is the one that counts."""
    view = state.proposed
    if view is None or len(state.running) < len(view.members):
        return state, ()
    state = replace(state, current=view, proposed=None, running=Numbers())
    if view.initial:
        state = replace(state, failed_starts=0)
    return _let_go(state, {worker.number for worker in state.members} - set(view.members))


def _drop_spares(state: Membership) -> Outcome:
    """End who is not wanted any more and holds no state."""
    taken = set(state.proposed.members) if state.proposed else set()
    spare = [worker for worker in state.workers if worker.phase != "member" and worker.number not in taken]
    # The least warm first.
    spare.sort(key=lambda worker: (("starting", "connected", "ready").index(worker.phase), -worker.number))
    excess = len(state.wanted) - state.target
    told: list[Instruction] = []
    for worker in spare:
        if worker.preempted or excess > 0:
            excess -= not worker.preempted
            state = state.without(worker.number)
            told.append(End(worker.number, "it was given notice" if worker.preempted else "fewer workers are wanted"))
    return state, tuple(told)


def _start_missing(state: Membership) -> Outcome:
    """Start what is missing, as far as there is room."""
    count = min(state.target - len(state.wanted), state.free)
    if state.stage != "open" or count <= 0 or state.failed_starts >= state.most_losses:
        return state, ()
    numbers = tuple(range(state.next_worker, state.next_worker + count))
    workers = (*state.workers, *(Worker(number) for number in numbers))
    state = replace(state, workers=workers, next_worker=numbers[-1] + 1, free=state.free - count)
    return state, (Start(numbers),)


def _stop_early(state: Membership) -> Outcome:
    """Stop in good order before a notice takes more members than the run can spare."""
    leaving = [worker.number for worker in state.members if worker.preempted]
    remaining = sum(not worker.preempted for worker in state.workers)
    if state.stage != "open" or not leaving or remaining >= state.low:
        return state, ()
    why = f"after the notice to worker {leaving[-1]}, {remaining} would remain, and {state.low} are the fewest allowed"
    return replace(state, stage="stopping"), (StopRun(why),)


def _propose(state: Membership) -> Outcome:
    """Propose what the members should be, where that differs from what they are and nothing else is under way."""
    if state.stage != "open" or state.proposed is not None:
        return state, ()
    ready = tuple(worker.number for worker in state.workers if worker.phase == "ready" and not worker.preempted)
    if state.current is None:
        if not ready or len(ready) < len(state.workers):
            return state, ()
        ready = by_host(ready[: state.meshes.for_workers(len(ready)).workers], _hosts(state))
        state, install = _install(state.put_all(ready, phase="member"), ready, initial=True)
        return state, (install,)
    staying, joiners = who_stays(state, batched_by_host(state, ready))
    if not staying:  # somebody has to hand the state over: they leave by the view after
        staying = state.current.members
    mesh = state.meshes.for_workers(len(staying) + len(joiners))
    joiners = joiners[: max(0, mesh.workers - len(staying))]
    if joiners and waits_for_more(state, mesh):
        joiners, mesh = (), state.meshes.for_workers(len(staying))
    staying = fitting_workers(staying, state.current.grid, state.current.ranks, mesh.workers)
    if (staying, joiners) == (state.current.members, ()) and mesh == state.current.grid:
        return state, ()
    members = assign_ranks(staying, joiners, state.current.grid, state.current.ranks, mesh, _hosts(state))
    state, install = _install(state, members, scheduled=True, joiners=joiners)
    return state, (install,)


# -- small things -----------------------------------------------------------------------------------------------------
def _install(
    state: Membership,
    members: tuple[int, ...],
    *,
    scheduled: bool = False,
    joiners: tuple[int, ...] = (),
    initial: bool = False,
) -> tuple[Membership, Instruction]:
    mesh, known, inside = state.meshes.for_workers(len(members)), state.by_number, set(members)
    hosts = tuple(known[number].host for number in members)
    leavers: tuple[int, ...] = ()
    if scheduled and state.current is not None and state.meshes.leavers_send_state:
        leavers = tuple(number for number in state.current.members if number not in inside)
    view = View(
        state.next_view,
        members,
        scheduled,
        joiners,
        initial,
        mesh="" if mesh.replica == 1 else str(mesh),
        hosts=hosts if len(set(hosts)) > 1 else (),
        leavers=leavers,
    )
    for worker in state.members:
        if worker.number not in inside:
            state = state.put(worker.number, excluded=True)
    state = replace(state, proposed=view, next_view=view.number + 1, running=Numbers())
    return state, InstallView(view)


def _hosts(state: Membership) -> dict[int, str]:
    return {worker.number: worker.host for worker in state.workers}


def _let_go(state: Membership, numbers: set[int]) -> Outcome:
    for number in numbers:
        state = state.without(number)
    return state, tuple(Release(number) for number in sorted(numbers))


def _expect(state: Membership, number: int, phase: Phase, event: Event) -> None:
    found = state.get(number).phase
    if found != phase:
        raise ProtocolViolation(f"worker {number} is {found}, not {phase}: {event}")


# [requests] What somebody asks of a run from outside of its membership: whether it can be, and the answer.

Request = ResizeAsked | ReshapeAsked
OVER = "the run must be running (got one that is over): go on with it: elastune run ... --resume"


def objection(state: Membership, request: Event) -> str:
    """Why ``request`` cannot be; "" where it can. A number of workers always can: it is cut to what is allowed."""
    try:
        if isinstance(request, ReshapeAsked):
            refuse_mesh(state, request.mesh)
    except UserError as error:
        return str(error)
    return ""


def answer(state: Membership, request: Request, members: Sequence[int], why_not: str) -> Answer:
    """To ``request``, whose sender is not known to the machine; ``state`` is what it has made of the run."""
    if why_not:
        return Answer(False, why_not, list(members))
    if isinstance(request, ReshapeAsked):
        return Answer(True, f"from {len(members)} workers to the mesh {state.meshes.wanted}", list(members))
    allowed = f" ({request.workers} asked for; from {state.low} to {state.high} are allowed)"
    bounds = "" if request.workers == state.target else allowed
    return Answer(True, f"from {len(members)} to {state.target} workers{bounds}", list(members))
