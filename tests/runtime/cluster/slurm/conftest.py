"""One Slurm for all of these tests, and controllers of which nothing is left on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.cluster.slurm.runs import EPOCHS, PROGRAM, RUN, Controller
from tests.support.elastic_runs import Runs
from tests.support.slurm import VirtualSlurm

from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualSlurm]:
    with VirtualSlurm(tmp_path_factory.mktemp("slurm"), nodes=3) as cluster:
        yield cluster


@pytest.fixture
def controllers(slurm: VirtualSlurm, tmp_path: Path) -> Iterator[Callable[..., Controller]]:
    """Starts one; when the test is over nothing of it is left, in the queue or on a node."""
    started: list[Controller] = []

    def start(asked: str, before: Sequence[str] = (), words: Sequence[str] = RUN, hidden: bool = False) -> Controller:
        if hidden:
            (tmp_path / "run").mkdir()
            for name in slurm.nodes:
                slurm.kill_node(name)
                slurm.start_node(name, hides=tmp_path / "run")
        started.append(Controller(slurm, tmp_path, asked, before, words))
        return started[-1]

    yield start
    for controller in started:
        controller.close()
    deadline = time.monotonic() + 90.0  # an agent that has not come yet waits a minute for its controller

    def left() -> list[Any]:
        return [*slurm.queue("%i:%T"), *(process for name in slurm.nodes for process in slurm.processes(name))]

    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left() == []


@pytest.fixture(scope="session")
def undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The SHA-256 of one process's weights."""
    runs = Runs(cluster, tmp_path_factory.mktemp("undisturbed"), Program(PROGRAM))
    return runs(1, epochs=EPOCHS, plain=True).sha256
