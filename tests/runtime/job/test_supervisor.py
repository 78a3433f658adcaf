"""Who is blamed, and when: tables of events against a clock that stands still."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastune.core.journal.records import Reported, RunFailed, RunFinished
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.base import Event, Exited, Handle, Message, how_it_ended
from elastune.runtime.job.interrupts import Interrupts
from elastune.runtime.job.run import EXIT_S, GRACE_S, JobSupervisor, ShutdownControl


class StandingClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time


class ScriptedHandle(Handle):
    """Hands out what a test puts in; ``kill`` ends whoever lives."""

    def __init__(self, workers: int) -> None:
        self.spec = RunSpec(Program(Path("none.py")), Path("out"), execution=ExecutionSettings(workers=workers))
        self.left = set(range(workers))
        self.events: list[Event] = []
        self.stops = self.kills = 0

    def poll(self) -> list[Event]:
        result, self.events = self.events, []
        self.left -= {event.rank for event in result if isinstance(event, Exited)}
        return result

    @property
    def alive(self) -> int:
        return len(self.left)

    def stop(self) -> None:
        self.stops += 1

    def kill(self) -> None:
        self.kills += 1
        self.events += [Exited(rank, -9, "") for rank in sorted(self.left)]


FINISHED = RunFinished("sha", 2, 3, 4, 1.0, {})
ECHO = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"


def failed(rank: int, reason: str = "exception", detail: str = "KeyError: 'k' (mine.py:3)") -> Message:
    return Message(rank, RunFailed(reason, detail, rank))


def watch(*events: Event, workers: int = 2, seconds_later: float = GRACE_S) -> RunFinished | RunFailed:
    """The outcome of ``events``, the workers that then still live being ended by whoever watches."""
    clock, handle = StandingClock(), ScriptedHandle(workers)
    watched = JobSupervisor(handle, clock=clock)
    handle.events = list(events)
    watched.pump()
    clock.time += seconds_later
    watched.pump()
    watched.pump()
    assert watched.outcome is not None
    assert handle.alive == 0
    return watched.outcome


def test_a_good_end() -> None:
    assert watch(Message(0, FINISHED), Exited(1, 0, ""), Exited(0, 0, "")) == FINISHED


def test_a_finished_run_whose_worker_hangs() -> None:
    assert watch(Message(0, FINISHED), Exited(1, 0, ""), seconds_later=EXIT_S) == FINISHED
    assert watch(Message(0, FINISHED), Exited(1, -11, ""), Exited(0, 0, "")) == FINISHED


BLAME = {
    "the one that raised": ([failed(1), Exited(1, 1, "log")], 1, "exception"),
    "an echo is never the cause": ([failed(0, detail=ECHO), Exited(1, -9, "")], 1, "worker_lost"),
    "the cause, though echoes came first": (
        [failed(0, detail=ECHO), failed(2, detail=ECHO), failed(1)],
        1,
        "exception",
    ),
    "divergence among echoes": ([failed(0, detail=ECHO), failed(1, "diverged", "loss is nan")], 1, "diverged"),
    "a segmentation fault": ([failed(0, detail=ECHO), Exited(0, 1, ""), Exited(1, -11, "")], 1, "worker_lost"),
    "an exit code": ([Exited(1, 7, "log")], 1, "worker_lost"),
    "of echoes alone the first": ([failed(2, detail=ECHO), failed(0, detail=ECHO)], 2, "exception"),
    "whoever was killed first": ([Exited(2, -9, ""), Exited(1, -9, "")], 2, "worker_lost"),
    "an exception that reads like an echo": (
        [failed(1, detail="OSError: connection reset (mine.py:2)")],
        1,
        "exception",
    ),
}


@pytest.mark.parametrize("name", sorted(BLAME))
def test_blame(name: str) -> None:
    events, rank, reason = BLAME[name]
    outcome = watch(*events, workers=3)
    assert isinstance(outcome, RunFailed)
    assert (outcome.rank, outcome.reason) == (rank, reason), outcome


def test_signals_codes_and_logs_are_told() -> None:
    killed = watch(Exited(1, -9, "the log"))
    assert isinstance(killed, RunFailed)
    assert (killed.exit_code, killed.log) == (-9, "the log")
    assert killed.detail == "worker 1 was ended by signal 9 (out of memory?)"
    raised = watch(failed(1), Exited(1, 1, "the log"))
    assert isinstance(raised, RunFailed)
    assert (raised.exit_code, raised.log) == (1, "the log")
    silent = watch(Exited(0, 0, ""), Exited(1, 0, ""))
    assert isinstance(silent, RunFailed)
    assert silent.detail == "all workers ended without a result"


CRASH = """--- worker 1
Fatal Python error: Segmentation fault

Thread 0x00007f2ea4b8b6c0 (most recent call first):
  File "/elsewhere/client.py", line 299 in _serve

Current thread 0x00007f2ec87d1b80 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/usr/lib/python3.11/site-packages/torch/nn/functional.py", line 5 in linear
  File "/somewhere/train.py", line 13 in train
  File "/somewhere/other.py", line 67 in entered

Extension modules: numpy.linalg._umath_linalg (total: 1)
"""


@pytest.mark.parametrize(
    ("code", "log", "words"),
    [
        (-11, CRASH, "was ended by signal 11 (a segmentation fault at train.py:13)"),
        (-6, CRASH.replace("Segmentation fault", "Aborted"), "was ended by signal 6 (an abort at train.py:13)"),
        (-11, "no trace", "was ended by signal 11 (a segmentation fault)"),
        (-11, "Current thread 0x0 (most recent call first):\n", "was ended by signal 11 (a segmentation fault)"),
        (-9, CRASH, "was ended by signal 9 (out of memory?)"),
        (-15, CRASH, "was ended by signal 15"),
        (3, CRASH, "exited with code 3"),
    ],
)
def test_a_crash_is_told_by_its_line_in_the_program(code: int, log: str, words: str) -> None:
    assert how_it_ended(code, log) == words
    failure = watch(Exited(1, code, log))
    assert isinstance(failure, RunFailed)
    assert failure.detail == f"worker 1 {words}"


@pytest.mark.parametrize("at_once", [True, False])
def test_a_second_interrupt_is_no_loss_of_a_worker(at_once: bool) -> None:
    handle, interrupts = ScriptedHandle(2), Interrupts()
    watched = JobSupervisor(handle, clock=StandingClock())
    ending = ShutdownControl(watched, interrupts)
    for count in (2,) if at_once else (1, 2):
        interrupts.count = count
        ending.look()
    watched.pump()
    assert watched.outcome == RunFailed("interrupted", "ended by a second interrupt", 0)
    assert (handle.stops, handle.kills) == (0 if at_once else 1, 1)


def test_others_have_a_grace_to_say_what_they_saw() -> None:
    clock, handle = StandingClock(), ScriptedHandle(2)
    watched = JobSupervisor(handle, clock=clock)
    handle.events = [failed(0, detail=ECHO)]
    watched.pump()
    clock.time += GRACE_S / 2
    watched.pump()
    assert handle.kills == 0
    clock.time += GRACE_S
    watched.pump()
    watched.pump()
    assert handle.kills == 1
    assert isinstance(watched.outcome, RunFailed)
    assert watched.outcome.rank == 0


@pytest.mark.parametrize("in_time", [True, False])
def test_a_limit_of_time(in_time: bool) -> None:
    clock, handle = StandingClock(), ScriptedHandle(2)
    watched = JobSupervisor(handle, clock=clock, timeout_s=5.0)
    clock.time += 4.9
    watched.pump()
    assert handle.kills == 0
    handle.events = [Message(0, FINISHED)] if in_time else []
    watched.pump()
    clock.time += 0.2
    watched.pump()
    assert handle.kills == (0 if in_time else 1)
    if in_time:
        handle.events = [Exited(0, 0, ""), Exited(1, 0, "")]
    watched.pump()
    assert watched.outcome == FINISHED if in_time else isinstance(watched.outcome, RunFailed)
    if isinstance(watched.outcome, RunFailed):
        assert (watched.outcome.reason, watched.outcome.detail) == ("timeout", "still running after 5 s")


def test_a_failure_just_before_the_limit_keeps_its_reason() -> None:
    clock, handle = StandingClock(), ScriptedHandle(2)
    watched = JobSupervisor(handle, clock=clock, timeout_s=5.0)
    clock.time += 4.9
    handle.events = [failed(1)]
    watched.pump()
    clock.time += GRACE_S
    watched.pump()
    watched.pump()
    assert isinstance(watched.outcome, RunFailed)
    assert watched.outcome.reason == "exception"


def test_ending_a_job_says_why() -> None:
    handle = ScriptedHandle(2)
    watched = JobSupervisor(handle, clock=StandingClock())
    watched.end("nobody wants it")
    watched.pump()
    assert isinstance(watched.outcome, RunFailed)
    assert watched.outcome.detail == "nobody wants it"


def test_records_are_handed_on_in_order() -> None:
    handle = ScriptedHandle(1)
    watched = JobSupervisor(handle, clock=StandingClock())
    results = [Reported(0, step, 0, 0.0, {}) for step in range(3)]
    handle.events = [Message(0, record) for record in results] + [Message(0, FINISHED)]
    assert watched.pump() == results
    assert watched.outcome is None
