"""One running job as its driver sees it: events in, records and an outcome out."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from elastune.cluster.base import Exited, Handle, how_it_ended
from elastune.core.clock import Clock, SystemClock
from elastune.journal.records import Record, RunFailed, RunFinished

GRACE_S = 1.0
EXIT_S = 10.0  # a finished run's workers have nothing left to do but to exit
# What a worker says when ANOTHER one went away: never the cause of a failure.
_ECHOES = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "timed out",
    "storeerror",
    "tcpstore",
)


class JobSupervisor:
    """Follows a job until all of its workers are gone; ``outcome`` is then set.

    After the first failure the other workers get ``GRACE_S`` to say what they saw, then they are ended. ``timeout_s``
    bounds the whole job, which has run for ``ran_s`` already.
    """

    def __init__(
        self, handle: Handle, *, timeout_s: float | None = None, clock: Clock | None = None, ran_s: float = 0.0
    ) -> None:
        self.handle = handle
        self.outcome: RunFinished | RunFailed | None = None
        self._clock = clock or SystemClock()
        self._deadline = None if timeout_s is None else self._clock.now() + timeout_s - ran_s
        self._timeout_s = timeout_s
        self._finished: RunFinished | None = None
        self._failures: list[RunFailed] = []
        self._ended_by_us: list[RunFailed] = []
        self._kill_at: float | None = None
        self._stopped_for: Literal["requested", "notice"] = "requested"

    @property
    def finished(self) -> bool:
        """Whether the job has its result: its workers have only to exit."""
        return self._finished is not None

    def stop(self, why: Literal["requested", "notice"] = "requested") -> None:
        """Ask for a checkpoint and an end; the outcome will say ``why``."""
        self._stopped_for = why
        self.handle.stop()

    def pump(self) -> list[Record]:
        """Handle what happened; returns the records to keep. Never blocks."""
        records: list[Record] = []
        for event in self.handle.poll():
            if isinstance(event, Exited):
                self._exited(event)
            elif isinstance(event.record, RunFinished):
                self._finished = event.record
                self._kill_at = self._clock.now() + EXIT_S
            elif isinstance(event.record, RunFailed):
                self._fail(event.record)
            else:
                records.append(event.record)
        self._keep_time()
        if self.handle.alive == 0 and self.outcome is None:
            self.outcome = self._judge()
        return records

    def end(self, why: str, reason: Literal["worker_lost", "interrupted"] = "worker_lost") -> None:
        """End the workers now; the outcome says ``why``, unless the job has failed or finished already."""
        if not self._failures:
            self._failures.append(RunFailed(reason, why, 0))
        self._kill()

    def _kill(self) -> None:
        self._kill_at = float("inf")
        self.handle.kill()

    def _exited(self, event: Exited) -> None:
        if event.code != 0 and not any(f.rank == event.rank for f in self._failures):
            detail = f"worker {event.rank} {how_it_ended(event.code, event.log)}"
            lost = RunFailed("worker_lost", detail, event.rank, event.code, event.log)
            if event.code == -9 and self._kill_at == float("inf"):
                self._ended_by_us.append(lost)
            else:
                self._fail(lost)
        elif event.code != 0 and event.log:
            self._failures = [
                replace(f, exit_code=event.code, log=event.log) if f.rank == event.rank else f for f in self._failures
            ]

    def _fail(self, failure: RunFailed) -> None:
        self._failures.append(failure)
        if self._kill_at is None and self._finished is None:
            self._kill_at = self._clock.now() + GRACE_S

    def _keep_time(self) -> None:
        now = self._clock.now()
        if self._deadline is not None and now >= self._deadline and not (self._finished or self._failures):
            self._failures.append(RunFailed("timeout", f"still running after {self._timeout_s:g} s", 0))
            self._deadline, self._kill_at = None, now
        if self._kill_at is not None and now >= self._kill_at:
            self._kill()

    def _judge(self) -> RunFinished | RunFailed:
        """The finished record if nothing failed; else the failure that came first and is no echo of another."""
        if self._finished is not None:
            asked = self._finished.stopped == "requested"
            return replace(self._finished, stopped=self._stopped_for) if asked else self._finished
        failures = self._failures or self._ended_by_us
        if not failures:
            return RunFailed("worker_lost", "all workers ended without a result", 0)
        causes = [f for f in failures if not (f.reason == "exception" and _is_echo(f.detail))]
        return (causes or failures)[0]


def _is_echo(detail: str) -> bool:
    return any(word in detail.lower() for word in _ECHOES)
