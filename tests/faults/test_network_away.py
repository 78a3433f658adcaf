"""The network goes away and comes back while everybody lives: a pause, and nothing that the result would show."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.soaked import soaked
from tests.support.elastic_runs import SLOTS, Ran
from tests.support.forked import ForkedProcess, elastune
from tests.support.hosts import Namespace, enter

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


def started(space: Namespace, out: Path, workers: str, *more: str) -> ForkedProcess:
    """A run in ``space``, controller and all; what it says is in the files ``said`` and ``errors`` beside ``out``."""
    words = ["run", str(PROGRAM.path), "--out", str(out), "--json", "--seed", "3"]
    words += ["--workers", workers, "--slots", str(SLOTS), "--heartbeat", "1s", *more]
    words += ["--set", "pause_s=0.15", "--set", f"until={out.parent / 'go'}"]
    with (out.parent / "said").open("wb") as said, (out.parent / "errors").open("wb") as errors:
        return elastune(*words, out=said, err=errors, first=partial(enter, space.path))


def trains(out: Path, run: ForkedProcess, limit_s: float = 60.0) -> None:
    """Wait until workers train: one has said what it used in its first epoch."""
    until = time.monotonic() + limit_s
    while not (
        (out / "journal.jsonl").exists()
        and any(isinstance(entry.record, StepsCompleted) for entry in read(out / "journal.jsonl"))
    ):
        assert run.poll() is None, (out.parent / "errors").read_text()
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
    assert run.wait(90) == 0, (tmp_path / "errors").read_text()
    entries = read(out / "journal.jsonl")
    (end,) = [entry.record for entry in entries if isinstance(entry.record, RunFinished)]
    assert end.sha256 == undisturbed.sha256
    assert ledger(entries).exact
    assert not [entry.record for entry in entries if isinstance(entry.record, WorkerGone)]


def test_without_loopback_one_line_says_so(space: Namespace, tmp_path: Path) -> None:
    run = started(space, tmp_path / "out", "4")
    assert run.wait(60) == 2
    said, errors = ((tmp_path / name).read_text() for name in ("said", "errors"))
    assert "loopback interface" in said + errors
    assert "Traceback" not in errors
    assert len(errors.splitlines()) <= 1
