from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from tests.support.forked import started_by

from elastune.runtime.clusters.local import LocalCluster


@pytest.fixture(autouse=True)
def _odd_workers_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def runs(process: int) -> bool:
    """Whether ``process`` exists and is more than a zombie."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@pytest.fixture
def gone():
    """Asserts that all of some processes end within ``limit_s``; returns the seconds that took."""

    def check(processes: Iterable[float], limit_s: float = 20.0) -> float:
        begin = time.monotonic()
        left = [int(process) for process in processes]
        while left := [process for process in left if runs(process)]:
            assert time.monotonic() - begin < limit_s, f"still running: {left}"
            time.sleep(0.005)
        return time.monotonic() - begin

    return check


@pytest.fixture
def running():
    """Whether each of some processes runs."""
    return lambda processes: [runs(int(process)) for process in processes]


@pytest.fixture
def bare():
    """A new cluster whose server has imported no torch, for workers that need none."""
    return lambda entry: LocalCluster(3, entry=entry, preload=())


@pytest.fixture(scope="package")
def shared() -> Iterator[LocalCluster]:
    with started_by(subprocess), LocalCluster(3, entry="", preload=()) as cluster:
        yield cluster


@pytest.fixture
def serve(shared: LocalCluster, monkeypatch: pytest.MonkeyPatch):
    """A cluster for the entry that is asked for, the same each time: for tests that leave it as it was."""

    def with_entry(entry: str) -> LocalCluster:
        monkeypatch.setattr(shared, "_entry", entry)
        return shared

    yield with_entry
    assert shared.free == 3


@pytest.fixture(scope="package")
def warm() -> Iterator[LocalCluster]:
    """A cluster as users get it: torch and more imported."""
    with started_by(subprocess), LocalCluster(3, entry="odd_workers:all_reduce") as cluster:
        yield cluster


@pytest.fixture
def descriptors():
    """How many file descriptors a process has open."""
    return lambda process: len(os.listdir(f"/proc/{process}/fd"))
