"""The policy ``spot`` with agents of both kinds: who trains, and what becomes of the others, by the command line."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support.elastic_runs import Runs
from tests.support.forked import ForkedProcess, elastune

from elastune.core.journal.files import read
from elastune.core.journal.records import HostsHeld, Regrouped, WorkerGone
from elastune.core.run import Program
from elastune.report.sample_ledger import ledger
from elastune.runtime.clusters.local import LocalCluster

PROGRAM = Path(__file__).parents[3] / "faults" / "programs" / "elastic.py"
EPOCHS, LIMIT_S = 8, 120.0


class SpotRun:
    """A run of up to four workers with a day to its deadline, and agents of this machine with two each."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.out, self._stack = folder, folder / "run", stack
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._where = ["--token-file", str(folder / "token")]
            self._port = free.getsockname()[1]
        (folder / "prices.csv").write_text("kind,price\nspot,1\non-demand,3\n")
        sets = [f"epochs={EPOCHS}", "plain=true", "pause_s=0.1", f"until={folder / 'go'}"]
        words = ["run", str(PROGRAM), *(word for each in sets for word in ("--set", each)), "--seed", "3"]
        words += ["--policy", f"spot:deadline_h=24,prices={folder / 'prices.csv'}", "--workers", "1:4", "--json"]
        self.controller = self._start(
            "controller", *words, "--cluster", f"hosts:{self._port}", *self._where, "--out", str(self.out)
        )
        self.until((folder / "token").exists)

    def agent(self, kind: str) -> ForkedProcess:
        """Start one on a machine of this kind."""
        where = ["--join", f"127.0.0.1:{self._port}", *self._where, "--workers", "2"]
        return self._start(kind, "agent", *where, "--kind", kind, "--name", kind)

    def records(self, kind: type) -> list[Any]:
        journal = self.out / "journal.jsonl"
        return [entry.record for entry in read(journal) if isinstance(entry.record, kind)] if journal.exists() else []

    @property
    def said(self) -> str:
        return (self.folder / "controller.said").read_text()

    def until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < deadline, self.said
            assert self.controller.poll() is None, self.said
            time.sleep(0.05)

    def _start(self, name: str, *words: str) -> ForkedProcess:
        with (self.folder / f"{name}.result").open("wb") as result, (self.folder / f"{name}.said").open("wb") as said:
            process = elastune(*words, out=result, err=said)

        def end() -> None:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

        self._stack.callback(end)
        return process


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SpotRun]:
    with ExitStack() as stack:
        yield SpotRun(tmp_path, stack)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_spot_hosts_that_come_take_the_place_of_on_demand_ones(run: SpotRun, cluster: LocalCluster) -> None:
    run.agent("on-demand")
    run.until(lambda: len(run.records(WorkerGone)) == 1)
    assert len(run.records(Regrouped)[-1].members) == 1, "the fewest stay while there is nobody else"
    run.agent("spot")
    run.until(lambda: len(run.records(WorkerGone)) == 2 and len(run.records(Regrouped)[-1].members) == 2)
    (run.folder / "go").touch()
    assert run.controller.wait(LIMIT_S) == 0, run.said
    why = ("left", "the deadline can be met without it")
    assert [(record.how, record.why) for record in run.records(WorkerGone)] == [why, why]
    assert any(record.workers == {"spot": 2} for record in run.records(HostsHeld))
    result = json.loads((run.folder / "controller.result").read_text())
    alone = Runs(cluster, run.folder / "alone", Program(PROGRAM))(1, epochs=EPOCHS, plain=True)
    assert result["sha256"] == alone.sha256
    assert ledger(read(run.out / "journal.jsonl")).exact
