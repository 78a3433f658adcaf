"""What became of a worker and of its run: a pure state machine. Events go in, new facts and actions come out.

A worker may end because its program ended, because its machine failed, or because the run asked it to. Who is told, and
whether the run goes on, is decided once all messages of that worker have been read (``WorkerDrained``). ``RunFacts`` is
the state, ``Kill``, ``Start`` and events for the driver are the actions.
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

# What a controller knows of a run and of its workers: the state of ``cluster.judgement``.

NO_END = Exited(NOBODY, 0, "")
UNKNOWN = 1  # the code of a process of which nobody knows how it ended


@dataclass(frozen=True)
class WorkerFacts:
    """What is known of one worker.

    Its process, its connection and its coordinator are heard of in any order, so none of these facts follows from
    another one.

    Attributes:
        number: Which it is.
        phase: "running" from its start until its end is told, "gone" then; "apart" as long as it is none of this run's,
            as those are that have outlived a controller until the next one takes them over.
        trained: It has been a member.
        parted: Its connection has ended.
        code: The exit code of its entry point, as it said when it parted; None where it has not, or without a word.
        explains_until: It has parted without a word: until when the end of its process is awaited, which tells why.
        doomed: Why it was ended, where the reason was not its own.
        lost: It counts as lost; else it was not needed any more.
        fatal: Its loss was one too many: what to say of that.
        end: How its process has ended; perhaps not all that it had said is here yet.
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
        """How its process has ended, in words; "" where it has not."""
        if self.end is None:
            return ""
        return self.end.why or f"worker {self.number} {how_it_ended(self.end.code, self.end.log)}"

    @property
    def exited(self) -> Exited:
        """How its process has ended, for the driver."""
        assert self.end is not None
        return Exited(self.number, UNKNOWN if self.end.code is None else self.end.code, self.end.log)


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run.

    Attributes:
        first: So many workers began it: those with higher numbers came later.
        workers: All there ever were, by number.
        over: Nothing is started any more; every worker that ends is the driver's concern.
        failed: By its program's own doing.
        finished: A worker has said so.
        noticed: It was to stop because its machines are taken away.
        last_lost: Who was lost last.
        last_end: The end that was told last.
        withheld: What workers said of the run's end while somebody's was to be explained: perhaps the program ended it.
    """

    first: int
    workers: Mapping[int, WorkerFacts] = field(default_factory=dict)
    over: bool = False
    failed: bool = False
    finished: bool = False
    noticed: bool = False
    last_lost: int = NOBODY
    last_end: Exited = NO_END
    deferred_results: tuple[tuple[int, RunFinished], ...] = ()

    def of(self, number: int) -> WorkerFacts:
        """What is known of worker ``number``."""
        return self.workers.get(number) or WorkerFacts(number)

    def put(self, number: int, **facts: Any) -> RunFacts:
        """As this, with these facts about worker ``number``."""
        return self.put_all((number,), **facts)

    def put_all(self, numbers: Iterable[int], **facts: Any) -> RunFacts:
        """As this, with these facts about each of ``numbers``."""
        changed = {number: replace(self.of(number), **facts) for number in numbers}
        return replace(self, workers={**self.workers, **changed}) if changed else self

    def seen(self, members: Iterable[int]) -> RunFacts:
        """As this, with ``members`` seen to train together."""
        return self.put_all((number for number in members if not self.of(number).trained), trained=True)

    @property
    def running(self) -> list[int]:
        """The workers whose ends are still to be told."""
        return [number for number, worker in self.workers.items() if worker.phase == "running"]

    @property
    def unexplained(self) -> list[WorkerFacts]:
        """Those that have parted without a word and may still end in a way that tells why."""
        return [worker for worker in self.workers.values() if worker.explains_until is not None]

    def is_replacement(self, number: int) -> bool:
        """Whether worker ``number`` was started after the run's first ones."""
        return number >= self.first

    def never_joined(self, number: int) -> bool:
        """Whether worker ``number`` came later than the first ones and has never trained with the others."""
        return self.is_replacement(number) and not self.of(number).trained


# What the end of a worker's process says of the program that ran in it.

NOT_STARTED = 71  # EX_OSERR of sysexits.h


def ended_by_program(end: ProcessEnded) -> str:
    """What the program did to end its worker's process without a word; "" where it was something else that ended it."""
    if end.why or end.code is None or end.code < 0 or end.code in (ORPHANED_CODE, NOT_STARTED):
        return ""
    if end.code == DISCONNECTED_CODE:
        return "the program closed its worker's connection, a file that it had not opened (os.closerange?)"
    return f"the program ended its worker's process with exit code {end.code} (os._exit, or a library that exits)"


# What became of a worker and of its run: a pure machine. News comes in, the facts and what is to be done come out.
#
# That a worker ends may be its program's will, its machine's fault, or what the run asked of it. Who is to hear of
# that, and whether the run goes on, follows from all that is known once everything it ever said has been heard
# (``WorkerDrained``).

EXPLAIN_S = 2.0  # how long the end of a process is awaited whose connection has closed without a word
WITHOUT_CONTROLLER = "it ended while there was no controller"


@dataclass(frozen=True)
class Kill:
    """End processes.

    Attributes:
        workers: Whose.
        why: For their logs.
    """

    workers: tuple[int, ...]
    why: str = ""


@dataclass(frozen=True)
class EventContext:
    """What else there is to know when news is heard.

    Attributes:
        now: The clock, in s.
        members: Who trains together.
        why_left: Why the worker was to leave that the news is of; "" where nobody has asked for that.
    """

    now: float = 0.0
    members: Collection[int] = ()
    why_left: str = ""


Action = Event | Kill | Start
"""To be told to the driver, or done."""
Transition = tuple[RunFacts, tuple[Action, ...]]


def step(facts: RunFacts, news: ForController, moment: EventContext) -> Transition:
    """Hear ``news`` of a run.

    Args:
        facts: What was known of it before.
        news: What its coordinator has told. Of records only those that say how the run ended are judged: ``Said`` knows
            which of the others are news.
        moment: When it is heard.

    Returns:
        What is known now, and what is to be done, in order.
    """
    match news:
        case RecordSent(worker, RunFailed() as record):
            return _failed(facts, worker, record, moment.members)
        case RecordSent(worker, RunFinished() as record):
            return _finished(facts, worker, record)
        case WorkerDisconnected():
            return _parted(facts, news, moment.now), ()
        case Start(workers) if not (facts.over or facts.finished):
            return facts.put_all(workers, phase="running"), (news,)
        case End():
            return _to_end(facts, news)
        case Stall(worker, reason, detail) if not facts.over:
            return _failed(facts, worker, RunFailed(reason, detail, worker), moment.members)
        case GiveUp(why) if not facts.over:
            return _given_up(facts, why)
        case StopRun():
            return replace(facts, noticed=True), ()
        case WorkerDrained(worker):
            return _buried(facts, facts.of(worker), moment.why_left)
    return facts, ()


def take_over(facts: RunFacts, back: Collection[int], away: Sequence[int], why: str) -> Transition:
    """Go on with a run whose controller has died.

    Args:
        facts: What the next controller knows.
        back: The workers that have come back to it.
        away: Those that have not, though their processes live: they are lost.
        why: What is told of these.

    Returns:
        What is known now, and what is to be done.
    """
    facts = facts.put_all(back, phase="running").put_all(away, phase="running", ended_because=why, lost=True)
    facts = replace(facts, last_lost=away[-1]) if away else facts
    return facts, tuple(Kill((worker,), why) for worker in away)


def expire_explanations(facts: RunFacts, now: float) -> Transition:
    """End those whose time to explain their end is up; once there is nobody left of them the run may have finished.

    Args:
        facts: What is known.
        now: The clock, in s.

    Returns:
        What is known then, and what is to be done.
    """
    acts: list[Action] = []
    for worker in facts.unexplained:
        if worker.explains_until is not None and worker.explains_until <= now:
            facts = facts.put(worker.number, explains_until=None)
            acts.append(Kill((worker.number,), worker.ended_because or ""))
    if facts.deferred_results and not facts.unexplained:
        deferred_results, facts = facts.deferred_results, replace(facts, deferred_results=())
        for number, record in deferred_results:
            facts, told = _finished(facts, number, record)
            acts += told
    return facts, tuple(acts)


# -- what workers say of the run's end --------------------------------------------------------------------------------
def _failed(facts: RunFacts, number: int, record: RunFailed, members: Collection[int]) -> Transition:
    if facts.of(number).ended_because is not None:  # whatever it did on its way out
        return facts, ()
    if facts.is_replacement(number) and members and number not in members:
        # Its machine, not the program, may be to blame: others train.
        facts = facts.put(number, ended_because=f"it failed before it could join: {record.detail}", lost=True)
        return replace(facts, last_lost=number), ()
    # The program's own failure is no reason to start replacements.
    return replace(facts, over=True, failed=True), (Message(number, record),)


def _finished(facts: RunFacts, number: int, record: RunFinished) -> Transition:
    if facts.failed:  # of survivors that were about to be ended
        return facts, ()
    if facts.unexplained:  # perhaps the program has ended one of its workers
        return replace(facts, deferred_results=(*facts.deferred_results, (number, record))), ()
    if facts.finished:
        return facts, ()
    if facts.noticed and record.stopped == "requested":
        record = replace(record, stopped="notice")
    return replace(facts, finished=True), (Message(number, record),)


# -- what the coordinator does with workers ---------------------------------------------------------------------------
def _parted(facts: RunFacts, news: WorkerDisconnected, now: float) -> RunFacts:
    ended_because = facts.of(news.worker).ended_because is not None
    explains = news.code is None and not ended_because and not facts.never_joined(news.worker)
    until = now + EXPLAIN_S if explains else None
    facts = facts.put(news.worker, parted=True, code=news.code, explains_until=until)
    if news.code is None or ended_because:
        return facts
    last = all(facts.workers[other].parted for other in facts.running)
    # Before the loss that this is to the coordinator makes it ask for another worker.
    return replace(facts, over=facts.over or news.code != 0 or last)


def _to_end(facts: RunFacts, news: End) -> Transition:
    worker = facts.of(news.worker)
    by_itself = worker.end is not None and news.why == worker.how
    ended_because = worker.ended_because if worker.parted or by_itself else news.why
    facts = facts.put(news.worker, ended_because=ended_because, lost=worker.lost or news.lost)
    if news.lost:
        facts = replace(facts, last_lost=news.worker)
    # Who has said its last words ends by itself, and how one ends that has said nothing tells why.
    ends_by_itself = worker.code is not None or worker.explains_until is not None
    return facts, () if ends_by_itself else (Kill((news.worker,), ended_because or ""),)


def _given_up(facts: RunFacts, why: str) -> Transition:
    """End the run. What the worker printed whose loss was one too many is known once its process has ended."""
    facts, last = replace(facts, over=True), facts.last_end
    kill = Kill(tuple(facts.running))
    if facts.last_lost in facts.running:
        return facts.put(facts.last_lost, fatal=why), (kill,)
    told = "" if last.rank == NOBODY else f"; worker {last.rank} {how_it_ended(last.code, last.log)}"
    return facts, (kill, _one_too_many(why + told, last))


def _one_too_many(why: str, last: Exited) -> Message:
    return Message(last.rank, RunFailed("worker_lost", why, max(0, last.rank), last.code, last.log))


# -- the end of a worker, now that all it ever said is known ----------------------------------------------------------
def _buried(facts: RunFacts, worker: WorkerFacts, why_left: str) -> Transition:
    assert worker.end is not None
    facts = facts.put(worker.number, explains_until=None)
    if worker.phase == "apart":
        return facts, (Message(worker.number, _gone_apart(worker.number, worker.end)),)
    end, fatal = worker.exited, worker.fatal
    facts = replace(facts.put(worker.number, phase="gone"), last_end=end)
    if fatal is not None:
        return facts, (_one_too_many(fatal if worker.how in fatal else f"{fatal}; {worker.how}", end), end)
    if worker.ended_because is None and not facts.finished and (own_will := _own_will(facts, worker)):
        record = RunFailed("exception", own_will, worker.number, worker.end.code, worker.end.log)
        return replace(facts, over=True, failed=True), (Message(worker.number, record), end)  # it would do so again
    left_early = worker.code == 0 and bool(facts.running)  # well and before the others: that is how a worker leaves
    by_itself = worker.ended_because is None and worker.code is not None and not left_early
    concerns_run = facts.over or by_itself or (facts.finished and worker.ended_because is None)
    over = facts.over or by_itself or (facts.finished and not facts.running)
    told = end if concerns_run else Message(worker.number, _gone(worker, why_left))
    return replace(facts, over=over), (told,)


def _own_will(facts: RunFacts, worker: WorkerFacts) -> str:
    """What the program did to end ``worker``'s process without a word; "" where it was something else that did."""
    assert worker.end is not None
    return ended_by_program(worker.end) if worker.code is None and not facts.never_joined(worker.number) else ""


def _gone(worker: WorkerFacts, why_left: str) -> WorkerGone:
    """How a worker's end is told that the run survives."""
    end = worker.exited
    if worker.ended_because is not None:
        why = f"{worker.ended_because} (exit code {end.code})"
        return WorkerGone(worker.number, "lost" if worker.lost else "left", why, end.code, end.log)
    if worker.code == 0:
        return WorkerGone(worker.number, "left", why_left or "it left the run", worker.code)
    return WorkerGone(worker.number, "lost", worker.how, end.code, end.log)


def _gone_apart(number: int, end: ProcessEnded) -> WorkerGone:
    """The same of one that ended before anybody was taken over."""
    return WorkerGone(number, "left" if end.code == 0 else "lost", end.why or WITHOUT_CONTROLLER, end.code, end.log)
