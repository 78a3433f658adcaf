"""TorchInductor's code on one worker and on two: the same bits, and made once on a machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.elastic_runs import Runs, together

from elastune.core.journal.records import Compiled, Record
from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.elastic_run import ElasticRun

PROGRAM = Program(Path(__file__).parent / "programs" / "compiled.py")


def joined() -> Callable[..., None]:
    """A second worker comes to one that trains."""
    asked: list[int] = []

    def act(run: ElasticRun, records: list[Record]) -> None:
        if not asked and run.members:
            asked.append(2)
            run.resize(2)

    return act


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="TorchInductor needs a C++ compiler on a CPU, and here is none")
def test_two_workers_run_what_one_has_compiled(cluster: LocalCluster, tmp_path: Path) -> None:
    runs, settings = Runs(cluster, tmp_path, PROGRAM), {"cache": str(tmp_path / "cache"), "limit_s": 280.0}
    one, two = runs(1, **settings), runs(2, **settings)
    assert one.sha256 == two.sha256
    assert one.reports[0]["made"] > 0
    assert two.reports == [{"made": 0.0, "found": 2 * one.reports[0]["made"]}]
    grown = runs(1, act=joined(), slow_until=together(2), epochs=10, pause_s=0.2, **settings)
    assert grown.reports == two.reports, "who joins reads what others have made"
    assert {r.worker for r in grown.records if isinstance(r, Compiled)} == {0, 1}, "in passes that do not count, too"
    seconds = {r.worker: r.seconds for r in one.records if isinstance(r, Compiled)}
    again = {r.worker: r.seconds for r in two.records if isinstance(r, Compiled)}  # read, and not made
    assert set(seconds) == {0}
    assert set(again) == {0, 1}
