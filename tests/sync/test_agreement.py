"""One ballot, two ways for its votes to come together: they agree on the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from elastune.core.signals import Decision, Snapshot
from elastune.policies.runtime.host import Proposal
from elastune.sync.agreement import AgreementProtocol
from elastune.train.adapt.agreement import Agreement

WORKERS = 3


def in_the_reduction(ballots: list[AgreementProtocol[Any, Any]]) -> list[list[Any]]:
    """Every worker votes in the same step, and has the sums with it."""
    sums = [sum(votes) for votes in zip(*(ballot.vote() for ballot in ballots), strict=True)]
    return [list(ballot.count_votes(sums, len(ballots))) for ballot in ballots]


class Coordinator:
    """Adds up what workers offer, whenever they do; what comes of it takes effect where nobody has been yet."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._offers: dict[int, list[float]] = {}
        self._furthest = 0
        self.effective: int | None = None

    def offer(self, worker: int, round_: int, votes: list[float]) -> None:
        self._offers[worker] = votes
        self._furthest = max(self._furthest, round_)
        if len(self._offers) == self._workers:
            self.effective = self._furthest + 2

    def sums(self, round_: int) -> list[float] | None:
        if self.effective is None or round_ < self.effective:
            return None
        return [sum(votes) for votes in zip(*self._offers.values(), strict=True)]


def by_the_coordinator(ballots: list[AgreementProtocol[Any, Any]]) -> list[list[Any]]:
    """Workers are in rounds of their own, the slowest at 4, the fastest at 9."""
    coordinator, rounds = Coordinator(len(ballots)), [4, 9, 6]
    for worker, ballot in enumerate(ballots):
        assert coordinator.sums(rounds[worker]) is None
        coordinator.offer(worker, rounds[worker], ballot.vote())
    assert coordinator.effective == 11
    assert all(coordinator.sums(round_) is None for round_ in range(11)), "no worker acts where another has passed"
    agreed = []
    for ballot in ballots:
        sums = coordinator.sums(coordinator.effective)
        assert sums is not None
        agreed.append(list(ballot.count_votes(sums, len(ballots))))
    return agreed


def proposal(decision: Decision) -> Proposal:
    cause = Snapshot(0, 0, 0, 0.0, 1, 8, 0.1)
    return Proposal("mine", 0, decision, cause)


@pytest.mark.parametrize("way", [in_the_reduction, by_the_coordinator])
def test_workers_that_propose_alike_agree(way: Callable[[list[Any]], list[list[Any]]]) -> None:
    ballots = [Agreement(["mine"]) for _ in range(WORKERS)]
    for ballot in ballots:
        ballot.add(proposal(Decision(workers=2)))
    assert [[agreed.decision for agreed in own] for own in way(list(ballots))] == [[Decision(workers=2)]] * WORKERS


@pytest.mark.parametrize("way", [in_the_reduction, by_the_coordinator])
def test_workers_that_differ_do_not(way: Callable[[list[Any]], list[list[Any]]]) -> None:
    ballots = [Agreement(["mine"]) for _ in range(WORKERS)]
    for count, ballot in enumerate(ballots, 2):
        ballot.add(proposal(Decision(workers=count)))
    assert [[agreed.decision for agreed in own] for own in way(list(ballots))] == [[None]] * WORKERS


def test_nothing_comes_of_silence() -> None:
    assert in_the_reduction([Agreement(["mine"]) for _ in range(WORKERS)]) == [[]] * WORKERS
