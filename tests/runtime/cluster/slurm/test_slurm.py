"""Runs on a real Slurm: its nodes come, die, are preempted and run out of time while a run trains."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.cluster.slurm.runs import ELASTUNE, LIMIT_S, PROGRAM, RUN, SCRIPT, TRAINING, Controller
from tests.support.slurm import VirtualSlurm

from elastune.cli import main
from elastune.core.journal.files import read
from elastune.core.journal.records import (
    Adopted,
    Checkpointed,
    HostsHeld,
    LinkMeasured,
    Regrouped,
    Reported,
    RunFinished,
    RunStarted,
    TrialAdopted,
    TrialFinished,
    TrialReported,
    WorkerGone,
)
from elastune.core.run import ExecutionSettings, Program
from elastune.report.sample_ledger import ledger
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

STUDY = ["--sampler", "random", "--trials", "3", "--mode", "exact", "--seed", "3"]
STUDY += ["--set", "epochs=6", "--set", "samples=256"]
FRONTIER = ["--budget", "60s", "--short", "--seeds", "2", "--sampler", "random", "--set", "epochs=2"]
FRONTIER += ["--workers", "1,2,4"]


@contextmanager
def changed(run: Controller) -> Iterator[None]:
    """What is done inside changes who trains; afterwards there are four workers again."""
    before = len(run.records(Regrouped))
    yield
    run.until(lambda: len(run.records(Regrouped)) > before)
    run.until_on(4)


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_jobs_come_and_go_while_a_run_trains(
    slurm: VirtualSlurm, controllers: Callable[..., Controller], undisturbed: str
) -> None:
    run = controllers("slurm:partition=spot,workers_per_node=2,idle_s=0")
    token = run.out / "cluster" / "token"
    run.until(token.exists)
    assert token.stat().st_mode & 0o777 == 0o600
    run.until_on(4)
    assert len(slurm.queue()) == 2

    subprocess.run([*ELASTUNE, "resize", str(run.out), "2"], check=True, capture_output=True)
    run.until_on(2)
    run.until(lambda: len(slurm.queue()) == 1)
    subprocess.run([*ELASTUNE, "resize", str(run.out), "4"], check=True, capture_output=True)
    run.until_on(4)

    *_, dead = slurm.running.values()
    with changed(run):
        slurm.kill_node(dead)
    lost = [record for record in run.records(WorkerGone) if record.how == "lost"]
    assert len(lost) == 2
    assert f"host {dead} was lost" in lost[0].why
    slurm.start_node(dead)

    job, node = list(slurm.running.items())[-1]
    with changed(run):  # what Slurm does before a job's time is up
        slurm.order("scancel", "--batch", "--signal=USR1", job)
    assert {record.why for record in run.records(WorkerGone)[-2:]} == {f"host {node}: its agent was asked to end"}

    job, node = list(slurm.running.items())[-1]
    with changed(run):
        slurm.preempt(node)
    assert {record.why for record in run.records(WorkerGone)[-2:]} == {f"host {node}: its agent was asked to end"}

    assert run.go()["sha256"] == undisturbed
    assert ledger(read(run.out / "journal.jsonl")).exact
    assert len([record for record in run.records(WorkerGone) if record.how == "lost"]) == 2


@pytest.mark.timeout(400)
@pytest.mark.soak
def test_jobs_that_slurm_itself_ends(
    slurm: VirtualSlurm, controllers: Callable[..., Controller], undisturbed: str
) -> None:
    """One is preempted where that cancels it, others come to the end of their minute, and others come in their place.
    An agent that somebody has started by hand stays."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    spot = "partition=cheap,kind=spot,time=1,notice_s=5,workers_per_node=1,cpus_per_worker=2,idle_s=0"
    run = controllers(f"slurm:{spot},port={port}", words=RUN)
    token = run.out / "cluster" / "token"
    run.until(token.exists)
    join = ["agent", "--join", f"127.0.0.1:{port}", "--token-file", str(token), "--name", "mine", "--workers", "1"]
    with (run.folder / "agent").open("wb") as said:
        agent = subprocess.Popen([*ELASTUNE, *join], stdout=said, stderr=said)
    try:
        run.until_on(4)
        job, node = list(slurm.running.items())[-1]
        slurm.preempt(node)
        run.until(lambda: f"host {node} has gone" in run.said)
        told = slurm.order("scontrol", "show", "job", job)
        assert "Partition=cheap" in told
        assert "PreemptTime=None" not in told
        assert "PreemptMode=CANCEL" in slurm.order("scontrol", "show", "partition", "cheap")

        others = {each for each, at in slurm.running.items() if at != node}
        assert others
        run.until(lambda: not others & set(slurm.queue()))  # nobody ends them: they leave before Slurm does
        for each in others:
            assert "JobState=FAILED Reason=NonZeroExitCode" in slurm.order("scontrol", "show", "job", each)
        run.until(lambda: run.on > 1)
        assert run.go()["sha256"] == undisturbed
        assert agent.wait(LIMIT_S) == 0
    finally:
        agent.kill()
        agent.wait()
    gone = run.records(WorkerGone)
    assert {record.how for record in gone} == {"left"}
    # Others may come to the end of a later minute just as the run ends.
    assert sum(record.why.endswith("its agent was asked to end") for record in gone) >= 3
    assert ledger(read(run.out / "journal.jsonl")).exact
    held = run.records(HostsHeld)
    assert {kind for record in held for kind in record.workers} == {"spot", "on-demand"}


@pytest.mark.timeout(400)
@pytest.mark.soak
def test_nodes_that_do_not_see_the_run_push_its_checkpoints(
    slurm: VirtualSlurm, controllers: Callable[..., Controller], undisturbed: str, tmp_path: Path
) -> None:
    words = [*RUN, "--checkpoint-every", "2"]
    run = controllers("slurm:workers_per_node=2,idle_s=0,folder=local", words=words, hidden=True)
    try:
        run.until_on(4)
        told = slurm.ask("scontrol", "show", "job") + slurm.ask("squeue", "-h", "-o", "%all")
        assert (run.out / "cluster" / "token").read_text().strip() not in told
        run.until(lambda: run.records(Checkpointed))
        assert [path.name for path in (run.out / "cluster").iterdir()] == ["token"], "logs are on the nodes"
        assert run.go()["sha256"] == undisturbed
        newest = run.records(Checkpointed)[-1].step
        assert (run.out / "checkpoints" / f"step-{newest:010d}" / "state.json").is_file()
    finally:
        for name in slurm.nodes:
            slurm.kill_node(name)
            slurm.start_node(name)


def ended(records: Iterable[Any]) -> dict[int, tuple[str, str]]:
    """How each trial ended, and its weights."""
    return {r.trial: (r.state, r.run.sha256) for r in records if isinstance(r, TrialFinished)}


@pytest.mark.timeout(400)
@pytest.mark.soak
def test_a_study_takes_nodes_and_goes_on_without_them(
    slurm: VirtualSlurm, controllers: Callable[..., Controller], tmp_path: Path, cluster: LocalCluster
) -> None:
    """It begins on one node, two more join, its controller is killed and followed, one is given up, one is cut off."""
    others = ["NodeName=n2,n3", "State=DRAIN", "Reason=others"]
    slurm.ask("scontrol", "update", *others)
    words = ["tune", str(PROGRAM), *STUDY, "--workers", "3", "--trial-workers", "1:2", "--grace", "120s"]
    run = controllers("slurm:workers_per_node=1,cpus_per_worker=2,idle_s=0", words=words)
    run.until(lambda: run.records(TrialReported))
    assert set(slurm.running.values()) == {"n1"}
    slurm.ask("scontrol", "update", others[0], "State=RESUME")
    run.until(lambda: run.said.count("has come") == 3)
    jobs = {node: job for job, node in slurm.running.items()}
    run.until(lambda: len({record.trial for record in run.records(TrialReported)}) >= 2)
    run.close()
    run.start("--resume")
    run.until(lambda: run.records(TrialAdopted))
    assert {node: job for job, node in slurm.running.items()} == jobs
    slurm.kill_node("n3")
    slurm.ask("scancel", "--batch", "--signal=USR1", jobs["n1"])  # what Slurm does before a job's time is up
    run.until(lambda: "host n1 has gone" in run.said and "host n3 has gone: " in run.said)
    run.go()
    slurm.start_node("n3")
    alone, fixed = tmp_path / "alone", {"epochs": 6, "samples": 256}
    execution = ExecutionSettings(mode="exact")
    tune(
        StudyRequest(
            Program(PROGRAM), alone, sampler="random", trials=3, seed=3, execution=execution, workers=2, config=fixed
        ),
        cluster=cluster,
    )
    here = ended(entry.record for entry in read(alone / "journal.jsonl"))
    assert ended(run.records(TrialFinished)) == here
    assert {state for state, _ in here.values()} == {"complete"}


@pytest.mark.timeout(400)
@pytest.mark.soak
def test_a_frontier_times_its_steps_on_the_nodes(slurm: VirtualSlurm, controllers: Callable[..., Controller]) -> None:
    run = controllers("slurm:workers_per_node=2", words=["frontier", str(PROGRAM), *FRONTIER])
    found = run.go()
    assert {row["seconds_label"] for row in found["rows"]} == {"measured"}
    assert list(found["links"]) == ["within a host", "across hosts"]
    assert {(link.workers, link.hosts) for link in run.records(LinkMeasured)} == {(2, 1), (2, 2), (4, 2)}


@pytest.mark.timeout(400)
def test_a_run_has_the_nodes_of_its_allocation(
    slurm: VirtualSlurm, controllers: Callable[..., Controller], undisturbed: str
) -> None:
    run = controllers("slurm:workers_per_node=2", before=["salloc", "--quiet", "--nodes=2", "--exclusive"])
    run.until_on(4)
    assert run.go()["sha256"] == undisturbed


@pytest.mark.timeout(400)
def test_workers_of_srun_are_one_run(slurm: VirtualSlurm, tmp_path: Path, undisturbed: str) -> None:
    command = ["srun", "--nodes=2", "--ntasks=2", "--export=ALL,MASTER_ADDR=127.0.0.1", *ELASTUNE, "run", str(PROGRAM)]
    out = ["--json", "--out", str(tmp_path / "run")]
    done = subprocess.run([*command, *TRAINING, *out], capture_output=True, text=True, env=slurm.environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sha256"] == undisturbed


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_controller_in_a_job_submits_itself_again(slurm: VirtualSlurm, tmp_path: Path, undisturbed: str) -> None:
    command = tmp_path / "elastune"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m elastune "$@"\n')
    command.chmod(0o755)
    out, go = tmp_path / "run", tmp_path / "go"
    environment = {**slurm.environment, "PATH": f"{tmp_path}:{slurm.environment['PATH']}", "OUT": str(out)}
    environment["SBATCH_PARTITION"] = "brief"  # of the controller
    slow = ["--set", "pause_s=0.8", "--set", f"until={go}", "--workers", "2"]
    cluster = ["--cluster", "slurm:agents=jobs,partition=main,workers_per_node=2"]
    options = ["--parsable", SCRIPT, str(PROGRAM), *TRAINING, *slow, *cluster]
    first = subprocess.run(
        ["sbatch", *options], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )

    def until(true: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < deadline, [log.read_text() for log in tmp_path.glob("*.out")]
            time.sleep(0.1)

    journal = out / "journal.jsonl"

    def trained(times: int) -> bool:
        """Whether the last of so many controllers has heard of its workers."""
        kinds = [type(entry.record) for entry in read(journal)] if journal.exists() else []
        return kinds.count(RunStarted) == times and Reported in kinds[::-1][: kinds[::-1].index(RunStarted)]

    def another_than(job: str) -> str:
        """The job by which a controller has submitted itself again."""
        until(lambda: job not in slurm.queue())
        (found,) = slurm.queue("%i", "--name=controller")
        return found

    until(lambda: trained(1))
    slurm.order("scancel", "--batch", "--signal=USR1", first.stdout.strip())
    second = another_than(first.stdout.strip())
    until(lambda: trained(2))
    slurm.preempt(slurm.running[second])
    another_than(second)
    go.touch()
    until(lambda: not slurm.queue())
    last = [entry.record for entry in read(journal) if isinstance(entry.record, RunFinished)][-1]
    assert (last.stopped, last.sha256) == ("complete", undisturbed)


def test_doctor_tells_what_there_is(
    slurm: VirtualSlurm, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--cluster", "slurm:partition=spot", "--json"]) == 0
    found = {finding["what"]: finding["value"] for finding in json.loads(capfd.readouterr().out)["findings"]}
    assert found["preemption"].startswith("PreemptMode=REQUEUE, JobRequeue=1")
    assert "MaxTime=01:00:00, PreemptMode=REQUEUE, GraceTime=60" in found["partition spot"]
    assert (found["address for agents"], found["shared folder"]) == ("127.0.0.1", str(tmp_path))
    assert (found["time after SIGTERM"], found["clocks"][:6]) == ("KillWait=30 sec", "within")
    assert list(tmp_path.iterdir()) == []
    assert main(["doctor", "--cluster", "slurm:partition=nope"]) == 2
    assert "Slurm must answer" in capfd.readouterr().err


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_controller_that_is_killed_leaves_no_job(slurm: VirtualSlurm, controllers: Callable[..., Controller]) -> None:
    run = controllers("slurm:workers_per_node=2")
    run.until(lambda: run.said.count("has come") == 2)
    run.process.kill()  # the fixture looks for what is left


@pytest.mark.timeout(400)
def test_the_next_controller_takes_jobs_over(
    slurm: VirtualSlurm, controllers: Callable[..., Controller], undisturbed: str
) -> None:
    run = controllers("slurm:workers_per_node=2", words=[*RUN, "--grace", "120s"])
    run.until_on(4)
    jobs = slurm.queue()
    run.close()
    run.start("--resume")
    run.until(lambda: run.records(Adopted))
    assert (run.records(Adopted)[0].workers, run.records(Adopted)[0].lost) == ([0, 1, 2, 3], [])
    assert slurm.queue() == jobs
    assert run.go()["sha256"] == undisturbed
    assert ledger(read(run.out / "journal.jsonl")).exact
    assert not (run.out / "cluster" / "controller.json").exists()


def test_what_slurm_refuses_is_told_in_one_line(
    slurm: VirtualSlurm, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    for asked in ("partition=nope", "gpus_per_node=4"):
        command = ["run", str(PROGRAM), "--workers", "1", "--cluster", f"slurm:{asked}", "--out", str(tmp_path / asked)]
        assert main(command) == 2
        said = capfd.readouterr().err.strip().splitlines()
        assert ("sinfo" if "nope" in asked else "sbatch: Invalid generic resource") in said[-1]
        assert len(said) == 1
    assert slurm.queue() == []
