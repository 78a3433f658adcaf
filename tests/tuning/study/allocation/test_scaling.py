"""How trials gain by more workers, by their batch: fitted to trials whose truth is known."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np
import pytest

from elastune.tuning.study.throughput import (
    BatchTable,
    MeasuredScaling,
    ThroughputTable,
    gains,
    log_speedup,
    slopes,
)

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
BATCHES = (16, 32, 64, 128, 256, 512)


def speed(batch: float, workers: int) -> float:
    """Ten a second on one; small batches gain little: 16 nothing, 512 seven times on eight workers."""
    return 10.0 * workers / (1.0 + min(1.2, 8.0 / batch) * (workers - 1))


def trials(number: int, noise: float = 0.0, seed: int = 0) -> list[MeasuredScaling]:
    """Each on three numbers of workers."""
    rng, result = np.random.default_rng(seed), []
    for _ in range(number):
        batch, level = 2.0 ** rng.uniform(4, 9), rng.uniform(0.1, 10.0)
        counts = sorted(int(count) for count in rng.choice(COUNTS, size=3, replace=False))
        rates = [(float(w), level * speed(batch, w) * math.exp(noise * rng.standard_normal())) for w in counts]
        result.append(MeasuredScaling(batch, tuple(rates)))
    return result


def errors(shown: list[MeasuredScaling], by_batch: bool) -> float:
    """Of the logarithm of the gain by eight workers, the mean over batches."""
    known = gains(shown)
    truths = {batch: math.log(speed(batch, 8) / speed(batch, 1)) for batch in BATCHES}
    return fmean(abs(log_speedup(slopes(known, b if by_batch else None), 8) - truth) for b, truth in truths.items())


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_truth_is_found_by_batch(noise: float) -> None:
    many = trials(45, noise)
    assert errors(many, by_batch=True) < 0.15
    assert errors(many, by_batch=False) > 0.3


def test_while_few_are_known_all_count() -> None:
    """One trial of a large batch, four of small ones: what is said of large ones lies between."""
    small = [MeasuredScaling(16.0, tuple((float(w), speed(16, w)) for w in (1, 2, 4))) for _ in range(4)]
    large = MeasuredScaling(512.0, tuple((float(w), speed(512, w)) for w in (1, 2, 4)))
    known = gains([*small, large])
    common, said, truth = (
        log_speedup(slopes(known), 4),
        log_speedup(slopes(known, 512.0), 4),
        math.log(speed(512, 4) / 10.0),
    )
    assert common < said < truth
    assert log_speedup(slopes(gains(small), 512.0), 4) == pytest.approx(log_speedup(slopes(gains(small)), 4), abs=0.01)
    assert log_speedup(slopes(gains([])), 4) == 0.0


def test_one_wild_measurement_moves_nobody() -> None:
    wild = [*trials(45), MeasuredScaling(64.0, ((1.0, 10.0), (8.0, 8000.0)))]
    assert errors(wild, by_batch=True) < 0.2


def taught(table: ThroughputTable, seed: int = 1) -> ThroughputTable:
    rng = np.random.default_rng(seed)
    for trial in range(40):
        batch = BATCHES[trial % len(BATCHES)]
        if isinstance(table, BatchTable):
            table.has_batch(trial, batch)
        for workers in sorted({1, *(int(count) for count in rng.choice(COUNTS, size=2))}):
            table.add(trial, workers, round(1000 * speed(batch, workers)), 1000.0)
    return table


def test_a_table_tells_small_batches_from_large_ones() -> None:
    by_batch, alike = BatchTable(), ThroughputTable()
    for table in (by_batch, alike):
        taught(table)
        for trial, batch in ((98, 16.0), (99, 512.0)):
            if isinstance(table, BatchTable):
                table.has_batch(trial, batch)
            table.add(trial, 1, 1000, 100.0)
    gain = {trial: dict(by_batch.of(trial).points)[4] / 10.0 for trial in (98, 99)}
    assert gain[98] == pytest.approx(speed(16, 4) / 10.0, rel=0.2)
    assert gain[99] == pytest.approx(speed(512, 4) / 10.0, rel=0.2)
    assert dict(alike.of(98).points)[2] == dict(alike.of(99).points)[2], "for all alike"
    by_batch.add(99, 4, 100, 10.0)
    assert dict(by_batch.of(99).points)[4] == 10.0, "what it measured itself counts"


def test_slots_count_as_they_make_steps() -> None:
    """Five workers are no more than four where there are eight slots: no step upwards is learnt from four to five."""
    table = BatchTable()
    for trial in range(6):
        table.has_batch(trial, 64.0)
        for workers in (1, 2, 4, 5):
            table.add(trial, workers, 1000 * min(workers, 4), 100.0)
    table.has_batch(9, 64.0)
    table.add(9, 1, 1000, 100.0)
    assert dict(table.of(9, slots=8).points)[4] == pytest.approx(40.0, rel=0.02)


def test_nothing_is_known_before_anybody_ran() -> None:
    assert BatchTable().of(1).points == ((1, 1.0),)
