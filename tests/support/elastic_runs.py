"""Runs of a program whose workers have things done to them; what they come to is compared by hash and ledger."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastune.core.journal.records import (
    Entry,
    Record,
    Regrouped,
    Reported,
    Restarted,
    RunFailed,
    RunFinished,
    StateLost,
    WorkerGone,
)
from elastune.core.run import Elastic, ExecutionSettings, Program, RunSpec
from elastune.report.sample_ledger import Ledger, ledger
from elastune.runtime.clusters.elastic_cluster import ElasticCluster
from elastune.runtime.elastic_run import ElasticRun
from elastune.runtime.job.run import JobSupervisor

LIMIT_S = 120.0
SLOTS = 4
# Kills are seen at once by the end of a connection. Nobody is lost by silence on a busy machine.
PATIENT = Elastic(low=1, high=4, heartbeat_s=30.0)
Act = Callable[[ElasticRun, list[Record]], None]


@dataclass
class Ran:
    """What a run came to."""

    outcome: RunFinished | RunFailed
    records: list[Record] = field(default_factory=list)

    @property
    def sha256(self) -> str:
        assert isinstance(self.outcome, RunFinished), self.outcome
        return self.outcome.sha256

    @property
    def ledger(self) -> Ledger:
        return ledger(Entry(float(i), record) for i, record in enumerate(self.records))

    @property
    def lost(self) -> list[int]:
        return [r.worker for r in self.records if isinstance(r, WorkerGone) and r.how == "lost"]

    @property
    def regrouped(self) -> list[Regrouped]:
        return [r for r in self.records if isinstance(r, Regrouped)]

    @property
    def reports(self) -> list[dict[str, float]]:
        return [r.metrics for r in self.records if isinstance(r, Reported)]


def check_same(ran: Ran, undisturbed: Ran) -> None:
    """Equal to the bit, every sample once; and what evaluations found: reports within an epoch are of who is there."""
    assert ran.sha256 == undisturbed.sha256
    assert ran.ledger.exact, ran.ledger
    losses, wanted = ([r["loss"] for r in each.reports if "loss" in r] for each in (ran, undisturbed))
    assert losses == wanted


def check_kept_on(ran: Ran, undisturbed: Ran) -> None:
    """And nobody went back to a checkpoint."""
    check_same(ran, undisturbed)
    back = [r for r in ran.records if isinstance(r, Restarted | StateLost)]
    assert not back, back


def together(workers: int) -> Callable[[list[Record]], bool]:
    """Whether so many have trained together."""
    return lambda records: any(len(r.members) == workers for r in records if isinstance(r, Regrouped))


def formed(*members: int) -> Callable[[list[Record]], bool]:
    """Whether just these, in this order, have trained together."""
    return lambda records: any(r.members == list(members) for r in records if isinstance(r, Regrouped))


def gone(*workers: int) -> Callable[[list[Record]], bool]:
    """Whether all of them have been lost, or have left."""
    return lambda records: {r.worker for r in records if isinstance(r, WorkerGone)} >= set(workers)


class Runs:
    """Starts runs of ``program`` in folders of their own on one cluster."""

    def __init__(self, cluster: ElasticCluster, folder: Path, program: Program) -> None:
        self._cluster = cluster
        self._program = program
        self._folder = folder
        self._count = itertools.count()

    def __call__(
        self,
        workers: int,
        *,
        act: Act = lambda handle, records: None,
        mode: Any = "exact",
        elastic: Elastic | None = None,
        execution: dict[str, Any] | None = None,
        out: Path | None = None,
        spec: dict[str, Any] | None = None,
        limit_s: float = LIMIT_S,
        slow_until: Callable[[list[Record]], object] | None = None,
        **config: Any,
    ) -> Ran:
        """Run the program to its end; ``act`` is called whenever there may be news.

        ``slow_until``: it rests after each step, as ``pace.Rests`` says, until that is true of the run's records.
        """
        number = next(self._count)
        done = self._folder / f"{number}-is-fast"
        if slow_until is not None:
            config["until"] = str(done)
        run = RunSpec(
            self._program,
            out or self._folder / str(number),
            config,
            seed=3,
            execution=ExecutionSettings(**{"workers": workers, "mode": mode, "num_slots": SLOTS, **(execution or {})}),
            elastic=elastic or PATIENT,
            **(spec or {}),
        )
        handle = self._cluster.start(run)
        watch = JobSupervisor(handle, timeout_s=limit_s)
        records: list[Record] = []
        try:
            while watch.outcome is None:
                self._cluster.wait(0.05)
                records += watch.pump()
                act(handle, records)
                if slow_until is not None and not done.exists() and slow_until(records):
                    done.touch()
        finally:
            handle.kill()
            deadline = time.monotonic() + 20
            while handle.alive and time.monotonic() < deadline:
                self._cluster.wait(0.05)
                handle.poll()
        return Ran(watch.outcome, [*records, watch.outcome])
