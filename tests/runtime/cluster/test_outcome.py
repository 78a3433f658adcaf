"""What becomes of workers and of their run, whatever is heard of them in whichever order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastune.core.journal.records import Record, RunFailed, RunFinished, WorkerGone
from elastune.elastic.coordinator.controller_interface import (
    ForController,
    RecordSent,
    WorkerDisconnected,
    WorkerDrained,
)
from elastune.elastic.coordinator.machine import End, GiveUp, Start, StopRun
from elastune.elastic.stragglers import Stall
from elastune.elastic.worker.client import ORPHANED_CODE
from elastune.runtime.clusters.base import NOBODY, Event, Exited, Message
from elastune.runtime.launcher import Bootstrap, ProcessEnded
from elastune.runtime.outcome import (
    EXPLAIN_S,
    Action,
    EventContext,
    Kill,
    RunFacts,
    Transition,
    ended_by_program,
    expire_explanations,
    take_over,
    transition,
)

BEGUN = RunFacts(first=2).put_all((0, 1), phase="running")  # and worker 2 comes later
KILLED = "worker 1 was ended by signal 9 (out of memory?)"
EXITED = ended_by_program(ProcessEnded(Bootstrap(1, "", ""), 3))
BUG = RunFailed("exception", "ValueError: no", 0)
News = ForController | ProcessEnded | float


def finished(stopped: str = "complete") -> RunFinished:
    return RunFinished("a" * 64, 2, 10, 640, 1.0, {}, stopped=stopped)


def ended(worker: int, code: int | None, why: str = "") -> ProcessEnded:
    return ProcessEnded(Bootstrap(worker, "127.0.0.1:1", "secret"), code, f"log {worker}", why)


def gone(worker: int, how: str, why: str, code: int = -9) -> Message:
    return Message(worker, WorkerGone(worker, how, why, code, f"log {worker}"))


def left(worker: int, why: str) -> Message:
    return Message(worker, WorkerGone(worker, "left", why, 0))


def exited(worker: int, code: int) -> Exited:
    return Exited(worker, code, f"log {worker}")


def failed(worker: int, reason: str, detail: str, code: int) -> Message:
    return Message(worker, RunFailed(reason, detail, worker, code, f"log {worker}"))


def says(worker: int, record: Record) -> RecordSent:
    return RecordSent(worker, record, 1)


def after(*news: News, facts: RunFacts = BEGUN, members: tuple[int, ...] = (0, 1), why_left: str = "") -> Transition:
    """What all of that makes of ``facts``, and what is done. A number: so many seconds are over."""
    now, done = 0.0, list[Action]()
    for one in news:
        if isinstance(one, ProcessEnded):
            facts = facts.put(one.bootstrap.worker, end=one)
            continue
        if isinstance(one, float):
            now += one
            facts, acts = expire_explanations(facts, now)
        else:
            facts, acts = transition(facts, one, EventContext(now, members, why_left))
        done += acts
    return facts, tuple(done)


def told(acts: tuple[Action, ...]) -> list[Event]:
    return [act for act in acts if not isinstance(act, Kill | Start)]


OF_ONE_WORKER: dict[str, tuple[list[News], list[Action]]] = {
    "killed by its machine": (
        [WorkerDisconnected(1, None), End(1, KILLED, lost=True), ended(1, -9), WorkerDrained(1)],
        [gone(1, "lost", KILLED)],
    ),
    "killed, which its launcher tells first": (
        [ended(1, -9), WorkerDisconnected(1, None), End(1, KILLED, lost=True), WorkerDrained(1)],
        [gone(1, "lost", KILLED)],
    ),
    "nobody knows how it ended": (
        [ended(1, None, "its host is gone"), WorkerDisconnected(1, None), WorkerDrained(1)],
        [gone(1, "lost", "its host is gone", code=1)],
    ),
    "orphaned": (
        [WorkerDisconnected(1, None), ended(1, ORPHANED_CODE), WorkerDrained(1)],
        [gone(1, "lost", f"worker 1 exited with code {ORPHANED_CODE}", ORPHANED_CODE)],
    ),
    "silent, so it was ended": (
        [End(1, "it was silent", lost=True), WorkerDisconnected(1, None), EXPLAIN_S, ended(1, -9), WorkerDrained(1)],
        [Kill((1,), "it was silent"), gone(1, "lost", "it was silent (exit code -9)")],
    ),
    "not needed any more, so it was ended": (
        [End(1, "one too many"), says(1, BUG), ended(1, -9), WorkerDrained(1)],
        [Kill((1,), "one too many"), gone(1, "left", "one too many (exit code -9)")],
    ),
    "lost before it was not needed": (
        [End(1, "it was silent", lost=True), End(1, "one too many"), ended(1, 3), WorkerDrained(1)],
        [
            Kill((1,), "it was silent"),
            Kill((1,), "one too many"),
            gone(1, "lost", "one too many (exit code 3)", 3),
        ],
    ),
    "without a word, and its process lives": (
        [WorkerDisconnected(1, None), End(1, "gone", lost=True), EXPLAIN_S / 2, EXPLAIN_S],
        [Kill((1,))],
    ),
    "asked to leave": (
        [WorkerDisconnected(1, 0), End(1, "it ended with exit code 0"), ended(1, 0), WorkerDrained(1)],
        [left(1, "a resize")],
    ),
    "later than others, and could not begin": (
        [Start((2,)), says(2, BUG), ended(2, 1), WorkerDisconnected(2, 1), WorkerDrained(2)],
        [Start((2,)), gone(2, "lost", f"it failed before it could join: {BUG.detail} (exit code 1)", 1)],
    ),
    "later than others, and without a word": (
        [Start((2,)), WorkerDisconnected(2, None), End(2, "gone", lost=True), ended(2, -9), WorkerDrained(2)],
        [Start((2,)), Kill((2,)), gone(2, "lost", "worker 2 was ended by signal 9 (out of memory?)")],
    ),
    "not needed once the run has finished": (
        [says(0, finished()), End(1, "one too many"), ended(1, -9), WorkerDrained(1)],
        [Message(0, finished()), Kill((1,), "one too many"), gone(1, "left", "one too many (exit code -9)")],
    ),
    "at the end, by its program": (
        [says(0, finished()), ended(1, 3), WorkerDisconnected(1, None), WorkerDrained(1)],
        [Message(0, finished()), exited(1, 3)],
    ),
    "later than others, and its program exits": (
        [Start((2,)), ended(2, 3), WorkerDisconnected(2, None), WorkerDrained(2)],
        [Start((2,)), gone(2, "lost", "worker 2 exited with code 3", 3)],
    ),
}


@pytest.mark.parametrize("name", OF_ONE_WORKER)
def test_a_run_survives_the_end_of_a_worker(name: str) -> None:
    news, wanted = OF_ONE_WORKER[name]
    facts, done = after(*news, why_left="a resize")
    assert list(done) == wanted
    assert not facts.over
    assert facts.running == [worker for worker in facts.workers if WorkerDrained(worker) not in news]


OF_THE_RUN: dict[str, tuple[list[News], list[Action]]] = {
    "all end well": (
        [
            says(0, finished()),
            says(1, finished()),
            WorkerDisconnected(0, 0),
            ended(0, 0),
            WorkerDrained(0),
            WorkerDisconnected(1, 0),
            ended(1, 0),
        ],
        [Message(0, finished()), exited(0, 0)],
    ),
    "the program fails": (
        [
            says(1, BUG),
            Start((2,)),
            says(0, finished()),
            GiveUp("too few"),
            ended(1, 1),
            WorkerDisconnected(1, 1),
            WorkerDrained(1),
        ],
        [Message(1, BUG), exited(1, 1)],
    ),
    "the program fails without a record": (
        [WorkerDisconnected(1, 7), Start((2,)), ended(1, 7), WorkerDrained(1)],
        [exited(1, 7)],
    ),
    "the program ends its process": (
        [
            ended(1, 3),
            WorkerDisconnected(1, None),
            End(1, "worker 1 exited with code 3", lost=True),
            WorkerDrained(1),
            Start((2,)),
        ],
        [
            failed(1, "exception", EXITED, 3),
            exited(1, 3),
        ],
    ),
    "one leaves, and the others are lost": (
        [WorkerDisconnected(0, 0), ended(1, -9), WorkerDrained(1), ended(0, 0), WorkerDrained(0)],
        [gone(1, "lost", KILLED), exited(0, 0)],
    ),
    "it has finished, and the last one is ended": (
        [says(0, finished()), ended(0, 0), WorkerDrained(0), End(1, "one too many"), ended(1, -9), WorkerDrained(1)],
        [
            Message(0, finished()),
            exited(0, 0),
            Kill((1,), "one too many"),
            gone(1, "left", "one too many (exit code -9)"),
        ],
    ),
    "the last ones leave": (
        [
            WorkerDisconnected(0, 0),
            ended(0, 0),
            WorkerDrained(0),
            WorkerDisconnected(1, 0),
            Start((2,)),
            ended(1, 0),
            WorkerDrained(1),
        ],
        [left(0, "it left the run"), exited(1, 0)],
    ),
    "they will never come together": (
        [Stall(1, "user_error", "ranks differ"), Stall(0, "timeout", "late")],
        [Message(1, RunFailed("user_error", "ranks differ", 1))],
    ),
    "one loss too many": (
        [End(1, "it was silent", lost=True), GiveUp("1 left"), says(0, finished()), ended(1, -9), WorkerDrained(1)],
        [
            Kill((1,), "it was silent"),
            Kill((0, 1)),
            Message(0, finished()),
            failed(1, "worker_lost", f"1 left; {KILLED}", -9),
            exited(1, -9),
        ],
    ),
    "one loss too many, whose end is known": (
        [ended(1, -9), End(1, KILLED, lost=True), GiveUp(f"1 left, {KILLED}"), WorkerDrained(1)],
        [Kill((1,)), Kill((0, 1)), failed(1, "worker_lost", f"1 left, {KILLED}", -9), exited(1, -9)],
    ),
    "nobody has ever come": (
        [GiveUp("nobody could be started"), GiveUp("twice")],
        [Kill((0, 1)), Message(NOBODY, RunFailed("worker_lost", "nobody could be started", 0, 0, ""))],
    ),
    "given up after the end of one that was lost": (
        [ended(1, -9), End(1, KILLED, lost=True), WorkerDrained(1), GiveUp("1 left")],
        [Kill((1,)), gone(1, "lost", KILLED), Kill((0,)), failed(1, "worker_lost", f"1 left; {KILLED}", -9)],
    ),
}


@pytest.mark.parametrize("name", OF_THE_RUN)
def test_a_run_is_over(name: str) -> None:
    news, wanted = OF_THE_RUN[name]
    facts, done = after(*news)
    assert list(done) == wanted
    assert facts.over
    assert 2 not in facts.running


def test_a_program_that_exits_is_blamed_where_its_worker_had_trained() -> None:
    facts, _ = after(Start((2,)))
    facts, done = after(ended(2, 3), WorkerDisconnected(2, None), WorkerDrained(2), facts=facts.seen((0, 1, 2)))
    assert done == (failed(2, "exception", EXITED, 3), exited(2, 3))
    assert facts.over


def test_a_failure_is_the_programs_where_nobody_trains_or_it_was_there_from_the_first() -> None:
    facts, done = after(says(0, BUG), members=(1,))
    assert facts.over
    assert done == (Message(0, BUG),)
    facts, done = after(Start((2,)), says(2, BUG), members=())
    assert facts.over
    assert told(done) == [Message(2, BUG)]


def test_a_run_has_not_finished_while_an_end_may_be_the_programs_doing() -> None:
    begun = [WorkerDisconnected(1, None), says(0, finished())]
    facts, done = after(*begun, EXPLAIN_S / 2)
    assert done == ()
    assert not facts.finished
    _, done = after(*begun, ended(1, 3), WorkerDrained(1), 0.1)
    assert [type(event) for event in told(done)] == [Message, Exited], "it failed, and did not finish"
    assert isinstance(done[0], Message)
    assert isinstance(done[0].record, RunFailed)
    _, done = after(*begun, ended(1, -9), WorkerDrained(1), 0.1)
    assert told(done) == [gone(1, "lost", KILLED), Message(0, finished())]
    _, done = after(*begun, EXPLAIN_S)
    assert done == (Kill((1,)), Message(0, finished()))


def test_a_run_whose_machines_are_taken_away_says_so() -> None:
    stop = StopRun(1, "notice to worker 1 (host a: spot): 0 workers would remain")
    told_why = replace(finished("notice"), stop_why=stop.why)
    assert after(stop, says(0, finished("requested")))[1] == (Message(0, told_why),)
    assert after(stop, says(0, finished()))[1] == (Message(0, finished()),)
    assert after(says(0, finished("requested")))[1] == (Message(0, finished("requested")),)


def test_nobody_is_started_for_a_run_that_finishes() -> None:
    facts, done = after(says(0, finished()), Start((2,)))
    assert not facts.over
    assert told(done) == list(done)


def test_who_was_not_taken_over_ended_without_a_controller() -> None:
    facts, done = after(
        ended(1, -9), WorkerDrained(1), ended(2, 0, "its host is back"), WorkerDrained(2), facts=RunFacts(2)
    )
    assert done == (
        gone(1, "lost", "it ended while there was no controller"),
        gone(2, "left", "its host is back", 0),
    )
    facts, done = take_over(facts, {0}, [3], "it is away")
    assert done == (Kill((3,), "it is away"),)
    assert set(facts.running) == {0, 3}
    facts, done = after(ended(3, -9), WorkerDrained(3), facts=facts)
    assert done == (gone(3, "lost", "it is away (exit code -9)"),)
    assert not facts.over
