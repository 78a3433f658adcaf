"""The controller is killed and its workers train on; the next one takes them over, or they end at a checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.elastic_runs import Ran, Runs
from tests.support.forked import ForkedProcess, elastune

from elastune.core.journal.files import read
from elastune.core.journal.records import Adopted, Checkpointed, Regrouped, RunStarted, WorkerGone
from elastune.core.run import Program
from elastune.report.sample_ledger import ledger
from elastune.runtime.clusters.local import LocalCluster

PROGRAM = Program(Path(__file__).parent / "programs" / "elastic.py")
ELASTUNE = [sys.executable, "-m", "elastune"]
EPOCHS, STEPS, LIMIT_S = 6, 96, 120.0


@pytest.fixture(scope="module")
def alone(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Runs(cluster, tmp_path_factory.mktemp("alone"), PROGRAM)(1, epochs=EPOCHS)


class Controlled:
    """A run of the command line whose controllers may be killed. It ends once ``go`` is called."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.out = folder, folder / "out"
        settings = [f"epochs={EPOCHS}", "pause_s=0.2", f"until={folder / 'go'}"]
        sets = [word for setting in settings for word in ("--set", setting)]
        more = ["--seed", "3", "--slots", "4", "--checkpoint-every", "1", "--heartbeat", "3s", "--json"]
        self.words = ["run", str(PROGRAM.path), *sets, *more, *options, "--out", str(self.out)]
        self._starts = 0
        self.start()

    def start(self, *more: str, fresh: bool = False) -> None:
        """Begin a controller; ``fresh``: in a Python of its own, that has imported nothing."""
        self._starts += 1
        said, result = (self.folder / f"{name}{self._starts}" for name in ("said", "result"))
        with said.open("wb") as err, result.open("wb") as out:
            self.process: ForkedProcess | subprocess.Popen[bytes] = (
                subprocess.Popen([*ELASTUNE, *self.words, *more], stdout=out, stderr=err)
                if fresh
                else elastune(*self.words, *more, out=out, err=err)
            )

    @property
    def said(self) -> str:
        return (self.folder / f"said{self._starts}").read_text()

    def records(self, kind: type) -> list[Any]:
        journal = self.out / "journal.jsonl"
        return [entry.record for entry in read(journal) if isinstance(entry.record, kind)] if journal.exists() else []

    def saved(self) -> int:
        """The step of the newest checkpoint on the disk."""
        return max((int(path.name.split("-")[1]) for path in (self.out / "checkpoints").glob("step-*")), default=0)

    def until(self, true: Callable[[], object], alive: bool = True) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < deadline, self.said
            assert not alive or self.process.poll() is None, self.said
            time.sleep(0.05)

    def kill(self) -> None:
        """The controller, and nothing else."""
        self.process.kill()
        self.process.wait()

    def workers(self) -> dict[int, int]:
        """The processes that have this run's worker logs open, by worker."""
        results = {}
        for path in Path("/proc").glob("[0-9]*/fd/1"):
            try:
                log = Path(os.readlink(path))
            except OSError:
                continue
            if log.parent == self.out.resolve() / "logs" and log.stem.startswith("worker-"):
                results[int(log.stem.partition("-")[2])] = int(path.parts[2])
        return results

    def goes_on(self, steps: int = 2) -> None:
        """Until the run has come further by itself."""
        before = self.saved()
        self.until(lambda: self.saved() >= before + steps, alive=False)

    def taken_over(self, times: int, fresh: bool = False) -> Adopted:
        self.start("--resume", fresh=fresh)
        self.until(lambda: len(self.records(Adopted)) == times)
        return self.records(Adopted)[-1]

    def result(self) -> dict[str, Any]:
        """Let it end; what it says."""
        (self.folder / "go").touch()
        assert self.process.wait(LIMIT_S) == 0, self.said
        data: dict[str, Any] = json.loads((self.folder / f"result{self._starts}").read_text())
        return data

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for process in self.workers().values():
            os.kill(process, signal.SIGKILL)


@pytest.fixture
def controlled(tmp_path: Path) -> Iterator[Callable[..., Controlled]]:
    made: list[Controlled] = []

    def make(*options: str) -> Controlled:
        made.append(Controlled(tmp_path, *options))
        return made[0]

    yield make
    for one in made:
        one.close()


def ended(said: str) -> dict[int, str]:
    """How workers have ended without a controller, as their agent has ``said``."""
    result = re.findall(r"worker (\d+) has ended without a controller: (.*)", said)
    return {int(worker): how for worker, how in result}


def port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def as_if_nothing_had_happened(run: Controlled, result: dict[str, Any], alone: Ran, *, lost: bool = False) -> None:
    """``lost``: a worker was; where that was beside an evaluation, the others did the step before it again."""
    assert result["sha256"] == alone.sha256
    seen = ledger(read(run.out / "journal.jsonl"))
    assert seen.exact, seen
    assert len(run.records(RunStarted)) == 1  # nothing was begun again
    saved = [record.step for record in run.records(Checkpointed)]
    expected = sorted(
        [*range(1, STEPS + 1), *range(STEPS // EPOCHS, STEPS + 1, STEPS // EPOCHS)]
    )  # and each epoch's end
    if lost:
        assert {*expected[:-2]} <= {*saved} <= {*expected}
    else:
        assert saved in (expected, expected[:-1])  # all that was said meanwhile, and nothing twice


@pytest.mark.timeout(400)
def test_killed_again_and_again_on_a_host(
    controlled: Callable[..., Controlled], tmp_path: Path, alone: Ran, all_gone: Callable[..., None]
) -> None:
    at, token = port(), tmp_path / "token"
    hosts = ["--cluster", f"hosts:{at}", "--token-file", str(token), "--tls"]
    run = controlled("--workers", "1:2", *hosts, "--grace", "120s")
    run.until(token.exists)
    join = ["--join", f"127.0.0.1:{at}", "--token-file", str(token), "--workers", "2"]
    with (tmp_path / "agent").open("wb") as said:
        agent = elastune("agent", *join, out=said, err=said)
    try:
        run.until(lambda: run.saved() >= 2 and len(run.workers()) == 2)
        before = run.workers()
        # A second controller while the first one lives.
        second = subprocess.run([*ELASTUNE, *run.words, "--resume"], capture_output=True, text=True, timeout=LIMIT_S)
        assert (second.returncode, len(second.stderr.strip().splitlines())) == (2, 1), second.stderr
        assert f"held by pid {run.process.pid}" in second.stderr

        run.kill()
        run.goes_on()
        result = run.taken_over(1)
        assert (result.workers, result.lost) == ([0, 1], [])
        assert run.workers() == before
        run.goes_on()

        run.kill()
        os.kill(before[1], signal.SIGKILL)
        all_gone([before[1]])
        result = run.taken_over(2)
        assert (result.workers, result.lost) == ([0], [1])
        run.until(lambda: 2 in run.workers() and [len(record.members) for record in run.records(Regrouped)][-1:] == [2])
        assert run.workers()[0] == before[0]

        as_if_nothing_had_happened(run, run.result(), alone, lost=True)
        assert not list(run.out.glob(".elastune-*")), "of the controllers that were killed"
        assert [record.worker for record in run.records(WorkerGone) if record.how == "lost"] == [1]
        assert agent.wait(LIMIT_S) == 0
    finally:
        agent.kill()
        agent.wait()


@pytest.mark.timeout(300)
def test_on_this_machine(controlled: Callable[..., Controlled], alone: Ran, all_gone: Callable[..., None]) -> None:
    run = controlled("--workers", "2", "--grace", "120s")
    run.until(lambda: run.saved() >= 2)
    before = run.workers()
    assert len(before) == 2
    run.kill()
    run.goes_on()
    assert run.taken_over(1, fresh=True).workers == [0, 1]
    loaded = Path(f"/proc/{run.process.pid}/maps").read_text()
    assert "pydantic" in loaded
    assert "libtorch" not in loaded, "workers wait while a controller loads torch"
    assert "numpy" not in loaded, "and so they do for anything else"
    assert run.workers() == before
    as_if_nothing_had_happened(run, run.result(), alone)
    all_gone(before.values())
    assert not list(run.out.glob(".*agent*"))


@pytest.mark.timeout(300)
def test_nobody_comes(controlled: Callable[..., Controlled], alone: Ran) -> None:
    """The workers end at a checkpoint, from which the run can go on."""
    run = controlled("--workers", "2", "--grace", "3s")
    run.until(lambda: run.saved() >= 2)
    before, saved = run.workers(), run.saved()
    run.kill()
    run.until(lambda: not any(Path(f"/proc/{process}").exists() for process in before.values()), alive=False)
    assert run.saved() > saved
    log = run.out / "logs" / "agent.log"  # whose agent hears of an end a moment after it
    run.until(lambda: ended(log.read_text()) == {0: "code 75", 1: "code 75"}, alive=False)
    saved = run.saved()
    run.start("--resume")
    run.until(lambda: len(run.records(RunStarted)) == 2)
    assert run.records(RunStarted)[-1].resumed_step == saved
    assert run.result()["sha256"] == alone.sha256
    assert ledger(read(run.out / "journal.jsonl")).exact


@pytest.mark.timeout(300)
@pytest.mark.soak
def test_nobody_comes_to_a_host(
    controlled: Callable[..., Controlled], tmp_path: Path, all_gone: Callable[..., None]
) -> None:
    """Its agent looks for the next controller in vain: workers have written a checkpoint, and all end with code 75."""
    at, token = port(), tmp_path / "token"
    run = controlled("--workers", "2", "--cluster", f"hosts:{at}", "--token-file", str(token), "--grace", "3s")
    run.until(token.exists)
    join = ["--join", f"127.0.0.1:{at}", "--token-file", str(token), "--workers", "2"]
    with (tmp_path / "agent").open("wb") as out:
        agent = elastune("agent", *join, out=out, err=out)
    try:
        run.until(lambda: run.saved() >= 2 and len(run.workers()) == 2)
        before, saved = run.workers(), run.saved()
        run.kill()
        assert agent.wait(LIMIT_S) == 75
        all_gone(before.values())
        text = (tmp_path / "agent").read_text()
        assert ended(text) == {0: "code 75", 1: "code 75"}, text
        assert "looking for the next one for up to 3 s" in text
        assert run.saved() > saved, "they trained on, and their last step is in a checkpoint"
    finally:
        agent.kill()
        agent.wait()
