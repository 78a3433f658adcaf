"""Hooks that wait, fail, are dropped; and policies that talk to each other in any order."""

from __future__ import annotations

import gc
import json
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from elastune.core.errors import UserError
from elastune.core.signals import Decision
from elastune.policies.base import Policy
from elastune.policies.run import Limits, Run
from elastune.policies.runtime.handle import CollectiveFailed
from elastune.policies.runtime.host import HOOKS, MOST_FAILURES, Failure, PolicyHost, Proposal
from elastune.testing.policy_kit import LIMITS, Crowd, sit

HERE = __file__


class GNSPolicy(Policy):
    """The slide's."""

    def __init__(self) -> None:
        self.prev = 0.0

    def after_step(self, run: Run) -> None:
        gns = run.allreduce(run.grad_noise_scale(), "avg")
        if gns > self.prev:
            run.resize(run.size() + 1)
        self.prev = gns


class Does(Policy):
    """Whatever it is told, in ``after_step``; ``seen`` is for the test's eyes."""

    def __init__(self, body: Callable[[Does, Run], object], **state: Any) -> None:
        self._body = body
        self.log: list[Any] = []
        vars(self).update(state)

    def after_step(self, run: Run) -> None:
        self._body(self, run)

    def state(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_body"}


def hosts_of(*bodies: Callable[[Does, Run], object]) -> tuple[Crowd, list[Does]]:
    """A crowd whose worker r runs ``bodies[r]``."""
    policies = [Does(body) for body in bodies]
    return Crowd(len(bodies), lambda rank: [("does", policies[rank])]), policies


def alone(policy: Policy, hook: str = "after_step", host: PolicyHost | None = None) -> PolicyHost:
    """A host after one call of ``hook``."""
    host = host or PolicyHost([("it", policy)])
    host.call(hook, sit(), LIMITS, 0)
    return host


# -- hooks and what they ask for ---------------------------------------------------------------------------------------


def test_every_hook_is_called_with_the_run() -> None:
    class All(Policy):
        def __init__(self) -> None:
            self.log: list[Any] = []

    for hook in HOOKS:
        setattr(All, hook, lambda self, run, hook=hook: self.log.append([hook, run.step, run.rank()]))
    policy = All()
    host = PolicyHost([("all", policy)])
    for hook in HOOKS:
        host.call(hook, sit(step=7), LIMITS, 3)
    assert policy.log == [[hook, 7, 3] for hook in HOOKS]
    assert host.take_proposals() == []


def test_what_hooks_ask_for_comes_in_order_and_once() -> None:
    host = PolicyHost([(f"p{n}", Does(lambda self, run, n=n: run.set_batch_size(n))) for n in (64, 10, 20)])
    host.call("after_step", sit(), LIMITS, 0)
    found = [Proposal(f"p{n}", 100, Decision(batch_size=n), sit(), {"log": []}) for n in (10, 20)]
    assert host.take_proposals() == found, "that of the first asks for what is there"
    assert host.take_proposals() == []


def test_nothing_can_be_changed_after_training() -> None:
    class Late(Policy):
        def after_train(self, run: Run) -> None:
            run.resize(3)

    host = alone(Late(), "after_train")
    assert host.take_proposals() == []
    assert "after training nothing can be changed" in host.take_failures()[0].detail


def test_a_policy_that_does_not_wait_is_cheap() -> None:
    """Under 20 microseconds on a quiet machine; the bound is for a busy one."""

    class Plain(Policy):
        def __init__(self) -> None:
            self.prev, self.most, self.seen = 0.0, 2048, [1, 2]

        def after_step(self, run: Run) -> None:
            self.prev = run.grad_noise_scale()

    host, snapshot = PolicyHost([("plain", Plain()) for _ in range(10)]), sit({"noise_scale": 4.0})
    times = []
    for _ in range(200):
        start = time.perf_counter()
        host.call("after_step", snapshot, LIMITS, 0)
        times.append((time.perf_counter() - start) / 10)
    assert min(times) < 60e-6


def test_calls_leave_no_cycles_for_the_garbage_collector() -> None:
    seen: list[weakref.ref[Any]] = []

    class Token:
        pass

    def body(self: Does, run: Run) -> None:
        token = Token()
        seen.append(weakref.ref(token))
        run.allreduce(1.0)

    gc.disable()
    try:
        crowd, _ = hosts_of(body)
        crowd.step()
        crowd.exchange()
        assert not crowd.waiting
        assert seen[0]() is None
    finally:
        gc.enable()


# -- collectives -------------------------------------------------------------------------------------------------------


def test_the_slides_policy() -> None:
    crowd = Crowd(2, lambda rank: [("gns", GNSPolicy())], limits=Limits(1, 3))
    for gns in (5.0, 4.0, 3.0):
        crowd.step({"noise_scale": gns})
    assert crowd.decisions == [(3, Decision(workers=3))], "seen after 1, resumed after 2, applied after 3"
    assert len(crowd.hosts) == 3
    assert crowd.failures() == []
    crowd.step({"noise_scale": 2.0})
    assert [host.state()["policies"][0]["state"] for host in crowd.hosts] == [{"prev": 3.0}] * 3


def test_a_hook_waits_while_training_goes_on() -> None:
    def body(self: Does, run: Run) -> None:
        self.log.append([run.step, run.allreduce(run.rank() + 1.0, "sum"), run.step])

    crowd, policies = hosts_of(body, body)
    crowd.call("after_step")
    assert [policy.log for policy in policies] == [[], []]
    assert all(host.waiting for host in crowd.hosts)
    crowd.call("after_step")  # skipped: the hook before waits
    crowd.exchange()
    assert [policy.log for policy in policies] == [[[0, 3.0, 0]]] * 2
    assert not crowd.waiting


def test_all_collectives() -> None:
    def body(self: Does, run: Run) -> None:
        rank = float(run.rank())
        self.log.append(run.allreduce([rank, 1.0], "sum"))
        self.log.append(run.broadcast(rank, root=2))
        self.log.append(run.allgather([rank] * run.rank()))
        self.log.append(run.allgather(rank))

    crowd, policies = hosts_of(body, body, body)
    crowd.call("after_step")
    for _ in range(4):
        crowd.exchange()
    assert not crowd.waiting
    assert [p.log for p in policies] == [[[3.0, 3.0], 2.0, [[], [1.0], [2.0, 2.0]], [0.0, 1.0, 2.0]]] * 3


def test_one_exchange_brings_all_that_were_begun_in_any_order() -> None:
    def body(self: Does, run: Run) -> None:
        names = "abc" if run.rank() else "cab"
        begun = {name: run.allreduce_async(float(ord(name) * (run.rank() + 1)), "sum", name) for name in names}
        self.log.append([begun[name].result() for name in (sorted(names) if run.rank() else reversed("abc"))])

    crowd, policies = hosts_of(body, body)
    crowd.call("after_step")
    crowd.exchange()
    assert policies[1].log == [[291.0, 294.0, 297.0]]
    assert policies[0].log == [[297.0, 294.0, 291.0]]


def test_policies_that_run_in_another_order_on_each_worker_meet() -> None:
    class Asks(Policy):
        def __init__(self, value: float) -> None:
            self.value = value

        def after_step(self, run: Run) -> None:
            self.value = run.allreduce(self.value + run.rank(), "sum", name="x")

    first, second = [Asks(1.0), Asks(1.0)], [Asks(10.0), Asks(10.0)]
    hosts = [PolicyHost([("a", first[rank]), ("b", second[rank])]) for rank in range(2)]
    for rank, host in enumerate(hosts):
        for seat in hosts[rank]._seats if rank == 0 else reversed(hosts[rank]._seats):
            host._by_hook["after_step"] = [seat]
            host.call("after_step", sit(), LIMITS, rank)
    rows = [host.offer() for host in hosts]
    for rank, host in enumerate(hosts):
        host.deliver(rows, rank)
    assert [policy.value for policy in (*first, *second)] == [3.0, 3.0, 21.0, 21.0]


def test_blocking_calls_in_crossed_orders_fail_and_nothing_waits_for_ever() -> None:
    def body(self: Does, run: Run) -> None:
        run.resize(3)
        for name in ("xy", "yx")[run.rank()]:
            self.log.append(run.allreduce(1.0, name=name))

    crowd, policies = hosts_of(body, body)
    crowd.call("after_step")
    crowd.exchange()
    assert not crowd.waiting
    details = [failure.detail for _, failure in crowd.failures()]
    assert "CollectiveFailed: avg 'x': not called on rank 1, or only behind another one" in details[0]
    assert "CollectiveFailed: avg 'y': not called on rank 0, or only behind another one" in details[1]
    assert [policy.log for policy in policies] == [[], []]
    assert [host.take_proposals() for host in crowd.hosts] == [[], []]


def test_a_hook_may_live_with_a_collective_that_failed() -> None:
    def body(self: Does, run: Run) -> None:
        if run.rank() == 0:
            try:
                run.allreduce(1.0)
            except CollectiveFailed as error:
                self.log.append(str(error))
        run.resize(3)

    crowd, policies = hosts_of(body, body)
    crowd.call("after_step")
    assert [len(host.take_proposals()) for host in crowd.hosts] == [0, 1]
    crowd.exchange()
    assert len(policies[0].log) == 1
    assert policies[0].log[0].startswith("avg 'does/avg/0': not called on rank 1")
    assert [len(host.take_proposals()) for host in crowd.hosts] == [1, 0]
    assert crowd.failures() == []


def test_what_one_hook_left_behind_is_not_taken_for_anothers() -> None:
    """Rank 0 lacks the collective after step 0; that of its hook after step 1 must not meet it."""

    def body(self: Does, run: Run) -> None:
        if run.rank() or run.step:
            self.log.append([run.step, run.allreduce(float(run.step), "sum")])

    crowd, policies = hosts_of(body, body)
    crowd.call("after_step")
    for _ in range(4):
        crowd.step()
    assert [policy.log for policy in policies] == [[[1, 2.0], [2, 4.0], [3, 6.0]]] * 2


def test_a_hook_ends_when_all_its_collectives_have() -> None:
    def body(self: Does, run: Run) -> None:
        run.allreduce_async(1.0, name="a")
        if run.rank() == 0:
            run.allreduce_async(1.0, name="nobody else")
        run.resize(3)

    crowd, _ = hosts_of(body, body)
    crowd.call("after_step")
    assert [host.take_proposals() for host in crowd.hosts] == [[], []]
    crowd.exchange()
    assert [host.waiting for host in crowd.hosts] == [True, False]
    crowd.exchange()
    failures = crowd.failures()
    assert [rank for rank, _ in failures] == [0]
    assert "'nobody else'" in failures[0][1].detail
    assert [len(host.take_proposals()) for host in crowd.hosts] == [0, 1]


def test_a_failure_that_nobody_asked_for_is_told_even_if_it_came_with_the_rest() -> None:
    def body(self: Does, run: Run) -> None:
        run.allreduce_async(1.0, name="good")
        run.allreduce_async([1.0] * (run.rank() + 1), name="bad")

    crowd, _ = hosts_of(body, body)
    crowd.call("after_step")
    crowd.exchange()
    assert not crowd.waiting
    assert ["'bad'" in failure.detail for _, failure in crowd.failures()] == [True, True]


def test_a_name_is_used_once_at_a_time() -> None:
    def body(self: Does, run: Run) -> None:
        for _ in range(3):
            self.log.append(run.allreduce(1.0, "sum", name="x"))
        run.allreduce_async(1.0, name="x")
        run.allreduce_async(1.0, name="x")

    crowd, _ = hosts_of(body, body)
    crowd.call("after_step")
    for _ in range(3):
        crowd.exchange()
    assert not crowd.waiting
    assert "is under way (got x)" in crowd.failures()[0][1].detail


def test_a_worker_without_the_policy_is_named() -> None:
    crowd = Crowd(3, lambda rank: [("gns", GNSPolicy())] if rank != 1 else [])
    for _ in range(2):
        crowd.step({"noise_scale": 1.0})
    assert [(rank, "rank 1" in failure.detail) for rank, failure in crowd.failures()] == [(0, True), (2, True)]


@pytest.mark.parametrize("rows", [[[1.0]], [[1.0], [1.0]], [[], []]])
def test_rubbish_rows_are_refused(rows: list[list[float]]) -> None:
    host = alone(GNSPolicy())
    with pytest.raises(ValueError, match=r"a row of collectives|1 rows for hooks among 2 workers|no row of rank"):
        host.deliver(rows, 0 if rows[0] else 2)
    assert host.waiting


def test_collectives_are_for_the_hooks_own_thread() -> None:
    caught: list[Exception] = []

    def elsewhere(run: Run) -> None:
        try:
            run.allreduce(1.0)
        except UserError as error:
            caught.append(error)

    def body(self: Does, run: Run) -> None:
        thread = threading.Thread(target=elsewhere, args=(run,))
        thread.start()
        thread.join()

    assert alone(Does(body)).take_failures() == []
    assert "collectives are for the hook itself" in str(caught[0])


# -- hooks that raise --------------------------------------------------------------------------------------------------


def test_a_hook_that_raises_changes_nothing() -> None:
    def body(self: Does, run: Run) -> None:
        run.resize(3)
        self.log.append(run.step)
        self.new = 1
        raise TypeError("no\nsuch thing")

    class Fails(Policy):
        def __init__(self) -> None:
            self.log: list[int] = [1]

        after_step = body

    policy = Fails()
    host = alone(policy)
    assert vars(policy) == {"log": [1]}
    assert host.take_proposals() == []
    (failure,) = host.take_failures()
    line = body.__code__.co_firstlineno + 4
    assert failure == Failure("it", "after_step", 100, f"TypeError: no such thing ({HERE}:{line})")
    assert host.take_failures() == []


def test_an_error_is_placed_in_the_users_file() -> None:
    detail = alone(Does(lambda self, run: run.resize(99))).take_failures()[0].detail
    assert detail.startswith("UserError: this run may have from 1 to 8 workers (got 99): ask for what")
    assert f"{HERE}:" in detail
    deep = alone(Does(lambda self, run: json.loads("{"))).take_failures()[0].detail
    assert f"{HERE}:" in deep, "not in the library that it called"


def test_after_three_failures_in_a_row_a_policy_is_off() -> None:
    fails = [True, True, False, True, True, True, True, False]
    host = PolicyHost(
        [("it", Does(lambda self, run: 1 / (not fails[run.step]))), ("other", Does(lambda self, run: None))]
    )
    off = []
    for step in range(len(fails)):
        host.call("after_step", sit(step=step), LIMITS, 0)
        off.append([failure.off for failure in host.take_failures()])
    assert off == [[False], [False], [], [False], [False], [True], [], []]
    assert MOST_FAILURES == 3
    again = PolicyHost([("it", Does(lambda self, run: run.stop()))])
    again.load(json.loads(json.dumps(host.state())))
    again.call("after_step", sit(), LIMITS, 0)
    assert again.take_proposals() == [], "a joiner's is off, too"
    again.load(host.state(), pardon=True)
    again.call("after_step", sit(), LIMITS, 0)
    assert len(again.take_proposals()) == 1


def test_the_others_go_on_without_one_that_raised() -> None:
    def body(self: Does, run: Run) -> None:
        if run.step == 0 and run.rank() == 1:
            raise RuntimeError("on this rank only")
        self.log.append([run.step, run.allreduce(1.0, "sum")])

    crowd, policies = hosts_of(body, body)
    crowd.call("after_step")
    for _ in range(8):
        crowd.step()
    assert [(rank, failure.step) for rank, failure in crowd.failures()] == [(0, 0), (1, 0)]
    assert policies[0].log == policies[1].log == [[step, 2.0] for step in range(1, 8)]


@pytest.mark.parametrize("wait", [False, True])
def test_an_interrupt_passes_through(wait: bool) -> None:
    def body(self: Does, run: Run) -> None:
        self.log.append(1)
        if wait:
            run.allreduce(1.0)
        raise KeyboardInterrupt

    policy = Does(body)
    host = PolicyHost([("it", policy)])
    with pytest.raises(KeyboardInterrupt):
        host.call("after_step", sit(workers=1), LIMITS, 0)
        host.deliver([host.offer()], 0)
    assert not host.waiting
    assert policy.log == []
    assert host.take_failures() == []


# -- hooks that are dropped --------------------------------------------------------------------------------------------


def test_cancel_drops_hooks_that_wait_as_if_they_had_never_begun() -> None:
    cleared: list[str] = []

    def body(self: Does, run: Run) -> None:
        self.log.append("begun")
        run.resize(3)
        try:
            run.allreduce(1.0)
        finally:
            cleared.append("finally")
        self.log.append("not reached")

    policy = Does(body)
    host = alone(policy)
    assert policy.log == ["begun"]
    assert host.state()["policies"][0]["state"] == {"log": []}, "that from before the hook"
    host.cancel()
    assert cleared == ["finally"]
    assert policy.log == []
    assert not host.waiting
    assert host.offer() == []
    assert (host.take_proposals(), host.take_failures()) == ([], [])
    alone(policy, host=host)
    assert host.waiting, "it is called again"


def test_a_hook_that_will_not_end_is_ended() -> None:
    def body(self: Does, run: Run) -> None:
        for _ in range(5):
            try:
                run.allreduce(1.0)
            except BaseException:  # noqa: BLE001  as a user might
                self.log.append("caught")

    policy = Does(body)
    host = alone(policy)
    host.cancel()
    assert not host.waiting
    assert policy.log == []


def test_an_error_while_clearing_up_is_reported() -> None:
    def body(self: Does, run: Run) -> None:
        try:
            run.allreduce(1.0)
        finally:
            self.log.append(1 / 0)

    host = alone(Does(body))
    host.cancel()
    assert not host.waiting
    assert "ZeroDivisionError" in host.take_failures()[0].detail


# -- state -------------------------------------------------------------------------------------------------------------


class Keeps(Policy):
    def __init__(self, at: tuple[int, ...] = (30, 60)) -> None:
        self.at = at
        self.seen: dict[str, Any] = {}

    def after_step(self, run: Run) -> None:
        self.seen[str(run.step)] = [run.lr(), None, math.inf]


def test_state_goes_to_another_host_as_json() -> None:
    host = alone(Keeps())
    other = PolicyHost([("new", Keeps()), ("it", Keeps((1,)))])
    other.load(json.loads(json.dumps(host.state())))
    new, it = (seat.policy for seat in other._seats)
    assert vars(it) == {"at": (30, 60), "seen": {"100": [0.1, None, math.inf]}}, "a tuple is one again"
    assert vars(new) == {"at": (30, 60), "seen": {}}, "what is not told of stays"


def test_policies_of_one_name_keep_their_order() -> None:
    first, second = Keeps((1,)), Keeps((2,))
    other = PolicyHost([("x", Keeps()), ("x", Keeps())])
    other.load(PolicyHost([("x", first), ("x", second)]).state())
    assert [seat.policy.at for seat in other._seats] == [(1,), (2,)]


def test_a_state_is_a_copy() -> None:
    policy = Keeps()
    host = alone(policy)
    host.state()["policies"][0]["state"]["seen"].clear()
    policy.seen["100"].append(1)
    assert host.state()["policies"][0]["state"]["seen"] == {"100": [0.1, None, math.inf]}


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"x": object()}, "attribute x must be JSON"),
        ({"x": {"y": [1, {2}]}}, r"attribute x\.y\[1\] must be JSON"),
        ({"x": {1: 2}}, r"attribute x\[1\] must be JSON"),
        ({"x": np.zeros(2)}, "attribute x must be JSON"),
        ({"x": 1j}, "attribute x must be JSON"),
        (None, "must give a dict"),
    ],
)
def test_state_that_is_not_json_is_refused_at_the_start(state: Any, where: str) -> None:
    class Odd(Policy):
        def state(self) -> dict[str, Any]:
            found: dict[str, Any] = state
            return found

    with pytest.raises(UserError, match=f"policy odd.*{where}|policy odd {where}"):
        PolicyHost([("odd", Odd())])


def test_state_that_becomes_what_cannot_travel_is_the_hooks_failure() -> None:
    class Stores(Policy):
        def after_step(self, run: Run) -> None:
            self.run = run

    policy = Stores()
    host = alone(policy)
    assert "policy it: attribute run must be JSON" in host.take_failures()[0].detail
    assert vars(policy) == {}


def test_numbers_of_numpy_become_plain_ones() -> None:
    host = PolicyHost([("it", Keeps((np.float64(1.5),)))])  # type: ignore[arg-type]
    assert type(host.state()["policies"][0]["state"]["at"][0]) is float


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"policies": 1},
        {"policies": [{"name": "it"}]},
        {"policies": [{"name": "it", "state": [], "failures": {}, "off": False}]},
        {"policies": [{"name": "it", "state": {}, "failures": {"nohook": 1}, "off": False}]},
    ],
)
def test_rubbish_state_is_refused(state: Any) -> None:
    with pytest.raises(UserError, match="no state of policies"):
        PolicyHost([("it", Keeps())]).load(state)


def test_a_policy_that_cannot_load_says_so() -> None:
    class Picky(Keeps):
        def load(self, state: dict[str, Any]) -> None:
            raise KeyError("old")

    with pytest.raises(UserError, match="policy it cannot take over its state .got KeyError: 'old'"):
        PolicyHost([("it", Picky())]).load(PolicyHost([("it", Keeps())]).state())


def test_a_policy_whose_load_fails_behind_a_failure_is_off() -> None:
    class Picky(Policy):
        def after_step(self, run: Run) -> None:
            raise ValueError("no")

        def load(self, state: dict[str, Any]) -> None:
            raise KeyError("old")

    host = alone(Picky())
    assert [(failure.hook, failure.off) for failure in host.take_failures()] == [("after_step", False), ("load", True)]
    alone(Picky(), host=host)
    assert host.take_failures() == []
