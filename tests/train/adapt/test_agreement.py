"""Proposals from the hook to the verdict: every policy by itself."""

from __future__ import annotations

import json

from elastune.adapt.policies.host import Proposal
from elastune.core.decisions import VOTE_LENGTH, Decision, Signal, Snapshot
from elastune.train.adaptation.decisions import OpenProposals, VoteResult

CAUSE = Snapshot(7, 1, 448, 3.0, 2, 64, 0.1, signals={"loss": Signal(0.5, 0.1)})


def proposed(policy: str, **decision: float) -> Proposal:
    return Proposal(policy, 7, Decision(**decision), CAUSE, {"seen": 3})


def summed(*agreements: OpenProposals) -> list[float]:
    return [sum(column) for column in zip(*(agreement.vote() for agreement in agreements), strict=True)]


def holding(*proposals: Proposal) -> OpenProposals:
    agreement = OpenProposals(["a", "b"])
    for proposal in proposals:
        agreement.add(proposal)
    return agreement


def test_nobody_says_anything() -> None:
    one, other = holding(), holding()
    assert summed(one, other) == [0.0] * (3 * VOTE_LENGTH), "the program has a vote, too"
    assert one.count_votes(summed(one, other), 2) == []


def test_what_all_propose_is_agreed_on() -> None:
    own = proposed("b", batch_size=128)
    one, other = holding(own), holding(proposed("b", batch_size=128))
    sums = summed(one, other)
    assert one.count_votes(sums, 2) == [VoteResult("b", own.decision, own)]
    assert other.count_votes(sums, 2) == [VoteResult("b", own.decision, own)]
    assert one.count_votes(summed(one, other), 2) == [], "it is counted once"


def test_a_quarrel_about_one_policy_leaves_the_other_alone() -> None:
    one = holding(proposed("a", lr=0.1), proposed("b", workers=3))
    other = holding(proposed("a", lr=0.2), proposed("b", workers=3))
    found = one.count_votes(summed(one, other), 2)
    assert [(v.policy, v.decision) for v in found] == [("a", None), ("b", Decision(workers=3))]


def test_who_proposed_nothing_hears_that_others_did() -> None:
    one, other = holding(proposed("a", lr=0.1)), holding()
    assert other.count_votes(summed(one, other), 2) == [VoteResult("a", None, None)]
    idle = holding()  # it had no samples of the step, and so no vote
    assert idle.count_votes(summed(one), 1) == [VoteResult("a", Decision(lr=0.1), None)]


def test_a_policys_second_proposal_waits_for_the_next_vote() -> None:
    first, second = proposed("a", batch_size=128), proposed("a", batch_size=256)
    agreement = holding(first, second)
    assert [v.own_proposal for v in agreement.count_votes(agreement.vote(), 1)] == [first]
    assert [v.own_proposal for v in agreement.count_votes(agreement.vote(), 1)] == [second]


def test_open_proposals_travel_as_json() -> None:
    agreement, taken = holding(proposed("b", lr_factor=0.5, ramp_steps=3), proposed("a", stop=True)), holding()
    taken.add(proposed("a", workers=9))
    taken.load(json.loads(json.dumps(agreement.to_json())))
    assert taken.to_json() == agreement.to_json()
    assert taken.vote() == agreement.vote()
    fewer = OpenProposals(["b"])
    fewer.load(agreement.to_json())
    assert [p["policy"] for p in fewer.to_json()] == ["b"], "what a resumed run has no policy for is dropped"
