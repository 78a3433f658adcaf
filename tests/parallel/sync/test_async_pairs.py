"""Pair averaging in fast mode: nobody waits for a partner, and rounds still end in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastune.testing.kits.sync import same
from elastune.testing.worker_processes import processes


@pytest.fixture(autouse=True)
def _workers_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_one_offer_at_a_time_until_it_is_taken() -> None:
    import pairing_workers

    with processes(2, pairing_workers.offer) as them:
        assert [them.receive(rank)[1] for rank in range(2)] == [[], [(0, 0, 7), (0, 1, 5), (0, 0, 9)]]
        for rank in range(2):
            them.send(rank, "end")


def test_a_round_goes_to_its_end_while_the_partner_has_not_begun() -> None:
    """It would never get there if it waited in any mix. The partner takes what was offered meanwhile."""
    import pairing_workers

    with processes(2, pairing_workers.slow_partner) as them:
        (_, first, *result), (_, second, *also) = them.receive(0), them.receive(1)
        same(first, second)
        assert result[0] == also[0], "how old what was taken is, all hear alike"
        assert result[2] == 0 < also[2], "the partner took what the first one had offered"
        for rank in range(2):
            them.send(rank, "end")
