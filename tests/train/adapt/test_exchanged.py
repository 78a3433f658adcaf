"""Bytes are told one exchange later than they were sent: each counts once, for the steps that it was sent for."""

from __future__ import annotations

from elastune.train.adaptation.adapter import LEARNERS_DISTANCE, MIX_STALENESS, SENT_BYTES, ExchangeStatistics


def step(counts: ExchangeStatistics, so_far: int, steps: int = 1, *, contributed: bool = True) -> float:
    result = counts.since(so_far)
    counts.reduced(result, steps, None, contributed=contributed)
    return result


def test_bytes_belong_to_the_steps_they_were_sent_for() -> None:
    counts = ExchangeStatistics()
    assert step(counts, 500) == 500, "what came before the first step"
    assert counts.signals() == {}, "is of no step"
    step(counts, 600, steps=10)
    assert counts.signals() == {SENT_BYTES: (100.0, None)}
    step(counts, 800)
    assert counts.signals() == {SENT_BYTES: (20.0, None)}, "200 bytes for a round of 10 steps"
    assert counts.signals() == {}, "told once"


def test_what_did_not_travel_is_told_again() -> None:
    counts = ExchangeStatistics()
    step(counts, 0)
    assert counts.since(100) == 100
    assert counts.since(150) == 150, "the exchange before was lost"
    assert step(counts, 150, contributed=False) == 150, "a worker without samples: not in the sum"
    assert step(counts, 170) == 170
    assert step(counts, 90) == 0.0, "never fewer than none"


def test_the_newest_rounds_distance_and_staleness() -> None:
    counts = ExchangeStatistics()
    counts.reduced(0.0, 8, 0.25, 1.5, contributed=True)
    measured = counts.signals()
    assert (measured[LEARNERS_DISTANCE], measured[MIX_STALENESS]) == ((0.25, None), (1.5, None))
    counts.reduced(0.0, 1, None, contributed=True)
    assert not {LEARNERS_DISTANCE, MIX_STALENESS} & counts.signals().keys(), "all-reduce has one learner"
