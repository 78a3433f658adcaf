"""Workers of another launcher, who judge each other by what they tell in a store, and by no clock but their own."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from elastune.elastic.wire.messages import Beat
from elastune.elastic.worker.group import StaticWatch


def watch(rank: int, store: Any, said: Beat, limit_s: float) -> StaticWatch:
    workers: Any = SimpleNamespace(rank=rank, size=2, failed=None, beat=lambda: said)
    result = StaticWatch(workers, store, limit_s)
    result.end()  # asked by the test, not by its thread
    return result


def test_a_clock_that_jumps_is_nobodys_end(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Beat(step=3, doing="reducing", operation=5, what="a sum")
    store, now_s = HashStore(), 1e9
    monkeypatch.setattr(time, "time", lambda: now_s)
    one, other = (watch(rank, store, waits, 60.0) for rank in (0, 1))
    assert (one.stall, other.stall) == (None, None)
    for jump_s in (3600.0, -7200.0):
        now_s += jump_s
        assert (one.stall, other.stall) == (None, None)


def test_who_tells_nothing_new_has_been_there_since_it_was_seen() -> None:
    waits, computes = Beat(step=3, doing="reducing", operation=5, what="a sum"), Beat(step=3, operation=5)
    store = HashStore()
    one, other = watch(0, store, waits, 0.2), watch(1, store, computes, 0.2)
    assert other.stall is None
    assert one.stall is None
    waited = Beat(step=3, doing="reducing", since_s=1.0, operation=5, what="a sum")
    late = watch(0, store, waited, 0.2).stall
    assert late is not None
    assert (late.worker, late.reason) == (1, "timeout")
