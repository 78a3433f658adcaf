import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.adapt.policies.library.divergence import DEAF_STEPS, DivergenceGuard, Sanity, advance
from elastune.core.decisions import Decision
from elastune.core.errors import UserError
from elastune.testing.kits.policy import PolicyDriver, PolicyKit

RULES = DivergenceGuard(factor=3.0, patience=3, every=10, tries=2)


class TestDivergenceGuard(PolicyKit):
    def make(self):
        return DivergenceGuard(every=10, patience=2)


def judge(losses, rules=RULES):
    """What is done after which step, remembering left out; and the state in the end."""
    state, done = Sanity(), []
    for step, loss in enumerate(losses, 1):
        state, action = advance(state, step, loss, rules)
        done += [(step, action)] if action not in (None, "remember") else []
    return done, state


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.0] * 20, []),
        ([1.0] * 5 + [2.9] * 10, []),
        ([1.0] * 5 + [9.0, 9.0, 1.0, 9.0, 9.0, 1.0], []),
        ([1.0] * 5 + [9.0] * 3, [(8, "restore")]),
        ([1.0] * 5 + [math.nan], [(6, "restore")]),
        ([1.0] * 5 + [math.inf], [(6, "restore")]),
        ([1.0] * 5 + [math.nan] * 3 + [1.0], [(6, "restore")]),
        ([1.0] * 5 + [math.nan] * 7, [(6, "restore"), (9, "restore"), (12, "stop")]),
        ([math.nan], [(1, "stop")]),
        ([-5.0] * 9 + [-4.0] * 9, []),
        ([-5.0] * 9 + [6.0] * 3, [(12, "restore")]),
        ([2.0, -2.0] * 20, []),
        ([10.0 * 0.9**i for i in range(60)], []),
    ],
)
def test_what_it_does(losses, expected):
    assert judge(losses)[0] == expected


def test_losses_that_it_rejects_leave_the_measure_alone():
    _, before = judge([1.0] * 5)
    _, after = judge([1.0] * 5 + [100.0, 100.0])
    assert (after.smooth, after.spread, after.sane) == (before.smooth, before.spread, before.sane)


def test_it_remembers_every_so_often_and_never_on_the_way_up():
    state, kept = Sanity(), []
    for step in range(1, 60):
        state, action = advance(state, step, 1.0 if step < 25 else 2.5, RULES)
        kept += [step] if action == "remember" else []
    assert kept[:3] == [1, 11, 21]
    assert not [step for step in kept if 25 <= step < 32], "2.5 is sane but far above 1.0"


def test_it_does_not_remember_soon_after_going_back():
    state, kept = Sanity(), []
    for step in range(1, 40):
        state, action = advance(state, step, math.nan if step == 10 else 1.0, RULES)
        kept += [step] if action == "remember" else []
    assert kept == [1, 20, 30]


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=100), st.integers(0, 3))
def test_whatever_the_losses(losses, tries):
    rules = DivergenceGuard(factor=2.0, patience=2, every=7, tries=tries)
    state, back, stopped = Sanity(), [], False
    for step, loss in enumerate(losses, 1):
        state, action = advance(state, step, loss, rules)
        assert math.isfinite(state.smooth)
        assert math.isfinite(state.spread)
        stopped = stopped or action == "stop"
        back += [step] if action == "restore" else []
        assert action != "restore" or state.kept >= 0
    assert len(back) <= tries
    assert all(later - step > DEAF_STEPS for step, later in itertools.pairwise(back))
    assert stopped or state.tried <= tries


def hook(policy, step, loss):
    return policy.decide(step=step, loss=loss)


def test_what_it_asks_for():
    policy = PolicyDriver(DivergenceGuard(tries=1, backoff=0.25))
    assert hook(policy, 1, 1.0) == Decision(remember=True)
    assert hook(policy, 2, 1.0).empty
    assert hook(policy, 3, math.nan) == Decision(restore=True, lr_factor=0.25)
    assert [hook(policy, step, math.nan).empty for step in (4, 5)] == [True, True], "these ran before it was back"
    assert hook(policy, 6, math.nan) == Decision(restore=True, stop=True), "the checkpoint is the copy's"
    assert hook(PolicyDriver(DivergenceGuard()), 1, math.nan) == Decision(stop=True)
    assert hook(PolicyDriver(DivergenceGuard()), 1, None).empty


def test_where_the_copy_was_forgotten_it_stops_all_the_same():
    policy = PolicyDriver(DivergenceGuard(tries=0))
    assert hook(policy, 1, 1.0) == Decision(remember=True)
    assert hook(policy, 2, math.nan) == Decision(restore=True, stop=True)
    assert [hook(policy, step, math.nan).empty for step in (3, 4)] == [True, True], "these ran before it was answered"
    assert hook(policy, 5, math.nan) == Decision(stop=True), "what was refused is not asked for again"


class Descent:
    """Plain descent on x^2 / 2, which diverges for lr > 2; decisions count after the next step, as in training."""

    def __init__(self, lr):
        self.x, self.lr, self.copy, self.step, self.stopped = 1.0, lr, None, 0, False
        self.pending = Decision()

    def train(self, policy, steps):
        for _ in range(steps):
            if self.stopped:
                return
            self.step += 1
            loss = self.x * self.x / 2 + 0.01
            self.x -= self.lr * self.x
            decision, self.pending = self.pending, hook(policy, self.step, loss)
            if decision.restore:
                self.x = self.copy
            self.lr *= decision.lr_factor or 1.0
            self.copy = self.x if decision.remember else self.copy
            self.stopped = decision.stop


@pytest.mark.parametrize("lr", [2.5, 3.9, 1e200])
def test_a_diverging_descent_is_saved_or_stopped(lr):
    run, policy = Descent(lr=0.1), PolicyDriver(DivergenceGuard(every=10, tries=3))
    run.train(policy, 25)
    run.lr = lr
    run.train(policy, 2000)
    if lr < 16:  # within three halvings of 2
        assert not run.stopped
        assert run.lr < 2
        assert abs(run.x) < 1e-3
    else:
        assert run.stopped
        assert policy.state.tried == 3
        assert math.isfinite(run.x)


@pytest.mark.parametrize(
    "wrong",
    [
        {"factor": 1.0},
        {"factor": math.nan},
        {"patience": 0},
        {"every": 0},
        {"backoff": 1.0},
        {"backoff": 0.0},
        {"tries": -1},
    ],
)
def test_wrong_options(wrong):
    with pytest.raises(UserError, match="divergence cannot work with this"):
        DivergenceGuard(**wrong)
