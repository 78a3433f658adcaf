"""A host whose clock is set back while its workers write checkpoints."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from elastune.train.checkpoints.spool import Spool, Ticket


def test_what_was_written_first_goes_first_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path)
    spool.make()
    now_ns = 10**18
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)
    for step in range(4):
        now_ns -= 3600 * 10**9
        spool.hand_over(Ticket("ab", f".draft-{step}-1-1", "state.json", 1, "0" * 64))
    assert [ticket.draft for _, ticket in spool.tickets()] == [f".draft-{step}-1-1" for step in range(4)]
