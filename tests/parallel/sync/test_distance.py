"""How far apart learners are, told from what rides in one exchange, against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from tests.parallel.sync.syncs_made import make_diloco_exact, make_exact, make_local_exact

from elastune.parallel.comm.group import Group
from elastune.parallel.sync.rounds import RoundSync, distance, squared_delta
from elastune.testing.kits.sync import Run


def defined(learners: list[list[torch.Tensor]]) -> float:
    """In double precision, with nothing spared."""
    rows = torch.stack([torch.cat([value.detach().double().reshape(-1) for value in each]) for each in learners])
    mean = rows.mean(0)
    return float(((rows - mean).norm(dim=1).square().mean().sqrt()) / mean.norm())


@pytest.mark.parametrize("spread", [1.0, 1e-2, 1e-5])
def test_one_number_of_each_is_enough(spread: float) -> None:
    """Parameters of size 1, a common way of 0.01, and learners apart by parts of it."""
    draw = torch.Generator().manual_seed(0)
    begun = [torch.randn(300, 7, generator=draw), torch.randn(11, generator=draw)]
    common = [0.01 * torch.randn(value.shape, generator=draw) for value in begun]
    learners = [
        [b + c + spread * 0.01 * torch.randn(b.shape, generator=draw) for b, c in zip(begun, common, strict=True)]
        for _ in range(4)
    ]
    execution = [torch.stack(rows).mean(0) for rows in zip(*learners, strict=True)]
    square = sum(float(squared_delta(each, begun)) for each in learners) / 4
    result = distance(square, execution, begun)
    if spread >= 1e-2:
        assert result == pytest.approx(defined(learners), rel=0.02)
    else:
        assert result is not None
        assert 0 <= result < 3e-5, "rounding: thousandths of the common way, which is 0.01"


def test_what_is_no_distance() -> None:
    one, zero = [torch.ones(3)], [torch.zeros(3)]
    assert distance(math.inf, one, zero) is None, "a learner has diverged"
    assert distance(math.nan, one, zero) is None
    assert distance(1.0, [torch.full((3,), math.nan)], zero) is None
    assert distance(1.0, zero, zero) is None, "there is nothing to relate it to"
    assert distance(float(squared_delta(one, zero)), one, zero) == 0.0, "learners are all the same"


@pytest.mark.parametrize("make", [make_local_exact, make_diloco_exact])
def test_a_round_tells_its_learners_distance(make) -> None:  # type: ignore[no-untyped-def]
    run = Run(make, Group())
    sync = run.sync
    assert isinstance(sync, RoundSync)
    for at in range(2):
        sync.control = [1.0, float(at), 0.0]
        run.passes(at)
        run._update()
        apart = list(sync._learners.values(range(4)).values())
        expected = defined([[value.clone() for value in each] for each in apart])
        sync.after_step()
        assert sync.statistics.distance == pytest.approx(expected, rel=1e-3)
        assert sync.totals == [1.0, float(at), 0.0], "and what rides along beside it is whole"


def test_without_learners_there_is_none() -> None:
    run = Run(make_exact, Group())
    run.round(0, lambda: None)
    assert run.sync.statistics.distance is None
