"""How long the end of a group is waited for, and when its buffers may be used again; the library is a fake."""

import time
from dataclasses import dataclass

import pytest
import torch

from elastune.parallel.comm.group import DRAIN_S, Group


class FakeWork:
    """Ends when its group is severed, or never."""

    def __init__(self, library: "FakeLibrary") -> None:
        self._library = library

    def is_completed(self) -> bool:
        return self._library.severed and self._library.ends_works

    def wait(self, *_: object) -> None:
        raise RuntimeError("the connection was closed")


@dataclass
class FakeLibrary:
    """A process group and its connections. ``closes``: whether it lets go of these once they are severed."""

    closes: bool
    ends_works: bool
    severed: bool = False

    def allreduce(self, tensors: list[torch.Tensor]) -> FakeWork:
        return FakeWork(self)

    def sever(self) -> None:
        self.severed = True

    def all_closed(self) -> bool:
        return self.severed and self.closes


def drained(library: FakeLibrary) -> tuple[bool, float]:
    group = Group(0, 2, library, "gloo", connections=library)
    group.all_reduce(torch.zeros(1))
    began = time.monotonic()
    return group.drain(), time.monotonic() - began


def test_what_has_ended_and_is_closed_may_be_used_again() -> None:
    assert drained(FakeLibrary(closes=True, ends_works=True))[0]


def test_a_connection_that_stays_open_is_not_waited_for_once_all_has_ended() -> None:
    again, took_s = drained(FakeLibrary(closes=False, ends_works=True))
    assert not again, "it may still be read"
    assert took_s < DRAIN_S / 2


def test_a_work_that_the_library_forgot_spoils_its_buffers() -> None:
    assert not drained(FakeLibrary(closes=True, ends_works=False))[0]


def test_a_work_on_an_open_connection_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastune.parallel.comm.group.DRAIN_S", 0.1)
    with pytest.raises(RuntimeError, match="did not end within 0.1 s"):
        drained(FakeLibrary(closes=False, ends_works=False))
