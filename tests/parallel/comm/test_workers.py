"""Reductions among real worker processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastune.parallel.comm.exact import ExactReducer
from elastune.parallel.comm.group import Group


@pytest.fixture(autouse=True)
def _workers_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize("workers", [2, 3])
def test_sums_are_those_of_the_canonical_tree_bit_for_bit(workers: int) -> None:
    """Several buckets, four types, odd sizes, slots without samples, absent members, any order of arrival."""
    import reducing_workers

    from elastune.testing.worker_processes import processes

    with processes(workers, reducing_workers.reduce) as them:
        assert [them.receive(rank) for rank in range(workers)] == [([],)] * workers


def test_sums_that_climb_by_levels_have_the_same_bits() -> None:
    import reducing_workers

    from elastune.testing.worker_processes import processes

    with processes(4, reducing_workers.climb, "aabb") as them:
        assert [them.receive(rank) for rank in range(4)] == [([],)] * 4
        for rank in range(4):
            them.send(rank, "go on")
        assert [them.receive(rank) for rank in range(4)] == [("broken",)] * 4


TOPOLOGIES = ["ring", "native", "tree", "binary_tree:chunk_kib=1", "star:chunk_kib=1", "hierarchical", "auto"]


@pytest.mark.parametrize(
    ("workers", "hosts", "parents"),
    [(2, "", "parents=[1,1]"), (3, "aab", "parents=[2,0,2]"), (4, "aabb", "parents=[1,3,1,3]")],
)
def test_sums_have_the_same_bits_on_every_route(workers: int, hosts: str, parents: str) -> None:
    import reducing_workers

    from elastune.testing.worker_processes import processes

    with processes(workers, reducing_workers.by_routes, [*TOPOLOGIES, parents], hosts) as them:
        assert [them.receive(rank) for rank in range(workers)] == [([],)] * workers


@pytest.mark.parametrize("topology", ["star", "ring", "parents=[0,0,1]"])
def test_who_waits_on_a_route_is_freed_when_the_group_is_given_up(topology: str) -> None:
    import reducing_workers

    from elastune.testing.worker_processes import processes

    with processes(3, reducing_workers.break_on_a_route, topology) as them:
        assert [them.receive(rank) for rank in range(3)] == [("goes on",), ("goes on",), ("stays away",)]
        for rank in (0, 1):
            them.send(rank, "give it up")
        assert [them.receive(rank) for rank in (0, 1)] == [("freed",)] * 2


def test_a_lone_worker_sums_alike() -> None:
    import reducing_workers

    assert reducing_workers.wrong_sums(Group(), 64, 200) == []


@pytest.mark.parametrize("workers", [2, 3])
def test_numbers_are_gathered_whatever_they_are(tmp_path: Path, workers: int) -> None:
    import reducing_workers

    from elastune.testing.worker_processes import processes

    with processes(workers, reducing_workers.gather, f"file://{tmp_path}/meet") as them:
        assert [them.receive(rank) for rank in range(workers)] == [([],)] * workers


def test_the_order_of_additions_shows() -> None:
    """The check above can fail: a plain sum of the same numbers has other bits."""
    import reducing_workers

    terms = [reducing_workers.value(80, slot, 8) for slot in range(8)]
    values = [torch.zeros(101) if term is None else term for term in terms]
    assert not torch.equal(sum(values[1:], values[0]), reducing_workers.tree(values))


def test_sums_live_until_the_next_step_begins() -> None:
    reducer = ExactReducer([torch.empty(4)], 2, Group())
    for factor in (1.0, 2.0):
        reducer.begin()
        for slot in (0, 1):
            reducer.begin_slot(slot, last=slot == 1)
            reducer.put(0, torch.full((4,), factor))
        (total,) = reducer.finish()
        assert total.tolist() == [2 * factor] * 4
