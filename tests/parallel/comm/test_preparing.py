"""Groups that form while something else is done: who gets them, and what becomes of those that nobody wants."""

from __future__ import annotations

import threading

import pytest

from elastune.parallel.comm.backends import BackgroundForming
from elastune.parallel.comm.group import GroupBroken


def test_the_result_is_handed_over_once() -> None:
    dropped: list[str] = []
    preparing = BackgroundForming(lambda: "groups", dropped.append)
    assert preparing.result() == "groups"
    assert preparing.ended
    preparing.discard()
    assert dropped == []  # they are another's now
    with pytest.raises(GroupBroken):
        preparing.result()


def test_what_is_discarded_while_it_forms_is_let_go_of_once_it_is_there() -> None:
    may_end, let_go = threading.Event(), threading.Event()
    preparing = BackgroundForming(lambda: may_end.wait(10), lambda _: let_go.set())
    assert not preparing.ended
    preparing.discard()
    assert not let_go.is_set()
    may_end.set()
    assert let_go.wait(10)
    with pytest.raises(GroupBroken):
        preparing.result()


def test_what_is_there_already_is_let_go_of_at_once_and_once() -> None:
    dropped: list[str] = []
    preparing = BackgroundForming(lambda: "groups", dropped.append)
    preparing._ended.wait(10)
    preparing.discard()
    preparing.discard()
    assert dropped == ["groups"]


def test_what_went_wrong_is_raised_where_the_result_is_asked_for() -> None:
    def fails() -> str:
        raise GroupBroken("a worker did not come")

    with pytest.raises(GroupBroken, match="did not come"):
        BackgroundForming(fails, lambda _: None).result()
