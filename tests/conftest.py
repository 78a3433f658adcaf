"""Fixtures that several rooms share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from elastune.cluster.local import WARM, LocalCluster
from elastune.core.run import Program

torch.set_num_threads(1)
# How fast examples are made and run says how busy the machine is.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

HERE = Path(__file__).parent
SLOWEST_FIRST = ("faults", "e2e", "parity", "cli", "study", "report", "search", "frontier", "mechanisms")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In several processes (``-n``) the slowest rooms begin, so that none of them ends alone."""
    if hasattr(config, "workerinput"):
        rank = {room: at for at, room in enumerate(SLOWEST_FIRST)}
        items.sort(key=lambda item: rank.get(item.path.relative_to(HERE).parts[0], len(rank)))


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """Four local workers, forked from one warm server, which has read the digits, for the whole test run."""
    with LocalCluster(capacity=4, preload=(*WARM, "tests.programs.preloaded")) as place:
        yield place


@pytest.fixture
def tiny() -> Program:
    return Program(Path(__file__).parent / "programs" / "tiny.py")


@pytest.fixture
def program(tmp_path: Path):
    """Writes a program."""

    def write(text: str, name: str = "mine.py") -> Program:
        path = tmp_path / name
        path.write_text(text)
        return Program(path)

    return write
