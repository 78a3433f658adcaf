import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.adapt.policies.base import Policy
from elastune.adapt.policies.host import (
    GUARD_OPTIONS,
    Bounds,
    ChangeBudget,
    Cooldown,
    Hysteresis,
    Patience,
    PolicyEntry,
    apply_guards,
    guards_for,
    to_json,
)
from elastune.core.decisions import Decision
from elastune.core.errors import UserError
from elastune.core.plan.batch_size import lr_change
from elastune.testing.kits.policy import PolicyDriver, SimulatedWorkers, make_snapshot

GROW = Decision(batch_size=128, lr_factor=2.0, ramp_steps=5, correct_momentum=True)
SHRINK = Decision(batch_size=32)
NOTHING = Decision()
ALL = {"min_batch": 8, "max_batch": 512, "min_workers": 1, "max_workers": 4}
ALL |= {"hysteresis": 1.2, "patience": 2, "cooldown": 3, "budget": 5}


def passed(guard, *decisions, every=1, **at):
    """What ``guard`` lets through of ``decisions``, one each ``every`` steps."""
    state, result = guard.init(), []
    for i, decision in enumerate(decisions):
        allowed, state = guard.filter(decision, make_snapshot(step=i * every, **at), json.loads(json.dumps(state)))
        result.append(allowed)
    return result


# -- one by one --------------------------------------------------------------------------------------------------------


def test_bounds_leave_what_is_inside():
    assert passed(Bounds(8, 512, 1, 4), GROW, Decision(workers=3), Decision(lr=0.1)) == [
        GROW,
        Decision(workers=3),
        Decision(lr=0.1),
    ]


@pytest.mark.parametrize("rule", ["none", "sqrt", "linear"])
def test_a_cut_batch_gets_the_rate_that_its_rule_gives(rule):
    decision = Decision(batch_size=1024, lr_factor=lr_change(rule, 64, 1024, make_snapshot()).factor)
    (result,) = passed(Bounds(max_batch=256), decision)
    assert result.batch_size == 256
    assert result.lr_factor == pytest.approx(lr_change(rule, 64, 256, make_snapshot()).factor)


def test_a_cut_batch_gets_about_the_rate_of_adascale():
    at = make_snapshot({"gradient_variance": 64_000.0, "gradient_square": 2.0})
    decision = Decision(batch_size=256, lr_factor=lr_change("adascale", 64, 256, at).factor)
    result, _ = Bounds(max_batch=128).filter(decision, at, {})
    assert result.lr_factor == pytest.approx(lr_change("adascale", 64, 128, at).factor, rel=0.01)


@pytest.mark.parametrize(
    ("bounds", "asked", "left"),
    [
        ({"max_batch": 64}, GROW, None),
        ({"max_batch": 50}, GROW, None),  # no growth becomes a shrinking
        ({"min_batch": 80}, SHRINK, None),
        ({"min_batch": 40}, SHRINK, Decision(batch_size=40)),
        ({"max_workers": 3}, Decision(workers=8), Decision(workers=3)),
        ({"max_workers": 2}, Decision(workers=8, lr=0.5), Decision(lr=0.5)),
        ({"min_workers": 2}, Decision(workers=1), None),
        ({"max_batch": 64}, Decision(batch_size=128, lr_factor=2.0, workers=4), Decision(workers=4)),
    ],
)
def test_bounds(bounds, asked, left):
    assert passed(Bounds(**bounds), asked) == [left]


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 64), st.integers(1, 64), st.floats(0.1, 10.0))
def test_bounds_hold_whatever_is_asked(batch, now, workers, size, factor):
    decision = Decision(batch_size=batch, workers=workers, lr_factor=factor)
    result, _ = Bounds(16, 1024, 2, 8).filter(decision, make_snapshot(batch_size=now, workers=size), {})
    result = result or NOTHING
    assert result.batch_size is None or 16 <= result.batch_size <= 1024
    assert result.workers is None or 2 <= result.workers <= 8
    assert result.lr_factor is None or 0.0 < result.lr_factor < math.inf


def test_hysteresis_drops_small_changes_only():
    keep = Hysteresis(1.5)
    small, large = Decision(batch_size=80, lr_factor=1.25, ramp_steps=3), Decision(batch_size=96, lr_factor=1.5)
    assert passed(keep, small, large, Decision(batch_size=50), Decision(batch_size=42)) == [
        None,
        large,
        None,
        Decision(batch_size=42),
    ]
    assert passed(keep, Decision(workers=5, batch_size=128), workers=4) == [Decision(batch_size=128)]
    assert passed(keep, Decision(lr_factor=1.01)) == [Decision(lr_factor=1.01)]


def test_patience_wants_it_several_times_in_a_row():
    guard = Patience(3)
    assert passed(guard, GROW, GROW, GROW, GROW) == [None, None, GROW, None]
    assert passed(guard, GROW, GROW, NOTHING, GROW, GROW) == [None] * 5
    assert passed(guard, GROW, GROW, SHRINK, SHRINK, SHRINK) == [None, None, None, None, SHRINK]
    more = Decision(batch_size=512)
    assert passed(guard, GROW, more, GROW, more)[2] == GROW  # up is up
    assert passed(Patience(1), GROW, NOTHING, SHRINK) == [GROW, None, SHRINK]


def test_cooldown_counts_steps():
    assert passed(Cooldown(10), *[GROW] * 5, every=4) == [GROW, None, None, GROW, None]
    assert passed(Cooldown(0), GROW, GROW) == [GROW, GROW]
    assert passed(Cooldown(10), NOTHING, GROW) == [None, GROW]  # nothing is no change


def test_budget_runs_out():
    assert passed(ChangeBudget(2), GROW, NOTHING, SHRINK, GROW) == [GROW, None, SHRINK, None]
    assert passed(ChangeBudget(0), GROW) == [None]


def test_workers_that_are_late_cost_once():
    four, five = Decision(workers=4), Decision(workers=5)
    assert passed(ChangeBudget(1), four, four, five, four) == [four, four, None, four]
    assert passed(ChangeBudget(1), GROW, GROW) == [GROW, None]


# -- together ----------------------------------------------------------------------------------------------------------


def test_each_sees_what_the_one_before_let_through():
    guards = guards_for({"budget": 1, "cooldown": 5, "max_batch": 64})
    assert [type(guard) for guard in guards] == [Bounds, Cooldown, ChangeBudget]
    left, states = apply_guards(
        guards, "after_step", GROW, make_snapshot(), {}
    )  # cut to nothing: no cooldown begins, nothing is spent
    assert left == NOTHING
    left, states = apply_guards(guards, "after_step", SHRINK, make_snapshot(), states)
    assert left == SHRINK
    left, _ = apply_guards(guards, "after_step", SHRINK, make_snapshot(step=1000), states)
    assert left == NOTHING


@pytest.mark.parametrize("emergency", [Decision(restore=True, lr_factor=0.5), Decision(stop=True, workers=1)])
def test_emergencies_pass_whole(emergency):
    guards = guards_for({**ALL, "budget": 0, "min_workers": 2})
    states = {type(guard).__name__: guard.init() for guard in guards}
    result, after = apply_guards(guards, "after_step", emergency, make_snapshot(), states)
    assert result == emergency
    assert after == {**states, "asking": "after_step"}


def test_to_remember_passes_by_itself():
    decision = Decision(remember=True, batch_size=128)
    result, _ = apply_guards(guards_for({"budget": 0}), "after_step", decision, make_snapshot(), {})
    assert result == Decision(remember=True)


def test_every_option_makes_a_guard():
    assert len(guards_for(ALL)) == 5
    assert set(ALL) == set(GUARD_OPTIONS)
    assert guards_for({}) == ()


@pytest.mark.parametrize(
    "options",
    [
        {"cooldown": -1},
        {"budget": -1},
        {"patience": 0},
        {"hysteresis": 0.9},
        {"hysteresis": math.nan},
        {"min_batch": 0},
        {"max_workers": 0},
        {"min_batch": 9, "max_batch": 8},
        {"min_workers": 3, "max_workers": 2},
    ],
)
def test_impossible_guards_are_refused(options):
    with pytest.raises(UserError):
        guards_for(options)


# -- around a policy ---------------------------------------------------------------------------------------------------


class Doubles(Policy):
    """Asks for twice the batch after every step, and counts how often it got it."""

    monitors = ("loss",)
    survives_divergence = True

    def __init__(self):
        self.asked = 0
        self.history = []

    def after_step(self, run):
        run.set_batch_size(2 * run.batch_size(), lr="linear")
        self.asked += 1
        self.history.append(run.step)


def guarded(policy, *guards):
    return PolicyDriver(PolicyEntry("it", policy, guards))


def test_a_dropped_decision_was_never_made():
    policy = guarded(Doubles(), Cooldown(10))
    assert policy.decide(step=0) == Decision(batch_size=128, lr_factor=2.0)
    assert policy.decide(step=5) == NOTHING
    assert policy.state == {"asked": 1, "history": [0]}
    assert policy.decide(step=10).batch_size == 128
    assert policy.state == {"asked": 2, "history": [0, 10]}


def test_a_cut_decision_was_made():
    policy = guarded(Doubles(), Bounds(max_batch=100))
    assert policy.decide() == Decision(batch_size=100, lr_factor=pytest.approx(100 / 64))
    assert policy.state["asked"] == 1


def test_what_the_hook_raises_passes_through():
    class Breaks(Policy):
        def before_epoch(self, run):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        guarded(Breaks(), Cooldown(1)).decide("before_epoch")


class Seldom(Policy):
    """Asks in one hook, and has another that asks for nothing."""

    def before_step(self, run):
        pass

    def after_step(self, run):
        run.resize(run.size() + 1)


def test_hooks_that_never_ask_do_not_break_patience():
    policy = guarded(Seldom(), Patience(2))
    results = [policy.decide(hook) for hook in ("before_step", "after_step", "before_step", "after_step")]
    assert results == [NOTHING, NOTHING, NOTHING, Decision(workers=3)]


def test_its_state_travels():
    policy, other = (guarded(Doubles(), *guards_for(ALL)) for _ in range(2))
    for step in range(4):
        policy.decide(step=step)
    policy.travel_to(other)
    assert to_json(other.policy_state) == to_json(policy.policy_state)
    after = [[each.decide(step=step) for step in range(4, 20)] for each in (policy, other)]
    assert after[0] == after[1]
    assert any(decision != NOTHING for decision in after[0])


def test_a_resumed_run_may_have_other_guards():
    policy, other = guarded(Doubles(), *guards_for({"cooldown": 100})), guarded(Doubles(), *guards_for(ALL))
    policy.decide(step=0)
    policy.travel_to(other)
    assert other.policy_state.guards["Cooldown"] == {"changed": 0}
    for step in (99, 100, 101):
        other.decide(step=step)
    assert other.policy_state.guards["ChangeBudget"] == {"made": 1, "workers": None}


def test_workers_agree_behind_guards_and_the_batch_grows_at_their_pace():
    doubles = PolicyEntry("doubles", Doubles(), guards_for({"cooldown": 10, "max_batch": 512}))
    crowd = SimulatedWorkers(2, lambda rank: [doubles])
    crowd.train([{}] * 100)
    assert {verdict.outcome for verdict in crowd.verdicts} == {"applied"}
    assert [decision.batch_size for _, decision in crowd.decisions] == [128, 256, 512]
    steps = [step for step, _ in crowd.decisions]
    assert [b - a for a, b in itertools.pairwise(steps)] == [10, 10]
