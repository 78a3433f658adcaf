"""The workers that train together, as one of them sees them, and its log of completed operations.

All members execute the same sequence of collective operations: a step's reduction, or a gather. An operation is
*completed* at a worker when its whole result is there. No worker completes the next one before all have contributed
to this one, so members differ by one operation at most. When a group breaks, the survivors meet in the next view's
group and compare. A survivor that missed the newest completed operation copies its result; if nobody has it, all
repeat the operation. Workers that another launcher started have no coordinator: ``StaticWatch`` compares them
through their rendezvous store.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from functools import partial
from typing import NoReturn, cast

import torch
from torch._C._distributed_c10d import Store

from elastune.core.errors import UserError
from elastune.core.layout import Unrecoverable
from elastune.core.mesh import Mesh
from elastune.core.slots import cut
from elastune.core.sync_plan import SyncPlan
from elastune.elastic.stragglers import COLLECTIVES, HeartbeatSample, Stall, find_stall, rank_differences
from elastune.elastic.wire.messages import Beat, Doing, decode, encode
from elastune.elastic.wire.view import View
from elastune.elastic.worker import state_transfer
from elastune.elastic.worker.reconcile import (
    LearnerAssignment,
    MemberStatus,
    OpenRound,
    RecoveryPlan,
    goes_on,
    reconcile,
)
from elastune.elastic.worker.state_transfer import Packed, StateOwner
from elastune.parallel.comm.group import CollectiveMismatch, Group, GroupBroken
from elastune.parallel.comm.process_groups import Comms, replicated

# [commit log] What one worker has completed of the sequence that all members execute, and what it holds for those that have not.

_ROWS = b"rows"  # what is sent is a gather's result


class CommitLog:
    """``completed`` operations, the newest of them a gather with the result ``rows``, completed after ``gathered_at``
    steps, or (None) a step.

    ``lost``: since the last reconciliation a member went without
    leaving, or what broke cannot be done again. ``served``: the newest exchange brought this worker a result.
    """

    def __init__(self) -> None:
        self.completed = 0
        self.rewinds = 0
        self.rows: list[torch.Tensor] | None = None
        self.gathered_at = 0
        self.lost = False
        self.served = False
        self.all_done = False  # there is no operation after the newest one

    def begin(self) -> None:
        """Nothing is completed: training begins, or begins again from a snapshot."""
        self.completed, self.rows, self.all_done = 0, None, False

    def gathered(self, rows: list[torch.Tensor], step: int) -> None:
        """A gather is completed here, after so many steps. Behind it this worker may load a checkpoint of another one,
        and be asked how far it is before others have the gather's result.
        """
        self.completed, self.rows, self.gathered_at = self.completed + 1, rows, step

    def stepped(self) -> None:
        """A step is completed here."""
        self.completed, self.rows = self.completed + 1, None

    def compare(
        self, group: Group, owner: StateOwner, view: View, dealing: LearnerAssignment, *, joins: bool
    ) -> RecoveryPlan:
        """Tell the others how far this worker is, hear the same of them, and draw the conclusion that all draw.

        ``view``: whose ``group`` it is. ``dealing``: who has which learner of an open round.
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
        told = [float(x) for x in (*astuple(status)[:-1], *astuple(owner.open_round))]
        rows = [_status(row) for row in group.gather_row(told)]
        dealt = partial(dealing.seats, members=view.members)
        return reconcile(rows, view.hosts, lambda rounds: goes_on(rounds, dealt, dealing.size_of))

    def exchange(self, group: Group, owner: StateOwner, plan: RecoveryPlan) -> None:
        """Send and receive what ``plan`` says. Raises ``GroupBroken``."""
        me = group.rank
        if plan.rewind_to is not None:
            if me == plan.rewind_source:
                for rank in plan.rewind_lacking:
                    state_transfer.send_packed(group, rank, owner.snapshot())
            elif me in plan.rewind_lacking and plan.rewind_source is not None:
                owner.keep_snapshot(state_transfer.receive_packed(group, plan.rewind_source))
        elif me in plan.lagging and plan.result_source is not None:
            self._take_result(group, owner, plan.result_source)
        elif me == plan.result_source:
            for rank in plan.lagging:
                self._give_result(group, owner, rank)
        received: Packed | None = None
        for joiner, source in plan.state_source.items():
            if me == source:  # a joiner passes on what it has received, at once
                state_transfer.send_floats(group, joiner, [float(self.completed), float(self.rewinds)])
                state_transfer.send_packed(group, joiner, received or owner.pack())
            elif me == joiner:
                completed, rewinds = state_transfer.receive_floats(group, source)
                self.completed, self.rewinds = int(completed), int(rewinds)
                received = state_transfer.receive_packed(group, source)
        if received is not None:
            owner.unpack(received)

    def _give_result(self, group: Group, owner: StateOwner, rank: int) -> None:
        if self.rows is not None:
            state_transfer.send_packed(group, rank, (_ROWS, self.rows))
            return
        for tensor in owner.last_result():
            group.send(tensor, rank)

    def _take_result(self, group: Group, owner: StateOwner, source: int) -> None:
        """What the worker at ``source`` has completed; both are at the same operation, so both know its kind."""
        if owner.reducing:
            result = owner.result_room()
            for tensor in result:
                group.receive(tensor, source)
            owner.adopt_result(result)
            self.stepped()
        else:
            self.gathered(state_transfer.receive_packed(group, source)[1], owner.step)
        self.served = True


def _status(row: list[float]) -> MemberStatus:
    completed, step, unrepeatable, lost, snapshot, rewinds, joins, done, steps, *of_round = (int(x) for x in row)
    said = bool(unrepeatable), bool(lost), snapshot, rewinds, bool(joins), bool(done), steps
    return MemberStatus(completed, step, *said, open=OpenRound(*of_round))


# [group] The workers that train together, as one of them sees them: who they are now, and what to do when that changes.
#
# All members execute the same sequence of collective operations: a step's reduction, or a gather. An operation is
# *completed* at a worker once its whole result is there. No worker completes the next one before all have contributed to
# this one, so members differ by one operation at most. When a group breaks, the survivors meet in the next view's group
# and compare: a survivor that missed the newest completed operation copies its result from one that has it; if none has,
# all repeat it.

Rows = list[list[float]]


class Rewind(BaseException):
    """Back to the newest snapshot, or to the start: the training function is to be called again."""


class Leave(BaseException):
    """This worker is no member any more."""


class Interruption:
    """What a change of views costs: ``discarded`` steps, and a pause between the steps before and after it."""

    def __init__(self) -> None:
        self.discarded = 0  # steps that were begun and not completed
        self._last: tuple[int, float] | None = None  # the newest completed step's view, and its time

    def step_completed(self, view: int, now: float) -> float | None:
        """Seconds since the step before this one, if that was under another view."""
        before, self._last = self._last, (view, now)
        return None if before is None or before[0] == view else now - before[1]


class WorkerGroup:
    """Workers that stay as they are: one alone, or those that torchrun or srun started. A lost one ends the run.

    Attributes:
        comms: What they reduce on.
        synchronised: This worker does what the others do. If not (it builds what it will train, or the step at this
            place was lost), its gathers return its own values only.
        restart_from_checkpoint: All state was lost: the run goes on from its newest checkpoint, or from the start.
        where: Tells which line the user's program is at; any thread may ask.
        failed: What this worker was doing when its group broke for good.
        left: What the program has left early since the newest step, and at which line.
        gathered_on: How the workers stood whose values the newest gathering brought; others may stand so by now.
    """

    elastic = False
    restart_from_checkpoint = False

    def __init__(self, group: Group, comms: Comms | None = None) -> None:
        """All of ``group``; ``comms``: how they stand, where not each carries a replica of its own."""
        self.comms = comms or replicated(group)
        self.gathered_on = self.comms.mesh
        self.synchronised = True
        self.interruption = Interruption()
        self.where: Callable[[], str] = lambda: ""
        self.failed: Beat | None = None
        self.left = ""
        self._log = CommitLog()
        self._step = 0
        self._said: tuple[float, str, int, int, int, str] = (time.monotonic(), "starting", 0, 0, 0, "")

    @property
    def group(self) -> Group:
        """All of them."""
        return self.comms.everyone

    @property
    def worker(self) -> int:
        """This worker's number, whatever its rank is."""
        return self.group.rank

    @property
    def view(self) -> int:
        """The number of the view that this worker is a member of; 0 where there are none."""
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
        """How many workers there are."""
        return self.group.size

    @property
    def assignment_view(self) -> int:
        """The number of the view by which learners are dealt out in the open round, or in the next one."""
        return self.view

    @property
    def seat(self) -> tuple[int, int]:
        """How many workers learners are dealt out to in the open round, or in the next one, and which this one is."""
        return self.size, self.rank

    def learner_workers(self, assignment_view: int, learners: int) -> Mapping[int, int]:
        """Which worker has each of so many ``learners`` in the deal of the view ``assignment_view``."""
        parts = cut(learners, self.size)
        return {learner: worker for worker, part in zip(self.members, parts, strict=True) for learner in part}

    def report_round(self, step: int, learners: int, sync: SyncPlan, took_s: float) -> None:
        """Tell that this worker's ``learners`` have taken all steps of the round that begins after ``step``, of
        ``sync``, in ``took_s``, and wait for the others'."""

    @property
    def broken(self) -> bool:
        """Whether this view is over, so that what is under way can be given up."""
        return False

    def begin_step(self) -> float:
        """1.0 where this worker has heard of the next view; travels with the step's reduction."""
        return 0.0

    def end_step(self, heard: float, contributors: int, *, served: bool) -> None:
        """A step is completed; ``heard`` is the sum of what ``begin_step`` said at the ``contributors``.

        ``served``: by another worker's result (``recover``).
        """
        self._log.stepped()

    def boundary(self) -> None:
        """At a step boundary: enter the view that was agreed on, if one was."""

    def gather_tensors(self, mine: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Every worker's flat tensor, by rank, on every worker. Sizes may differ, dtypes not.

        ``what`` is gathered, in words. Raises ``UserError`` on every worker where they do not mean the same.
        """
        self.say("gathering", self._step, mine.nbytes, what)
        self.gathered_on = self.comms.mesh
        try:
            rows = self._gather_alike(mine, what)
        except GroupBroken:
            self.failed = self.beat()
            raise
        self._log.gathered(rows, self._step)
        self.say("computing", self._step)
        return rows

    def _gather_alike(self, mine: torch.Tensor, what: str) -> list[torch.Tensor]:
        try:
            return self.group.gather_tensors(mine, zlib.crc32(f"{what} {mine.dtype}".encode()))
        except CollectiveMismatch:
            own = f"in {what}{self.at}".encode()
            rows = self.group.gather_tensors(torch.frombuffer(bytearray(own), dtype=torch.uint8))
            told = {rank: row.numpy().tobytes().decode(errors="replace") for rank, row in enumerate(rows)}
            raise rank_differences(self._step, told) from None

    def leaves(self, loop: str) -> None:
        """The program has left ``loop`` before its end: perhaps no other one has."""
        self.left = f"after it left {loop} at {self.where() or 'an unknown line'}"

    @contextmanager
    def told_if_left(self, loop: str) -> Iterator[None]:
        """Around the ``yield`` of a loop that the program may leave early."""
        try:
            yield
        except GeneratorExit:
            self.leaves(loop)
            raise

    @property
    def at(self) -> str:
        """Where the program is, to be put behind what it does: " (train.py:34)"."""
        found = ", ".join(filter(None, [self.where(), self.left]))
        return f" ({found})" if found else ""

    def gather(self, values: Sequence[float], what: str) -> Rows:
        """Every worker's ``values``, by rank, on every worker; see ``gather_tensors``."""
        return [row.tolist() for row in self.gather_tensors(torch.tensor(values, dtype=torch.float64), what)]

    def gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        """Every worker's ``data``, by rank, on every worker; see ``gather_tensors``."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return [row.numpy().tobytes() for row in self.gather_tensors(mine, what)]

    def recover(self, error: GroupBroken) -> bool:
        """The group broke. True if the operation it broke in was completed by another worker's result."""
        self.failed = self.beat()
        raise error

    def restart(self, error: GroupBroken) -> None:
        """The group broke in what cannot be done again by itself: the survivors begin again."""
        self.failed = self.beat()
        raise error

    def lose(self, error: Unrecoverable) -> NoReturn:
        """State was found to be lost: nobody has it any more."""
        raise error

    def resize(self, workers: int, why: str = "") -> None:
        """Ask for so many workers; the journal says ``why``."""
        rule = "workers can change only where elastune starts them"
        raise UserError(rule, "workers of another launcher", "use elastune run --workers LOW:HIGH")

    def reshape(self, mesh: Mesh, why: str = "") -> None:
        """Ask for workers that stand as ``mesh`` says, and are as many."""
        self.resize(mesh.workers)

    def layers_found(self, layers: int) -> None:
        """Tell into how many stages a pipeline could be cut, once the model is known."""

    def replace(self, rank: int) -> None:
        """Ask for another worker in place of the one of ``rank``, which goes on until that one is there."""
        self.resize(self.size)

    def finish(self) -> None:
        """This worker's training function has ended well; returns once no other one needs anything of it."""

    def join(self) -> None:
        """Become a member with everybody's state, if this worker is none yet."""

    def say(self, doing: str, step: int, size_bytes: int = 0, what: str = "") -> None:
        """Tell what this worker is about to do, so that others can judge how long that may take, and whether all do
        the same. ``what``: the operation that it will wait in.
        """
        self._step = step
        self._said = (time.monotonic(), doing, step, size_bytes, self._log.completed, what)

    def beat(self) -> Beat:
        """What this worker said last, and where its program is; any thread may ask."""
        since, doing, step, size_bytes, operation, what = self._said
        told = cast(Doing, doing), max(0.0, time.monotonic() - since), size_bytes
        line = ", ".join(filter(None, [self.where(), self.left]))
        return Beat(step, *told, self.view, operation, what, line)


# [static watch] Workers that another launcher started have no coordinator: each tells the others what it does, and looks for itself.
#
# They tell it in the store by which they found each other, once in a while, from a thread that nothing waits for.

EVERY_S = 0.5
STUCK_S = 5.0  # a library that does not let go of the main thread by then never will


class WorkersDiverged(Exception):
    """The workers of a static run will never come together; ``found`` says why."""

    def __init__(self, found: Stall) -> None:
        super().__init__(found.detail)
        self.found = found


class StaticWatch:
    """Watches over ``workers`` from now until ``end``, by way of ``store``.

    ``limit_s``: how long they may wait for one that does something else. ``on_stuck``: called in this object's thread
    where they will never come together and this worker cannot be told, since its main thread is held by a library.
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
        self._found: Stall | None = None
        self._told = 0  # how often this worker has told what it does
        self._seen: dict[int, tuple[bytes, float]] = {}  # what each other one told last, and since when that is known
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, name="static watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Look no more."""
        self._ended.set()

    @property
    def found(self) -> Stall | None:
        """Why a collective that has failed here could not succeed; another worker may have found it first, and ended.

        Raises ``RuntimeError`` where the store is gone.
        """
        return self._found or self._compare(self._workers.failed or self._workers.beat())

    def _compare(self, own: Beat) -> Stall | None:
        """What follows from ``own``, which the others are told, and from what they told."""
        self._tell(own)
        sights = [HeartbeatSample(self._workers.rank, self._workers.rank, "", own, 0.0)]
        for rank in set(range(self._workers.size)) - {self._workers.rank}:
            if self._store.check([_key(rank)]):
                told = self._store.get(_key(rank))
                beat = decode(told.partition(b" ")[2])
                assert isinstance(beat, Beat)
                sights.append(HeartbeatSample(rank, rank, "", beat, self._known_s(rank, told)))
        return find_stall(sights, self._limit_s)

    def _known_s(self, rank: int, told: bytes) -> float:
        """For how long it is known here that ``rank`` has ``told`` this, and nothing since. No clock is compared with
        another's: those of hosts differ, and jump."""
        with self._lock:
            if self._seen.get(rank, (b"", 0.0))[0] != told:
                self._seen[rank] = told, time.monotonic()
            return time.monotonic() - self._seen[rank][1]

    def _tell(self, own: Beat) -> None:
        with self._lock:
            self._told += 1
            self._store.set(_key(self._workers.rank), f"{self._told} {encode(own).decode()}")

    def _live(self) -> None:
        try:
            while not self._ended.wait(EVERY_S):
                own = self._workers.beat()
                if own.doing not in COLLECTIVES:
                    self._tell(own)
                elif (found := self._compare(own)) is not None and not self._ended.is_set():
                    self._found = found
                    self._workers.group.abandon(found.detail)
                    if not self._ended.wait(STUCK_S):
                        self._on_stuck(WorkersDiverged(found))
                    return
        except RuntimeError:  # the store went with its worker: what waits for that one ends by its connections
            return


def _key(rank: int) -> str:
    return f"elastune/doing/{rank}"
