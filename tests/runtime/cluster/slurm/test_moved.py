"""A controller in a job whose node dies: Slurm begins it again on another node, with another address."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.cluster.slurm.runs import LIMIT_S, PROGRAM, SCRIPT, TRAINING, worker_processes
from tests.support.hosts import Network
from tests.support.slurm import VirtualSlurm

from elastune.core.journal.files import read
from elastune.core.journal.records import Adopted, Regrouped, Reported, RunFinished, RunStarted, WorkerGone
from elastune.report.sample_ledger import ledger


@pytest.mark.timeout(400)
@pytest.mark.soak
def test_a_requeue_of_the_controller_s_job_hands_its_workers_over(
    slurm: VirtualSlurm, tmp_path: Path, undisturbed: str
) -> None:
    out, go, script = tmp_path / "run", tmp_path / "go", tmp_path / "controller.sh"
    settings = [*TRAINING, "--set", "pause_s=0.4", "--set", f"until={go}", "--workers", "2", "--grace", "120s"]
    cluster = ["--cluster", "slurm:agents=jobs,partition=main,workers_per_node=2", "--out", str(out), "--resume"]
    words = [sys.executable, "-m", "elastune", "run", str(PROGRAM), *settings, *cluster]
    script.write_text(f"#!/bin/sh\nexec {shlex.join(words)}\n")

    def records(kind: type) -> list[Any]:
        journal = out / "journal.jsonl"
        return [entry.record for entry in read(journal) if isinstance(entry.record, kind)] if journal.exists() else []

    def until(true: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not true():
            logs = [log.read_text() for log in (*tmp_path.glob("*.out"), *out.glob("cluster/*.log"))]
            assert time.monotonic() < deadline, (logs, slurm.told())
            time.sleep(0.1)

    options = ["--parsable", "--requeue", "--open-mode=append", f"--output={tmp_path}/controller.out", str(script)]
    submitted = subprocess.run(["sbatch", *options], env=slurm.environment, capture_output=True, text=True, check=True)
    job = submitted.stdout.strip()
    until(lambda: records(Reported))
    before = worker_processes(out)
    assert len(before) == 2
    slurm.order("scontrol", "requeue", job)
    until(lambda: records(Adopted))
    assert (records(Adopted)[0].workers, records(Adopted)[0].lost) == ([0, 1], [])
    assert worker_processes(out) == before, "the same processes"
    go.touch()
    until(lambda: records(RunFinished) and not slurm.queue())
    (finished,) = records(RunFinished)
    assert (finished.stopped, finished.sha256) == ("complete", undisturbed)
    assert len(records(RunStarted)) == 1, "nothing was begun again"
    assert "Slurm begins this job again" in (tmp_path / "controller.out").read_text()


@pytest.mark.timeout(400)
@pytest.mark.soak
def test_the_controller_is_requeued_on_another_node_and_takes_its_workers_over(
    tmp_path: Path, undisturbed: str
) -> None:
    """Nodes are network namespaces. The same processes train on, and no step is done again."""
    command = tmp_path / "elastune"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m elastune "$@"\n')
    command.chmod(0o755)
    out, go = tmp_path / "run", tmp_path / "go"
    slow = ["--set", "pause_s=0.4", "--set", f"until={go}", "--workers", "2", "--grace", "120s"]
    cluster = ["--cluster", "slurm:agents=jobs,partition=main,workers_per_node=2"]

    def records(kind: type) -> list[Any]:
        journal = out / "journal.jsonl"
        return [entry.record for entry in read(journal) if isinstance(entry.record, kind)] if journal.exists() else []

    with Network(3) as network, VirtualSlurm(tmp_path / "slurm", 3, network=network) as slurm:
        environment = {**slurm.environment, "PATH": f"{tmp_path}:{slurm.environment['PATH']}", "OUT": str(out)}

        def until(true: Callable[[], object]) -> None:
            deadline = time.monotonic() + LIMIT_S
            while not true():
                logs = [log.read_text() for log in (*tmp_path.glob("*.out"), *out.glob("cluster/*.log"))]
                assert time.monotonic() < deadline, (logs, slurm.told())
                time.sleep(0.1)

        def address() -> str:
            return str(json.loads((out / ".coordinator.json").read_text())["address"].rpartition(":")[0])

        options = ["--parsable", "--requeue", SCRIPT, str(PROGRAM), *TRAINING, *slow, *cluster]
        submitted = subprocess.run(
            ["sbatch", *options], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        job = submitted.stdout.strip()
        until(lambda: records(Reported))
        nodes, before = slurm.running, worker_processes(out)
        (agent,) = (each for each in nodes if each != job)
        assert nodes[agent] != nodes[job]
        assert len(before) == 2
        by_node = {f"n{at}": host.address for at, host in enumerate(network.hosts, 1)}
        assert address() == by_node[nodes[job]]

        slurm.kill_node(nodes[job])
        until(lambda: records(Adopted))
        (adopted,) = records(Adopted)
        assert (adopted.workers, adopted.lost) == ([0, 1], [])
        assert worker_processes(out) == before, "the same processes"
        again = slurm.running
        assert again[agent] == nodes[agent], "the same job"
        assert again[job] not in (nodes[job], nodes[agent])
        assert address() == by_node[again[job]]
        go.touch()
        until(lambda: records(RunFinished) and not slurm.queue())
        assert [process for name in slurm.nodes for process in slurm.processes(name)] == []
    (finished,) = records(RunFinished)
    assert (finished.stopped, finished.sha256) == ("complete", undisturbed)
    assert ledger(read(out / "journal.jsonl")).exact
    assert len(records(RunStarted)) == 1, "nothing was begun again"
    assert {record.how for record in records(WorkerGone)} <= {"left"}
    assert len(records(Regrouped)) <= 1
