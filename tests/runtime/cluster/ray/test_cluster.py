"""A run on the nodes of a real Ray: they come, die, and are drained while it trains."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.hosts import Network

from elastune.cli import main
from elastune.core.journal.files import read
from elastune.core.journal.records import (
    Adopted,
    HostsHeld,
    LinkMeasured,
    Regrouped,
    Reported,
    RunFinished,
    TrialFinished,
    TrialReported,
    WorkerGone,
)
from elastune.parallel.comm.sockets import interface_with
from elastune.report.sample_ledger import ledger
from elastune.runtime.clusters.ray import RayKind

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

PROGRAM = Path(__file__).parents[3] / "faults" / "programs" / "elastic.py"
ELASTUNE = [sys.executable, "-m", "elastune"]
EPOCHS = 12
TRAINING = ["--set", f"epochs={EPOCHS}", "--set", "plain=true", "--seed", "3", "--slots", "4"]
RUN = ["run", str(PROGRAM), *TRAINING, "--workers", "1:4"]
STUDY = ["--sampler", "random", "--trials", "3", "--mode", "exact", "--seed", "3"]
STUDY += ["--set", "epochs=6", "--set", "samples=256"]
FRONTIER = ["--budget", "60s", "--short", "--seeds", "2", "--sampler", "random", "--set", "epochs=2"]
FRONTIER += ["--workers", "1,2,4"]
LIMIT_S = 120.0
MARK = "ELASTUNE_TEST_OF_RAY"  # in the environment of all that runs on the nodes
STORE_BYTES = 80 << 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Ray whose head has room for no worker."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, str(tmp_path_factory.mktemp("ray")))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        found = Cluster(initialize_head=True, head_node_args=head)
        yield found
        found.shutdown()


@pytest.fixture(autouse=True)
def _without_nodes(cluster: Cluster) -> Iterator[None]:
    """Each test begins with the head alone, and with a Ray that knows so: of a node that was killed it hears late."""
    yield
    for each in list(cluster.worker_nodes):
        cluster.remove_node(each, allow_graceful=True)


class Running:
    """``elastune`` and ``words`` on ``cluster`` in ``folder``, its trainings slow until ``folder`` has a file "go".

    ``each``: workers on a node; by default as many as most nodes have room for, those too that Ray has not missed yet.
    ``more``: settings of the cluster.
    """

    def __init__(
        self, cluster: Cluster, folder: Path, words: Sequence[str] = RUN, each: int | None = None, more: str = ""
    ) -> None:
        self.cluster, self.folder = cluster, folder
        slow = ["--set", "pause_s=0.3", "--set", f"until={folder / 'go'}"]
        settings = "idle_s=1" if each is None else f"idle_s=1,workers_per_node={each}"
        where = ["--cluster", f"ray:{cluster.address},{settings}{more}"]
        self._command = [*ELASTUNE, *words, *slow, *where, "--json", "--out", str(folder / "run")]
        self.begin()

    def begin(self, *more: str) -> None:
        with (self.folder / "said").open("wb") as said, (self.folder / "result").open("wb") as result:
            self.process = subprocess.Popen([*self._command, *more], stdout=result, stderr=said)

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    def records(self, kind: type) -> list[Any]:
        journal = self.folder / "run" / "journal.jsonl"
        return [entry.record for entry in read(journal) if isinstance(entry.record, kind)] if journal.exists() else []

    def until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < deadline, self.said
            assert self.process.poll() is None, self.said
            time.sleep(0.05)

    def until_on(self, workers: int) -> None:
        """Until so many train together."""
        self.until(lambda: (views := self.records(Regrouped)) and len(views[-1].members) == workers)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The SHA-256 of one worker's weights."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main(["run", str(PROGRAM), *TRAINING, "--workers", "1", "--out", str(out)]) == 0
    (found,) = (entry.record for entry in read(out / "journal.jsonl") if isinstance(entry.record, RunFinished))
    return found.sha256


def node(cluster: Cluster, cpus: int = 2) -> Any:
    """A new one, with room for so many workers."""
    return cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES)


def left_on(cluster: Cluster) -> list[str]:
    """The processes of actors, agents and workers on the nodes."""
    mark, found = f"{MARK}={os.environ[MARK]}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            marked = mark in (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if marked and int(process.name) != os.getpid() and any(b"elastune" in w or b"AgentActor" in w for w in words):
            found.append(b" ".join(words).decode())
    return found


def nothing_is_left_on(cluster: Cluster) -> None:
    """Soon: Ray ends actors when it comes to it."""
    deadline = time.monotonic() + LIMIT_S
    while left := left_on(cluster):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def drain(cluster: Cluster, node: Any, seconds: int) -> None:
    """As a cloud's notice makes Ray do it."""
    why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    when = ["--deadline-remaining-seconds", str(seconds)]
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address]
    subprocess.run([*command, "--node-id", node.node_id, *why, *when], check=True, capture_output=True)


def test_nodes_come_die_and_are_drained(cluster: Cluster, tmp_path: Path, undisturbed: str) -> None:
    first = node(cluster)
    run = Running(cluster, tmp_path)
    run.until(lambda: "step 1: loss" in run.said)
    run.until(lambda: "1 agent waits for Ray nodes with 2 CPUs free" in run.said)
    second = node(cluster)
    run.until_on(4)
    cluster.remove_node(second, allow_graceful=False)
    run.until_on(2)
    node(cluster)
    run.until_on(4)
    drain(cluster, first, 60)
    run.until_on(2)
    (tmp_path / "go").touch()
    assert run.process.wait(LIMIT_S) == 0, run.said
    nothing_is_left_on(cluster)
    result = json.loads((tmp_path / "result").read_text())
    assert result["sha256"] == undisturbed
    assert ledger(read(tmp_path / "run" / "journal.jsonl")).exact
    gone = {record.worker: (record.how, record.why) for record in run.records(WorkerGone)}
    lost = [worker for worker, (how, why) in gone.items() if how == "lost" and "was lost" in why]
    left = [worker for worker, (how, why) in gone.items() if how == "left" and "drained-by-ray" in why]
    assert (len(lost), len(left)) == (2, 2), gone


@pytest.mark.soak
def test_nothing_on_the_nodes_outlives_a_killed_controller(cluster: Cluster, tmp_path: Path) -> None:
    node(cluster)
    found = {finding.name: finding.value for finding in RayKind(address=cluster.address).examine()}
    assert found["workers on a node"] == "2"
    run = Running(cluster, tmp_path)
    run.until(lambda: "step 1: loss" in run.said)
    assert left_on(cluster) != []
    run.process.kill()
    run.process.wait()
    nothing_is_left_on(cluster)


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """Another address of this machine."""
    with Network(0) as network:
        yield network.address


@pytest.mark.soak
def test_the_next_controller_takes_actors_over(
    cluster: Cluster, tmp_path: Path, undisturbed: str, elsewhere: str
) -> None:
    """It has another address. One of them has waited for a node all the time, and gets it while there is none."""
    node(cluster)
    run = Running(cluster, tmp_path, [*RUN, "--grace", "120s", "--interface", "lo"])
    run.until(lambda: "step 1: loss" in run.said)
    run.until(lambda: "1 agent waits for Ray nodes" in run.said)
    kept = tmp_path / "run" / "cluster"
    assert (kept / "token").stat().st_mode & 0o777 == 0o600
    run.process.kill()
    run.process.wait()
    node(cluster)
    other = ["--resume", "--interface", interface_with(elsewhere)]
    run.begin(*other)
    run.until(lambda: run.records(Adopted))
    assert f"will connect to {elsewhere} instead of 127.0.0.1" in run.said
    run.until_on(4)
    run.process.kill()
    run.process.wait()
    run.begin(*other)
    run.until(lambda: len(run.records(Adopted)) == 2)
    taken = [(record.workers, record.lost) for record in run.records(Adopted)]
    assert taken == [([0, 1], []), ([0, 1, 2, 3], [])]
    assert json.loads((tmp_path / "run" / ".coordinator.json").read_text())["address"].startswith(f"{elsewhere}:")
    (tmp_path / "go").touch()
    assert run.process.wait(LIMIT_S) == 0, run.said
    nothing_is_left_on(cluster)
    assert json.loads((tmp_path / "result").read_text())["sha256"] == undisturbed
    assert ledger(read(tmp_path / "run" / "journal.jsonl")).exact
    assert not (kept / "controller.json").exists()


@pytest.mark.soak
def test_an_on_demand_host_stands_in_for_spot_nodes_that_are_drained(
    cluster: Cluster, tmp_path: Path, undisturbed: str
) -> None:
    """The policy ``spot``, after its deadline: from the first step on that presses, whatever this machine's speed."""
    first, token = node(cluster), tmp_path / "token"
    found = {finding.name: finding.value for finding in RayKind(address=cluster.address).examine()}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "prices.csv").write_text("kind,price\nspot,1\non-demand,3\n")
    policy = ["--policy", f"spot:deadline_h=0.01,prices={tmp_path / 'prices.csv'}", "--token-file", str(token)]
    run = Running(cluster, tmp_path, [*RUN, *policy], each=2, more=f",kind=spot,port={port}")
    run.until(lambda: run.records(Reported))
    join = ["--join", f"{found['address for agents']}:{port}", "--token-file", str(token), "--workers", "4"]
    with (tmp_path / "agent").open("wb") as said:
        own = ["--kind", "on-demand", "--name", "reserve"]
        agent = subprocess.Popen([*ELASTUNE, "agent", *join, *own], stdout=said, stderr=said)
    try:

        def until_held(workers: dict[str, int]) -> None:
            run.until(lambda: (records := run.records(HostsHeld)) and records[-1].workers == workers)
            run.until_on(4)

        until_held({"spot": 2, "on-demand": 2})
        drain(cluster, first, 60)
        until_held({"on-demand": 4})
        node(cluster)
        until_held({"spot": 2, "on-demand": 2})
        (tmp_path / "go").touch()
        assert run.process.wait(LIMIT_S) == 0, run.said
        assert agent.wait(LIMIT_S) == 0
    finally:
        agent.kill()
        agent.wait()
    nothing_is_left_on(cluster)
    gone = [(record.how, record.why) for record in run.records(WorkerGone)][:4]
    assert {how for how, _ in gone} == {"left"}
    assert ["drained-by-ray" in why for _, why in gone] == [True, True, False, False]
    assert {why for _, why in gone[2:]} == {"the deadline can be met without it"}
    assert json.loads((tmp_path / "result").read_text())["sha256"] == undisturbed
    assert ledger(read(tmp_path / "run" / "journal.jsonl")).exact


def ended(records: Iterable[Any]) -> dict[int, tuple[str, str]]:
    """How each trial ended, and its weights."""
    return {r.trial: (r.state, r.run.sha256) for r in records if isinstance(r, TrialFinished)}


@pytest.mark.soak
def test_a_study_takes_nodes_and_goes_on_without_them(
    cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It begins on one node, two more join, one is drained and one is cut off."""
    first = node(cluster, cpus=1)
    words = ["tune", str(PROGRAM), *STUDY, "--workers", "3", "--trial-workers", "1:2"]
    run = Running(cluster, tmp_path, words, each=1)
    run.until(lambda: run.records(TrialReported))
    others = [node(cluster, cpus=1) for _ in range(2)]
    run.until(lambda: run.said.count("has come") == 3)
    drain(cluster, first, 60)
    cluster.remove_node(others[0], allow_graceful=False)
    run.until(lambda: run.said.count("has gone") == 2)
    assert "drained-by-ray" in run.said
    (tmp_path / "go").touch()
    assert run.process.wait(LIMIT_S) == 0, run.said
    nothing_is_left_on(cluster)
    alone = tmp_path / "alone"
    assert main(["tune", str(PROGRAM), *STUDY, "--workers", "2", "--json", "--out", str(alone)]) == 0
    here = ended(entry.record for entry in read(alone / "journal.jsonl"))
    assert ended(run.records(TrialFinished)) == here
    assert {state for state, _ in here.values()} == {"complete"}


@pytest.mark.soak
def test_a_frontier_times_its_steps_on_the_nodes(cluster: Cluster, tmp_path: Path) -> None:
    for _ in range(2):
        node(cluster)
    (tmp_path / "go").touch()
    run = Running(cluster, tmp_path, ["frontier", str(PROGRAM), *FRONTIER])
    assert run.process.wait(LIMIT_S) == 0, run.said
    found = json.loads((tmp_path / "result").read_text())
    assert {row["seconds_label"] for row in found["rows"]} == {"measured"}
    assert {(link.workers, link.hosts) for link in run.records(LinkMeasured)} == {(2, 1), (4, 1)}
    assert found["links"] == {}, "all nodes of this Ray are one machine"
