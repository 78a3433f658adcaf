"""What user code reads as its rank, the number of workers and its parent in a topology, at every step, against what the
journal says."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.soaked import soaked
from tests.support.elastic_runs import Runs

from elastune.core.communication import Topology, routes_of
from elastune.core.journal.records import Regrouped, Reported, TopologyChanged
from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster

PROGRAM = Program(Path(__file__).parent / "programs" / "watching.py")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("workers", "resize", "faults", "route"),
    [
        (1, ["3 3", "14 2"], [], []),
        (3, [], ["kill 0 5 before", "kill 2 9 gather"], []),
        (3, ["12 4"], ["kill 0 9 before", "kill 2 24 relaying"], ["1 tree", "4 parents=[2,0,2]", "20 star"]),
        *soaked(
            (3, ["8 1"], [], []),
            (2, ["3 4"], ["kill 1 7 scatter"], []),
            (3, ["6 4", "20 3"], [], ["2 parents=[2,0,2]", "12 binary_tree", "17 ring", "24 star"]),
        ),
    ],
)
def test_rank_and_size_are_never_stale(
    cluster: LocalCluster, tmp_path: Path, workers: int, resize: list[str], faults: list[str], route: list[str]
) -> None:
    ran = Runs(cluster, tmp_path, PROGRAM)(workers, resize=resize, faults=faults, route=route)
    laid = [result for result in ran.records if isinstance(result, TopologyChanged)]
    assert len(laid) >= len(route)
    views = {result.step: len(result.members) for result in ran.records if isinstance(result, Regrouped)}
    reports = [result for result in ran.records if isinstance(result, Reported)]
    assert views, "the workers changed"
    assert len(reports) == 32, "one a step"
    for outcome in reports:
        # It is made inside of the step after ``told.step``.
        now = [size for first, size in sorted(views.items()) if first <= outcome.step + 1]
        size = now[-1] if now else workers
        assert outcome.metrics["size"] == size, f"step {outcome.step + 1}"
        assert outcome.metrics["rank"] == (size - 1) / 2
        assert outcome.metrics["squares"] == pytest.approx(sum(rank**2 for rank in range(size)) / size)
        topology = next((result.topology for result in reversed(laid) if result.step <= outcome.step), "native")
        routes = routes_of(Topology.parse(topology), size)
        gives = [(rank + 1) * sum(route.up[rank] + 1 for route in routes) for rank in range(size)]
        assert outcome.metrics["gives"] == pytest.approx(sum(gives) / size), f"step {outcome.step + 1}, {topology}"
