from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.errors import UserError
from elastune.core.slots import shares, slices_of_round
from elastune.core.sync_plan import SyncPlan


@pytest.mark.parametrize(
    "text",
    [
        "allreduce",
        "local:learners=8,every=16",
        "local:learners=8,every=16,moments=fresh",
        "diloco:learners=4,every=50,outer_lr=0.4,outer_momentum=0.95",
        "diloco:learners=4,every=60,fragments=4,cycles=3,delay=1,blend=0.5",
        "averaging:learners=8,every=16,mix=2,pull=0.25",
        "gossip:learners=3,every=2",
        "parameter_server:learners=4,every=3,staleness=1",
        "parameter_server",
        "parameter_server:learners=4,every=50,staleness=3",
        "pair_averaging:learners=8,every=64,moments=fresh,mix=4",
        "local:learners=4,every=16,quorum=3",
        "local:learners=4,every=16,moments=fresh,send=int8",
        "diloco:learners=4,every=50,send=bf16,outer_lr=0.4",
        "diloco:learners=4,every=50,outer_lr=0.4,quorum=1,grace=0.25",
    ],
)
def test_what_is_said_is_what_is_read(text: str) -> None:
    assert str(SyncPlan.parse(text)) == text
    assert SyncPlan.parse(f" {text.replace(',', ', ')} ") == SyncPlan.parse(text)


def test_rounds_are_long_enough_to_meet_in_where_nobody_says_how_long() -> None:
    for text in ("averaging:learners=8", "gossip:learners=8,mix=4", "parameter_server:learners=8,staleness=2"):
        assert SyncPlan.parse(text).every == 16
    assert [SyncPlan.parse(text).every for text in ("local:learners=8", "diloco", "parameter_server")] == [1, 1, 1]
    assert SyncPlan.parse("gossip:learners=8", every=4).every == 4


@pytest.mark.parametrize("number", [1, np.float64(1.0), 1.0])
def test_numbers_of_any_kind_are_said_alike(number: float) -> None:
    """As a search may draw them."""
    plan = SyncPlan("averaging", 8, 16, pull=number)
    assert str(plan) == "averaging:learners=8,every=16,pull=1.0"
    assert SyncPlan.parse(str(plan)) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be known"),
        ("gossips", "use allreduce or local"),
        ("local:learners=0", "learners must be a whole number"),
        ("local:learners=2,learners=2", "each once"),
        ("local:every=1.5", "every=1.5"),
        ("local:h=3", "h=3"),
        ("local:every=999999999", "every must be"),
        ("allreduce:learners=4", "leave settings out"),
        ("gossip:pull=0.5", "gossip has no setting pull"),
        ("averaging:pull=nan", "pull=nan"),
        ("averaging:pull=1.5", "from 0 to 1"),
        ("parameter_server:learners=4", "without staleness"),
        ("parameter_server:learners=4,staleness=65", "staleness must be"),
        ("averaging:mix=0", "mix must be a whole number"),
        ("diloco:outer_momentum=1", "outer_momentum must be"),
        ("local:moments=none", "moments=mean"),
        ("local:every=20,fragments=2", "local has no setting fragments"),
        ("diloco:every=20,fragments=65", "fragments must be"),
        ("diloco:every=20,cycles=0,fragments=2", "cycles must be"),
        ("diloco:every=20,blend=0.5", "blend=0.5.*give fragments=4"),
        ("diloco:every=20,fragments=4,delay=5", "use delay=4"),
        ("diloco:every=20,fragments=2,cycles=5", "use delay=1"),
        ("diloco:every=20,fragments=4,cycles=5", "use every=60"),
        ("diloco:every=20,fragments=4,blend=nan", "blend=nan"),
        ("gossip:learners=4,every=1", "gossip, every=1, mix=1.*use every=2 or more, or local:learners=4,every=1"),
        ("averaging:every=8,mix=8", "averaging, every=8, mix=8.*use every=9"),
        ("pair_averaging:every=8,mix=20", "use every=21"),
        ("parameter_server:learners=4,every=2,staleness=1", "every=2, staleness=1.*use every=3"),
        ("local:learners=4,quorum=5", "use quorum=4 or less"),
        ("gossip:learners=4,quorum=3", "gossip has no setting quorum"),
        ("local:learners=4,grace=2", "give quorum=3, too"),
        ("local:learners=4,quorum=3,grace=-1", "grace=-1"),
        ("local:learners=4,quorum=3,grace=1e9", "grace must be"),
        ("diloco:learners=4,every=20,fragments=4,quorum=3", "meet only where a round ends"),
        ("local:send=int7", "'int7'.*send=whole, =bf16, =int8 or =int4"),
        ("local:send=8", "send=8"),
        ("gossip:learners=4,send=int8", "gossip has no setting send"),
        ("local:learners=4,every=4,send=int8,quorum=3", "send=int8 with quorum=3.*leave one of them out"),
        ("diloco:learners=4,every=20,fragments=4,send=bf16", "send=bf16 with fragments=4"),
    ],
)
def test_anything_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        SyncPlan.parse(text)


@pytest.mark.parametrize(
    ("slots", "workers", "mechanism", "message"),
    [
        (6, 2, "replicated", "as many slots"),
        (8, 5, "replicated", "a learner for every"),
        (8, 2, "zero", "hold its learners whole"),
    ],
)
def test_what_does_not_go_together_is_refused(slots: int, workers: int, mechanism: str, message: str) -> None:
    SyncPlan().check(slots, workers, mechanism, "exact")
    SyncPlan("local", 4, 2).check(8, 4, "replicated", "exact")
    with pytest.raises(UserError, match=message):
        SyncPlan("local", 4, 2).check(slots, workers, mechanism, "exact")


def test_a_quorum_is_for_fast_mode() -> None:
    plan = SyncPlan.parse("diloco:learners=4,every=2,quorum=3,grace=0.5")
    assert plan.has_quorum
    assert not SyncPlan.parse("diloco:learners=4,quorum=4").has_quorum
    plan.check(8, 4, "replicated", "fast")
    plan = SyncPlan.parse("local:learners=8,every=16,quorum=6")
    plan.check_quorum(elastic=True)
    SyncPlan.parse("local:learners=8,every=16").check_quorum(elastic=False)
    with pytest.raises(UserError, match="elastune run --workers"):
        plan.check_quorum(elastic=False)
    with pytest.raises(UserError, match="use --mode fast"):
        plan.check(8, 4, "replicated", "exact")


@given(
    batches=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    each=st.integers(1, 3),
    learners=st.integers(1, 5),
    workers=st.integers(1, 5),
    mode=st.sampled_from(["exact", "fast"]),
    least=st.integers(1, 2),
)
def test_workers_share_out_a_round(batches, each, learners, workers, mode, least) -> None:
    """Every sample once; the weights of each learner's own steps add up to 1; and nothing shows the workers."""
    plan, slots = SyncPlan("local", learners, len(batches)), each * learners
    workers = min(workers, learners)
    runs = [
        slices_of_round(batches, slots, learners, plan.carried(workers, rank), mode, 4, least)
        for rank in range(workers)
    ]
    used = sorted(place for run in runs for part in run if part.weight for place in part.samples)
    assert used == list(range(sum(batches)))
    assert plan.most_carried(workers) == max(len({part.learner for part in run}) for run in runs)
    assert all([part.ends_step for part in run] == [False] * (len(run) - 1) + [True] for run in runs)
    assert all(sum(part.ends_local_step for part in run) == len(batches) for run in runs)
    updates = [part for run in runs for part in run if part.ends_update]
    assert len(updates) == learners * len(batches)
    assert sum(part.counts for part in updates) == pytest.approx(1.0)
    for run, rank in zip(runs, range(workers), strict=True):
        for learner in plan.carried(workers, rank):
            own = [part for part in run if part.learner == learner]
            weights = sum(part.weight for part in own)
            assert weights == pytest.approx(sum(part.counts > 0 for part in own if part.ends_update))
    alone = slices_of_round(batches, slots, learners, range(learners), mode, 4, least)
    results = [(p.learner, p.slot, p.samples, p.weight, p.counts, p.ends_slot, p.ends_update) for p in alone]
    assert sorted(results, key=str) == sorted(
        [(p.learner, p.slot, p.samples, p.weight, p.counts, p.ends_slot, p.ends_update) for run in runs for p in run],
        key=str,
    )


def test_one_learner_and_one_batch_are_a_step() -> None:
    (*_, last) = slices_of_round([10], 4, 1, range(1), "exact", None)
    plain = shares(10, 4, 1, 0, "exact", None)
    assert (last.samples, last.weight, last.ends_step) == (plain[-1].samples, plain[-1].weight, True)
