"""Who is in a run: a pure state machine. An event comes in; the new state and instructions come out.

Each event first changes the facts: which workers are there, and what was requested. The consequences are then
derived alike after every event. Read ``Membership``, the instructions, ``transition`` and ``derive`` in
this order. The coordinator carries out some instructions, and the controller the others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal

from elastune.core.errors import UserError
from elastune.core.formatting import count
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
    NoticeEnding,
    Progressed,
    Ready,
    ReplaceAsked,
    ReshapeAsked,
    ResizeAsked,
    Running,
    WaitedEnough,
)
from elastune.elastic.wire.view import View

Phase = Literal["starting", "connected", "ready", "member"]

Stage = Literal["open", "stopping", "finishing", "over"]

Request = ResizeAsked | ReshapeAsked

OVER = "the run must be running (got one that is over): go on with it: elastune run ... --resume"

NUMBER = attrgetter("number")


@dataclass(frozen=True)
class Confirm:
    """Confirm to ``worker``, a joiner, that it is a member of view number ``view`` for good."""

    worker: int
    view: int


@dataclass(frozen=True)
class Release:
    """Let ``worker``, a member until now, end: the others go on without it. It may have ended already."""

    worker: int


@dataclass(frozen=True)
class Start:
    """Start these new workers. Their numbers were never used before."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class End:
    """End ``worker`` by force. ``lost``: it counts as lost; else it is no longer needed."""

    worker: int
    why: str
    lost: bool = False


@dataclass(frozen=True)
class Dismiss:
    """Let every worker end: the run is over."""


@dataclass(frozen=True)
class GiveUp:
    """End the run as failed: it cannot go on."""

    why: str


@dataclass(frozen=True)
class StopRun:
    """Have the run write a checkpoint and end: too few would remain after the notice to ``worker``."""

    worker: int
    why: str


Instruction = InstallView | Confirm | Release | Start | End | Dismiss | GiveUp | StopRun


class ProtocolViolation(ValueError):
    """A message contradicts what happened before: one side has a bug."""


@dataclass(frozen=True)
class Numbers:
    """A set of worker numbers, held as one bit for each number, so that adding a number is cheap in large runs."""

    bits: int = 0

    def __contains__(self, number: int) -> bool:
        return bool(self.bits >> number & 1)

    def __len__(self) -> int:
        return self.bits.bit_count()

    def plus(self, number: int) -> Numbers:
        """This set with ``number``."""
        return Numbers(self.bits | 1 << number)


@dataclass(frozen=True)
class Worker:
    """A worker that is not gone.

    Attributes:
        number: Its number, which no other worker of the run ever has.
        phase: How far it is. A "member" holds the run's state, or begins with the other members of an initial view.
        preempted: It will be taken away.
        due: It will be taken away so soon that the time is only enough to write a checkpoint.
        to_replace: Another worker is to take its place, without hurry.
        done: Its training function has ended well.
        excluded: A view without it was installed while it was a member.
        host: The host that it runs on.
        late: The other workers of its host no longer wait for it.
    """

    number: int
    phase: Phase = "starting"
    preempted: bool = False
    due: bool = False
    to_replace: bool = False
    done: bool = False
    excluded: bool = False
    host: str = ""
    late: bool = False


@dataclass(frozen=True)
class Membership:
    """The state of the machine: a run's workers, its views, and what was requested.

    Attributes:
        low: The smallest number of workers that the run goes on with.
        high: The largest number of workers that the run may have.
        target: The number of workers that the run is to have.
        most_losses: The run ends after this many losses in a row without progress.
        next_worker: The number of the next worker to be started.
        workers: All workers that are not gone, in the order of their numbers.
        next_view: The number of the next view.
        current: The newest complete view (all its members have reported Running); None while no worker holds state.
        proposed: The newest view, as long as it is not complete.
        running: The members of the proposed view that have reported Running.
        first_step: The first step of the proposed view, as these members have reported it.
        free: How many more workers could be started.
        capacity_stale: A worker has gone since ``free`` was reported, so there may be more room by now.
        max_first_step: The highest first step of any view.
        consecutive_failures: Breaks of views since the run last progressed: ``max_first_step`` rose, or a checkpoint or
            a report had a higher step than any before.
        failed_starts: Workers that were lost before they became members, since the last one that became a member.
        stage: Whether the run goes on, stops, finishes or is over.
        meshes: The meshes that the workers may form.
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
        """The workers that hold the run's state, by number."""
        return tuple(worker for worker in self.workers if worker.phase == "member")

    @property
    def live(self) -> tuple[View, ...]:
        """The views whose members may train now, oldest first.

        The view before a scheduled one goes on until the scheduled one is complete.
        """
        before = self.proposed is None or self.proposed.scheduled
        return tuple(v for v in (self.current if before else None, self.proposed) if v is not None)

    @property
    def wanted(self) -> tuple[Worker, ...]:
        """The workers that remain once all current changes are done."""
        leaving: set[int] = set()
        if self.current is not None and self.proposed is not None:
            leaving = set(self.current.members) - set(self.proposed.members)
        leaving |= {worker.number for worker in self.workers if worker.preempted or worker.to_replace}
        return tuple(worker for worker in self.workers if worker.number not in leaving)

    @property
    def missing(self) -> int:
        """How many workers are to be started once there is room."""
        return max(0, self.target - len(self.wanted)) if self.stage == "open" else 0

    def find(self, number: int) -> Worker | None:
        """Worker ``number``, if it is not gone."""
        at = self._place(number)
        return self.workers[at] if at < len(self.workers) and self.workers[at].number == number else None

    @property
    def by_number(self) -> Mapping[int, Worker]:
        """All workers that are not gone, by number: for a caller that looks up many of them."""
        return {worker.number: worker for worker in self.workers}

    def get(self, number: int) -> Worker:
        """Worker ``number``. Raises ``KeyError`` if it is gone."""
        worker = self.find(number)
        if worker is None:
            raise KeyError(number)
        return worker

    def put(self, number: int, **facts: Any) -> Membership:
        """This state with changed fields of worker ``number``."""
        worker = self.find(number)
        if worker is None:
            return self
        at = self._place(number)
        return replace(self, workers=(*self.workers[:at], replace(worker, **facts), *self.workers[at + 1 :]))

    def put_all(self, numbers: Sequence[int], **facts: Any) -> Membership:
        """This state with changed fields of each of these workers."""
        changed = set(numbers)
        workers = (replace(worker, **facts) if worker.number in changed else worker for worker in self.workers)
        return replace(self, workers=tuple(workers))

    def _place(self, number: int) -> int:
        """The index in ``workers`` at which a worker of this number stands, or would stand."""
        return bisect_left(self.workers, number, key=NUMBER)

    def without(self, number: int) -> Membership:
        """This state without worker ``number``."""
        workers = tuple(worker for worker in self.workers if worker.number != number)
        return replace(self, workers=workers, capacity_stale=True)


def begin(
    workers: Sequence[int], low: int, high: int, most_losses: int = 8, meshes: MeshChoice | None = None
) -> Membership:
    """The state of a run whose ``workers`` are being started.

    ``workers`` is empty if the workers come back by themselves. The run may have ``low`` to ``high`` workers.
    """
    numbers = sorted(set(workers))
    if len(numbers) < len(workers) or min(numbers, default=0) < 0:
        raise ValueError(f"a run begins with workers of different numbers, not with {list(workers)}")
    if not 1 <= low <= high or most_losses < 1:
        raise ValueError(f"1 <= low <= high and most_losses >= 1 must hold, not {low}, {high}, {most_losses}")
    target = min(max(len(numbers), low), high)
    started = tuple(Worker(number) for number in numbers)
    next_worker = max(numbers, default=-1) + 1
    return Membership(low, high, target, most_losses, next_worker, started, meshes=meshes or MeshChoice())


# --- places: who stays, joins, is waited for ---


def who_stays(state: Membership, ready: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The members that stay, and the workers that join.

    A member to be replaced stays until another worker can join. A member that got notice leaves at once, unless too few
    members would remain: then it stays until others have joined, or its time is due.
    """
    assert state.current is not None
    by_number = state.by_number
    everyone = [by_number[number] for number in state.current.members]
    members = [worker for worker in everyone if not worker.preempted]
    fit = [worker.number for worker in members if not worker.to_replace][: state.target]
    joiners = ready[: state.target - len(fit)]
    slow = [worker.number for worker in members if worker.to_replace][: state.target - len(fit) - len(joiners)]
    if slow and _blocked(state) and len(fit) + len(slow) > state.low:
        slow.pop()
    needed = max(0, state.low - len(fit) - len(slow) - len(joiners))
    leaving = [worker.number for worker in everyone if worker.preempted and not worker.due][:needed]
    stay = {*fit, *slow, *leaving}
    return tuple(worker.number for worker in everyone if worker.number in stay), joiners


def batched_by_host(state: Membership, ready: tuple[int, ...]) -> tuple[int, ...]:
    """The ``ready`` workers that join now: the first workers of a host join together, as each view costs all a pause.

    The host of a worker that has not connected yet is unknown, so any host may have to wait for it.
    """
    coming = [worker for worker in state.workers if worker.phase in ("starting", "connected") and not worker.late]
    if not (ready and coming):
        return ready
    by_number, settled = state.by_number, {worker.host for worker in state.members}
    anywhere, hosts = any(worker.phase == "starting" for worker in coming), {worker.host for worker in coming}
    return tuple(
        number for number in ready if (host := by_number[number].host) in settled or not (anywhere or host in hosts)
    )


def waits_for_host(state: Membership) -> bool:
    """Whether a ready worker waits for others of its host."""
    if state.current is None:
        return False
    ready = tuple(worker.number for worker in state.workers if worker.phase == "ready")
    return ready != batched_by_host(state, ready)


def waits_for_more(state: Membership, mesh: Mesh) -> bool:
    """Whether ``mesh`` divides layers otherwise than is wanted, and workers are coming with which it would not."""
    coming = any(worker.phase in ("starting", "connected") for worker in state.workers)
    wanted = state.meshes.for_workers(state.target)
    return coming and (mesh.tensor, mesh.pipeline) != (wanted.tensor, wanted.pipeline)


def waits_for_others(state: Membership, event: Event) -> bool:
    """Whether nothing follows from ``event``, which ``state`` includes, before other workers have sent the same.

    ``derive`` would find the same by looking at every worker, which is slow if each of thousands of workers sends it.
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
    """Raise ``UserError`` if the run cannot form the mesh that ``text`` describes."""
    mesh = Mesh.parse(text)
    state.meshes.refuse(mesh)
    if not state.low <= mesh.workers <= state.high:
        fix = "ask for a mesh of as many, or begin the run with --workers LOW:HIGH"
        raise UserError(f"this run has from {state.low} to {state.high} workers", f"{mesh}: {mesh.workers}", fix)


def _blocked(state: Membership) -> bool:
    """Whether there is room for another worker only once a member leaves.

    If a worker has just gone, there will be room. And no member is let go while replacements fail to start.
    """
    coming = any(worker.phase != "member" for worker in state.workers)
    return not (state.free or coming or state.capacity_stale or state.failed_starts)


Outcome = tuple[Membership, tuple[Instruction, ...]]


# --- one event ---


def transition(state: Membership, worker: int | None, event: Event) -> Outcome:
    """The state and the instructions that follow from one event.

    Late events are ignored: those of workers that are gone, and those about views that were replaced.

    Args:
        state: The state before the event.
        worker: The worker that the event is about; None for an event of the run.
        event: The event.

    Raises:
        ProtocolViolation: The event contradicts what happened before.
    """
    if state.stage == "over":
        return state, ()
    if worker is None:
        facts, instructions, broken = _RUN_EVENTS[type(event)](state, event)
        return derive(facts, instructions, broken, "")
    if worker >= state.next_worker:
        raise ProtocolViolation(f"worker {worker} was never started: {event}")
    if state.find(worker) is None:
        return state, ()
    facts, instructions, broken = _WORKER_EVENTS[type(event)](state, worker, event)
    if not (instructions or broken) and waits_for_others(facts, event):
        return facts, ()
    return derive(facts, instructions, broken, getattr(event, "why", ""))


def changes(state: Membership, event: Event) -> bool:
    """Whether ``event``, an event of the run, would change ``state``."""
    facts, instructions, broken = _RUN_EVENTS[type(event)](state, event)
    return facts != state or bool(instructions) or broken


# --- from an event to facts: the new state, instructions, and whether a view that may train broke ---

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
            raise ProtocolViolation(f"all members have sent this before: {event}")
        return state, (), False
    if worker not in view.ranks or worker in state.running:
        raise ProtocolViolation(f"worker {worker} is not a member or has sent this before: {event}")
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
    instructions: tuple[Instruction, ...] = ()
    for joiner in view.joiners:
        # A joiner that the members cannot reach would break every view that has it.
        if (member := state.find(joiner)) is not None and member.phase != "member":
            state, instructions = state.without(joiner), (*instructions, End(joiner, "it could not be taken in"))
            state = replace(state, failed_starts=state.failed_starts + 1)
    return state, instructions, True


def _noticed(state: Membership, worker: int, event: Noticed) -> Facts:
    return state.put(worker, preempted=True), (), False


def _notice_ending(state: Membership, worker: int, event: NoticeEnding) -> Facts:
    return state.put(worker, preempted=True, due=True), (), False


def _replace(state: Membership, worker: int, event: ReplaceAsked) -> Facts:
    _expect(state, worker, "member", event)
    return replace(state.put(worker, to_replace=True), capacity_stale=False), (), False


def _left(state: Membership, worker: int, event: Left) -> Facts:
    if not state.get(worker).excluded:
        raise ProtocolViolation(f"there was no view without worker {worker}: {event}")
    newest = state.proposed or state.current
    # The worker may have left before it received a newer view that has it.
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
        # Several losses at once count once: until the next view is complete, only its members can be lost.
        state = replace(state, consecutive_failures=state.consecutive_failures + 1)
    return state, (End(worker, event.why, lost=True),), broken


def _done(state: Membership, worker: int, event: Done) -> Facts:
    _expect(state, worker, "member", event)
    return replace(state.put(worker, done=True), stage="finishing"), (), False


def _resize(state: Membership, event: ResizeAsked) -> Facts:
    target = min(max(event.workers, state.low), state.high)
    return replace(state, target=target, failed_starts=0), (), False


def _reshape(state: Membership, event: ReshapeAsked) -> Facts:
    mesh = Mesh.parse(event.mesh)  # the receiver of the request has checked it by ``refuse_mesh``
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


_WORKER_EVENTS: dict[type[Any], Callable[[Membership, int, Any], Facts]] = {
    Connected: _connected,
    Ready: _ready,
    Running: _running,
    Broken: _broken,
    Noticed: _noticed,
    NoticeEnding: _notice_ending,
    ReplaceAsked: _replace,
    Left: _left,
    Lost: _lost,
    Done: _done,
}
_RUN_EVENTS: dict[type[Any], Callable[[Membership, Any], Facts]] = {
    ResizeAsked: _resize,
    ReshapeAsked: _reshape,
    LayersFound: _layers,
    CapacityChanged: _capacity,
    WaitedEnough: _waited,
    Progressed: _progressed,
}


# --- from facts to instructions ---


def derive(state: Membership, instructions: tuple[Instruction, ...], broken: bool, why: str) -> Outcome:
    """Derive what follows from the facts in ``state``, alike after every event.

    The order is fixed. First: is the run over? Then: has a broken view to be replaced, or is a new view complete? Then:
    have workers to be ended or started, and is a new view to be proposed?

    Args:
        state: The facts.
        instructions: Instructions that follow from the event itself.
        broken: Whether a view that may train broke.
        why: The reason of the break.
    """
    end = _ending(state, why)
    if end is not None:
        # A worker that has not connected yet would find no coordinator.
        unconnected = tuple(
            End(worker.number, "the run is over") for worker in state.workers if worker.phase == "starting"
        )
        return replace(state, stage="over"), (*instructions, end, *unconnected)
    for consequence in (_replace_broken if broken else _complete, _drop_spares, _start_missing, _stop_early, _propose):
        state, more = consequence(state)
        instructions = (*instructions, *more)
    return state, instructions


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
    """Replace the broken view at once by one of the members that hold the state."""
    members = {worker.number for worker in state.members}
    *_, newest = state.live
    # A member that is not in the newest view leaves for good: the others may have completed steps without it by now,
    # and it could not catch up. It stays only if no other member is left.
    ordered = newest.members if members & set(newest.members) else state.current.members if state.current else ()
    staying = tuple(number for number in ordered if number in members)
    initial = state.current is None
    state = replace(state, proposed=None, running=Numbers())
    if not staying:
        return replace(state, current=None), ()
    places = state.meshes.for_workers(len(staying)).workers
    # If the newest view never came into force, each member still holds the state of the view before it.
    staying = fitting_workers(staying, newest.grid, newest.ranks, places)
    state, instructions = _let_go(state, members - set(staying))
    state, install = _install(state, staying, initial=initial)
    return state, (*instructions, install)


def _complete(state: Membership) -> Outcome:
    """Make the proposed view the current one, once all its members run."""
    view = state.proposed
    if view is None or len(state.running) < len(view.members):
        return state, ()
    state = replace(state, current=view, proposed=None, running=Numbers())
    if view.initial:
        state = replace(state, failed_starts=0)
    return _let_go(state, {worker.number for worker in state.members} - set(view.members))


def _drop_spares(state: Membership) -> Outcome:
    """End the workers that are not wanted any more and hold no state."""
    taken = set(state.proposed.members) if state.proposed else set()
    spare = [worker for worker in state.workers if worker.phase != "member" and worker.number not in taken]
    # The least warm first.
    spare.sort(key=lambda worker: (("starting", "connected", "ready").index(worker.phase), -worker.number))
    excess = len(state.wanted) - state.target
    instructions: list[Instruction] = []
    for worker in spare:
        if worker.preempted or excess > 0:
            excess -= not worker.preempted
            state = state.without(worker.number)
            instructions.append(
                End(worker.number, "it was given notice" if worker.preempted else "fewer workers are wanted")
            )
    return state, tuple(instructions)


def _start_missing(state: Membership) -> Outcome:
    """Start the missing workers, as far as there is room."""
    count = min(state.target - len(state.wanted), state.free)
    if state.stage != "open" or count <= 0 or state.failed_starts >= state.most_losses:
        return state, ()
    numbers = tuple(range(state.next_worker, state.next_worker + count))
    workers = (*state.workers, *(Worker(number) for number in numbers))
    state = replace(state, workers=workers, next_worker=numbers[-1] + 1, free=state.free - count)
    return state, (Start(numbers),)


def _stop_early(state: Membership) -> Outcome:
    """Stop the run in good order once a notice is nearly over, if too few workers or no copy of the state would remain.

    Until then the members with a notice train on, because replacements may still come.
    """
    due = [worker.number for worker in state.members if worker.due]
    if state.stage != "open" or not due:
        return state, ()
    holders = sum(not worker.due for worker in state.members)
    remaining = holders + sum(worker.phase != "member" and not worker.preempted for worker in state.workers)
    if holders and remaining >= state.low:
        return state, ()
    why = f"{count(remaining, 'worker')} would remain, the fewest allowed are {state.low}"
    if remaining >= state.low:
        why = "no member would remain, and no other worker has joined yet"
    return replace(state, stage="stopping"), (StopRun(due[-1], why),)


def _propose(state: Membership) -> Outcome:
    """Propose a view of the wanted members, if it differs from the current view and no other change is running."""
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
    if not staying:  # some members have to send the state to the joiners: they leave by the view after
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


def _install(
    state: Membership,
    members: tuple[int, ...],
    *,
    scheduled: bool = False,
    joiners: tuple[int, ...] = (),
    initial: bool = False,
) -> tuple[Membership, Instruction]:
    mesh, by_number, inside = state.meshes.for_workers(len(members)), state.by_number, set(members)
    hosts = tuple(by_number[number].host for number in members)
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
    actual = state.get(number).phase
    if actual != phase:
        raise ProtocolViolation(f"worker {number} is {actual}, not {phase}: {event}")


# --- requests from outside of the run ---


def objection(state: Membership, request: Event) -> str:
    """The reason why ``request`` is impossible; "" if it is possible.

    A number of workers is cut to what the run allows, unless that leaves only one number.
    """
    try:
        if isinstance(request, ReshapeAsked):
            refuse_mesh(state, request.mesh)
        elif isinstance(request, ResizeAsked) and state.low == state.high != request.workers:
            rule = f"this run has {count(state.low, 'worker')} throughout"
            raise UserError(rule, request.workers, f"begin a run with {_wider_bounds(state, request.workers)}")
    except UserError as error:
        return str(error)
    return ""


def answer(state: Membership, request: Request, members: Sequence[int], why_not: str) -> Answer:
    """The answer to the sender of ``request``; ``state`` is the state after the request."""
    if why_not:
        return Answer(False, why_not, list(members))
    if isinstance(request, ReshapeAsked):
        return Answer(True, f"from {len(members)} workers to the mesh {state.meshes.wanted}", list(members))
    if request.workers == state.target:
        return Answer(True, f"from {len(members)} to {count(state.target, 'worker')}", list(members))
    allowed = f"{request.workers} asked for; from {state.low} to {state.high} are allowed"
    fix = f"a run with {_wider_bounds(state, request.workers)} may have them"
    return Answer(True, f"from {len(members)} to {count(state.target, 'worker')} ({allowed}; {fix})", list(members))


def _wider_bounds(state: Membership, workers: int) -> str:
    """The option of a run that may have ``workers``, too. It also gives the run a slot for each of them."""
    return f"--workers {min(state.low, workers)}:{max(state.high, workers)}"
