"""What became of a worker and of its run: a pure state machine. Events go in, new facts and actions come out.

A worker may end because its program ended, because its machine failed, or because the run asked it to. ``transition``
decides between these causes once all messages of that worker have been read (``WorkerDrained``): it then reports the
end to the driver, and continues or ends the run. ``RunFacts`` is the state. ``Kill``, ``Start`` and events for the
driver are the actions; ``runtime.elastic_run`` executes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from elastune.core.journal.records import RunFailed, RunFinished, WorkerGone
from elastune.elastic.coordinator.controller_interface import (
    ForController,
    RecordSent,
    WorkerDisconnected,
    WorkerDrained,
)
from elastune.elastic.coordinator.machine import End, GiveUp, Start, StopRun
from elastune.elastic.stragglers import Stall
from elastune.elastic.worker.client import DISCONNECTED_CODE, ORPHANED_CODE
from elastune.runtime.clusters.base import NOBODY, Event, Exited, Message, how_it_ended
from elastune.runtime.launcher import ProcessEnded

NOT_STARTED = 71  # EX_OSERR of sysexits.h
EXPLAIN_S = 2.0  # how long to wait for the end of a process whose connection closed without an exit code
WITHOUT_CONTROLLER = "it ended while there was no controller"
NO_END = Exited(NOBODY, 0, "")
UNKNOWN = 1  # the exit code reported for a process whose real exit code is unknown


@dataclass(frozen=True)
class WorkerFacts:
    """The controller's knowledge of one worker.

    Events of its process, of its connection and of the coordinator arrive in any order, so no fact follows from
    another fact.

    Attributes:
        number: The worker's number.
        phase: "running" from its start until its end is reported, then "gone". "apart" while it does not belong to
            this run: a worker that outlived a controller is apart until ``take_over``.
        trained: It has been a member.
        parted: Its connection has closed.
        code: The exit code of its entry point, which a worker sends before it closes its connection; None without.
        explains_until: Its connection closed without an exit code. The controller waits until then for the end of the
            process, which shows the cause.
        ended_because: Why the run ended it; None while it runs, and where it ended by itself.
        lost: It counts as lost; otherwise a worker that the run ended was no longer needed.
        fatal: Its loss was one too many for the run: the reason to report. None otherwise.
        end: How its process ended. The worker's last messages may still be unread.
    """

    number: int
    phase: Literal["apart", "running", "gone"] = "apart"
    trained: bool = False
    parted: bool = False
    code: int | None = None
    explains_until: float | None = None
    ended_because: str | None = None
    lost: bool = False
    fatal: str | None = None
    end: ProcessEnded | None = None

    @property
    def how(self) -> str:
        """How its process ended, in words; "" while it runs."""
        if self.end is None:
            return ""
        return self.end.why or f"worker {self.number} {how_it_ended(self.end.code, self.end.log)}"

    @property
    def exited(self) -> Exited:
        """How its process ended, as an event for the driver."""
        assert self.end is not None
        return Exited(self.number, UNKNOWN if self.end.code is None else self.end.code, self.end.log)


@dataclass(frozen=True)
class RunFacts:
    """The controller's knowledge of one run. Each method returns changed facts.

    Attributes:
        first: The number of workers that the run began with. Workers with this number or a higher one came later.
        workers: All workers that the run ever had, by number.
        over: The run starts no more workers, and passes the end of every worker to the driver.
        failed: Its program has failed.
        finished: A worker has reported the result.
        noticed: Why the run was asked to stop: its machines will be taken away. "" where it was not asked.
        last_lost: The worker that was lost last.
        last_end: The last end of a worker's process.
        deferred_results: Results that came while a worker was ``unexplained``, with the workers that sent them. They
            count only if the program has not ended that worker.
    """

    first: int
    workers: Mapping[int, WorkerFacts] = field(default_factory=dict)
    over: bool = False
    failed: bool = False
    finished: bool = False
    noticed: str = ""
    last_lost: int = NOBODY
    last_end: Exited = NO_END
    deferred_results: tuple[tuple[int, RunFinished], ...] = ()

    def of(self, number: int) -> WorkerFacts:
        """The facts about worker ``number``, which may be new."""
        return self.workers.get(number) or WorkerFacts(number)

    def put(self, number: int, **facts: Any) -> RunFacts:
        """Change ``facts`` of worker ``number``."""
        return self.put_all((number,), **facts)

    def put_all(self, numbers: Iterable[int], **facts: Any) -> RunFacts:
        """Change ``facts`` of each worker in ``numbers``."""
        changed = {number: replace(self.of(number), **facts) for number in numbers}
        return replace(self, workers={**self.workers, **changed}) if changed else self

    def seen(self, members: Iterable[int]) -> RunFacts:
        """Note that each of ``members`` has trained."""
        return self.put_all((number for number in members if not self.of(number).trained), trained=True)

    @property
    def running(self) -> list[int]:
        """The workers whose end has not been reported yet."""
        return [number for number, worker in self.workers.items() if worker.phase == "running"]

    @property
    def unexplained(self) -> list[WorkerFacts]:
        """Workers that closed their connection without an exit code, and whose process may still show the cause."""
        return [worker for worker in self.workers.values() if worker.explains_until is not None]

    def is_replacement(self, number: int) -> bool:
        """Whether worker ``number`` was started after the run's first ones."""
        return number >= self.first

    def never_joined(self, number: int) -> bool:
        """Whether worker ``number`` was started after the first workers and has never been a member."""
        return self.is_replacement(number) and not self.of(number).trained


@dataclass(frozen=True)
class Kill:
    """An action: end the processes of workers.

    Attributes:
        workers: The workers.
        why: The reason, for their logs.
    """

    workers: tuple[int, ...]
    why: str = ""


@dataclass(frozen=True)
class EventContext:
    """What ``transition`` reads besides the event and the facts.

    Attributes:
        now: The clock, in s.
        members: The workers that train together now.
        why_left: Why the event's worker was asked to leave; "" where it was not asked.
    """

    now: float = 0.0
    members: Collection[int] = ()
    why_left: str = ""


Action = Event | Kill | Start
"""An event for the driver, or something that the controller has to do."""
Transition = tuple[RunFacts, tuple[Action, ...]]
"""The new facts, and the actions in order."""


def transition(facts: RunFacts, event: ForController, context: EventContext) -> Transition:
    """Process one event of a run's coordinator.

    Args:
        facts: The facts before the event.
        event: The event. Of a worker's records only ``RunFailed`` and ``RunFinished`` have an effect; ``RecordFilter``
            handles all others.
        context: The clock, the members, and why the event's worker was asked to leave.

    Returns:
        The new facts, and the actions in order.
    """
    match event:
        case RecordSent(worker, RunFailed() as record):
            return _failed(facts, worker, record, context.members)
        case RecordSent(worker, RunFinished() as record):
            return _finished(facts, worker, record)
        case WorkerDisconnected():
            return _parted(facts, event, context.now), ()
        case Start(workers) if not (facts.over or facts.finished):
            return facts.put_all(workers, phase="running"), (event,)
        case End():
            return _to_end(facts, event)
        case Stall(worker, reason, detail) if not facts.over:
            return _failed(facts, worker, RunFailed(reason, detail, worker), context.members)
        case GiveUp(why) if not facts.over:
            return _given_up(facts, why)
        case StopRun(why=why):
            return replace(facts, noticed=why), ()
        case WorkerDrained(worker):
            return _ended(facts, facts.of(worker), context.why_left)
    return facts, ()


def take_over(facts: RunFacts, back: Collection[int], away: Sequence[int], why: str) -> Transition:
    """Continue a run whose controller has died.

    Args:
        facts: The facts that the next controller has collected.
        back: The workers that have come back to the next controller.
        away: The workers that have not come back although their processes live: they are lost.
        why: The reason to report for the lost workers.

    Returns:
        The new facts, and the actions in order.
    """
    facts = facts.put_all(back, phase="running").put_all(away, phase="running", ended_because=why, lost=True)
    facts = replace(facts, last_lost=away[-1]) if away else facts
    return facts, tuple(Kill((worker,), why) for worker in away)


def expire_explanations(facts: RunFacts, now: float) -> Transition:
    """End each unexplained worker whose time is up. Once no such worker is left, report the deferred results.

    Args:
        facts: The facts before.
        now: The clock, in s.

    Returns:
        The new facts, and the actions in order.
    """
    actions: list[Action] = []
    for worker in facts.unexplained:
        if worker.explains_until is not None and worker.explains_until <= now:
            facts = facts.put(worker.number, explains_until=None)
            actions.append(Kill((worker.number,), worker.ended_because or ""))
    if facts.deferred_results and not facts.unexplained:
        deferred_results, facts = facts.deferred_results, replace(facts, deferred_results=())
        for number, record in deferred_results:
            facts, reported = _finished(facts, number, record)
            actions += reported
    return facts, tuple(actions)


# -- records of the run's end -----------------------------------------------------------------------------------------


def _failed(facts: RunFacts, number: int, record: RunFailed, members: Collection[int]) -> Transition:
    if facts.of(number).ended_because is not None:  # the run was ending it anyway
        return facts, ()
    if facts.is_replacement(number) and members and number not in members:
        # Others train, so its machine may be the cause, not the program.
        facts = facts.put(number, ended_because=f"it failed before it could join: {record.detail}", lost=True)
        return replace(facts, last_lost=number), ()
    # A replacement would fail alike.
    return replace(facts, over=True, failed=True), (Message(number, record),)


def _finished(facts: RunFacts, number: int, record: RunFinished) -> Transition:
    if facts.failed:  # a survivor of the failure, not ended yet
        return facts, ()
    if facts.unexplained:  # the program may have ended that worker
        return replace(facts, deferred_results=(*facts.deferred_results, (number, record))), ()
    if facts.finished:
        return facts, ()
    if facts.noticed and record.stopped == "requested":
        record = replace(record, stopped="notice", stop_why=facts.noticed)
    return replace(facts, finished=True), (Message(number, record),)


# -- instructions and events of the coordinator -----------------------------------------------------------------------


def _parted(facts: RunFacts, event: WorkerDisconnected, now: float) -> RunFacts:
    ended_because = facts.of(event.worker).ended_because is not None
    explains = event.code is None and not ended_because and not facts.never_joined(event.worker)
    until = now + EXPLAIN_S if explains else None
    facts = facts.put(event.worker, parted=True, code=event.code, explains_until=until)
    if event.code is None or ended_because:
        return facts
    last = all(facts.workers[other].parted for other in facts.running)
    # At once: the coordinator counts this as a loss, and would ask for a replacement.
    return replace(facts, over=facts.over or event.code != 0 or last)


def _to_end(facts: RunFacts, instruction: End) -> Transition:
    worker = facts.of(instruction.worker)
    by_itself = worker.end is not None and instruction.why == worker.how
    ended_because = worker.ended_because if worker.parted or by_itself else instruction.why
    facts = facts.put(instruction.worker, ended_because=ended_because, lost=worker.lost or instruction.lost)
    if instruction.lost:
        facts = replace(facts, last_lost=instruction.worker)
    # A worker that sent its exit code ends by itself. The end of an unexplained worker has to show the cause.
    ends_by_itself = worker.code is not None or worker.explains_until is not None
    return facts, () if ends_by_itself else (Kill((instruction.worker,), ended_because or ""),)


def _given_up(facts: RunFacts, why: str) -> Transition:
    """End the run. If the lost worker's process still runs, its end completes the report (``WorkerFacts.fatal``)."""
    facts, last = replace(facts, over=True), facts.last_end
    kill = Kill(tuple(facts.running))
    if facts.last_lost in facts.running:
        return facts.put(facts.last_lost, fatal=why), (kill,)
    last_end = "" if last.rank == NOBODY else f"; worker {last.rank} {how_it_ended(last.code, last.log)}"
    return facts, (kill, _one_too_many(why + last_end, last))


def _one_too_many(why: str, last: Exited) -> Message:
    return Message(last.rank, RunFailed("worker_lost", why, max(0, last.rank), last.code, last.log))


# -- the end of a worker, after all its messages ----------------------------------------------------------------------


def _ended(facts: RunFacts, worker: WorkerFacts, why_left: str) -> Transition:
    assert worker.end is not None
    facts = facts.put(worker.number, explains_until=None)
    if worker.phase == "apart":
        return facts, (Message(worker.number, _gone_apart(worker.number, worker.end)),)
    end, fatal = worker.exited, worker.fatal
    facts = replace(facts.put(worker.number, phase="gone"), last_end=end)
    if fatal is not None:
        return facts, (_one_too_many(fatal if worker.how in fatal else f"{fatal}; {worker.how}", end), end)
    if worker.ended_because is None and not facts.finished and (cause := _program_cause(facts, worker)):
        record = RunFailed("exception", cause, worker.number, worker.end.code, worker.end.log)
        # A replacement would end alike.
        return replace(facts, over=True, failed=True), (Message(worker.number, record), end)
    left_early = worker.code == 0 and bool(facts.running)  # a worker that leaves the run ends well, before the others
    by_itself = worker.ended_because is None and worker.code is not None and not left_early
    concerns_run = facts.over or by_itself or (facts.finished and worker.ended_because is None)
    over = facts.over or by_itself or (facts.finished and not facts.running)
    report = end if concerns_run else Message(worker.number, _gone(worker, why_left))
    return replace(facts, over=over), (report,)


def _program_cause(facts: RunFacts, worker: WorkerFacts) -> str:
    """How the program ended ``worker``'s process; "" where it did not, or where the worker never joined the run."""
    assert worker.end is not None
    return ended_by_program(worker.end) if worker.code is None and not facts.never_joined(worker.number) else ""


def ended_by_program(end: ProcessEnded) -> str:
    """How the program ended its worker's process; "" where something else ended the process, or may have."""
    if end.why or end.code is None or end.code < 0 or end.code in (ORPHANED_CODE, NOT_STARTED):
        return ""
    if end.code == DISCONNECTED_CODE:
        return "the program closed its worker's connection, a file that it had not opened (os.closerange?)"
    return f"the program ended its worker's process with exit code {end.code} (os._exit, or a library that exits)"


def _gone(worker: WorkerFacts, why_left: str) -> WorkerGone:
    """The record of a worker's end that the run survives."""
    end = worker.exited
    if worker.ended_because is not None:
        why = f"{worker.ended_because} (exit code {end.code})"
        return WorkerGone(worker.number, "lost" if worker.lost else "left", why, end.code, end.log)
    if worker.code == 0:
        return WorkerGone(worker.number, "left", why_left or "it left the run", worker.code)
    return WorkerGone(worker.number, "lost", worker.how, end.code, end.log)


def _gone_apart(number: int, end: ProcessEnded) -> WorkerGone:
    """The record of a worker that ended before ``take_over``."""
    return WorkerGone(number, "left" if end.code == 0 else "lost", end.why or WITHOUT_CONTROLLER, end.code, end.log)
