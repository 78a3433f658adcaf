"""Links between hosts: who measures what with whom, and what comes of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from elastune.parallel.comm.network_probe import rounds
from elastune.testing.worker_processes import processes


@pytest.mark.parametrize("count", range(2, 9))
def test_each_talks_to_each_once_and_to_nobody_else_meanwhile(count: int) -> None:
    result = rounds(count)
    assert Counter(pair for each in result for pair in each) == {(i, j): 1 for j in range(count) for i in range(j)}
    for pairs in result:
        assert max(Counter(end for pair in pairs for end in pair).values()) == 1
    assert len(result) == count - 1 + count % 2


def test_the_first_worker_of_each_host_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import reducing_workers

    with processes(4, reducing_workers.probe, "abca") as them:
        rows = [them.receive(rank)[0] for rank in range(4)]
    assert rows[3] == [0.0] * 6
    for rank in range(3):
        pairs = list(zip(rows[rank][::2], rows[rank][1::2], strict=True))
        assert pairs[rank] == (0.0, 0.0)
        for other in {0, 1, 2} - {rank}:
            latency_s, bytes_s = pairs[other]
            assert 0 < latency_s < 1
            assert 1e5 < bytes_s < 1e12
