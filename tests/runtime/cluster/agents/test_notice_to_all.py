"""All hosts of a run get notice at the same time: it waits for other hosts as long as the notice allows."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support.elastic_runs import Runs
from tests.support.forked import elastune

from elastune.core.journal.files import read
from elastune.core.journal.records import Checkpointed, Restarted, WorkerGone
from elastune.core.run import Program
from elastune.report.sample_ledger import ledger
from elastune.runtime.clusters.local import LocalCluster

PROGRAM = Path(__file__).parents[3] / "faults" / "programs" / "elastic.py"
EPOCHS, LIMIT_S = 4, 90.0
TRAINING = ["--set", f"epochs={EPOCHS}", "--set", "plain=true", "--set", "pause_s=0.2", "--seed", "3", "--slots", "4"]


class Scene:
    """A controller on this machine, and agents of one worker each. It trains slowly until ``go`` is called."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.out, self._stack = folder, folder / "run", stack
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        where = ["--cluster", f"hosts:{self.port}", "--token-file", str(folder / "token"), "--workers", "1:2"]
        words = ["run", str(PROGRAM), *TRAINING, "--set", f"until={folder / 'go'}", *where, "--json"]
        self.controller = self._start("controller", *words, "--out", str(self.out))
        self.agents: dict[str, Any] = {}
        self.until((folder / "token").exists)

    def _start(self, name: str, *words: str) -> Any:
        with (self.folder / name).open("wb") as said, (self.folder / f"{name}.out").open("wb") as out:
            process = elastune(*words, out=out, err=said)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def agent(self, name: str) -> None:
        join = ["--join", f"127.0.0.1:{self.port}", "--token-file", str(self.folder / "token"), "--workers", "1"]
        notice = ["--notice-file", str(self.folder / f"{name}.notice")]
        self.agents[name] = self._start(name, "agent", *join, *notice, "--name", name)

    def records(self, kind: type) -> list[Any]:
        journal = self.out / "journal.jsonl"
        return [entry.record for entry in read(journal) if isinstance(entry.record, kind)] if journal.exists() else []

    @property
    def said(self) -> str:
        return (self.folder / "controller").read_text()

    def until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < deadline, self.said
            assert self.controller.poll() is None, self.said
            time.sleep(0.02)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        result = Scene(tmp_path, stack)
        for name in ("a", "b"):
            result.agent(name)
        result.until(lambda: " 2 workers" in result.said)
        yield result


@pytest.mark.timeout(200)
def test_replacements_that_come_in_time_go_on(scene: Scene, tmp_path: Path, cluster: LocalCluster) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.notice").write_text("60")
    scene.until(lambda: scene.said.count("will go in 60 s") == 2)
    scene.until(lambda: scene.records(WorkerGone))
    for name in ("c", "d"):
        scene.agent(name)
    scene.until(lambda: "host a has gone" in scene.said and "host b has gone" in scene.said)
    assert [scene.agents[name].wait(LIMIT_S) for name in ("a", "b")] == [75, 75]
    (tmp_path / "go").touch()
    assert scene.controller.wait(LIMIT_S) == 0, scene.said
    result = json.loads((tmp_path / "controller.out").read_text())
    assert (result["stopped"], result["steps_discarded"]) == ("complete", 0)
    alone = Runs(cluster, tmp_path / "alone", Program(PROGRAM))(1, epochs=EPOCHS, plain=True)
    assert result["sha256"] == alone.sha256
    assert {record.how for record in scene.records(WorkerGone)} == {"left"}
    assert not scene.records(Restarted)
    assert ledger(read(scene.out / "journal.jsonl")).exact


@pytest.mark.timeout(200)
@pytest.mark.soak
def test_without_replacements_the_run_ends_with_a_checkpoint_before_the_notices_are_over(
    scene: Scene, tmp_path: Path
) -> None:
    began = time.monotonic()
    for name in ("a", "b"):
        (tmp_path / f"{name}.notice").write_text("8")
    assert scene.controller.wait(LIMIT_S) == 75, scene.said
    assert 3.5 < time.monotonic() - began < 8.0, "it waited for half of the time, and saved in the rest"
    assert "stopped: notice to worker" in scene.said
    assert "its agent" not in scene.said
    assert "notice has appeared" in scene.said
    assert [scene.agents[name].wait(LIMIT_S) for name in ("a", "b")] == [75, 75]
    result = json.loads((tmp_path / "controller.out").read_text())
    assert result["stopped"] == "notice"
    assert scene.records(Checkpointed)[-1].step == result["steps"]
