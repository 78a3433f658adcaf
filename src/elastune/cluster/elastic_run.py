"""An elastic run, from its controller's side: which news concern the driver, and what its coordinator asks for.

It knows no processes: whoever launches workers does what it asks (``Host``) and tells it how they end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from elastune.cluster.base import NOBODY, Event, Exited, Message, how_it_ended
from elastune.core.errors import UserError
from elastune.core.run import RunSpec
from elastune.elastic.coordinator.coordinator import Coordinator
from elastune.elastic.protocol.client import remove_contact, write_contact
from elastune.elastic.protocol.instructions import End, GiveUp, Start, StopRun
from elastune.journal.records import (
    Decided,
    PolicyFailed,
    Record,
    Reported,
    Restarted,
    RunFailed,
    RunFinished,
    WorkerGone,
)


class Host(Protocol):
    """What launches and ends the workers of one run."""

    def start_workers(self, workers: Sequence[int]) -> None:
        """Start workers with these numbers. How one ends that could not be started is told like any other end."""
        ...

    def kill_workers(self, workers: Sequence[int]) -> None:
        """End these workers now."""
        ...

    def stop(self) -> None:
        """Ask the run to checkpoint and end."""
        ...


class ElasticRun:
    """The coordinator of ``spec`` and the judgement of what its workers' words and ends mean.

    ``over``: nothing is started any more; every worker that ends is the driver's concern.
    """

    def __init__(self, spec: RunSpec, host: Host, last_line: Callable[[int], str]) -> None:
        workers, elastic = spec.means.workers, spec.elastic
        self.high = spec.most_workers
        self.over = False
        self._host = host
        self._spec = spec
        self._running = set(range(workers))
        self._doomed: dict[int, str] = {}
        self._lost: list[int] = []
        self._fatal: tuple[int, str] | None = None  # the worker whose loss was one too many, and what to say of it
        self._finished: set[int] = set()
        self._reported: set[tuple[int, int, int]] = set()
        self._decided: set[tuple[int, str, str]] = set()  # step, policy, and the hook of a failure
        self._last = Exited(NOBODY, 0, "")
        self._noticed = self._announced = self._failed = False
        self._free = -1
        self.coordinator = Coordinator(
            range(workers),
            low=min(elastic.low, workers),
            high=self.high,
            heartbeat_s=elastic.heartbeat_s,
            most_losses=elastic.most_losses,
            last_line=last_line,
        )

    def announce(self) -> None:
        """Let other commands find the run. Raises ``UserError`` where its folder cannot be written."""
        try:
            write_contact(self._spec.out, self.coordinator.address, self.coordinator.token)
        except OSError as error:
            rule = "the output folder must be writable"
            raise UserError(rule, f"{self._spec.out}: {error.strerror}", "choose another folder") from error
        self._announced = True

    def heard(self, worker: int, record: Record) -> Event | None:
        """What ``worker`` said, or None where another one has said the same: all members tell what concerns the run."""
        match record:
            case RunFailed() if worker in self._doomed:  # whatever it did on its way out
                return None
            case RunFailed() if self._joins(worker):  # this machine, not the program, may be to blame: others train
                self._doomed[worker] = f"it failed before it could join: {record.detail}"
                self._lost.append(worker)
                return None
            case RunFailed():  # the program's own failure is no reason to start replacements
                self.over = self._failed = True
            case RunFinished() if self._failed:  # of survivors that were about to be ended
                return None
            case RunFinished():
                first = not self._finished
                self._finished.add(worker)
                if not first:
                    return None
                if self._noticed and record.stopped == "requested":
                    record = replace(record, stopped="notice")
            case Reported(epoch=epoch, step=step, nth=nth):
                if (epoch, step, nth) in self._reported:
                    return None
                self._reported.add((epoch, step, nth))
            case Decided(policy=policy, step=step):
                return self._told_first(worker, record, (step, policy, ""))
            case PolicyFailed(policy=policy, step=step, hook=hook):
                return self._told_first(worker, record, (step, policy, hook))
            case Restarted(step=step):  # what was decided after it is decided anew
                self._decided = {key for key in self._decided if key[0] <= step}
        return Message(worker, record)

    def _told_first(self, worker: int, record: Record, key: tuple[int, str, str]) -> Event | None:
        """``record``, unless a member has told of ``key`` already."""
        if key in self._decided:
            return None
        self._decided.add(key)
        return Message(worker, record)

    def ended(self, end: Exited, returned: int | None, why: str = "") -> list[Event]:
        """How a worker's end is to be told. ``returned``: the code its entry point ended with; None: it vanished."""
        worker, how = end.rank, why or f"worker {end.rank} {how_it_ended(end.code)}"
        self._running.discard(worker)
        self._last = end
        self.coordinator.lost(worker, how)
        if self._fatal is not None and self._fatal[0] == worker:
            return [self._failure(f"{self._fatal[1]}; {how}"), end]
        concerns = self.over or (bool(self._finished) and worker not in self._doomed)
        self.over = self.over or (bool(self._finished) and not self._running)
        if concerns:
            return [end]
        if worker in self._doomed:
            how = f"{self._doomed[worker]} (exit code {end.code})"
        elif returned == 0 and self._running:  # ended well and before the others: that is how a worker leaves
            return [Message(worker, WorkerGone(worker, "left", "it left the run", returned))]
        elif returned is not None:
            self.over = True
            return [end]
        left = worker in self._doomed and worker not in self._lost
        return [Message(worker, WorkerGone(worker, "left" if left else "lost", how, end.code, end.log))]

    def heed(self) -> list[Event]:
        """Do what the coordinator asks for; what it has to tell."""
        records = self.coordinator.take_records()
        events: list[Event] = [Message(NOBODY, record) for record in records]
        for instruction in self.coordinator.take():
            match instruction:
                case Start(workers=workers) if not (self.over or self._finished):
                    self._running.update(workers)
                    self._host.start_workers(workers)
                case End(worker=worker, why=why, lost=lost):
                    self._lost += [worker] * lost
                    self._doomed[worker] = why
                    self._host.kill_workers([worker])
                case GiveUp(why=why):
                    events += self._give_up(why)
                case StopRun():
                    self._noticed = True
                    self._host.stop()
        return events

    def _joins(self, worker: int) -> bool:
        """Whether ``worker`` came later than the run's first ones and does not train with the others yet."""
        members = self.coordinator.members
        return worker >= self._spec.means.workers and bool(members) and worker not in members

    def room(self, free: int) -> None:
        """Tell the coordinator how many workers could be started: of ``free`` in the cluster, what the run may have."""
        free = max(0, min(free, self.high - len(self._running)))
        if free != self._free and not self.over:
            self._free = free
            self.coordinator.capacity(free)

    def close(self) -> None:
        """End the coordinator. Idempotent."""
        self.over = True
        if self._announced:
            remove_contact(self._spec.out)
        self.coordinator.close()

    def _give_up(self, why: str) -> list[Event]:
        """End the run. What the worker printed whose loss was one too many is known once its process has ended."""
        self.over = True
        if self._lost and self._lost[-1] in self._running:
            self._fatal = (self._lost[-1], why)
        self._host.kill_workers(sorted(self._running))
        if self._fatal is not None:
            return []
        told = "" if self._last.rank == NOBODY else f"; worker {self._last.rank} {how_it_ended(self._last.code)}"
        return [self._failure(why + told)]

    def _failure(self, why: str) -> Event:
        last = self._last
        return Message(last.rank, RunFailed("worker_lost", why, max(0, last.rank), last.code, last.log))
