"""Hosts come, die and go while a run trains, each in a network namespace of its own, as a user would start them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastune.cluster.agents.interface import interface_with
from elastune.journal.reader import read
from elastune.journal.records import Regrouped, WorkerGone
from elastune.report.tables.sample_ledger import ledger
from elastune.testing.hosts import Network

PROGRAM = Path(__file__).parents[2] / "faults" / "programs" / "elastic.py"
ELASTUNE = [sys.executable, "-m", "elastune"]
TRAINING = ["--set", "epochs=30", "--set", "plain=true", "--seed", "3"]
LIMIT_S = 120.0


class Hosts:
    """A controller, and agents on the hosts of ``network``."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.token = folder / "token"
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        interface = interface_with(network.address)
        options = [
            "--workers",
            "1:4",
            "--cluster",
            "hosts:7070",
            "--interface",
            interface,
            "--token-file",
            str(self.token),
        ]
        slow = ["--set", "pause_s=0.1", "--set", f"until={folder / 'go'}"]
        command = [*ELASTUNE, "run", str(PROGRAM), *TRAINING, *slow, *options, "--json", "--out", str(folder / "run")]
        with (folder / "said").open("wb") as said, (folder / "result").open("wb") as result:
            self.run = subprocess.Popen(command, stdout=result, stderr=said)

    def agent(self, at: int) -> None:
        """Start one with two workers on host ``at``."""
        options = ["--join", f"{self.network.address}:7070", "--token-file", str(self.token), "--workers", "2"]
        command = self.network.hosts[at].space.command(*ELASTUNE, "agent", *options, "--name", f"host{at}")
        with (self.folder / f"agent{at}").open("wb") as said:
            self.agents[at] = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)

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
            assert self.run.poll() is None, self.said
            time.sleep(0.05)

    def until_on(self, workers: int) -> None:
        """Until so many train together."""
        self.until(lambda: (views := self.records(Regrouped)) and len(views[-1].members) == workers)

    def close(self) -> None:
        for process in (self.run, *self.agents.values()):
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Network(3) as network:
        cluster = Hosts(network, tmp_path)
        yield cluster
        cluster.close()


def left_on(network: Network) -> list[str]:
    """The processes in the hosts' namespaces but for those that hold them."""
    spaces = {os.readlink(host.space.path): host.space.pid for host in network.hosts}
    found = []
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            space = os.readlink(path)
            name = (path.parents[1] / "comm").read_text().strip()
        except OSError:
            continue
        if space in spaces and int(path.parts[2]) != spaces[space] and name != "cat":
            found.append(f"{path.parts[2]} {name}")
    return found


@pytest.mark.timeout(400)
def test_hosts_come_die_and_go(hosts: Hosts, tmp_path: Path) -> None:
    hosts.until(hosts.token.exists)
    assert hosts.token.stat().st_mode & 0o077 == 0
    hosts.agent(0)
    hosts.until(lambda: "epoch 0/30" in hosts.said)
    hosts.agent(1)
    hosts.until_on(4)
    os.killpg(hosts.agents[1].pid, signal.SIGKILL)
    hosts.until_on(2)
    hosts.agent(2)
    hosts.until_on(4)
    hosts.agents[0].send_signal(signal.SIGTERM)
    hosts.until_on(2)
    assert hosts.agents[0].wait(30) == 0
    (tmp_path / "go").touch()
    assert hosts.run.wait(LIMIT_S) == 0, hosts.said
    assert hosts.agents[2].wait(30) == 0
    result = json.loads((tmp_path / "result").read_text())
    undisturbed = subprocess.run(
        [*ELASTUNE, "run", str(PROGRAM), *TRAINING, "--workers", "1", "--json", "--out", str(tmp_path / "alone")],
        capture_output=True, check=True,
    )  # fmt: skip
    assert result["sha256"] == json.loads(undisturbed.stdout)["sha256"]
    assert ledger(read(tmp_path / "run" / "journal.jsonl")).exact
    gone = {record.worker: (record.how, record.why) for record in hosts.records(WorkerGone)}
    assert gone[2][0] == gone[3][0] == "lost"
    assert "host host1 was lost" in gone[2][1]
    assert gone[0] == gone[1] == ("left", "host host0: its agent was asked to end")
    assert left_on(hosts.network) == []
