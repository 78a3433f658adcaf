"""Fixtures that several rooms share."""

from __future__ import annotations

import gc
import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings
from tests.support import forked

from elastune.cli import main
from elastune.core.run import Program, RunSpec
from elastune.runtime.clusters.local import WARM, LocalCluster
from elastune.runtime.job.run import run_job

torch.set_num_threads(1)
FUZZ = int(os.environ.get("FUZZ", "0"))
# The same examples each time, so that a change fails by its own fault alone; ``make fuzz`` looks for others. How fast
# examples are made and run says how busy the machine is.
settings.register_profile(
    "busy machine",
    max_examples=100 * max(1, FUZZ // 10) if FUZZ else 50,
    derandomize=not FUZZ,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("busy machine")

HERE = Path(__file__).parent
TINY = HERE / "programs" / "tiny.py"
# Minutes each, as files run in one process: one that began late would end alone.
LONGEST = ("runtime/cluster/slurm/test_slurm.py", "runtime/cluster/ray/test_cluster.py")
SLOWEST_ROOMS = ("faults", "runtime", "e2e", "parallel", "parity", "cli", "tuning", "elastic")


def turns(files: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """When each of ``files`` begins: the longest, then those of the slowest rooms in turns, then the others.

    In turns, because most in ``cluster`` wait for processes and most in others compute: two cores have both to do.
    """
    found: dict[str, tuple[int, ...]] = {}
    begun = Counter[str]()
    for file in files:
        room = file.partition("/")[0]
        begun[room] += 1
        if file in LONGEST:
            found[file] = (0, LONGEST.index(file))
        elif room in SLOWEST_ROOMS:
            found[file] = (1, begun[room], SLOWEST_ROOMS.index(room))
        else:
            found[file] = (2,)
    return found


def soak_most(items: Iterable[pytest.Item]) -> None:
    """Mark cells of each matrix that is ``sampled(n)`` with ``soak``.

    Every n-th cell stays, the first included. Of a matrix of several axes a cell also stays that has a value of an axis
    which no earlier one has had.
    """
    matrices: dict[str, list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cells in matrices.values():
        nth = cells[0].get_closest_marker("sampled").args[0]  # type: ignore[union-attr]
        values = [{name: repr(value) for name, value in cell.callspec.params.items()} for cell in cells]
        kinds = {name: len({each[name] for each in values}) for name in values[0]}
        axes = [name for name, kind in kinds.items() if kind < len(cells)]  # not a list of as many things as cells
        seen: set[tuple[str, str]] = set()
        for at, (cell, each) in enumerate(zip(cells, values, strict=True)):
            fresh = {(name, each[name]) for name in axes} - seen
            if at % nth == 0 or fresh:
                seen |= fresh
            else:
                cell.add_marker("soak")


@pytest.hookimpl(tryfirst=True)  # before "-m" chooses by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In several processes (``-n``) files take their turns, so that none of them ends alone."""
    soak_most(items)
    if hasattr(config, "workerinput"):
        files = [str(item.path.relative_to(HERE)) for item in items]
        at = turns(dict.fromkeys(files))
        items.sort(key=lambda item: at[str(item.path.relative_to(HERE))])


@pytest.fixture(scope="session", autouse=True)
def _forks() -> Iterator[None]:
    """What the package starts from the tests' own process is forked from it; ``processes`` are for tests of starts."""
    with forked.started_by(forked.IN_PLACE):
        yield


@pytest.fixture
def processes() -> Iterator[None]:
    """What the package starts are new Python processes, as those of users."""
    with forked.started_by(subprocess):
        yield


def pytest_collection_finish() -> None:
    """Whatever looks for garbage during the tests need not look at all that they import."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Four local workers, forked from one warm server, which has read the digits, for the whole test run.

    It has imported all that it is going to: else the first test that counts seconds would count those, too.
    """
    with forked.started_by(subprocess):  # what this server has imported is what those of users have
        place = LocalCluster(capacity=4, preload=(*WARM, "tests.programs.preloaded"))
    with place:
        run_job(RunSpec(Program(TINY), tmp_path_factory.mktemp("warm") / "out"), cluster=place)
        yield place


@pytest.fixture
def tiny() -> Program:
    return Program(TINY)


@pytest.fixture
def program(tmp_path: Path):
    """Writes a program."""

    def write(text: str, name: str = "mine.py") -> Program:
        path = tmp_path / name
        path.write_text(text)
        return Program(path)

    return write


@dataclass(frozen=True)
class Said:
    """What a command said, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """Its one line of complaint."""
        assert self.code == 2, (self.code, self.err)
        assert self.out == "", self.out
        (line,) = self.err.splitlines()
        assert line.startswith("elastune: ")
        assert "Traceback" not in line
        return line

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        (line,) = self.out.splitlines()
        found = json.loads(line)
        assert isinstance(found, dict)
        return found


@pytest.fixture(scope="session")
def said() -> type[Said]:
    return Said


PLACES_OF_CLUSTERS = (
    *("runtime.job.run", "runtime.job.program_check"),
    *("tuning.study.run", "tuning.frontier.find_frontier"),
)


@contextmanager
def _forked_from(cluster: LocalCluster) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, forked.only_here(patch.undo):
        for module in PLACES_OF_CLUSTERS:
            patch.setattr(f"elastune.{module}.LocalCluster", lambda capacity: nullcontext(cluster))
        yield


@pytest.fixture(scope="session")
def forked_from() -> Callable[[LocalCluster], AbstractContextManager[None]]:
    """What commands start meanwhile in this process is forked from the tests' warm server."""
    return _forked_from


@pytest.fixture
def command_here(cluster: LocalCluster, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Said]]:
    """The command line, called in this process."""

    def call(*arguments: object) -> Said:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Said(code, out, err)

    with _forked_from(cluster):
        yield call
