"""Runs of a module's program; controllers in processes of their own, to be interrupted and killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.elastic_runs import Ran, Runs

from elastune.runtime.clusters.local import LocalCluster

LIMIT_S = 40.0


@pytest.fixture
def runs(cluster: LocalCluster, tmp_path: Path, request: pytest.FixtureRequest) -> Runs:
    """Starts runs of the module's ``PROGRAM``."""
    return Runs(cluster, tmp_path, request.module.PROGRAM)


@pytest.fixture(scope="module")
def undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Ran:
    """What every history of the module's ``PROGRAM`` must come to: one worker, and nothing happens to it.

    ``ALONE``: its means, where the module says them.
    """
    module, folder = request.module, tmp_path_factory.mktemp("undisturbed")
    ran = Runs(cluster, folder, module.PROGRAM)(1, execution=getattr(module, "ALONE", None))
    assert ran.ledger.exact
    return ran


def lives(process: int) -> bool:
    """Whether ``process`` exists and is more than a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Controller:
    """A fork of the test's process that executes ``act``; ``family`` is all that it started and has left."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.pid = os.fork()
        self.code: int | None = None
        if self.pid == 0:
            code = 1
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                act()
                code = 0
            finally:
                os._exit(code)

    def family(self) -> set[int]:
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
        results = {self.pid}
        while more := {child for child, parent in parents.items() if parent in results} - results:
            results |= more
        return results - {self.pid}

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self, limit_s: float = LIMIT_S) -> int:
        """Its exit code (negative: the signal), once it has ended."""
        deadline = time.monotonic() + limit_s
        while self.code is None:
            result, status = os.waitpid(self.pid, os.WNOHANG)
            if result:
                self.code = os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline, "the controller does not end"
            time.sleep(0.005)
        return self.code


@pytest.fixture
def controller() -> Iterator[Callable[[Callable[[], object]], Controller]]:
    made: list[Controller] = []

    def make(act: Callable[[], object]) -> Controller:
        made.append(Controller(act))
        return made[-1]

    yield make
    for each in made:
        if each.code is None:
            each.signal(signal.SIGKILL)
            each.end()


@pytest.fixture
def until():
    """Waits until something is true."""

    def wait(true: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not true():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.005)

    return wait


@pytest.fixture
def all_gone(until):
    """Asserts that no process of a family is left."""
    return lambda family: until(lambda: not any(lives(process) for process in family), 20.0)
