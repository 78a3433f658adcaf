"""Hosts come, die and go while a run trains, each in a network namespace of its own, as a user would start them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.agent_runs import ELASTUNE, LIMIT_S, AgentRun
from tests.support.forked import elastune
from tests.support.hosts import Network

from elastune.core.journal.files import read
from elastune.core.journal.records import (
    LinkMeasured,
    Reported,
    TrialFinished,
    TrialPaused,
    TrialReported,
    TrialStarted,
    WorkerGone,
)
from elastune.core.run import ExecutionSettings, Program
from elastune.elastic.wire.transport import fingerprint_of
from elastune.report.sample_ledger import ledger
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

PROGRAMS = Path(__file__).parents[3] / "faults" / "programs"
TUNED, SHARED = PROGRAMS / "elastic.py", PROGRAMS / "shares.py"
TRAINING = ["--set", "epochs=30", "--seed", "3", "--slots", "4"]
Begin = Callable[..., AgentRun]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts a controller; ``six``: of hosts that have IPv6 alone."""
    with ExitStack() as stack:

        def controller(*words: str, six: bool = False) -> AgentRun:
            network = stack.enter_context(Network(3, six=six))
            run = AgentRun(network, tmp_path, *words, "--set", f"until={tmp_path / 'go'}", tls=True)
            stack.callback(run.close)
            run.until(run.token.exists)
            return run

        yield controller


def ask_from(run: AgentRun, at: int, *words: str) -> str:
    """What a command about the run says on host ``at``."""
    command = run.network.hosts[at].space.command(*ELASTUNE, words[0], str(run.out), *words[1:])
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout.strip()


def ask_without_the_folder(run: AgentRun, at: int, *words: str) -> str:
    """Likewise, with no more than what its agents have been given: an address, and a copy of the token."""
    elsewhere = run.folder / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(run.token, elsewhere / "token")
    where = ["--cluster", f"hosts:{run.join}", "--token-file", "token"]
    command = run.network.hosts[at].space.command(*ELASTUNE, *words, *where)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.timeout(400)
def test_hosts_come_die_and_go(begin: Begin, tmp_path: Path) -> None:
    """By IPv6 alone; numbers and meshes are asked for on a host that has no worker."""
    execution = ["--mechanism", "sharded", "--workers", "1:4", "--set", "pause_s=0.3"]
    run = begin("run", str(SHARED), *TRAINING, *execution, six=True)
    assert run.token.stat().st_mode & 0o077 == 0
    assert fingerprint_of(run.token.read_text().strip())
    run.agent(0)
    run.until(lambda: run.records(Reported))
    run.agent(1)
    run.until_on(4)
    assert ask_without_the_folder(run, 2, "resize", "run", "3") == "from 4 to 3 workers"
    run.until_on(3)
    assert ask_from(run, 2, "reshape", "data=2,shard=2") == "from 3 workers to the mesh data=2,shard=2"
    run.until_on(4)
    run.lose(1)
    run.until_on(2)
    run.agent(2)
    run.until_on(4)
    run.agents[0].send_signal(signal.SIGTERM)
    run.until_on(2)
    assert run.agents[0].wait(30) == 75
    (tmp_path / "go").touch()
    assert run.controller.wait(LIMIT_S) == 0, run.said
    assert run.agents[2].wait(30) == 0
    with (tmp_path / "result").open("wb") as result, (tmp_path / "said").open("wb") as said:
        words = ["run", str(SHARED), *TRAINING, "--workers", "1", "--json", "--out", str(tmp_path / "alone")]
        assert elastune(*words, out=result, err=said).wait(LIMIT_S) == 0
    undisturbed = (tmp_path / "result").read_text()
    assert json.loads(run.result)["sha256"] == json.loads(undisturbed)["sha256"]
    assert ledger(read(run.out / "journal.jsonl")).exact
    gone = {record.worker: (record.how, record.why) for record in run.records(WorkerGone)}
    lost = [why for how, why in gone.values() if how == "lost"]
    assert len(lost) == 2
    assert "host host1 was lost" in lost[0]
    assert gone[0] == gone[1] == ("left", "host host0: its agent was asked to end")
    assert run.left() == []


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_study_on_hosts_that_come_die_and_go(begin: Begin, tmp_path: Path, cluster: LocalCluster) -> None:
    study = ["--sampler", "random", "--trials", "4", "--mode", "exact", "--slots", "4", "--seed", "3"]
    study += ["--set", "epochs=6", "--set", "pause_s=0.2"]
    run = begin("tune", str(TUNED), *study, "--workers", "4", "--trial-workers", "1:2")
    run.agent(0)
    run.until(lambda: len(run.records(TrialStarted)) >= 1)
    run.agent(1)
    run.until(lambda: len(run.records(TrialStarted)) >= 2)
    run.until(lambda: run.records(TrialReported))
    run.lose(1)
    run.until(lambda: "host1 has gone" in run.said)
    run.agents[0].send_signal(signal.SIGTERM)
    assert run.agents[0].wait(60) == 75
    run.until(lambda: "host0 has gone" in run.said)
    run.agent(2)
    (tmp_path / "go").touch()
    assert run.controller.wait(LIMIT_S) == 0, run.said
    assert run.agents[2].wait(30) == 0
    assert all(record.cut_off for record in run.records(TrialPaused))
    alone = StudyRequest(
        Program(TUNED),
        tmp_path / "alone",
        sampler="random",
        trials=4,
        seed=3,
        execution=ExecutionSettings(num_slots=4),
        workers=2,
        config={"epochs": 6, "pause_s": 0.2, "until": str(tmp_path / "go")},
    )
    tune(alone, cluster=cluster)
    journals = (run.out / "journal.jsonl", tmp_path / "alone" / "journal.jsonl")
    ended = [{r.trial: r for e in read(path) if isinstance(r := e.record, TrialFinished)} for path in journals]
    there, here = ({number: (r.state, r.run and r.run.sha256) for number, r in each.items()} for each in ended)
    assert there == here
    assert {state for state, _ in here.values()} == {"complete"}
    assert run.left() == []


@pytest.mark.timeout(400)
@pytest.mark.soak
def test_a_frontier_tells_apart_the_links_within_and_across_hosts(begin: Begin, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    options = ["--budget", "60s", "--short", "--seeds", "2", "--sampler", "random", "--set", "epochs=2"]
    options += ["--workers", "1,2,4"]
    run = begin("frontier", str(TUNED), *options, "--set", "pause_s=0.1")
    for at in (0, 1):
        run.network.hosts[at].slow("200mbit", "256k")  # 40 ns a byte; the link within is ten times as fast or more
        run.agent(at)
    assert run.controller.wait(LIMIT_S) == 0, run.said
    assert {(link.workers, link.hosts) for link in run.records(LinkMeasured)} == {(2, 1), (2, 2), (4, 2)}
    links = json.loads(run.result)["links"]
    within, across = (links[where]["seconds_per_byte"] for where in ("within a host", "across hosts"))
    assert across > 3 * within
    assert 10e-9 < across < 400e-9
