"""The network goes away and comes back while everybody lives: a pause, and nothing that the result would show."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.soaked import soaked
from tests.support.elastic_runs import SLOTS, Ran
from tests.support.hosts import Namespace

from elastune.core.journal.files import read
from elastune.core.journal.records import RunFinished, StepsCompleted, WorkerGone
from elastune.core.run import Program
from elastune.report.sample_ledger import ledger

PROGRAM = Program(Path(__file__).parent / "programs" / "elastic.py")


@pytest.fixture
def space() -> Iterator[Namespace]:
    made = Namespace()
    yield made
    made.close()


def started(space: Namespace, out: Path, workers: str, *more: str) -> subprocess.Popen[str]:
    """A run in ``space``, controller and all."""
    command = [sys.executable, "-m", "elastune", "run", str(PROGRAM.path), "--out", str(out), "--json", "--seed", "3"]
    command += ["--workers", workers, "--slots", str(SLOTS), "--heartbeat", "1s", *more]
    command += ["--set", "pause_s=0.15", "--set", f"until={out.parent / 'go'}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(space.command(*command), text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def trains(out: Path, run: subprocess.Popen[str], limit_s: float = 60.0) -> None:
    """Wait until workers train: one has said what it used in its first epoch."""
    until = time.monotonic() + limit_s
    while not (
        (out / "journal.jsonl").exists()
        and any(isinstance(entry.record, StepsCompleted) for entry in read(out / "journal.jsonl"))
    ):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("workers", "away_s"),
    [("3", (1.0, 3.0)), *soaked(("1", (3.0,)), ("3", (40.0,)))],
    ids=["three workers", "one worker", "for long"],
)
def test_the_run_goes_on(
    space: Namespace, tmp_path: Path, undisturbed: Ran, workers: str, away_s: tuple[float, ...]
) -> None:
    """Loopback is down for longer than the heartbeat, or again and again; every process lives."""
    space.do("ip link set lo up")
    out = tmp_path / "out"
    run = started(space, out, workers, "--checkpoint-every", "2")
    trains(out, run)
    for each_s in away_s:
        assert run.poll() is None, "it ended before its network went away"
        space.do("ip link set lo down")
        time.sleep(each_s)
        space.do("ip link set lo up")
        time.sleep(1.0)
    (tmp_path / "go").touch()
    said, errors = run.communicate(timeout=90)
    assert run.returncode == 0, (said, errors)
    entries = read(out / "journal.jsonl")
    (end,) = [entry.record for entry in entries if isinstance(entry.record, RunFinished)]
    assert end.sha256 == undisturbed.sha256
    assert ledger(entries).exact
    assert not [entry.record for entry in entries if isinstance(entry.record, WorkerGone)]


def test_without_loopback_one_line_says_so(space: Namespace, tmp_path: Path) -> None:
    run = started(space, tmp_path / "out", "4")
    said, errors = run.communicate(timeout=60)
    assert run.returncode == 2
    assert "loopback interface" in said + errors
    assert "Traceback" not in errors
    assert len(errors.splitlines()) <= 1
