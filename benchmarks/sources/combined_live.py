"""Searches of ``combined.py`` on hosts that are network namespaces of this machine, and what came of them."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.sources.combined_rows import Found, Row
from benchmarks.sources.genetic_replay import Search, Table, Training, rules
from tests.support.agent_runs import ELASTUNE
from tests.support.hosts import Host, Network

from elastune.core.journal.files import read
from elastune.core.journal.records import RunFinished, TrialFinished, TrialStarted
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.agents.credentials import make_token
from elastune.runtime.clusters.hosts import HostsCluster
from elastune.runtime.job.output import JOURNAL
from elastune.runtime.job.run import run_job
from elastune.train.machine import cores
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

BURST = "512k"
GATHER_S = 120.0
INTERRUPTED = "interrupted"


class Hosts:
    """``count`` hosts with room for ``each`` workers, whose links let ``link`` through. A context manager."""

    def __init__(self, count: int, link: str, folder: Path, each: int = 1) -> None:
        self.count, self._link, self._folder, self._runs, self._each = count, link, folder, 0, each

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            network = stack.enter_context(Network(self.count))
            token = make_token(self._folder / "token")
            self.cluster = stack.enter_context(HostsCluster(network.address, 0, token, grows=False))
            for at, host in enumerate(network.hosts):
                host.slow(self._link, BURST)
                join = f"{network.address}:{self.cluster.launcher.port}"
                words = ["--join", join, "--token-file", str(self._folder / "token"), "--workers", f"{self._each}"]
                command = host.space.command(*ELASTUNE, "agent", *words, "--name", f"host{at}")
                said = stack.enter_context((self._folder / f"agent{at}").open("wb"))
                agent = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
                stack.callback(_end, host, agent)
            self.cluster.gather(self.count * self._each, GATHER_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def single(self, program: Program, config: Mapping[str, Any], execution: ExecutionSettings) -> Found:
        """One training alone: seconds from its start to its end, processes' and judging included."""
        self.cluster.gather(execution.workers, GATHER_S)
        began = time.monotonic()
        done = self.train(program, config, execution)
        taken = time.monotonic() - began
        return {"seconds": round(taken, 4), "step_s": done.step_s, "accuracy": done.metrics["accuracy"]}

    def train(
        self, program: Program, config: Mapping[str, Any], execution: ExecutionSettings, most_steps: int | None = None
    ) -> RunFinished:
        """One training to its end, or of so many steps. Raises as ``run_job``."""
        self.cluster.gather(execution.workers, GATHER_S)
        spec = RunSpec(
            program, self._next(), config=config, execution=execution, max_steps=most_steps, checkpoint_every_steps=0
        )
        done = run_job(spec, cluster=self.cluster)
        if done.stopped in ("requested", "notice"):
            raise KeyboardInterrupt
        shutil.rmtree(spec.out, ignore_errors=True)
        return done

    def search(
        self,
        program: Program,
        config: Mapping[str, Any],
        execution: ExecutionSettings,
        row: Row,
        how: tuple[Search, Table, float, int],
        seed: int,
    ) -> Found:
        """One search to its end. ``how``: who proposes, out of what space, the target, trainings at most."""
        search, table, target, most = how
        self.cluster.gather(row.nodes, GATHER_S)
        request = StudyRequest(
            program, self._next(), config=dict(config), workers=row.nodes, execution=execution, seed=seed, trials=most,
            **rules(search, target, None),
        )  # fmt: skip
        if tune(request, space=table.space, cluster=self.cluster).ending == INTERRUPTED:
            raise KeyboardInterrupt
        result = course(request.out / JOURNAL, table, target, row.nodes)
        shutil.rmtree(request.out, ignore_errors=True)
        return {"row": row.key, "seed": seed, **result}

    def _next(self) -> Path:
        self._runs += 1
        return self._folder / f"run-{self._runs}"


def course(journal: Path, table: Table, target: float, workers: int) -> Found:
    """How a search went, by its journal: until the first training that reached the target, or the last that ended.

    ``runs``: begun by then. ``training_s``: the median from beginning to end of those that ended, processes' start and
    judging included. ``cores_busy``: the share of this machine's cores that ``workers`` of them took while they
    trained. ``unlike``: trainings that reached another accuracy than the table has for them.
    """
    begun: dict[int, float] = {}
    params: dict[int, Mapping[str, Any]] = {}
    ended, busy, best, unlike = list[float](), list[float](), 0.0, 0
    until, reached = 0.0, False
    for entry in read(journal):
        record = entry.record
        if isinstance(record, TrialStarted):
            begun[record.trial], params[record.trial] = entry.at, record.params
        elif isinstance(record, TrialFinished) and record.state == "complete" and not reached:
            accuracy, metrics = record.values["accuracy"], record.metrics
            best, until, reached = max(best, accuracy), entry.at, accuracy >= target
            ended.append(entry.at - begun[record.trial])
            busy.append(workers * metrics["cpu_seconds"] / metrics["train_seconds"])
            unlike += accuracy != table.trainings[table.key(params[record.trial])].accuracy
    first = min(begun.values())
    return {
        "seconds": round(until - first, 4),
        "runs": sum(at <= until for at in begun.values()),
        "ended": len(ended),
        "reached": reached,
        "accuracy": best,
        "training_s": round(statistics.median(ended), 4),
        "cores_busy": round(statistics.median(busy) / cores(), 4),
        "unlike": unlike,
    }


def table_of(program: Program, config: Mapping[str, Any], table: Table, workers: int) -> Table:
    """``table`` with what every configuration reaches, each trained once here, at this machine's own speed."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        request = StudyRequest(
            program, Path(folder) / "table", config=dict(config), workers=workers, sampler="grid",
            trials=len(table.keys), execution=ExecutionSettings(mode="fast"),
        )  # fmt: skip
        if tune(request, space=table.space).ending == INTERRUPTED:
            raise KeyboardInterrupt
        keys = {}
        for entry in read(request.out / JOURNAL):
            record = entry.record
            if isinstance(record, TrialStarted):
                keys[record.trial] = table.key(record.params)
            elif isinstance(record, TrialFinished):
                accuracy = record.values.get("accuracy", 0.0)
                results[keys[record.trial]] = Training(accuracy, accuracy, 1.0)
    return Table(table.genes, results)


def _end(host: Host, agent: subprocess.Popen[bytes]) -> None:
    host.kill()
    agent.wait()
