"""What takes less time among several routes is seen by summing on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastune.testing.worker_processes import processes


@pytest.mark.parametrize("num_slots", [0, 4])
def test_the_slower_way_is_seen_and_all_see_the_same(monkeypatch: pytest.MonkeyPatch, num_slots: int) -> None:
    """What goes along a ring takes a tenth of a second more a message; the group's own routes stay."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import summing_workers

    with processes(3, summing_workers.tried, num_slots) as them:
        results = [them.receive(rank)[1:] for rank in range(3)]
    (native_s, ring_allreduce_s, tree_s), routes = results[0]
    assert results == [results[0]] * 3
    assert ring_allreduce_s > 0.1 > max(native_s, tree_s)
    assert routes == ((), 512)
