"""Hooks that wait, fail, are dropped; and policies that talk to each other in any order."""

from __future__ import annotations

import gc
import itertools
import json
import math
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from elastune.adapt.policies.base import HOOKS, Hook, Limits, Policy, Run
from elastune.adapt.policies.collectives import CollectiveFailed
from elastune.adapt.policies.host import MOST_FAILURES, Failure, PolicyEntry, PolicyHost, Proposal
from elastune.core.decisions import Decision
from elastune.core.errors import UserError
from elastune.testing.kits.policy import LIMITS, SimulatedWorkers, make_snapshot

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


Body = Callable[[Any, Run], object]


def does(body: Body) -> Policy:
    """A policy whose ``after_step`` is ``body``, with a log."""

    class Does(Policy):
        def __init__(self) -> None:
            self.log: list[Any] = []

        after_step = body

    return Does()


def crowd_of(*bodies: Body) -> SimulatedWorkers:
    """A crowd whose worker r runs ``bodies[r]``."""
    return SimulatedWorkers(len(bodies), lambda rank: [PolicyEntry("does", does(bodies[rank]))])


def log_of(host: PolicyHost) -> list[Any]:
    """The first policy's log."""
    result: list[Any] = host.to_json()[0]["state"].get("log", [])
    return result


def logs(crowd: SimulatedWorkers) -> list[list[Any]]:
    return [log_of(host) for host in crowd.hosts]


def alone(policy: Policy, hook: Hook = "after_step", host: PolicyHost | None = None) -> PolicyHost:
    """A host after one call of ``hook``."""
    host = host or PolicyHost([PolicyEntry("it", policy)])
    host.call(hook, make_snapshot(), LIMITS, 0)
    return host


# -- hooks and what they ask for ---------------------------------------------------------------------------------------


def test_every_hook_is_called_with_the_run() -> None:
    class All(Policy):
        def __init__(self) -> None:
            self.log: list[Any] = []

    for hook in HOOKS:
        setattr(All, hook, lambda self, run, hook=hook: self.log.append([hook, run.step, run.rank()]))
    host = PolicyHost([PolicyEntry("all", All())])
    for hook in HOOKS:
        host.call(hook, make_snapshot(step=7), LIMITS, 3)
    assert log_of(host) == [[hook, 7, 3] for hook in HOOKS]
    assert host.drain_proposals() == []


def test_what_hooks_ask_for_comes_in_order_and_once() -> None:
    host = PolicyHost([PolicyEntry(f"p{n}", does(lambda self, run, n=n: run.set_batch_size(n))) for n in (64, 10, 20)])
    host.call("after_step", make_snapshot(), LIMITS, 0)
    before = {"state": {}, "guards": {}, "failures": {}, "off": False}
    results = [Proposal(f"p{n}", 100, Decision(batch_size=n), make_snapshot(), before) for n in (10, 20)]
    assert host.drain_proposals() == results, "that of the first asks for what is there"
    assert host.drain_proposals() == []


def test_nothing_can_be_changed_after_training() -> None:
    class Late(Policy):
        def after_train(self, run: Run) -> None:
            run.resize(3)

    host = alone(Late(), "after_train")
    assert host.drain_proposals() == []
    assert "after training nothing can be changed" in host.drain_failures()[0].detail


def test_a_policy_that_does_not_wait_is_cheap() -> None:
    """Under 20 microseconds on a quiet machine; the bound is for a busy one."""

    class Plain(Policy):
        def __init__(self) -> None:
            self.prev, self.most, self.seen = 0.0, 2048, [1, 2]

        def after_step(self, run: Run) -> None:
            self.prev = run.grad_noise_scale()

    host, snapshot = PolicyHost([PolicyEntry("plain", Plain()) for _ in range(10)]), make_snapshot({"noise_scale": 4.0})
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

    def body(self: Any, run: Run) -> None:
        token = Token()
        seen.append(weakref.ref(token))
        run.allreduce(1.0)

    gc.disable()
    try:
        crowd = crowd_of(body)
        crowd.step()
        crowd.exchange()
        assert not crowd.waiting
        assert seen[0]() is None
    finally:
        gc.enable()


# -- collectives -------------------------------------------------------------------------------------------------------


def test_the_slides_policy() -> None:
    crowd = SimulatedWorkers(2, lambda rank: [PolicyEntry("gns", GNSPolicy())], limits=Limits(1, 3))
    for gns in (5.0, 4.0, 3.0):
        crowd.step({"noise_scale": gns})
    assert crowd.decisions == [(3, Decision(workers=3))], "seen after 1, run again after 2, applied after 3"
    assert len(crowd.hosts) == 3
    assert crowd.failures() == []
    crowd.step({"noise_scale": 2.0})
    assert [host.to_json()[0]["state"] for host in crowd.hosts] == [{"prev": 3.0}] * 3


def test_a_hook_waits_while_training_goes_on() -> None:
    def body(self: Any, run: Run) -> None:
        self.log.append([run.step, run.allreduce(run.rank() + 1.0, "sum"), run.step])

    crowd = crowd_of(body, body)
    crowd.call("after_step")
    assert logs(crowd) == [[], []]
    assert all(host.waiting for host in crowd.hosts)
    crowd.call("after_step")  # skipped: the hook before waits
    crowd.exchange()
    assert logs(crowd) == [[[0, 3.0, 0]]] * 2
    assert not crowd.waiting


def test_all_collectives() -> None:
    def body(self: Any, run: Run) -> None:
        rank = float(run.rank())
        self.log.append(run.allreduce([rank, 1.0], "sum"))
        self.log.append(run.broadcast(rank, root=2))
        self.log.append(run.allgather([rank] * run.rank()))
        self.log.append(run.allgather(rank))

    crowd = crowd_of(body, body, body)
    crowd.call("after_step")
    for _ in range(4):
        crowd.exchange()
    assert not crowd.waiting
    assert logs(crowd) == [[[3.0, 3.0], 2.0, [[], [1.0], [2.0, 2.0]], [0.0, 1.0, 2.0]]] * 3


def test_one_exchange_brings_all_that_were_begun_in_any_order() -> None:
    def body(self: Any, run: Run) -> None:
        names = "abc" if run.rank() else "cab"
        begun = {name: run.allreduce_async(float(ord(name) * (run.rank() + 1)), "sum", name) for name in names}
        self.log.append([begun[name].result() for name in (sorted(names) if run.rank() else reversed("abc"))])

    crowd = crowd_of(body, body)
    crowd.call("after_step")
    crowd.exchange()
    assert logs(crowd) == [[[297.0, 294.0, 291.0]], [[291.0, 294.0, 297.0]]]


def test_policies_that_run_in_another_order_on_each_worker_meet() -> None:
    class Asks(Policy):
        def __init__(self, value: float) -> None:
            self.value = value

        def after_step(self, run: Run) -> None:
            self.value = run.allreduce(self.value + run.rank(), "sum", name="x")

    hosts = [PolicyHost([PolicyEntry("a", Asks(1.0)), PolicyEntry("b", Asks(10.0))]) for _ in range(2)]
    for rank, host in enumerate(hosts):
        for slot in host._slots if rank == 0 else reversed(host._slots):
            host._by_hook["after_step"] = [slot]
            host.call("after_step", make_snapshot(), LIMITS, rank)
    rows = [host.offer() for host in hosts]
    for rank, host in enumerate(hosts):
        host.deliver(rows, rank)
    assert [[entry["state"]["value"] for entry in host.to_json()] for host in hosts] == [[3.0, 21.0]] * 2


def test_blocking_calls_in_crossed_orders_fail_and_nothing_waits_for_ever() -> None:
    def body(self: Any, run: Run) -> None:
        run.resize(3)
        for name in ("xy", "yx")[run.rank()]:
            self.log.append(run.allreduce(1.0, name=name))

    crowd = crowd_of(body, body)
    crowd.call("after_step")
    crowd.exchange()
    assert not crowd.waiting
    details = [failure.detail for _, failure in crowd.failures()]
    assert "CollectiveFailed: avg 'x': not called on rank 1, or only after another one" in details[0]
    assert "CollectiveFailed: avg 'y': not called on rank 0, or only after another one" in details[1]
    assert logs(crowd) == [[], []]
    assert [host.drain_proposals() for host in crowd.hosts] == [[], []]


def test_a_hook_may_live_with_a_collective_that_failed() -> None:
    def body(self: Any, run: Run) -> None:
        if run.rank() == 0:
            try:
                run.allreduce(1.0)
            except CollectiveFailed as error:
                self.log.append(str(error))
        run.resize(3)

    crowd = crowd_of(body, body)
    crowd.call("after_step")
    assert [len(host.drain_proposals()) for host in crowd.hosts] == [0, 1]
    crowd.exchange()
    assert len(logs(crowd)[0]) == 1
    assert logs(crowd)[0][0].startswith("avg 'does/avg/0': not called on rank 1")
    assert [len(host.drain_proposals()) for host in crowd.hosts] == [1, 0]
    assert crowd.failures() == []


def test_what_one_hook_left_behind_is_not_taken_for_anothers() -> None:
    """Rank 0 lacks the collective after step 0; that of its hook after step 1 must not meet it."""

    def body(self: Any, run: Run) -> None:
        if run.rank() or run.step:
            self.log.append([run.step, run.allreduce(float(run.step), "sum")])

    crowd = crowd_of(body, body)
    crowd.call("after_step")
    for _ in range(4):
        crowd.step()
    assert logs(crowd) == [[[1, 2.0], [2, 4.0], [3, 6.0]]] * 2


def test_a_hook_ends_when_all_its_collectives_have() -> None:
    def body(self: Any, run: Run) -> None:
        run.allreduce_async(1.0, name="a")
        if run.rank() == 0:
            run.allreduce_async(1.0, name="nobody else")
        run.resize(3)

    crowd = crowd_of(body, body)
    crowd.call("after_step")
    assert [host.drain_proposals() for host in crowd.hosts] == [[], []]
    crowd.exchange()
    assert [host.waiting for host in crowd.hosts] == [True, False]
    crowd.exchange()
    failures = crowd.failures()
    assert [rank for rank, _ in failures] == [0]
    assert "'nobody else'" in failures[0][1].detail
    assert [len(host.drain_proposals()) for host in crowd.hosts] == [0, 1]


def test_a_failure_that_nobody_asked_for_is_told_even_if_it_came_with_the_rest() -> None:
    def body(self: Any, run: Run) -> None:
        run.allreduce_async(1.0, name="good")
        run.allreduce_async([1.0] * (run.rank() + 1), name="bad")

    crowd = crowd_of(body, body)
    crowd.call("after_step")
    crowd.exchange()
    assert not crowd.waiting
    assert ["'bad'" in failure.detail for _, failure in crowd.failures()] == [True, True]


def test_a_name_is_used_once_at_a_time() -> None:
    def body(self: Any, run: Run) -> None:
        for _ in range(3):
            self.log.append(run.allreduce(1.0, "sum", name="x"))
        run.allreduce_async(1.0, name="x")
        run.allreduce_async(1.0, name="x")

    crowd = crowd_of(body, body)
    crowd.call("after_step")
    for _ in range(3):
        crowd.exchange()
    assert not crowd.waiting
    assert "needs a name of its own until its result (got x)" in crowd.failures()[0][1].detail


def test_a_worker_without_the_policy_is_named() -> None:
    crowd = SimulatedWorkers(3, lambda rank: [PolicyEntry("gns", GNSPolicy())] if rank != 1 else [])
    for _ in range(2):
        crowd.step({"noise_scale": 1.0})
    assert [(rank, "rank 1" in failure.detail) for rank, failure in crowd.failures()] == [(0, True), (2, True)]


@pytest.mark.parametrize("rows", [[b"1"], [b"1", b"1"], [b"", b""]])
def test_rubbish_rows_are_refused(rows: list[bytes]) -> None:
    host = alone(GNSPolicy())
    with pytest.raises(ValueError, match=r"validation error|1 rows for hooks among 2 workers|no row of rank"):
        host.deliver(rows, 0 if rows[0] else 2)
    assert host.waiting


def test_a_hook_that_asks_for_other_things_each_time_it_is_run_is_ended() -> None:
    asked = itertools.count()

    def body(self: Any, run: Run) -> None:
        run.allreduce(1.0, name=f"c{next(asked)}")

    crowd = crowd_of(body, body)
    crowd.call("after_step")
    crowd.exchange()
    assert not crowd.waiting
    assert all("must call the same collectives" in failure.detail for _, failure in crowd.failures())


def test_what_a_hook_does_to_a_result_is_not_there_when_it_is_run_again() -> None:
    def body(self: Any, run: Run) -> None:
        ranks = run.allgather(float(run.rank()))
        ranks.append(9.0)
        self.log.append([*ranks, run.allreduce(len(ranks), "sum")])

    crowd = crowd_of(body, body)
    crowd.call("after_step")
    for _ in range(2):
        crowd.exchange()
    assert logs(crowd) == [[[0.0, 1.0, 9.0, 6.0]]] * 2


# -- hooks that raise --------------------------------------------------------------------------------------------------


def test_a_hook_that_raises_changes_nothing() -> None:
    def body(self: Any, run: Run) -> None:
        run.resize(3)
        self.log.append(run.step)
        self.new = 1
        raise TypeError("no\nsuch thing")

    class Fails(Policy):
        def __init__(self) -> None:
            self.log: list[int] = [1]

        after_step = body

    host = alone(Fails())
    assert host.to_json()[0]["state"] == {}
    assert host.drain_proposals() == []
    (failure,) = host.drain_failures()
    line = body.__code__.co_firstlineno + 4
    assert failure == Failure("it", "after_step", 100, f"TypeError: no such thing ({HERE}:{line})")
    assert host.drain_failures() == []


def test_an_error_is_placed_in_the_users_file() -> None:
    detail = alone(does(lambda self, run: run.replace(9))).drain_failures()[0].detail
    assert detail.startswith("UserError: there are ranks 0 to 1 (got 9): ask")
    assert f"{HERE}:" in detail
    deep = alone(does(lambda self, run: json.loads("{"))).drain_failures()[0].detail
    assert f"{HERE}:" in deep, "not in the library that it called"


def test_after_three_failures_in_a_row_a_policy_is_off() -> None:
    fails = [True, True, False, True, True, True, True, False]
    host = PolicyHost(
        [
            PolicyEntry("it", does(lambda self, run: 1 / (not fails[run.step]))),
            PolicyEntry("other", does(lambda self, run: None)),
        ]
    )
    off = []
    for step in range(len(fails)):
        host.call("after_step", make_snapshot(step=step), LIMITS, 0)
        off.append([failure.off for failure in host.drain_failures()])
    assert off == [[False], [False], [], [False], [False], [True], [], []]
    assert MOST_FAILURES == 3
    again = PolicyHost([PolicyEntry("it", does(lambda self, run: run.stop()))])
    again.load(json.loads(json.dumps(host.to_json())))
    again.call("after_step", make_snapshot(), LIMITS, 0)
    assert again.drain_proposals() == [], "a joiner's is off, too"
    again.load(host.to_json(), pardon=True)
    again.call("after_step", make_snapshot(), LIMITS, 0)
    assert len(again.drain_proposals()) == 1


@pytest.mark.parametrize(
    ("ask", "expected_count"), [(lambda run: run.resize(99), 0), (lambda run: run.set_batch_size(10**6), 1)]
)
def test_what_cannot_be_is_said_and_never_switches_a_policy_off(
    ask: Callable[[Run], None], expected_count: int
) -> None:
    host = PolicyHost([PolicyEntry("it", does(lambda self, run: ask(run)))])
    for step in range(3 * MOST_FAILURES):
        host.call(
            "after_step", make_snapshot(step=step, workers=2), replace(LIMITS, low=2, high=2, longest_batch=100), 0
        )
    assert [failure.off for failure in host.drain_failures()] == [False] * expected_count, "a rule is told once"
    assert {refused.decision for refused in host.drain_refusals()} == (
        set() if expected_count else {Decision(workers=99)}
    )
    assert host.drain_proposals() == []
    assert not host.to_json()[0]["off"]


def test_the_others_go_on_without_one_that_raised() -> None:
    def body(self: Any, run: Run) -> None:
        if run.step == 0 and run.rank() == 1:
            raise RuntimeError("on this rank only")
        self.log.append([run.step, run.allreduce(1.0, "sum")])

    crowd = crowd_of(body, body)
    crowd.call("after_step")
    for _ in range(8):
        crowd.step()
    assert [(rank, failure.step) for rank, failure in crowd.failures()] == [(0, 0), (1, 0)]
    assert logs(crowd) == [[[step, 2.0] for step in range(1, 8)]] * 2


@pytest.mark.parametrize("wait", [False, True])
def test_an_interrupt_passes_through(wait: bool) -> None:
    def body(self: Any, run: Run) -> None:
        self.log.append(1)
        if wait:
            run.allreduce(1.0)
        raise KeyboardInterrupt

    host = PolicyHost([PolicyEntry("it", does(body))])
    with pytest.raises(KeyboardInterrupt):
        host.call("after_step", make_snapshot(workers=1), LIMITS, 0)
        host.deliver([host.offer()], 0)
    assert not host.waiting
    assert log_of(host) == []
    assert host.drain_failures() == []


# -- hooks that are dropped --------------------------------------------------------------------------------------------


def test_a_hook_that_waits_leaves_no_trace_and_is_dropped_by_another_state() -> None:
    cleared: list[str] = []

    def body(self: Any, run: Run) -> None:
        self.log.append("begun")
        run.resize(3)
        try:
            run.allreduce(1.0)
        finally:
            cleared.append("finally")
        self.log.append("not reached")

    host = alone(does(body))
    assert cleared == ["finally"], "the attempt is over, training goes on"
    assert log_of(host) == [], "the state is that from before the hook"
    host.load(alone(does(lambda self, run: None)).to_json())
    assert not host.waiting
    assert host.offer() == alone(does(lambda self, run: None)).offer()
    assert (host.drain_proposals(), host.drain_failures()) == ([], [])
    host.call("after_step", make_snapshot(), LIMITS, 0)
    assert host.waiting, "it is called again"


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_when_workers_change_hooks_that_wait_begin_again_on_all_joiners_too(workers: int) -> None:
    def body(self: Any, run: Run) -> None:
        self.log.append(run.allreduce(1.0, "sum"))
        self.log.append(run.allreduce(10.0 * run.rank(), "max"))
        self.log.append(run.step)

    crowd = crowd_of(body, body, body)
    crowd.call("after_step")
    crowd.exchange()
    assert crowd.waiting, "the first collective has been heard, the second has not"
    data = json.loads(json.dumps(crowd.hosts[0].to_json()))
    hosts = [*crowd.hosts, *crowd_of(body).hosts][:workers]
    for rank, host in enumerate(hosts):
        if rank == 3:
            host.load(data)
        host.restart_waiting_hooks(workers, LIMITS, rank)
    for _ in range(2):
        assert all(host.waits_among(workers) for host in hosts)
        rows = [host.offer() for host in hosts]
        for rank, host in enumerate(hosts):
            host.deliver(rows, rank)
    assert not any(host.waiting for host in hosts)
    assert [log_of(host) for host in hosts] == [[workers, 10.0 * (workers - 1), crowd.snapshot.step]] * workers
    assert [host.drain_failures() for host in hosts] == [[]] * workers


def test_a_hook_that_swallows_what_ends_its_attempt_waits_all_the_same() -> None:
    def body(self: Any, run: Run) -> None:
        for _ in range(3):
            try:
                self.log.append(run.allreduce(1.0, "sum"))
            except BaseException:  # noqa: BLE001  as a user might
                self.log.append("caught")
        run.resize(3)

    crowd = crowd_of(body, body)
    crowd.call("after_step")
    assert logs(crowd) == [[], []]
    assert [host.drain_proposals() for host in crowd.hosts] == [[], []]
    crowd.exchange()
    assert not crowd.waiting
    assert logs(crowd) == [[2.0] * 3] * 2


def test_an_error_while_clearing_up_is_reported() -> None:
    def body(self: Any, run: Run) -> None:
        try:
            run.allreduce(1.0)
        finally:
            self.log.append(1 / 0)

    crowd = crowd_of(body, body)
    crowd.call("after_step")
    assert crowd.failures() == [], "of an attempt that has ended nothing counts"
    crowd.exchange()
    assert not crowd.waiting
    assert ["ZeroDivisionError" in failure.detail for _, failure in crowd.failures()] == [True, True]


# -- state -------------------------------------------------------------------------------------------------------------


class Keeps(Policy):
    def __init__(self, at: tuple[int, ...] = (30, 60)) -> None:
        self.at = at
        self.seen: dict[str, Any] = {}
        self.pair: tuple[int, ...] = (0, 0)

    def after_step(self, run: Run) -> None:
        self.seen[str(run.step)] = [run.lr(), None, math.inf]
        assert isinstance(self.pair, tuple), "a tuple is one again"
        self.pair = (*self.pair, run.step)


def hosting(*policies: tuple[str, Policy]) -> PolicyHost:
    return PolicyHost([PolicyEntry(name, policy) for name, policy in policies])


def states(host: PolicyHost) -> list[Any]:
    return [entry["state"] for entry in host.to_json()]


def test_state_goes_to_another_host_as_json() -> None:
    host = alone(Keeps())
    other = hosting(("new", Keeps()), ("it", Keeps((1,))))
    other.load(json.loads(json.dumps(host.to_json())))
    assert states(other) == [{}, {"seen": {"100": [0.1, None, math.inf]}, "pair": [0, 0, 100]}], "options stay"
    other.call("after_step", make_snapshot(step=7), LIMITS, 0)
    assert other.drain_failures() == []
    assert [state["pair"] for state in states(other)] == [(0, 0, 7), (0, 0, 100, 7)]


def test_policies_of_one_name_keep_their_order() -> None:
    first, second = alone(Keeps()).to_json(), hosting(("it", Keeps())).to_json()
    other = hosting(("it", Keeps()), ("it", Keeps()))
    other.load([*first, *second])
    assert other.to_json() == [*first, *second]


def test_a_state_is_a_copy() -> None:
    host = alone(Keeps())
    states(host)[0]["seen"].clear()
    assert states(host)[0]["seen"] == {"100": [0.1, None, math.inf]}


@dataclass(frozen=True)
class Count:
    calls: int = 0
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pure(Policy):
    hooks = ("before_epoch", "after_step")
    most: int = 3

    def init(self) -> Count:
        return Count()

    def decide(self, hook: str, state: Count, run: Run) -> Count:
        if state.calls == self.most:
            run.stop()
        return Count(state.calls + 1, (*state.steps, run.step))


def test_a_pure_policy_is_called_at_its_hooks_and_its_state_travels() -> None:
    host, other = hosting(("pure", Pure(most=1))), hosting(("pure", Pure(most=1)))
    for hook in HOOKS:
        host.call(hook, make_snapshot(step=5), LIMITS, 0)
    assert [proposal.decision for proposal in host.drain_proposals()] == [Decision(stop=True)]
    assert states(host) == [{"calls": 2, "steps": (5, 5)}]
    other.load(json.loads(json.dumps(host.to_json())))
    assert other.to_json() == host.to_json()


@pytest.mark.parametrize("saved", [None, [], {"calls": "many"}])
def test_a_state_that_is_none_of_the_policys_is_refused(saved: Any) -> None:
    host = hosting(("pure", Pure()))
    entry = {**host.to_json()[0], "state": saved}
    with pytest.raises(UserError, match="policy pure cannot take over its state"):
        host.load([entry])


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (object(), "attribute x must be JSON"),
        ({"y": [1, {2}]}, r"attribute x\.y\[1\] must be JSON"),
        ({1: 2}, r"attribute x\[1\] must be JSON"),
        (np.zeros(2), "attribute x must be JSON"),
        (1j, "attribute x must be JSON"),
    ],
)
def test_attributes_that_are_not_json_are_refused_at_the_start(value: Any, where: str) -> None:
    class Odd(Policy):
        def __init__(self) -> None:
            self.x = value

    with pytest.raises(UserError, match=f"policy Odd: {where}"):
        hosting(("odd", Odd()))


def test_state_that_becomes_what_cannot_travel_is_the_hooks_failure() -> None:
    class Stores(Policy):
        def after_step(self, run: Run) -> None:
            self.run = run

    host = alone(Stores())
    assert "policy Stores: attribute run must be JSON" in host.drain_failures()[0].detail
    assert states(host) == [{}]


def test_numbers_of_numpy_become_plain_ones() -> None:
    class Takes(Policy):
        def after_step(self, run: Run) -> None:
            self.x = np.float64(1.5)

    assert type(states(alone(Takes()))[0]["x"]) is float


@pytest.mark.parametrize(
    "saved",
    [
        None,
        {},
        [1],
        [{"name": "it"}],
        [{"name": "it", "state": {}, "guards": [], "failures": {}, "off": False}],
        [{"name": "it", "state": {}, "guards": {}, "failures": {"nohook": 1}, "off": False}],
    ],
)
def test_rubbish_state_is_refused(saved: Any) -> None:
    with pytest.raises(UserError, match="state of policies"):
        hosting(("it", Keeps())).load(saved)
