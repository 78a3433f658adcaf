"""Groups of a view form before their worker enters it, and nobody waits for what does not form."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from elastune.elastic.wire.view import View
from elastune.elastic.worker.elastic_group import ElasticWorkerGroup, ViewComms
from elastune.parallel.comm.group import Group, GroupBroken

NEXT = View(2, (0, 1), scheduled=True, joiners=(1,))


class Member:
    """Worker 0, and what it says."""

    worker = 0

    def __init__(self) -> None:
        self.said: list[tuple[int, str]] = []
        self.over = 0

    def superseded(self, number: int) -> bool:
        return number < self.over

    def broken(self, number: int, why: str) -> None:
        self.said.append((number, why))


class Factory:
    """Forms by ``make``, once ``may_form`` is set."""

    def __init__(self, make: Callable[[], Group] = lambda: Group(0, 2), backend: str = "gloo") -> None:
        self.backend, self.may_form, self.names = backend, threading.Event(), list[str]()
        self._make = make

    def form(self, store: Any, name: str, rank: int, size: int, **_: Any) -> Group:
        self.names.append(name)
        self.may_form.wait(10)
        return self._make()


def forming(member: Member, factory: Factory) -> ViewComms:
    return ViewComms(member, factory, climbs=False)  # type: ignore[arg-type]


def ready(comms: ViewComms, view: View) -> bool:
    until = time.monotonic() + 10
    while not comms.is_ready_for(view) and time.monotonic() < until:
        time.sleep(0.001)
    return comms.is_ready_for(view)


def test_a_worker_is_ready_once_the_groups_are_there() -> None:
    factory = Factory()
    comms = forming(Member(), factory)
    comms.view_installed(NEXT)
    assert not comms.is_ready_for(NEXT)
    factory.may_form.set()
    assert ready(comms, NEXT)
    assert comms.take(NEXT).everyone.size == 2
    assert factory.names.count("2") == 1


def test_who_leaves_with_it_and_who_has_a_gpu_waits_for_nothing() -> None:
    for view, backend in ((View(2, (1, 2), scheduled=True), "gloo"), (NEXT, "nccl")):
        factory = Factory(backend=backend)
        comms = forming(Member(), factory)
        comms.view_installed(view)
        assert comms.is_ready_for(view)
        assert not factory.names


def test_what_cannot_form_is_told_at_once() -> None:
    def fails() -> Group:
        raise GroupBroken("no device")

    member, factory = Member(), Factory(fails)
    factory.may_form.set()
    comms = forming(member, factory)
    comms.view_installed(NEXT)
    assert ready(comms, NEXT)
    assert member.said == [(2, "no device")]
    with pytest.raises(GroupBroken, match="no device"):
        comms.take(NEXT)


def test_groups_of_a_view_that_is_over_are_let_go_of() -> None:
    member, group = Member(), Group(0, 2)
    factory = Factory(lambda: group)
    factory.may_form.set()
    comms = forming(member, factory)
    comms.view_installed(NEXT)
    assert ready(comms, NEXT)
    member.over = 3
    comms.begin(View(3, (0,)))
    assert group.broken
    with pytest.raises(GroupBroken, match="over"):
        comms.take(NEXT)
    assert not member.said


def test_after_a_loss_groups_form_while_the_worker_still_computes_the_lost_step() -> None:
    member, factory = Member(), Factory()
    factory.may_form.set()
    group = ElasticWorkerGroup(member, factory)  # type: ignore[arg-type]
    member.on_break(View(1, (0, 1, 2)))  # type: ignore[attr-defined]
    assert factory.names == ["alone"], "the first view's form once its members have built what they train"
    group._current = View(1, (0, 1, 2))
    member.on_break(View(2, (0, 1)))  # type: ignore[attr-defined]
    assert ready(group._forming, View(2, (0, 1)))
    assert "2" in factory.names
