"""Hosts that see nothing of a run's folder: their agents push checkpoints to the controller, and bring them back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.elastic_runs import Runs
from tests.support.forked import ForkedProcess, elastune, hide

from elastune.core.journal.files import read
from elastune.core.journal.records import Adopted, Checkpointed, Regrouped, RunStarted
from elastune.core.run import Program
from elastune.report.sample_ledger import ledger
from elastune.runtime.clusters.local import LocalCluster

PROGRAM = Program(Path(__file__).parent / "programs" / "shares.py")
EPOCHS, LIMIT_S = 8, 120.0


class OwnFolders:
    """A controller and agents of this machine; each agent has a folder of its own, and sees no other."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.out, self.token = folder, folder / "out", folder / "token"
        self.agents: list[ForkedProcess] = []
        self._stack = stack
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    def _start(self, name: str, *words: str, first: Callable[[], object] = lambda: None) -> ForkedProcess:
        with (self.folder / f"{name}.result").open("wb") as result, (self.folder / f"{name}.said").open("wb") as said:
            process = elastune(*words, out=result, err=said, first=first)

        def end() -> None:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

        self._stack.callback(end)
        return process

    def controller(self, name: str, *more: str) -> ForkedProcess:
        sets = [f"epochs={EPOCHS}", "pause_s=0.2", f"until={self.folder / 'go'}"]
        settings = [word for setting in sets for word in ("--set", setting)]
        cluster = ["--cluster", f"hosts:{self.port}", "--token-file", str(self.token)]
        options = ["--workers", "4", "--mechanism", "zero", "--slots", "4", "--seed", "3", "--checkpoint-every", "2"]
        run = ["run", str(PROGRAM.path), *settings, *cluster, *options, "--json", "--out", str(self.out)]
        process = self._start(name, *run, *more)
        self.run = process
        self.until(lambda: self.token.exists() and self.out.exists())
        return process

    def agent(self) -> Path:
        """Start one with two workers; its folder."""
        folder = self.folder / f"host{len(self.agents)}"
        where = ["--join", f"127.0.0.1:{self.port}", "--token-file", str(self.token), "--folder", str(folder)]
        words = ["agent", *where, "--workers", "2", "--name", folder.name]
        self.agents.append(self._start(folder.name, *words, first=partial(hide, self.out)))
        return folder

    def until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < deadline, self.said
            assert self.run.poll() is None, self.said
            time.sleep(0.05)

    @property
    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.said")))

    def records(self, kind: type) -> list[Any]:
        journal = self.out / "journal.jsonl"
        return [entry.record for entry in read(journal) if isinstance(entry.record, kind)] if journal.exists() else []


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_run_without_a_shared_folder_loses_a_host_its_controller_and_nothing_else(
    tmp_path: Path, cluster: LocalCluster
) -> None:
    """Its state lies in pieces: each host has some, and only the controller has all. Nobody was told of any of this."""
    with ExitStack() as stack:
        hosts = OwnFolders(tmp_path, stack)
        first = hosts.controller("first")
        folders = [hosts.agent(), hosts.agent()]
        hosts.until(lambda: hosts.records(Checkpointed))
        assert (tmp_path / "first.said").read_text().count(f"does not see {hosts.out}: folder=local is used") == 1
        newest = max((hosts.out / "checkpoints").glob("step-*"))
        assert len(list(newest.glob("tensors-*"))) == 4, "each worker wrote its own piece"
        os.killpg(hosts.agents[1].pid, signal.SIGKILL)
        hosts.until(lambda: (views := hosts.records(Regrouped)) and len(views[-1].members) == 2)
        after = hosts.records(Regrouped)[-1].step
        hosts.until(lambda: any(record.step > after for record in hosts.records(Checkpointed)))
        os.killpg(first.pid, signal.SIGKILL)
        assert hosts.agents[0].wait(30) == 1
        for folder in folders:  # nothing but what the controller has is left
            shutil.rmtree(folder)
        (tmp_path / "go").touch()
        second = hosts.controller("second", "--resume")
        hosts.agent()
        hosts.agent()
        assert second.wait(LIMIT_S) == 0, hosts.said
        assert [agent.wait(30) for agent in hosts.agents[2:]] == [0, 0]
    result = json.loads((tmp_path / "second.result").read_text())
    alone = Runs(cluster, tmp_path / "alone", PROGRAM)(1, epochs=EPOCHS, execution={"mechanism": "zero"})
    assert result["sha256"] == alone.outcome.sha256
    resumed = hosts.records(RunStarted)[-1].resumed_step
    assert resumed is not None
    assert resumed >= after
    assert hosts.records(Checkpointed)[-1].step == result["steps"], "the last one came before the run was over"
    assert ledger(read(hosts.out / "journal.jsonl")).exact
    assert not [path for path in (hosts.out / "checkpoints").iterdir() if path.name.startswith(".")], "drafts"
    assert not [path for path in tmp_path.glob("host[23]/*") if path.name.startswith("files-")], (
        "nothing stays on hosts"
    )


@pytest.mark.timeout(400)
@pytest.mark.soak
def test_what_is_pushed_while_nobody_controls_the_run_waits_for_the_next_one(
    tmp_path: Path, cluster: LocalCluster
) -> None:
    with ExitStack() as stack:
        hosts = OwnFolders(tmp_path, stack)
        first = hosts.controller("first", "--grace", "120s")
        folders = [hosts.agent(), hosts.agent()]
        hosts.until(lambda: hosts.records(Checkpointed))
        first.kill()
        first.wait()
        before = [record.step for record in hosts.records(Checkpointed)]
        deadline = time.monotonic() + LIMIT_S
        while not any(folders[0].glob(f"files-*/**/.draft-{before[-1] + 2}-*")):  # the next one was written
            assert time.monotonic() < deadline, hosts.said
            time.sleep(0.05)
        second = hosts.controller("second", "--resume", "--grace", "120s")
        hosts.until(lambda: hosts.records(Adopted))
        hosts.until(lambda: len(hosts.records(Checkpointed)) >= len(before) + 3)
        (tmp_path / "go").touch()
        assert second.wait(LIMIT_S) == 0, hosts.said
        assert [agent.wait(30) for agent in hosts.agents] == [0, 0]
    result = json.loads((tmp_path / "second.result").read_text())
    alone = Runs(cluster, tmp_path / "alone", PROGRAM)(1, epochs=EPOCHS, execution={"mechanism": "zero"})
    assert result["sha256"] == alone.outcome.sha256
    assert hosts.records(Adopted)[0].lost == []
    assert len(hosts.records(RunStarted)) == 1
    steps = {record.step for record in hosts.records(Checkpointed)}
    assert steps >= {before[-1] + 2, result["steps"]}, "pushed by one controller's time, taken in the next one's"
    assert ledger(read(hosts.out / "journal.jsonl")).exact
