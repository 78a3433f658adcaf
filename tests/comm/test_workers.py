"""Reductions among real worker processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastune.comm.exact import ExactReducer
from elastune.comm.group import Group


@pytest.fixture(autouse=True)
def _workers_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize("workers", [2, 3])
def test_sums_are_those_of_the_canonical_tree_bit_for_bit(workers: int) -> None:
    """Several buckets, four types, odd sizes, slots without samples, absent members, any order of arrival."""
    import reducing_workers

    from elastune.testing.worker_processes import processes

    with processes(workers, reducing_workers.reduce) as them:
        assert [them.hear(rank) for rank in range(workers)] == [([],)] * workers


def test_a_lone_worker_sums_alike() -> None:
    import reducing_workers

    assert reducing_workers.wrong_sums(Group(), 64, 200) == []


@pytest.mark.parametrize("workers", [2, 3])
def test_numbers_are_gathered_whatever_they_are(tmp_path: Path, workers: int) -> None:
    import reducing_workers

    from elastune.testing.worker_processes import processes

    with processes(workers, reducing_workers.gather, f"file://{tmp_path}/meet") as them:
        assert [them.hear(rank) for rank in range(workers)] == [([],)] * workers


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
