"""Hosts in network namespaces, as a user would start them: half are cut off, an agent hangs, a file tells of an end,
a controller is killed and followed."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.agent_runs import LIMIT_S, AgentRun
from tests.support.elastic_runs import Runs
from tests.support.hosts import Network

from elastune.core.journal.files import read
from elastune.core.journal.records import Adopted, Reported, RunStarted, WorkerGone
from elastune.core.run import Program
from elastune.report.sample_ledger import ledger
from elastune.runtime.clusters.local import LocalCluster

PROGRAM = Path(__file__).parents[3] / "faults" / "programs" / "elastic.py"
EPOCHS = 12
TRAINING = ["--set", f"epochs={EPOCHS}", "--set", "plain=true", "--set", "pause_s=0.3", "--seed", "3"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[AgentRun]:
    """Four hosts with an agent for one worker on each; it trains slowly until ``go`` is there."""
    with ExitStack() as stack:
        network = stack.enter_context(Network(4))
        execution = ["--workers", "1:4", "--heartbeat", "5s", "--grace", "120s", "--set", f"until={tmp_path / 'go'}"]
        result = AgentRun(network, tmp_path, "run", str(PROGRAM), *TRAINING, *execution)
        stack.callback(result.close)
        result.until(result.token.exists)
        for at in range(4):  # a run that begins on all four tells of no other view
            result.until(lambda at=at: not at or result.records(Reported))
            result.agent(at, 1, "--notice-file", str(tmp_path / f"notice{at}"), "--notice-seconds", "30")
        result.until_on(4)
        yield result


def workers_on(run: AgentRun) -> list[list[int]]:
    """The processes on each host."""
    return [sorted(host.processes) for host in run.network.hosts]


@pytest.mark.timeout(400)
@pytest.mark.soak
def test_half_of_the_hosts_are_cut_off(run: AgentRun, tmp_path: Path, cluster: LocalCluster) -> None:
    """And one agent of the others hangs; all come back by themselves."""
    before = workers_on(run)
    run.controller.kill()
    run.controller.wait()
    run.begin("--resume")
    run.until(lambda: run.records(Adopted))
    (adopted,) = run.records(Adopted)
    assert (adopted.workers, adopted.lost) == ([0, 1, 2, 3], [])
    assert workers_on(run) == before

    run.agents[1].send_signal(signal.SIGSTOP)  # its worker trains on, as long as that is borne
    for at in (2, 3):
        run.network.hosts[at].cut()
    run.until_on(2)
    run.until(lambda: all(f"host host{at} has gone: it has been silent for 15 s" in run.said for at in (1, 2, 3)))
    run.until_on(1)
    lost = {record.why for record in run.records(WorkerGone) if record.how == "lost"}
    assert any(f"host host{at} was lost: it has been silent for 15 s" in why for at in (1, 2, 3) for why in lost), lost
    run.agents[1].send_signal(signal.SIGCONT)
    for at in (2, 3):
        run.network.hosts[at].heal()
    run.until_on(4)
    assert all(agent.poll() is None for agent in run.agents.values()), "the same agents"

    (tmp_path / "notice0").write_text("20")
    run.until_on(3)
    assert run.agents.pop(0).wait(LIMIT_S) == 75
    assert run.records(WorkerGone)[-1].how == "left"

    (tmp_path / "go").touch()
    assert run.controller.wait(LIMIT_S) == 0, run.said
    assert {agent.wait(LIMIT_S) for agent in run.agents.values()} == {0}
    alone = Runs(cluster, tmp_path / "alone", Program(PROGRAM))(1, epochs=EPOCHS, plain=True)
    assert json.loads(run.result)["sha256"] == alone.sha256
    assert ledger(read(run.out / "journal.jsonl")).exact
    assert len(run.records(RunStarted)) == 1
    assert run.left() == []
