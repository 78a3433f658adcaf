"""The policy ``spot`` on a real Slurm: jobs of one partition are spot nodes, one of another is an on-demand node."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.runtime.cluster.slurm.runs import ELASTUNE, RUN, Controller
from tests.support.slurm import VirtualSlurm

from elastune.core.journal.files import read
from elastune.core.journal.records import HostsHeld, WorkerGone
from elastune.report.sample_ledger import ledger

PASSED = "deadline_h=0.01"  # before it can be met: from the first step on it presses, whatever this machine's speed


@pytest.mark.timeout(400)
@pytest.mark.soak
def test_on_demand_nodes_stand_in_for_preempted_spot_nodes_as_long_as_it_takes(
    slurm: VirtualSlurm, controllers: Callable[..., Controller], undisturbed: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "prices.csv").write_text("kind,price\nspot,1\non-demand,3\n")
    words = [*RUN, "--policy", f"spot:{PASSED},prices={tmp_path / 'prices.csv'}"]
    spot = f"slurm:partition=cheap,kind=spot,nodes=1,workers_per_node=2,idle_s=0,port={port}"
    slurm.order("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=others")
    try:
        run = controllers(spot, words=words)
        run.until_on(2)
        (spot_node,) = slurm.running.values()
        join = ["--join", f"127.0.0.1:{port}", "--token-file", str(run.out / "cluster" / "token"), "--workers", "4"]
        agent = shlex.join([*ELASTUNE, "agent", *join, "--kind", "on-demand", "--name", "reserve"])
        log = f"--output={tmp_path / 'reserve'}"
        slurm.order("sbatch", "--partition=main", "--exclusive", log, f"--wrap=exec {agent}")

        def held(workers: dict[str, int]) -> bool:
            return bool(records := run.records(HostsHeld)) and records[-1].workers == workers

        run.until(lambda: held({"spot": 2, "on-demand": 2}) and run.on == 4)
        holds = slurm.preempt(spot_node, seconds=600)
        run.until(lambda: held({"on-demand": 4}) and run.on == 4)
        slurm.order("scancel", holds)
        run.until(lambda: held({"spot": 2, "on-demand": 2}) and run.on == 4)
        assert run.go()["sha256"] == undisturbed
    finally:
        slurm.order("scontrol", "update", "NodeName=n2", "State=RESUME")
    gone = [(record.how, record.why) for record in run.records(WorkerGone)]
    preempted = ("left", f"host {spot_node}: its agent was asked to end")
    assert gone[:4] == [preempted] * 2 + [("left", "the deadline can be met without it")] * 2
    assert ledger(read(run.out / "journal.jsonl")).exact
