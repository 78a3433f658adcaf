"""Votes add up exactly in single precision, and tell equal decisions from unequal ones."""

from dataclasses import fields

import torch
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.decisions import MOST_VOTERS, VOTE_LENGTH, Decision, outcome, vote
from elastune.core.sync_plan import SyncPlan

COUNTS = st.none() | st.integers(0, 2**32 - 3)
RATES = st.none() | st.floats(allow_nan=False, allow_infinity=False)
DECISIONS = st.builds(
    Decision,
    workers=COUNTS,
    mesh=st.none() | st.sampled_from(["data=1", "shard=3", "data=2,shard=2,tensor=5,pipeline=300"]),
    replace_rank=COUNTS,
    batch_size=COUNTS,
    micro_batch=COUNTS,
    lr=RATES,
    lr_factor=RATES,
    ramp_steps=st.integers(0, 10**6),
    correct_momentum=st.booleans(),
    remember=st.booleans(),
    restore=st.booleans(),
    stop=st.booleans(),
)


def summed(decisions: list[Decision]) -> list[float]:
    """As a reduction adds them, in single precision."""
    total = torch.zeros(VOTE_LENGTH)
    for decision in decisions:
        total = total + torch.tensor(vote(decision))
    return total.tolist()


@given(DECISIONS, st.integers(1, MOST_VOTERS))
def test_what_all_decide_comes_out_as_it_went_in(decision: Decision, voters: int) -> None:
    assert outcome(summed([decision] * voters), voters) == decision


@given(DECISIONS, DECISIONS, st.integers(1, 8), st.integers(1, 8))
def test_different_decisions_are_found_out(one: Decision, other: Decision, ones: int, others: int) -> None:
    result = outcome(summed([one] * ones + [other] * others), ones + others)
    assert result == one if one == other else result is None


@given(DECISIONS)
def test_one_that_says_nothing_disagrees_with_one_that_says_something(decision: Decision) -> None:
    if not decision.empty:
        assert outcome(summed([decision, Decision()]), 2) is None


def test_the_longest_strategy_has_room() -> None:
    """All settings, with as many digits as numbers that are drawn have."""
    numbers = dict.fromkeys(("outer_lr", "outer_momentum", "blend"), 1.2345678901234568e-05)
    whole = {"learners": 1_024, "every": 1_000_000, "fragments": 64, "cycles": 1_000, "delay": 14}
    plan = str(SyncPlan("diloco", moments="fresh", **whole, **numbers))  # type: ignore[arg-type]
    assert len(plan) > 160
    assert SyncPlan.parse(plan).blend == numbers["blend"]
    decision = Decision(sync=plan, topology="parents=[0,0,1]")
    assert outcome(summed([decision] * 3), 3) == decision


def test_a_lost_vote_is_no_agreement() -> None:
    assert outcome(summed([Decision(batch_size=64)]), 2) is None


def test_nobody_deciding_is_cheap_to_see() -> None:
    assert vote(Decision()) == [0.0] * VOTE_LENGTH


def test_decisions_contradict_where_they_set_one_thing() -> None:
    assert Decision(batch_size=64).contradicts(Decision(batch_size=64, lr_factor=2.0))
    assert not Decision(batch_size=64, lr_factor=2.0).contradicts(Decision(lr_factor=0.5, workers=3))
    assert Decision().empty
    both = Decision(batch_size=64, lr_factor=1.0, workers=3, stop=True)
    assert not both.empty
    assert both.to_json() == {"workers": 3, "batch_size": 64, "lr_factor": 1.0, "stop": True}
    assert {f.name for f in fields(Decision)} >= set(both.to_json())
