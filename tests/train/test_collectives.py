"""Named collectives, message by message: in any order, through losses, lost steps and joiners. No process, no clock."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from elastune.core.errors import UserError
from elastune.parallel.comm.channel import ChannelMessage
from elastune.parallel.comm.group import Group, GroupBroken
from elastune.train.collectives import CollectiveHandle, CollectiveLost, NamedCollectives


class Net:
    """The workers' messages; those of a view end with it."""

    def __init__(self) -> None:
        self.queues: dict[tuple[int, int], deque[tuple[int, ChannelMessage]]] = defaultdict(deque)
        self.view = 0


class Mail:
    def __init__(self, net: Net, members: Sequence[int], me: int) -> None:
        self.net, self.members, self.me, self.view = net, members, me, net.view

    def send(self, to: int, message: ChannelMessage) -> None:
        if self.view != self.net.view:
            raise GroupBroken("over")
        self.net.queues[self.view, self.members[to]].append((self.members.index(self.me), message))

    def next(self, *, wait: bool = True) -> tuple[int, ChannelMessage] | None:
        if self.view != self.net.view:
            raise GroupBroken("over")
        queue = self.net.queues[self.view, self.me]
        if queue:
            return queue.popleft()
        assert not wait, "this would wait for ever"
        return None


class One:
    """A worker."""

    def __init__(self, net: Net, number: int, members: tuple[int, ...]) -> None:
        self.worker, self.members, self.synchronised, self.attempt = number, members, True, 1
        self.group = Group(members.index(number), len(members))
        self.calls = NamedCollectives(
            self, lambda: self.attempt, self.fail, lambda group: Mail(net, self.members, self.worker), self.stand_in
        )
        self.passes: list[Callable[[], object]] = []  # that others make, and need this worker in

    def stand_in(self, until: Callable[[], bool]) -> None:
        while self.passes and not until():
            self.passes.pop(0)()

    def fail(self, error: GroupBroken) -> None:
        raise error

    def begin(self, kind: Any, name: str, value: Any, root: int = 0) -> CollectiveHandle[list[torch.Tensor]]:
        return CollectiveHandle(self.calls, self.calls.start(kind, name, torch.tensor(value), root), list)


@pytest.fixture
def net() -> Net:
    return Net()


def make_workers(net: Net, size: int) -> list[One]:
    return [One(net, number, tuple(range(size))) for number in range(size)]


def regroup(net: Net, workers: list[One], *, lost: bool = False) -> None:
    net.view += 1
    members = tuple(one.worker for one in workers)
    for one in workers:
        one.members = members
    for one in workers:
        one.calls.regroup(lost=lost)


def values(handle: CollectiveHandle[list[torch.Tensor]]) -> tuple[list[Any], tuple[int, ...], bool]:
    found = handle.wait()
    return [value.tolist() for value in found.value], found.workers, found.lost


def test_any_order_and_nobody_waits_in_a_call(net: Net) -> None:
    a, b = make_workers(net, 2)
    x, y = a.begin("allreduce", "x", [1.0, 2.0]), a.begin("gather", "y", [1])
    assert not x.done
    assert not y.done, "nobody else has called"
    other_y = b.begin("gather", "y", [2, 3])
    assert values(other_y) == ([[1], [2, 3]], (0, 1), False)
    assert y.done
    assert not x.done
    other_x = b.begin("allreduce", "x", [10.0, 20.0])
    for each in (x, other_x):
        assert values(each) == ([[11.0, 22.0]], (0, 1), False)
    assert values(y) == values(other_y)
    a.calls.look()
    b.calls.look()
    assert not a.calls._calls, "nothing is kept once all are done"


def test_the_nth_call_belongs_with_the_nth(net: Net) -> None:
    a, b = make_workers(net, 2)
    mine = [a.begin("allreduce", "x", [float(i)]) for i in range(3)]
    theirs = [b.begin("allreduce", "x", [10.0 * i]) for i in range(3)]
    assert [values(each)[0] for each in mine] == [values(each)[0] for each in theirs] == [[[0.0]], [[11.0]], [[22.0]]]


def test_who_waits_takes_part_in_what_keeps_another_from_its_call(net: Net) -> None:
    a, b = make_workers(net, 2)
    began: list[CollectiveHandle[list[torch.Tensor]]] = []
    mine = a.begin("allreduce", "x", [1.0])
    a.passes = [lambda: None, lambda: began.append(b.begin("allreduce", "x", [2.0])), lambda: None]
    assert not mine.done
    assert len(a.passes) == 2, "asking runs one"
    assert values(mine) == ([[3.0]], (0, 1), False)
    assert len(a.passes) == 1, "until the result is here"
    assert mine.done
    assert len(a.passes) == 1
    assert values(began[0]) == ([[3.0]], (0, 1), False)


def test_survivors_complete_what_a_dead_worker_gave_nothing_to(net: Net) -> None:
    a, b, _ = make_workers(net, 3)
    x, other = a.begin("allreduce", "x", [1.0]), b.begin("allreduce", "x", [2.0])
    regroup(net, [a, b])
    assert values(x) == values(other) == ([[3.0]], (0, 1), False)


def test_who_has_a_result_completes_the_others_by_it(net: Net) -> None:
    """Worker 0 had heard of the one that died, worker 1 had not."""
    a, b, c = make_workers(net, 3)
    handles = [one.begin("allreduce", "x", [10.0**one.worker]) for one in (a, b, c)]
    assert values(handles[0]) == ([[111.0]], (0, 1, 2), False)
    regroup(net, [a, b])
    assert values(handles[1]) == ([[111.0]], (0, 1, 2), False)


def test_what_becomes_of_a_result_here_does_not_reach_others(net: Net) -> None:
    a, b, c = make_workers(net, 3)
    handles = [one.begin("gather", "x", [one.worker]) for one in (a, b, c)]
    for value in handles[0].wait().value:
        value.fill_(-1)
    regroup(net, [a, b])
    assert values(handles[1])[0] == values(handles[0])[0] == [[0], [1], [2]]


def test_a_lost_step_drops_its_calls_and_they_are_made_again(net: Net) -> None:
    """Of three workers, one had not come to the call when the step was lost; an earlier step's call goes on."""
    a, b, _ = make_workers(net, 3)
    before = [one.begin("gather", "earlier", [one.worker]) for one in (a, b)]
    for one in (a, b):
        one.attempt = 2
    dropped = a.begin("allreduce", "x", [1.0])
    regroup(net, [a, b], lost=True)
    assert values(dropped) == ([[1.0]], (0,), True)
    for one in (a, b):
        one.attempt = 3
    again = [one.begin("allreduce", "x", [5.0]) for one in (a, b)]
    assert [values(each) for each in again] == [([[10.0]], (0, 1), False)] * 2
    assert [values(each) for each in before] == [([[0], [1]], (0, 1), False)] * 2


def test_outside_of_what_all_do_a_call_is_this_workers_own(net: Net) -> None:
    a, _ = make_workers(net, 2)
    a.synchronised = False
    assert values(a.begin("broadcast", "x", [4.0], root=1)) == ([[4.0]], (0,), True)
    assert not a.calls.state_dict()["counts"]


def test_a_joiner_is_in_the_calls_that_come_after_it(net: Net) -> None:
    a, b = make_workers(net, 2)
    x = [one.begin("allreduce", "x", [1.0]) for one in (a, b)]
    joiner = One(net, 5, (0, 1, 5))
    joiner.calls.load_state_dict(a.calls.state_dict())
    regroup(net, [a, b, joiner])
    assert [values(each) for each in x] == [([[2.0]], (0, 1), False)] * 2
    y = [one.begin("allreduce", "x", [2.0]) for one in (a, b, joiner)]
    assert [values(each) for each in y] == [([[6.0]], (0, 1, 5), False)] * 3


def test_a_broadcast_without_its_root(net: Net) -> None:
    """Where another one has what it sent it is completed; where nobody has, all are told."""
    a, b, c = make_workers(net, 3)
    got = [one.begin("broadcast", "x", [float(one.worker)], root=2) for one in (a, b, c)]
    assert values(got[0]) == ([[2.0]], (2,), False)
    never = [one.begin("broadcast", "y", [0.0], root=2) for one in (a, b)]
    regroup(net, [a, b])
    assert values(got[1]) == ([[2.0]], (2,), False)
    for each in never:
        with pytest.raises(CollectiveLost, match="'y'"):
            each.wait()


def test_a_broadcast_whose_root_is_another_worker_by_the_second_call(net: Net) -> None:
    """Worker 0 is gone between the calls, so ranks are other workers'. Nobody may take its own value for the root's:
    rank 1, who has called, is followed; of rank 0, who has not, all are told.
    """
    _, b, c = make_workers(net, 3)
    has, lacks = (b.begin("broadcast", name, [1.0], root=root) for name, root in (("x", 1), ("y", 0)))
    regroup(net, [b, c])
    follows, starts = (c.begin("broadcast", name, [2.0], root=root) for name, root in (("x", 1), ("y", 0)))
    assert values(has) == values(follows) == ([[1.0]], (1,), False)
    for each in (lacks, starts):
        with pytest.raises(CollectiveLost, match="'y'"):
            each.wait()


def test_the_last_worker_has_its_own(net: Net) -> None:
    a, _ = make_workers(net, 2)
    x = a.begin("allreduce", "x", [3.0])
    regroup(net, [a])
    assert values(x) == ([[3.0]], (0,), False)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (("allreduce", "x", [1.0]), ("allreduce", "x", [1.0, 2.0]), "one shape"),
        (("allreduce", "x", [1.0]), ("allreduce", "x", [1]), "one shape"),
        (("allreduce", "x", [1.0]), ("gather", "x", [1.0]), "the same collective"),
        (("broadcast", "x", [1.0], 0), ("broadcast", "x", [1.0], 1), "broadcast from rank [01] here, .* from rank"),
    ],
)
def test_what_does_not_fit_is_told_to_all(net: Net, one: Any, other: Any, words: str) -> None:
    a, b = make_workers(net, 2)
    for handle in (a.begin(*one), b.begin(*other)):
        with pytest.raises(UserError, match=words):
            handle.wait()


def test_what_cannot_be_sent_is_refused(net: Net) -> None:
    a, _ = make_workers(net, 2)
    for wrong in (
        ("", torch.zeros(1)),
        ("x" * 201, torch.zeros(1)),
        ("x", 3.0),
        ("x", torch.zeros(1, dtype=torch.cfloat)),
    ):
        with pytest.raises(UserError):
            a.calls.start("gather", *wrong)  # type: ignore[arg-type]
    for root in (2, -1, 0.0, True, "0", None):
        with pytest.raises(UserError, match="from 0 to 1"):
            a.begin("broadcast", "x", [1.0], root=root)  # type: ignore[arg-type]
    assert not a.calls.state_dict()["counts"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.float64])
def test_all_types_and_shapes_travel(net: Net, dtype: torch.dtype) -> None:
    a, b = make_workers(net, 2)
    tensors = [torch.tensor(1, dtype=dtype), torch.zeros(0, 3, dtype=dtype)]
    handles = [one.calls.start("gather", "x", tensors[one.worker]) for one in (a, b)]
    for one, call in zip((a, b), handles, strict=True):
        one.calls.wait(call)
        assert call.result is not None
        for found, wanted in zip(call.result.value, tensors, strict=True):
            assert torch.equal(found, wanted)
            assert found.dtype == dtype
