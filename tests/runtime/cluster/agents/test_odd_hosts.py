"""Hosts that are odd and do their work: one whose clock jumps, and one that has a part of its time only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from tests.support.agent_runs import ELASTUNE, LIMIT_S, AgentRun
from tests.support.elastic_runs import Runs
from tests.support.hosts import Host, Network

from elastune.core.journal.files import read
from elastune.core.journal.records import Checkpointed, Reported, WorkerGone
from elastune.core.run import Program
from elastune.report.sample_ledger import ledger
from elastune.runtime.clusters.local import LocalCluster

PROGRAM = Path(__file__).parents[3] / "faults" / "programs" / "elastic.py"
EPOCHS = 20
# Python loads it before anything else; it is in the path of the agent's workers, too.
JUMPS = """\
import sys
import time

now, now_ns = time.time, time.time_ns


def jump():
    return 3600 if int(2 * time.monotonic()) % 2 else -3600


time.time = lambda: now() + jump()
time.time_ns = lambda: now_ns() + jump() * 10**9
sys.stderr.write("the clock jumps\\n")
"""


@contextmanager
def overloaded(host: Host) -> Iterator[None]:
    """All that runs there stands still more than half of the time."""
    over = threading.Event()

    def tell(what: signal.Signals) -> None:
        for process in host.processes:
            with suppress(ProcessLookupError):
                os.kill(process, what)

    def rest() -> None:
        while not over.is_set():
            tell(signal.SIGSTOP)
            over.wait(0.3)
            tell(signal.SIGCONT)
            over.wait(0.2)

    thread = threading.Thread(target=rest)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.timeout(400)
@pytest.mark.soak
def test_a_clock_that_jumps_and_a_host_that_answers_slowly_cost_no_worker_and_no_bit(
    tmp_path: Path, cluster: LocalCluster
) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(JUMPS)
    words = ["run", str(PROGRAM), "--set", f"epochs={EPOCHS}", "--set", "plain=true", "--set", "pause_s=0.2"]
    words += ["--set", f"until={tmp_path / 'go'}", "--seed", "3", "--workers", "1:4", "--checkpoint-every", "5"]
    with ExitStack() as stack:
        network = stack.enter_context(Network(2))
        run = AgentRun(network, tmp_path, *words, "--heartbeat", "20s")
        stack.callback(run.close)
        run.until(run.token.exists)
        python_path = os.pathsep.join([str(tmp_path / "path"), *filter(None, [os.environ.get("PYTHONPATH")])])
        join = ["--join", run.join, "--token-file", str(run.token), "--workers", "2", "--name", "jumps"]
        command = network.hosts[0].space.command("env", f"PYTHONPATH={python_path}", *ELASTUNE, "agent", *join)
        with (tmp_path / "jumps").open("wb") as said:
            run.agents[0] = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        run.until(lambda: run.records(Reported))
        run.agent(1)
        run.until_on(4)
        with overloaded(network.hosts[1]):
            before = len(run.records(Checkpointed))
            run.until(lambda: len(run.records(Checkpointed)) >= before + 2)
        (tmp_path / "go").touch()
        assert run.controller.wait(LIMIT_S) == 0, run.said
        assert {agent.wait(LIMIT_S) for agent in run.agents.values()} == {0}
        assert run.left() == []
    assert "the clock jumps" in (tmp_path / "jumps").read_text()
    assert {record.how for record in run.records(WorkerGone)} <= {"left"}
    alone = Runs(cluster, tmp_path / "alone", Program(PROGRAM))(1, epochs=EPOCHS, plain=True)
    assert json.loads(run.result)["sha256"] == alone.sha256
    assert ledger(read(run.out / "journal.jsonl")).exact
