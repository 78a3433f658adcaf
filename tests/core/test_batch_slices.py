"""Shares: every sample once, weights that add up, no worker without a step."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

from hypothesis import example, given
from hypothesis import strategies as st

from elastune.core.slots import contributors, shares

SETTINGS = {
    "batch": st.integers(1, 300),
    "num_slots": st.integers(1, 24),
    "mode": st.sampled_from(["exact", "fast"]),
    "micro_batch": st.one_of(st.none(), st.integers(1, 40)),
}


@given(**SETTINGS, data=st.data())
def test_every_sample_once_and_weights_add_up(batch, num_slots, mode, micro_batch, data) -> None:
    workers = data.draw(st.integers(1, num_slots))
    everyone = [shares(batch, num_slots, workers, rank, mode, micro_batch) for rank in range(workers)]
    real = [share for own in everyone for share in own if share.weight]
    assert sorted(i for share in real for i in share.samples) == list(range(batch))
    assert math.isclose(sum(share.weight for share in real), 1.0)
    assert all(Fraction(len(s.samples), batch) == Fraction(s.weight).limit_denominator(1000) for s in real)
    for own in everyone:
        assert [share.ends_step for share in own] == [False] * (len(own) - 1) + [True]
        assert all(len(share.samples) <= (micro_batch or batch) for share in own)
        assert all(share.samples for share in own)


@given(**SETTINGS, data=st.data())
def test_exact_passes_do_not_depend_on_workers(batch, num_slots, mode, micro_batch, data) -> None:
    workers = data.draw(st.integers(1, num_slots))

    def passes(count: int) -> list[tuple[int, range, float]]:
        everyone = (s for rank in range(count) for s in shares(batch, num_slots, count, rank, "exact", micro_batch))
        return [(s.slot, s.samples, s.weight) for s in everyone if s.weight]

    assert passes(workers) == passes(1)


@given(**(SETTINGS | {"workers": st.integers(1, 24), "micro_batch": st.none() | st.integers(3, 40)}))
@example(batch=4, num_slots=10, workers=4, mode="fast", micro_batch=None)  # passes of 0, 2, 0 and 2, of slots of 1
def test_a_pass_has_the_samples_that_it_needs_where_the_batch_has_them(batch, num_slots, workers, mode, micro_batch):
    workers = min(workers, num_slots)
    everyone = [shares(batch, num_slots, workers, rank, mode, micro_batch, 2) for rank in range(workers)]
    assert min(len(share.samples) for own in everyone for share in own) >= min(2, batch)
    real = [share for own in everyone for share in own if share.weight]
    assert sorted(i for share in real for i in share.samples) == list(range(batch))
    assert sum(any(share.weight for share in own) for own in everyone) == contributors(
        batch, num_slots, workers, mode, 2
    )
    if mode == "exact":
        alone = [(share.slot, share.samples) for share in shares(batch, num_slots, 1, 0, mode, micro_batch, 2)]
        assert [(share.slot, share.samples) for share in real] == alone, "whatever the workers"
    if batch >= 2 * num_slots:
        usual = [shares(batch, num_slots, workers, rank, mode, micro_batch) for rank in range(workers)]
        assert everyone == usual, "nothing else changes"


def test_a_worker_without_samples_runs_a_copy_that_counts_nothing() -> None:
    (share,) = shares(batch=1, num_slots=4, workers=4, rank=0, mode="exact", micro_batch=None)
    assert (list(share.samples), share.weight, share.ends_step) == ([0], 0.0, True)


def test_workers_that_need_each_other_make_as_many_passes() -> None:
    """What is added comes first, and counts for nothing. Slots that end in one pass lie side by side."""
    for batch, slots, workers, micro_batch in itertools.product((1, 10, 29), (4, 5), (2, 3, 4), (None, 3)):
        options = "exact", micro_batch
        even = [shares(batch, slots, workers, rank, *options, even=True, in_turn=True) for rank in range(workers)]
        assert len({len(own) for own in even}) == 1
        for rank, own in enumerate(even):
            real = [part for part in own if part.weight]
            added = len(own) - len(real or own[-1:])
            assert all(part.weight == 0.0 and part.ends_slot and not part.ends_step for part in own[:added])
            assert all(part.slot % workers == rank for part in real)
            assert len({id(part) for part in own}) == len(own), "a pass is known by its object"
        for parts in zip(*even, strict=True):
            ends = tuple(part.slot if part.weight and part.ends_slot else -1 for part in parts)
            assert {part.ending for part in parts} == {ends}
        everything = sorted((part.slot, part.samples.start) for own in even for part in own if part.weight)
        alone = shares(batch, slots, 1, 0, *options)
        assert everything == [(part.slot, part.samples.start) for part in alone]
        ending = [slot for part in even[0] for slot in sorted(part.ending) if slot >= 0]
        if micro_batch is None and batch >= slots:
            assert ending == list(range(slots))
