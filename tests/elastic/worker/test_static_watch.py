"""Workers of another launcher, who judge each other by what they tell in a store, and by no clock but their own."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from elastune.elastic.wire.messages import Beat
from elastune.elastic.worker import group
from elastune.elastic.worker.group import StaticWatch, connection_lost


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


RESET = RuntimeError("[../gloo/transport/tcp/pair.cc:553]\nConnection reset by peer")


def test_a_rank_that_says_nothing_any_more_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "LOOK_EVERY_S", 0.01)
    store, says = HashStore(), Beat(step=3, doing="computing")
    one, _ = (watch(rank, store, says, 60.0) for rank in (0, 1))
    gloo = "(what failed here: [../gloo/transport/tcp/pair.cc:553] Connection reset by peer)"
    assert str(one.explain(RESET)) == f"rank 1 is lost: its process or its host has ended {gloo}"
    store.set("elastune/lost", "rank 7 is lost")
    assert str(one.explain(RESET)).startswith("rank 7 is lost ("), "who came first knows"


def test_a_rank_that_has_failed_says_so_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "LOOK_EVERY_S", 0.01)
    store, says = HashStore(), Beat(step=3, doing="computing")
    one, other = (watch(rank, store, says, 60.0) for rank in (0, 1))
    other.fail("ValueError: no data")
    assert str(one.explain(RESET)).startswith("rank 1 has failed: ValueError: no data (what failed here: ")


def test_without_the_store_nobody_can_tell_which() -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection closed by peer")

        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Connection closed by peer")

    one = watch(0, Gone(), Beat(), 60.0)
    one.fail("nobody hears it")
    assert "rendezvous store, is lost" in str(one.explain(RESET))


def test_texts_of_gloo_are_no_faults_of_the_program() -> None:
    assert connection_lost(RESET)
    assert not connection_lost(RuntimeError("shapes differ"))
    assert not connection_lost(ValueError("connection reset by peer"))
