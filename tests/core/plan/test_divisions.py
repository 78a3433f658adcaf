"""Every way to divide a cluster, and none that is not one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.plan.cluster_plan import MOST_PLANS, Allowed, Nodes, divisions
from elastune.core.slots import MOST_EXACT_WORKERS


def test_a_cluster_of_four_is_divided_in_every_way() -> None:
    plans = divisions(Nodes(2, 2), Allowed((8,), (8,), width=4, tensor=2, shard=False))
    names = set(zip(plans.width, plans.splits.data, plans.splits.tensor, strict=True))
    assert names == {
        *((w, 1, 1) for w in (1, 2, 4)),
        *((w, 2, 1) for w in (1, 2)),
        (1, 4, 1),
        *((w, 1, 2) for w in (1, 2)),
        (1, 2, 2),
    }


def test_no_plan_uses_more_than_there_is_or_more_parts_than_samples() -> None:
    plans = divisions(Nodes(3, 4), Allowed((2, 8), (1, 4), width=5, tensor=4, pipeline=3))
    assert (plans.workers <= 12).all()
    assert (plans.width <= 5).all()
    assert (plans.splits.parts <= plans.splits.batch).all()
    assert (plans.splits.micro * plans.splits.parts <= plans.splits.batch + plans.splits.parts).all()
    assert (plans.splits.tensor <= 4).all()
    assert (plans.splits.pipeline <= 3).all()
    rows = np.stack([plans.width, plans.splits.batch, plans.splits.micro, plans.splits.data, plans.splits.shard])
    rows = np.concatenate([rows, [plans.splits.tensor, plans.splits.pipeline]])
    assert len(np.unique(rows, axis=1).T) == len(plans.width)


@pytest.mark.parametrize(("nodes", "each", "words"), [(0, 4, "--nodes"), (2, 0, "--gpus-per-node")])
def test_no_nodes_are_refused(nodes: int, each: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Nodes(nodes, each)


def test_too_many_nodes_are_refused() -> None:
    with pytest.raises(UserError, match="65,536"):
        Nodes(65_537, 1)


def test_workers_with_many_divisors_are_divided_in_fewer_ways() -> None:
    """55,440 has 120 divisors, the most that a number of workers can have."""
    allowed = Allowed(tuple(64 * 2**i for i in range(5)), (8, 16, 32, 64), 128, tensor=8, pipeline=16)
    plans = divisions(Nodes(55_440, 1), allowed)
    assert 10_000 < len(plans.width) <= MOST_PLANS
    assert (plans.workers <= 55_440).all()
    for axis in (plans.width, plans.splits.shard, plans.splits.tensor, plans.splits.pipeline):
        sizes = np.unique(axis)
        assert sizes[0] == 1
        assert (sizes[1:] / sizes[:-1] < 2.5).all(), "near enough to one another that none is far from the best"
    assert plans.width.max() == 128


def test_few_ways_are_all_looked_at() -> None:
    sizes = np.unique(divisions(Nodes(360, 1), Allowed((512,), (8,), width=360, shard=False)).splits.data)
    assert sizes.tolist() == [size for size in range(1, 361) if 360 % size == 0]


def test_no_training_has_more_workers_than_can_be_summed_exactly() -> None:
    allowed = Allowed((65_536,), (8,), width=64, tensor=8, pipeline=8)
    plans = divisions(Nodes(2_048, 8), allowed)
    assert plans.splits.workers.max() == MOST_EXACT_WORKERS
    assert plans.workers.max() == 16_384, "several trainings still use the whole cluster"
    mesh = Mesh(data=8_192)
    with pytest.raises(UserError, match="at most 4,096 workers"):
        divisions(Nodes(2_048, 8), replace(allowed, mesh=mesh))
