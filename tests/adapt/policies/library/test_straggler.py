import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.adapt.policies.base import Limits
from elastune.adapt.policies.library.straggler import StragglerResponse, StragglerState, advance
from elastune.core.decisions import Decision
from elastune.core.errors import UserError
from elastune.testing.kits.policy import PolicyKit, decide


class TestReplaces(PolicyKit):
    def make(self):
        return StragglerResponse(patience=1, rest=5)


class TestShrinks(PolicyKit):
    def make(self):
        return StragglerResponse(action="shrink", patience=1, rest=5)


def act(named, patience=3, rest=10, tries=2, workers=4):
    """Steps after which it acts, and on whom; ``named``: the rank named after each step."""
    watch, acted = StragglerState(), []
    for step, rank in enumerate(named, 1):
        size = workers[step - 1] if isinstance(workers, list) else workers
        watch, on = advance(watch, step, size, rank, patience, rest, tries)
        acted += [(step, on)] if on is not None else []
    return acted


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ([2, 2, 2], [(3, 2)]),
        ([2, 2, None, 2, 2], []),
        ([2, 2, 1, 1, 1], [(5, 1)]),
        ([2] * 12, [(3, 2)]),
        ([2] * 40, [(3, 2), (13, 2)]),
        ([None] * 5, []),
        ([9] * 5, []),
        ([-1] * 5, []),
    ],
)
def test_when_it_acts(named, expected):
    assert act(named) == expected


def test_ranks_shift_when_workers_change():
    assert act([2] * 5, workers=[4, 4, 3, 3, 3]) == [(5, 2)]


def test_a_lone_worker_keeps_nobody_waiting():
    assert act([0] * 10, workers=1) == []


@given(st.lists(st.none() | st.integers(-1, 5), max_size=80), st.integers(1, 5), st.integers(1, 20), st.integers(1, 4))
def test_it_acts_seldom_and_only_on_workers(named, patience, rest, tries):
    acted = act(named, patience, rest, tries)
    assert len(acted) <= tries
    assert all(later - step >= rest for (step, _), (later, _) in itertools.pairwise(acted))
    assert all(set(named[step - patience : step]) == {rank} for step, rank in acted)


@pytest.mark.parametrize(
    ("action", "rank", "expected"),
    [
        ("replace", 1, Decision(replace_rank=1)),
        ("replace", 3, Decision(replace_rank=3)),
        ("shrink", 3, Decision(workers=3)),
        ("shrink", 1, Decision()),
    ],
)
def test_what_it_asks_for(action, rank, expected):
    policy = StragglerResponse(action=action, patience=1)
    assert decide(policy, signals={"straggler": float(rank)}, workers=4, limits=Limits(1, 4)) == expected


def test_the_fewest_workers_are_not_made_fewer():
    policy = StragglerResponse(action="shrink", patience=1)
    assert decide(policy, signals={"straggler": 3.0}, workers=4, limits=Limits(4, 8)).empty


def test_one_of_the_fewest_workers_is_replaced():
    policy = StragglerResponse(patience=1)
    decision = decide(policy, signals={"straggler": 3.0}, workers=4, limits=Limits(4, 8))
    assert decision == Decision(replace_rank=3)


@pytest.mark.parametrize("action", ["replace", "shrink"])
def test_workers_that_cannot_change_are_left_alone(action):
    policy = StragglerResponse(action=action, patience=1)
    assert decide(policy, signals={"straggler": 3.0}, workers=4, limits=Limits(4, 4)).empty


@pytest.mark.parametrize("wrong", [{"action": "scold"}, {"patience": 0}, {"rest": 0}, {"tries": 0}])
def test_wrong_options(wrong):
    with pytest.raises(UserError):
        StragglerResponse(**wrong)
