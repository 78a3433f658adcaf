"""The workers that train together, as one of them sees them: who they are now, and what to do when that changes.

All members execute the same sequence of collective operations: a step's reduction, or a gather. An operation is
*completed* at a worker once its whole result is there. No worker completes the next one before all have contributed to
this one, so members differ by one operation at most. When a group breaks, the survivors meet in the next view's group
and compare: a survivor that missed the newest completed operation copies its result from one that has it; if none has,
all repeat it.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn, cast

import torch

from elastune.comm.comms import Comms, replicated
from elastune.comm.group import GathersDiffer, Group, GroupBroken
from elastune.core.errors import UserError
from elastune.core.layout import Unrecoverable
from elastune.core.mesh import Mesh
from elastune.core.slots import cut
from elastune.core.sync_plan import SyncPlan
from elastune.elastic.protocol.difference import ranks_differ
from elastune.elastic.protocol.messages import Beat, Doing
from elastune.elastic.worker.commit_log import CommitLog

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
    def dealt_by(self) -> int:
        """The number of the view by which learners are dealt out in the open round, or in the next one."""
        return self.view

    @property
    def seat(self) -> tuple[int, int]:
        """How many workers learners are dealt out to in the open round, or in the next one, and which this one is."""
        return self.size, self.rank

    def carriers(self, dealt_by: int, learners: int) -> Mapping[int, int]:
        """Which worker has each of so many ``learners`` in the deal of the view ``dealt_by``."""
        parts = cut(learners, self.size)
        return {learner: worker for worker, part in zip(self.members, parts, strict=True) for learner in part}

    def took_round(self, step: int, learners: int, sync: SyncPlan, took_s: float) -> None:
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
        except GathersDiffer:
            own = f"in {what}{self.at}".encode()
            rows = self.group.gather_tensors(torch.frombuffer(bytearray(own), dtype=torch.uint8))
            told = {rank: row.numpy().tobytes().decode(errors="replace") for rank, row in enumerate(rows)}
            raise ranks_differ(self._step, told) from None

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
