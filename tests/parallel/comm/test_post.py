"""Messages that are sent without waiting, and what wakes those that wait for one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elastune.testing.worker_processes import processes


@pytest.fixture(autouse=True)
def _workers_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_messages_come_in_order_and_whole() -> None:
    """From each to each, of many sizes; an empty payload included."""
    import posting_workers

    with processes(3, posting_workers.exchange) as them:
        for rank in range(3):
            them.receive(rank)
        for rank in range(3):
            them.send(rank, "end")


def test_state_that_moves_at_the_same_time_is_not_taken_for_a_message() -> None:
    import posting_workers

    with processes(2, posting_workers.beside_an_exchange) as them:
        for rank in range(2):
            assert them.receive(rank)[0] == "exchanged"
        for rank in range(2):
            them.send(rank, "end")


def test_the_end_of_the_group_wakes_who_waits() -> None:
    """By a death, which the neighbours see, or because it is given up here."""
    import posting_workers

    with processes(3, posting_workers.wait_for_mail) as them:
        for rank in range(3):
            them.receive(rank)
        them.signal(2, signal.SIGKILL)
        assert them.receive(1)[0] == "broken"
        them.send(0, "give up")
        assert them.receive(0)[0] == "broken"
        for rank in (0, 1):
            assert them.receive(rank)[0] == "refused"
            them.send(rank, "end")
