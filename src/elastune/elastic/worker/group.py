"""The workers that train together, as one of them sees them, and its log of completed operations.

All members execute the same sequence of collective operations: a step's reduction, or a gather. An operation is
*completed* at a worker when its whole result is there. No worker completes the next one before all have contributed
to this one, so members differ by one operation at most. When a group breaks, the survivors meet in the next view's
group and compare. A survivor that missed the newest completed operation copies its result; if no survivor has it, all
repeat the operation. Workers that another launcher started have no coordinator: ``StaticWatch`` compares them
through their rendezvous store.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple
from functools import partial
from typing import NoReturn, cast

import torch
from torch._C._distributed_c10d import Store

from elastune.core.errors import UserError
from elastune.core.journal.records import ChangePart
from elastune.core.layout import Unrecoverable
from elastune.core.mesh import Mesh
from elastune.core.slots import cut
from elastune.core.sync_plan import SyncPlan
from elastune.elastic.stragglers import COLLECTIVES, HeartbeatSample, Stall, find_stall, rank_differences
from elastune.elastic.wire.messages import Beat, Corrupt, Doing, decode, encode
from elastune.elastic.wire.view import View
from elastune.elastic.worker import recovery
from elastune.elastic.worker.recovery import (
    MemberStatus,
    OpenRound,
    Packed,
    RecoveryPlan,
    StateOwner,
    goes_on,
    reconcile,
)
from elastune.parallel.comm.group import CollectiveMismatch, Group, GroupBroken
from elastune.parallel.comm.process_groups import Comms, replicated

Rows = list[list[float]]

_ROWS = b"rows"  # the description of a gather's result, where one is sent
LOOK_EVERY_S = 0.5
LOST_KEY, LOST_AFTER_BEATS = "elastune/lost", 3
CONNECTION_LOST = ("connection closed by peer", "connection reset by peer", "broken pipe")  # gloo's texts
STUCK_S = 5.0  # a library that holds the main thread for so long will never let it go


class Rewind(BaseException):
    """Raised to call the training function again: from the newest snapshot, or from the start."""


class Leave(BaseException):
    """Raised where this worker is no member any more."""


class WorkerGroup:
    """The workers of a run that another launcher started (torchrun, srun), or one worker alone.

    A lost one ends the run.

    ``ElasticWorkerGroup`` is the group of workers that come and go. Training uses both alike.

    Attributes:
        elastic: Whether workers may come and go.
        comms: The process groups that the workers reduce on.
        synchronised: Whether this worker executes what the others execute. If not (it builds what it will train, or the
            step at this place was lost), its gathers return its own values only.
        restart_from_checkpoint: All state was lost: the run goes on from its newest checkpoint, or from the start.
        where: Returns the line that the user's program is at. Any thread may call it.
        failed: What this worker was doing when its group broke for good.
        left: Which loop the program has left early since the newest step, and at which line.
        doubted_until: Every step up to this one is verified: the steps before were not what they should be.
        gathered_on: The mesh of the workers whose values the newest gather brought; the current mesh may be another
            one.
    """

    elastic = False
    restart_from_checkpoint = False

    def __init__(self, group: Group, comms: Comms | None = None) -> None:
        """Form the workers from ``group``. ``comms``: their process groups, if not each worker has a whole replica."""
        self.comms = comms or replicated(group)
        self.gathered_on = self.comms.mesh
        self.synchronised = True
        self.interruption = Interruption()
        self.where: Callable[[], str] = lambda: ""
        self.failed: Beat | None = None
        self.left = ""
        self.doubted_until = 0
        self._log = CommitLog()
        self._step = 0
        self._activity: tuple[float, str, int, int, int, str] = (time.monotonic(), "starting", 0, 0, 0, "")

    @property
    def group(self) -> Group:
        """The group of all workers."""
        return self.comms.everyone

    @property
    def worker(self) -> int:
        """This worker's number, which is independent of its rank."""
        return self.group.rank

    @property
    def view(self) -> int:
        """The number of the view that this worker is a member of; 0 if there are no views."""
        return 0

    @property
    def members(self) -> tuple[int, ...]:
        """The members' numbers, by rank."""
        return tuple(range(self.group.size))

    @property
    def planned(self) -> bool:
        """Whether this view was installed at an agreed step boundary."""
        return True

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.group.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.group.size

    @property
    def assignment_view(self) -> int:
        """The number of the view by which learners are distributed in the open round, or in the next one."""
        return self.view

    @property
    def seat(self) -> tuple[int, int]:
        """How many workers share the learners of the open or next round, and the place of this worker among them."""
        return self.size, self.rank

    def learner_workers(self, assignment_view: int, learners: int) -> Mapping[int, int]:
        """The worker of each of so many ``learners``, as the view ``assignment_view`` distributes them."""
        parts = cut(learners, self.size)
        return {learner: worker for worker, part in zip(self.members, parts, strict=True) for learner in part}

    def report_round(self, step: int, learners: int, sync: SyncPlan, took_s: float) -> None:
        """Report that this worker's learners have taken all steps of a round, and wait for the other learners.

        Args:
            step: The number of steps completed before the round.
            learners: How many learners this worker has.
            sync: The plan of the round.
            took_s: How long the steps of the round have taken here.
        """

    @property
    def broken(self) -> bool:
        """Whether this view is over, so that the running operation can be given up."""
        return False

    def begin_step(self) -> float:
        """Return 1.0 if this worker knows the next view, else 0.0; the number travels with the step's reduction."""
        return 0.0

    def end_step(self, view_known: float, contributors: int, *, served: bool) -> None:
        """Note that a step is completed.

        Args:
            heard: The sum of the values of ``begin_step`` over the contributors.
            contributors: How many workers have contributed to the step.
            served: Whether another worker's result has completed the step (``recover``).
        """
        self._log.stepped()

    def boundary(self) -> None:
        """Enter the view that the members have agreed on, if there is one. To be called at each step boundary."""

    def gather_tensors(self, mine: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Gather a flat tensor of every worker, by rank, on every worker. Sizes may differ, dtypes not.

        ``what`` names the values in words. Raises ``UserError`` on every worker if the workers gather different things.
        """
        self.set_activity("gathering", self._step, mine.nbytes, what)
        self.gathered_on = self.comms.mesh
        try:
            rows = self._gather_alike(mine, what)
        except GroupBroken:
            self.failed = self.beat()
            raise
        self._log.gathered(rows, self._step)
        self.set_activity("computing", self._step)
        return rows

    def _gather_alike(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        try:
            return self.group.gather_tensors(tensor, zlib.crc32(f"{what} {tensor.dtype}".encode()))
        except CollectiveMismatch:
            place = f"in {what}{self.at}".encode()
            rows = self.group.gather_tensors(torch.frombuffer(bytearray(place), dtype=torch.uint8))
            places = {rank: row.numpy().tobytes().decode(errors="replace") for rank, row in enumerate(rows)}
            raise rank_differences(self._step, places) from None

    def leaves(self, loop: str) -> None:
        """Note that the program has left ``loop`` before its end, which other workers may not have done."""
        self.left = f"after it left {loop} at {self.where() or 'an unknown line'}"

    @contextmanager
    def name_loop_in_beats(self, loop: str) -> Iterator[None]:
        """Wrap the ``yield`` of a loop, to note if the program leaves the loop early."""
        try:
            yield
        except GeneratorExit:
            self.leaves(loop)
            raise

    @property
    def at(self) -> str:
        """The place of the program, in brackets: " (train.py:34)"; "" if it is unknown."""
        places = ", ".join(filter(None, [self.where(), self.left]))
        return f" ({places})" if places else ""

    def gather(self, values: Sequence[float], what: str) -> Rows:
        """Gather the ``values`` of every worker, by rank, on every worker; see ``gather_tensors``."""
        return [row.tolist() for row in self.gather_tensors(torch.tensor(values, dtype=torch.float64), what)]

    def gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        """Gather the ``data`` of every worker, by rank, on every worker; see ``gather_tensors``."""
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return [row.numpy().tobytes() for row in self.gather_tensors(tensor, what)]

    def recover(self, error: GroupBroken) -> bool:
        """Go on after the group broke. Returns whether another worker's result has completed the broken operation."""
        self.failed = self.beat()
        raise error

    def restart(self, error: GroupBroken) -> None:
        """Go on after the group broke in an operation that cannot be repeated by itself: the survivors begin again."""
        self.failed = self.beat()
        raise error

    def go_back(self) -> NoReturn:
        """Go on from the newest checkpoint, as all members do."""
        raise RuntimeError("workers of another launcher cannot go back")

    def take_corruptions(self) -> list[Corrupt]:
        """Return the errors on purpose that were asked of this worker since the last call."""
        return []

    def lose(self, error: Unrecoverable) -> NoReturn:
        """Go on after state was found to be lost: no worker has it any more."""
        raise error

    def resize(self, workers: int, why: str = "") -> None:
        """Ask for so many workers. ``why`` goes into the journal."""
        rule = "workers can change only where elastune starts them"
        raise UserError(rule, "workers of another launcher", "use elastune run --workers LOW:HIGH")

    def reshape(self, mesh: Mesh, why: str = "") -> None:
        """Ask for as many workers as ``mesh`` has, in that mesh."""
        self.resize(mesh.workers)

    def layers_found(self, layers: int) -> None:
        """Report into how many stages a pipeline could cut the model, once the model is known."""

    def replace(self, rank: int) -> None:
        """Ask for another worker in place of the one of ``rank``, which goes on until the other one joins."""
        self.resize(self.size)

    def finish(self) -> None:
        """Note that this worker's training function has ended well.

        Returns once no other worker needs anything of it.
        """

    def join(self) -> None:
        """Become a member with the state of the others, if this worker is no member yet."""

    def set_activity(self, doing: str, step: int, size_bytes: int = 0, what: str = "") -> None:
        """Set what this worker is about to do, so that others can judge its delay and notice a difference.

        ``what`` names the operation that the worker will wait in.
        """
        self._step = step
        self._activity = (time.monotonic(), doing, step, size_bytes, self._log.completed, what)

    def beat(self) -> Beat:
        """What this worker is doing, and the place of its program. Any thread may call it."""
        since, doing, step, size_bytes, operation, what = self._activity
        fields = cast(Doing, doing), max(0.0, time.monotonic() - since), size_bytes
        line = ", ".join(filter(None, [self.where(), self.left]))
        return Beat(step, *fields, self.view, operation, what, line)


class WorkersDiverged(Exception):
    """The workers of a static run will never come together; ``stall`` is the reason."""

    def __init__(self, stall: Stall) -> None:
        super().__init__(stall.detail)
        self.stall = stall


class RanksLost(Exception):
    """Other workers of a static run are lost, so this one cannot go on."""


class StaticWatch:
    """Finds out whether workers that another launcher started will never come together. They have no coordinator.

    Until ``end``, a thread writes what this worker does to the rendezvous store, and reads the same of the other
    workers. Nothing waits for the thread.

    Args:
        workers: The group of this worker.
        store: The rendezvous store of the workers.
        limit_s: How long they may wait for a worker that does something else.
        on_stuck: Called in this object's thread if the workers will never come together and a library holds this
            worker's main thread.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        store: Store,
        limit_s: float,
        on_stuck: Callable[[WorkersDiverged], None] = lambda why: None,
    ) -> None:
        self._workers = workers
        self._store = store
        self._limit_s = limit_s
        self._on_stuck = on_stuck
        self._stall: Stall | None = None
        self._sent = 0  # how many heartbeats this worker has written
        self._received: dict[int, tuple[bytes, float]] = {}  # each rank's heartbeat, and its time here
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, name="static watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the watch."""
        self._ended.set()

    @property
    def stall(self) -> Stall | None:
        """The reason why a collective that has failed here could not succeed; another worker may have seen it first.

        Raises ``RuntimeError`` if the store is gone.
        """
        return self._stall or self._compare(self._workers.failed or self._workers.beat())

    def fail(self, why: str) -> None:
        """Let the others know that this worker has failed by itself, so that they do not count it as lost."""
        with suppress(RuntimeError):  # the store is gone
            self._store.set(_failed_key(self._workers.rank), why)

    def explain(self, error: BaseException) -> RanksLost:
        """Say which workers are lost, after an operation with them has failed with ``error``.

        It waits for a few heartbeats: a worker that is alive sends them. The first worker that knows lets others know.
        """
        others = [rank for rank in range(self._workers.size) if rank != self._workers.rank]
        try:
            if not self._store.check([LOST_KEY]):
                before = {rank: self._newest(rank) for rank in others}
                time.sleep(LOST_AFTER_BEATS * LOOK_EVERY_S)
                failed = {rank: why for rank in others if (why := self._read(_failed_key(rank)))}
                silent = [rank for rank in others if rank not in failed and self._newest(rank) == before[rank]]
                words = [f"rank {rank} has failed: {why}" for rank, why in failed.items()]
                words += [f"rank {rank} is lost: its process or its host has ended" for rank in silent]
                if words and not self._store.check([LOST_KEY]):
                    self._store.set(LOST_KEY, "; ".join(words))
            text = self._read(LOST_KEY) or "another rank is lost"
        except RuntimeError:
            text = "the launcher, or the rank that holds the rendezvous store, is lost"
        return RanksLost(f"{text} (what failed here: {' '.join(str(error).split())})")

    def _newest(self, rank: int) -> str:
        return self._read(_key(rank))

    def _read(self, key: str) -> str:
        return self._store.get(key).decode(errors="replace") if self._store.check([key]) else ""

    def _compare(self, beat_here: Beat) -> Stall | None:
        """Write this worker's heartbeat, and compare it with those of the others."""
        self._send(beat_here)
        sights = [HeartbeatSample(self._workers.rank, self._workers.rank, "", beat_here, 0.0)]
        for rank in set(range(self._workers.size)) - {self._workers.rank}:
            if self._store.check([_key(rank)]):
                text = self._store.get(_key(rank))
                beat = decode(text.partition(b" ")[2])
                assert isinstance(beat, Beat)
                sights.append(HeartbeatSample(rank, rank, "", beat, self._unchanged_s(rank, text)))
        return find_stall(sights, self._limit_s)

    def _unchanged_s(self, rank: int, text: bytes) -> float:
        """For how long the heartbeat of ``rank`` has been ``text``, by the clock of this host.

        The clocks of other hosts differ, and jump.
        """
        with self._lock:
            if self._received.get(rank, (b"", 0.0))[0] != text:
                self._received[rank] = text, time.monotonic()
            return time.monotonic() - self._received[rank][1]

    def _send(self, beat: Beat) -> None:
        with self._lock:
            self._sent += 1
            self._store.set(_key(self._workers.rank), f"{self._sent} {encode(beat).decode()}")

    def _live(self) -> None:
        try:
            while not self._ended.wait(LOOK_EVERY_S):
                beat = self._workers.beat()
                if beat.doing not in COLLECTIVES:
                    self._send(beat)
                elif (stall := self._compare(beat)) is not None and not self._ended.is_set():
                    self._stall = stall
                    self._workers.group.abandon(stall.detail)
                    if not self._ended.wait(STUCK_S):
                        self._on_stuck(WorkersDiverged(stall))
                    return
        except RuntimeError:  # the store is gone with its worker: operations with that worker end by their connections
            return


def _key(rank: int) -> str:
    return f"elastune/doing/{rank}"


def _failed_key(rank: int) -> str:
    return f"elastune/failed/{rank}"


def connection_lost(error: BaseException) -> bool:
    """Whether ``error`` says that the connection to another worker has ended, as gloo puts it."""
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in CONNECTION_LOST)


class Interruption:
    """Measures what a change of views costs: ``discarded`` steps, and the pause between two steps, by its parts.

    Attributes:
        discarded: The steps that were begun and not completed.
        parts_ms: The milliseconds of each part of the newest pause, in order; see ``ChangeTimed``.
    """

    def __init__(self) -> None:
        self.discarded = 0
        self.parts_ms: dict[ChangePart, float] = {}
        self._last: tuple[int, float] | None = None  # the newest completed step's view, and its time
        self._marks: list[tuple[ChangePart, float]] = []

    def mark(self, part: ChangePart) -> None:
        """Note that ``part`` of a change, which began at the mark before, ends now."""
        self._marks.append((part, time.monotonic()))

    def step_completed(self, view: int, now: float) -> float | None:
        """Seconds since the step before this one, if that was under another view. ``now``: of any clock."""
        before, self._last = self._last, (view, now)
        marks, self._marks = self._marks, []
        if before is None or before[0] == view:
            return None
        self.parts_ms, pause_s = {}, now - before[1]
        at = time.monotonic() - pause_s
        for part, ended in (*marks, ("first step", at + pause_s)):
            self.parts_ms[part] = round(self.parts_ms.get(part, 0.0) + 1000 * max(0.0, ended - at), 3)
            at = max(at, ended)
        return pause_s


class LearnerAssignment:
    """Which worker has which learner: by the newest view, or by the view in which the open round began."""

    def __init__(self) -> None:
        self._views: dict[int, View] = {}
        self._open: View | None = None

    def entered(self, view: View) -> None:
        """Note that this worker forms ``view``, which may distribute the learners of an open round."""
        self._views[view.number] = view

    def decided(self, assignment_view: int) -> None:
        """Note that the open round goes on as the view ``assignment_view`` distributes it; 0: no round goes on."""
        self._open = self._views[assignment_view] if assignment_view else None

    def round_over(self, now: View | None) -> None:
        """Note that a round is completed here; the view ``now`` distributes the learners of the next one."""
        self._open, self._views = None, {} if now is None else {now.number: now}

    def by(self, now: View) -> View:
        """The view that distributes the learners of the open round, or of the next one; ``now`` is the newest view."""
        return self._open or now

    def learner_workers(self, assignment_view: int, learners: int) -> Mapping[int, int]:
        """The worker of each of so many ``learners``, as the view ``assignment_view`` distributes them."""
        members = self._views[assignment_view].members
        parts = cut(learners, len(members))
        return {learner: worker for worker, part in zip(members, parts, strict=True) for learner in part}

    def seats(self, assignment_view: int, members: Sequence[int]) -> Sequence[int | None]:
        """The ranks of ``members`` in the view ``assignment_view``; None for a worker that was not in it."""
        ranks = self._views[assignment_view].ranks
        return [ranks.get(worker) for worker in members]

    def size_of(self, assignment_view: int) -> int:
        """The number of members of the view ``assignment_view``."""
        return len(self._views[assignment_view].members)


class CommitLog:
    """One worker's record of the operations that all members execute, with the newest gather's result.

    Attributes:
        completed: How many operations are completed here.
        rewinds: How often this worker was rewound.
        rows: The result of the newest operation, if it is a gather; None if it is a step.
        gathered_at: How many steps were completed before that gather.
        lost: Since the last reconciliation a member went without leaving, or an operation broke that cannot be
            repeated.
        served: The newest exchange brought this worker a result.
        all_done: The newest operation is the last one of all.
    """

    def __init__(self) -> None:
        self.completed = 0
        self.rewinds = 0
        self.rows: list[torch.Tensor] | None = None
        self.gathered_at = 0
        self.lost = False
        self.served = False
        self.all_done = False

    def begin(self) -> None:
        """Forget all operations: training begins, or begins again from a snapshot."""
        self.completed, self.rows, self.all_done = 0, None, False

    def gathered(self, rows: list[torch.Tensor], step: int) -> None:
        """Note that a gather is completed here, after so many steps.

        Afterwards this worker may load a checkpoint of another step, and be compared before others have the gather's
        result.
        """
        self.completed, self.rows, self.gathered_at = self.completed + 1, rows, step

    def stepped(self) -> None:
        """Note that a step is completed here."""
        self.completed, self.rows = self.completed + 1, None

    def compare(
        self, group: Group, owner: StateOwner, view: View, dealing: LearnerAssignment, *, joins: bool
    ) -> RecoveryPlan:
        """Exchange with the other members how far each worker is, and draw the conclusion that all of them draw.

        Args:
            group: The group of ``view``.
            owner: This worker's training.
            view: The new view.
            dealing: Which worker has which learner of an open round.
            joins: Whether this worker holds no state yet.
        """
        status = MemberStatus(
            completed=self.completed,
            step=owner.step,
            unrepeatable=owner.unrepeatable and not joins,
            lost=self.lost,
            snapshot=owner.snapshot_step,
            rewinds=self.rewinds,
            joins=joins,
            done=self.all_done,
            round_steps=owner.round_steps if self.rows is None else owner.step - self.gathered_at,
        )
        numbers = [float(x) for x in (*astuple(status)[:-1], *astuple(owner.open_round))]
        rows = [_status(row) for row in group.gather_row(numbers)]
        dealt = partial(dealing.seats, members=view.members)
        return reconcile(rows, view.hosts, lambda rounds: goes_on(rounds, dealt, dealing.size_of))

    def exchange(self, group: Group, owner: StateOwner, plan: RecoveryPlan) -> None:
        """Send and receive what ``plan`` demands of this worker. Raises ``GroupBroken``."""
        me = group.rank
        if plan.rewind_to is not None:
            if me == plan.rewind_source:
                for rank in plan.rewind_lacking:
                    recovery.send_packed(group, rank, owner.snapshot())
            elif me in plan.rewind_lacking and plan.rewind_source is not None:
                owner.keep_snapshot(recovery.receive_packed(group, plan.rewind_source))
        elif me in plan.lagging and plan.result_source is not None:
            self._take_result(group, owner, plan.result_source)
        elif me == plan.result_source:
            for rank in plan.lagging:
                self._give_result(group, owner, rank)
        received: Packed | None = None
        for joiner, source in plan.state_source.items():
            if me == source:  # a joiner passes on what it has received, at once
                recovery.send_floats(group, joiner, [float(self.completed), float(self.rewinds)])
                recovery.send_packed(group, joiner, received or owner.pack())
            elif me == joiner:
                completed, rewinds = recovery.receive_floats(group, source)
                self.completed, self.rewinds = int(completed), int(rewinds)
                received = recovery.receive_packed(group, source)
        if received is not None:
            owner.unpack(received)

    def _give_result(self, group: Group, owner: StateOwner, rank: int) -> None:
        if self.rows is not None:
            recovery.send_packed(group, rank, (_ROWS, self.rows))
            return
        for tensor in owner.last_result():
            group.send(tensor, rank)

    def _take_result(self, group: Group, owner: StateOwner, source: int) -> None:
        """Complete the operation that the worker at ``source`` has completed.

        Both are at the same one, so both know its kind.
        """
        if owner.reducing:
            result = owner.result_room()
            for tensor in result:
                group.receive(tensor, source)
            owner.adopt_result(result)
            self.stepped()
        else:
            self.gathered(recovery.receive_packed(group, source)[1], owner.step)
        self.served = True


def _status(row: list[float]) -> MemberStatus:
    completed, step, unrepeatable, lost, snapshot, rewinds, joins, done, steps, *of_round = (int(x) for x in row)
    flags = bool(unrepeatable), bool(lost), snapshot, rewinds, bool(joins), bool(done), steps
    return MemberStatus(completed, step, *flags, open=OpenRound(*of_round))
