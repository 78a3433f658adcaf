"""Routes that workers do not know alike are found before anything travels along them, and sums that are wrong after."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastune.core.communication import Topology, routes_of
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.relay import known, unlike
from elastune.testing.worker_processes import processes

TOPOLOGIES = ["ring", "tree", "star", "binary_tree", "parents=[1,2,2]"]


@pytest.fixture(autouse=True)
def _workers_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def of(rank: int, size: int, topology: str, chunk_kib: int = 512) -> list[float]:
    group = Group(rank, size)
    group.routes, group.chunk_kib = routes_of(Topology.parse(topology), size), chunk_kib
    return known(group)


@pytest.mark.parametrize("topology", ["native", *TOPOLOGIES])
def test_who_knows_the_same_is_not_told(topology: str) -> None:
    assert unlike([of(rank, 3, topology) for rank in range(3)]) == {}


@pytest.mark.parametrize(
    ("stale", "message"),
    [
        (of(1, 3, "parents=[0,0,1]"), "of 3 with routes"),
        (of(1, 3, "parents=[0,2,0]"), "of 3 with routes"),
        (of(1, 3, "native"), "of 3 with routes"),
        (of(1, 3, "tree", chunk_kib=8), "of 3 with routes"),
        (of(1, 2, "tree"), "of 2 with routes"),
        (of(2, 3, "tree"), "as rank 2 of 3 with routes"),
    ],
)
def test_a_stale_rank_size_or_parent_is_told(stale: list[float], message: str) -> None:
    rows = [of(rank, 3, "tree") for rank in range(3)]
    rows[1] = stale
    result = unlike(rows)
    assert result[1].startswith(message)
    assert result[0] == result[2]
    assert result[1] != result[0]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_sums_along_routes_come_out_right_or_are_found_out(topology: str) -> None:
    """The second time one worker does not add what it is given."""
    import summing_workers

    with processes(3, summing_workers.checked, topology) as them:
        for rank in range(3):
            right, wrong, result = them.receive(rank)[1:]
            assert right
            assert not wrong
            assert "routes of the group have changed" in result
