"""What user code reads as its rank and the number of workers, at every step, against what the journal says."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastune.cluster.local import LocalCluster
from elastune.core.run import Program
from elastune.journal.records import Regrouped, Reported
from elastune.testing.elastic_runs import Runs

PROGRAM = Program(Path(__file__).parent / "programs" / "watching.py")


@pytest.mark.parametrize(
    ("workers", "resize", "faults"),
    [
        (1, ["3 3", "14 2"], []),
        (3, ["8 1"], []),
        (3, [], ["kill 0 5 before", "kill 2 9 gather"]),
        (2, ["3 4"], ["kill 1 7 scatter"]),
    ],
)
def test_rank_and_size_are_never_stale(
    cluster: LocalCluster, tmp_path: Path, workers: int, resize: list[str], faults: list[str]
) -> None:
    ran = Runs(cluster, tmp_path, PROGRAM)(workers, resize=resize, faults=faults)
    views = {found.step: len(found.members) for found in ran.records if isinstance(found, Regrouped)}
    reports = [found for found in ran.records if isinstance(found, Reported)]
    assert views, "the workers changed"
    assert len(reports) == 32, "one a step"
    for told in reports:
        # It is made inside of the step after ``told.step``.
        now = [size for first, size in sorted(views.items()) if first <= told.step + 1]
        size = now[-1] if now else workers
        assert told.metrics["size"] == size, f"step {told.step + 1}"
        assert told.metrics["rank"] == (size - 1) / 2
        assert told.metrics["squares"] == pytest.approx(sum(rank**2 for rank in range(size)) / size)
