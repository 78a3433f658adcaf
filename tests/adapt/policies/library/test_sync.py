from __future__ import annotations

import math

import pytest

from elastune.adapt.policies.base import Limits
from elastune.adapt.policies.library.registry import build
from elastune.adapt.policies.library.sync import SyncByLink, SyncBySize, local_steps_for
from elastune.core.decisions import Decision, Signal
from elastune.core.errors import UserError
from elastune.core.sync_plan import SyncPlan
from elastune.testing.kits.policy import PolicyDriver, PolicyKit

BATCH = 64  # of ``PolicyDriver``


class TestBySize(PolicyKit):
    def make(self):
        return SyncBySize(above=2)


class TestByLink(PolicyKit):
    def make(self):
        return SyncByLink()


def test_large_clusters_are_apart_and_small_ones_together() -> None:
    policy = PolicyDriver(build("sync_by_size:above=4,strategy=local,learners=16,every=8"))
    assert policy.decide("before_step", workers=4).empty
    assert policy.decide("before_step", workers=5) == Decision(sync="local:learners=16,every=8")
    assert policy.decide("before_step", workers=9, sync="local:learners=16,every=8").empty
    assert policy.decide("before_step", workers=3, sync="local:learners=16,every=8") == Decision(sync="allreduce")


def test_by_default_there_are_as_many_learners_as_the_run_can_have() -> None:
    policy = PolicyDriver(build("sync_by_size:above=4,strategy=local"))
    for high, slots, learners in ((16, 16, 16), (16, 48, 16), (8, 32, 8), (6, 12, 6), (8, None, 8), (12, None, 12)):
        decision = policy.decide("before_step", workers=5, limits=Limits(1, high, num_slots=slots))
        assert decision == Decision(sync=f"local:learners={learners},every=16")


def signals(reduce_s: float, noise: float = 1e4) -> dict[str, Signal]:
    return in_rounds(reduce_s, 1) | {"noise_scale": Signal(noise)}


def test_a_dear_network_keeps_learners_apart() -> None:
    policy, apart = PolicyDriver(SyncByLink(share=0.5, again=100)), "local:learners=8,every=8"
    dear, cheap, calm = signals(0.75), signals(0.05), signals(0.75, noise=7)
    asked = [policy.decide("before_step", step=step, signals=dear, batch_size=64) for step in range(1, 11)]
    assert [each.empty for each in asked] == [True] * 9 + [False], "it looks for ten steps"
    assert asked[-1] == Decision(sync=apart)
    assert policy.decide("before_step", step=11, signals=dear, sync=apart).empty
    assert policy.decide("before_step", step=111, signals=in_rounds(1.5), sync=apart) == Decision(sync="allreduce")
    looks = [policy.decide("before_step", step=step, signals=dear, batch_size=64) for step in range(112, 123)]
    assert [each.empty for each in looks] == [True] * 10 + [False], "it looks anew, from the round's end on"
    policy = PolicyDriver(SyncByLink(share=0.5))
    assert all(policy.decide("before_step", step=step, signals=cheap).empty for step in range(1, 30))
    assert all(policy.decide("before_step", step=step, signals=calm, batch_size=64).empty for step in range(30, 60))


def test_it_waits_until_a_median_has_changed_for_good() -> None:
    policy = PolicyDriver(SyncByLink(share=0.5))
    for step in range(1, 30):
        assert policy.decide("before_step", step=step, signals=signals(0.05)).empty
    medians = (0.4, 0.4, 0.75)
    asked = [policy.decide("before_step", step=30 + i, signals=signals(s)) for i, s in enumerate(medians)]
    assert [each.empty for each in asked] == [True, True, False]
    assert asked[-1] == Decision(sync="local:learners=8,every=8")
    policy = PolicyDriver(SyncByLink(share=0.5))
    results = [policy.decide("before_step", step=20 + i, signals=signals((0.75, 0.05)[i % 3 == 2])) for i in range(30)]
    assert all(each.empty for each in results), "never in a row"


def in_rounds(exchange_s: float, every: int = 8) -> dict[str, Signal]:
    """As the monitor tells them of rounds: for all steps of one."""
    step_s = exchange_s + every * 0.1
    results = {"reduce_s": exchange_s, "compute_s": every * 0.08, "data_s": every * 0.02, "step_s": step_s}
    return {name: Signal(value) for name, value in (results | {"throughput": every * BATCH / step_s}).items()}


APART = "local:learners=8,every=8"


def apart_since_step_eleven() -> PolicyDriver:
    policy = PolicyDriver(SyncByLink(share=0.5, again=500))
    asked = [policy.decide("before_step", step=step, signals=signals(0.75), batch_size=64) for step in range(6, 11)]
    assert asked[-1] == Decision(sync=APART)
    assert policy.decide("before_step", step=11, signals=signals(0.75), sync=APART).empty
    return policy


def test_rounds_tell_when_the_network_is_well_again() -> None:
    policy = apart_since_step_eleven()
    # A round takes as long as a step did: its optimizer has no state.
    assert policy.decide("before_step", step=35, signals=in_rounds(0.75), sync=APART).empty
    assert policy.decide("before_step", step=43, signals=in_rounds(0.07), sync=APART) == Decision(sync="allreduce")
    assert policy.decide("before_step", step=44, signals=in_rounds(0.07), sync="allreduce").empty, "it looks anew"


def test_a_network_at_the_limit_does_not_send_it_to_and_fro() -> None:
    policy = apart_since_step_eleven()
    assert policy.decide("before_step", step=35, signals=in_rounds(0.75), sync=APART).empty
    assert policy.decide("before_step", step=43, signals=in_rounds(0.095), sync=APART).empty, "0.1 s would do"
    assert policy.decide("before_step", step=51, signals=in_rounds(0.075), sync=APART) == Decision(sync="allreduce")


def test_rounds_grow_and_shrink_with_what_they_exchange() -> None:
    """With the optimizer's state a round exchanges more than a step did."""
    policy, longer = apart_since_step_eleven(), "local:learners=8,every=16"
    assert policy.decide("before_step", step=34, signals=in_rounds(1.5), sync=APART).empty, "three rounds first"
    assert policy.decide("before_step", step=35, signals=in_rounds(1.5), sync=APART) == Decision(sync=longer)
    assert policy.decide("before_step", step=43, signals=in_rounds(1.5), sync=longer).empty
    assert policy.decide("before_step", step=91, signals=in_rounds(1.5, 16), sync=longer).empty
    assert policy.decide("before_step", step=92, signals=in_rounds(0.5, 16), sync=longer).empty, "half would do"
    shorter = Decision(sync="local:learners=8,every=4")
    assert policy.decide("before_step", step=93, signals=in_rounds(0.4, 16), sync=longer) == shorter


def test_rounds_with_exchanges_in_them_stay_as_long_as_they_are() -> None:
    policy, apart = PolicyDriver(SyncByLink(share=0.5, strategy="averaging")), "averaging:learners=8,every=8"
    asked = [policy.decide("before_step", step=step, signals=signals(0.75)) for step in range(6, 11)]
    assert asked[-1] == Decision(sync=apart)
    assert policy.decide("before_step", step=11, signals=signals(0.75), sync=apart).empty
    assert policy.decide("before_step", step=35, signals=in_rounds(6.0), sync=apart).empty


def test_the_first_rounds_tell_nothing_yet() -> None:
    """Medians are still those of all-reduce steps, or the network has changed meanwhile: bounded then."""
    policy = apart_since_step_eleven()
    assert policy.decide("before_step", step=34, signals=in_rounds(0.01), sync=APART).empty
    policy.decide("before_step", step=35, signals=in_rounds(75.0), sync=APART)
    assert policy.state.over == 4.0
    policy = apart_since_step_eleven()
    assert policy.decide("before_step", step=35, signals=in_rounds(0.7), sync=APART).empty
    assert policy.state.over == 1.0, "a round exchanges at least what a step does"


def test_a_rounded_round_takes_less_than_a_step_and_all_reduce_stays_too_dear() -> None:
    policy, apart = PolicyDriver(SyncByLink(share=0.5, again=500, send="int8")), "local:learners=8,every=8,send=int8"
    for step in range(6, 11):
        policy.decide("before_step", step=step, signals=signals(0.75), batch_size=64)
    assert policy.decide("before_step", step=11, signals=signals(0.75), sync=apart).empty
    for step in (35, 43, 51):
        decision = policy.decide("before_step", step=step, signals=in_rounds(0.28), sync=apart)
        assert decision.sync != "allreduce", "a step still takes 0.75"
    assert policy.state.over == pytest.approx(0.28 / 0.75)
    assert policy.decide("before_step", step=59, signals=in_rounds(0.02), sync=apart) == Decision(sync="allreduce")


def test_nothing_is_known_yet() -> None:
    nothing = {"signals": {}, "step": 50}
    assert PolicyDriver(SyncByLink()).decide("before_step", **nothing).empty


@pytest.mark.parametrize(("exchange_s", "expected"), [(0.0, 0), (math.nan, 0), (0.1, 1), (0.3, 4), (0.4, 4), (9.0, 16)])
def test_as_few_steps_apart_as_it_takes(exchange_s: float, expected: int) -> None:
    assert local_steps_for(exchange_s, 0.1, 0.5, 16) == expected


def test_rounds_are_a_power_of_two_whatever_is_the_most() -> None:
    assert [local_steps_for(9.0, 0.1, 0.5, most) for most in (1, 3, 48, 64)] == [1, 2, 32, 64]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("strategy=averaging,mix=4,pull=0.25", "averaging:learners=8,every=16,mix=4,pull=0.25"),
        ("strategy=gossip,mix=3", "gossip:learners=8,every=16,mix=3"),
        ("strategy=diloco,outer_lr=0.5,outer_momentum=0", "diloco:learners=8,every=16,outer_lr=0.5,outer_momentum=0.0"),
    ],
)
def test_a_strategys_own_settings_are_the_policys_too(options: str, expected: str) -> None:
    policy = build(f"sync_by_size:above=1,{options}")
    assert PolicyDriver(policy).decide("before_step", workers=2) == Decision(sync=expected)
    assert policy.policy.strategies(8, 4) == (expected,)


def test_learners_apart_by_the_link_have_their_strategys_settings() -> None:
    policy = build("sync_by_link:share=0.5,strategy=diloco,outer_lr=0.5")
    expected = "diloco:learners=8,every=8,outer_lr=0.5"
    hand = PolicyDriver(policy)
    asked = [hand.decide("before_step", step=step, signals=signals(0.75), batch_size=64) for step in range(8, 13)]
    assert asked[-1].sync == expected
    assert policy.policy.strategies(8, 4) == (expected.replace("every=8", "every=2"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sync_by_size:strategy=local,pull=0.5", "local has no setting pull"),
        ("sync_by_size:strategy=averaging,outer_lr=0.5", "averaging has no setting outer_lr"),
        ("sync_by_size:every=1", "use every=2 or more"),
        ("sync_by_size:every=4,mix=4", "use every=5 or more"),
        ("sync_by_size:pull=2", "pull"),
        ("sync_by_size:strategy=diloco,outer_momentum=1", "outer_momentum"),
        ("sync_by_link:strategy=diloco,pull=0.5", "diloco has no setting pull"),
        ("sync_by_link:mix=2", "mix"),
    ],
)
def test_settings_that_the_strategy_has_not_are_refused_at_once(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(text)


def test_what_says_no_strategy_is_refused() -> None:
    with pytest.raises(UserError, match="strategy"):
        build("sync_by_size:strategy=nothing")
    assert SyncPlan("averaging", 8, 16) == SyncPlan.parse("averaging:learners=8,every=16")
