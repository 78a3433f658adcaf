"""The statistics that ride in a reduction are those of the parts of a batch, whatever the parts are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elastune.core.run import ExecutionSettings
from elastune.core.slots import BatchSlice, Mode, shares
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import replicated
from elastune.parallel.comm.reducer import BLOCK, TURNS
from elastune.parallel.sync.base import Sync
from elastune.parallel.sync.registry import prepare

BATCH = 13  # slots of unequal size
X, Y = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(1)), torch.arange(BATCH) % 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))


def squares(indices: range, weights: list[torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The squared norm of the mean gradient over ``indices``, and of its product with ``weights``."""
    module = network()
    loss = F.cross_entropy(module(X[list(indices)]), Y[list(indices)])
    grads = torch.autograd.grad(loss, list(module.parameters()))
    plain = sum((g.double() ** 2).sum() for g in grads)
    weighed = sum(((g * w).double() ** 2).sum() for g, w in zip(grads, weights or [torch.zeros(())] * 4, strict=True))
    return torch.as_tensor(plain), torch.as_tensor(weighed)


def run_step(sync: Sync, plan: list[BatchSlice]) -> None:
    for i, share in enumerate(plan):
        sync.begin(share, starts_step=i == 0)
        indices = list(share.samples)
        sync.backward(F.cross_entropy(sync.replica.model(X[indices]), Y[indices]), share)


def prepared(mode: Mode, slots: int) -> Sync:
    return with_optimizer(network(), ExecutionSettings(mode=mode, num_slots=slots))


def with_optimizer(module: nn.Module, execution: ExecutionSettings) -> Sync:
    return prepare(module, torch.optim.SGD(module.parameters(), lr=0.1), execution, replicated(Group()))


CASES: dict[str, tuple[Mode, int, int | None, Callable[[BatchSlice], int]]] = {
    "a slot is a part": ("exact", 4, None, lambda share: share.slot),
    "a slot in pieces is one part": ("exact", 4, 2, lambda share: share.slot),
    "more slots than samples": ("exact", 16, None, lambda share: share.slot),
    "pieces of one slot are parts": ("exact", 1, 4, lambda share: share.samples.start),
    "micro-batches are parts": ("fast", 4, 5, lambda share: share.samples.start),
}


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("weighed", [False, True])
def test_norms_of_parts_and_of_the_whole(case: str, weighed: bool) -> None:
    mode, slots, micro_batch, part_of = CASES[case]
    plan = shares(BATCH, slots, 1, 0, mode, micro_batch)
    sync = prepared(mode, slots)
    weights = [torch.rand_like(p) + 0.5 for p in sync.replica.params] if weighed else None
    sync.measure(True, weights)
    run_step(sync, plan)
    parts: dict[int, list[int]] = {}
    for share in plan:
        parts.setdefault(part_of(share), []).extend(share.samples)
    assert len(parts) > 1
    expected = [
        (len(part) / BATCH, squares(range(part[0], part[-1] + 1), weights if weighed else None))
        for part in parts.values()
    ]
    result = sync.statistics
    assert result.parts["count"] == len(parts)
    assert result.parts["square"] == pytest.approx(float(sum(w * s for w, (s, _) in expected)), rel=1e-5)
    assert result.norms is not None
    whole = squares(range(BATCH), weights if weighed else None)
    assert result.norms[0] == pytest.approx(float(whole[0]), rel=1e-5)
    if weighed:
        assert result.parts["weighted"] == pytest.approx(float(sum(w * s for w, (_, s) in expected)), rel=1e-5)
        assert result.norms[1] == pytest.approx(float(whole[1]), rel=1e-5)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_the_loss_is_that_of_the_global_batch(mode: Mode) -> None:
    sync = prepared(mode, 4)
    run_step(sync, shares(BATCH, 4, 1, 0, mode, 5))
    assert sync.statistics.parts["loss"] == pytest.approx(F.cross_entropy(network()(X), Y).item(), rel=1e-6)
    assert sync.statistics.norms is None
    assert sync.statistics.parts["count"] == 0


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_measuring_changes_no_gradient(mode: Mode) -> None:
    """Of the same shares: to the last bit."""
    grads = []
    for measures in (False, True):
        sync = prepared(mode, 4)
        sync.measure(measures)
        run_step(sync, shares(BATCH, 4, 1, 0, mode, 5))
        grads.append([p.grad.clone() for p in sync.replica.params])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(("mode", "slots"), [("exact", 1), ("fast", 4)])
def test_one_pass_has_no_parts_to_compare(mode: Mode, slots: int) -> None:
    plan = shares(BATCH, slots, 1, 0, mode, None)
    assert [share.samples for share in plan] == [range(BATCH)], "measured or not, it is not cut"
    sync = prepared(mode, slots)
    sync.measure(True)
    run_step(sync, plan)
    assert sync.statistics.parts["count"] == 1


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_what_was_measured_of_slices_adds_up(mode: Mode) -> None:
    sync = prepared(mode, 4)
    plan = shares(BATCH, 4, 1, 0, mode, None)
    for i, share in enumerate(plan):
        sync.begin(share, starts_step=i == 0)
        sync.record_statistic("trace", share.weight * 8)
        indices = list(share.samples)
        sync.backward(F.cross_entropy(sync.replica.model(X[indices]), Y[indices]), share)
    assert sync.statistics.parts["trace"] == pytest.approx(8)


def test_clipping_comes_after_the_norms() -> None:
    sync = prepared("exact", 4)
    sync.measure(True)
    run_step(sync, shares(BATCH, 4, 1, 0, "exact", None))
    nn.utils.clip_grad_norm_(sync.replica.params, 1e-3)
    assert sync.statistics.norms is not None
    assert sync.statistics.norms[0] == pytest.approx(float(squares(range(BATCH))[0]), rel=1e-5)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_four_turns_look_at_every_block_of_a_large_model_once(mode: Mode) -> None:
    """In a reducer; a lone worker of fast mode has none."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 700), nn.Tanh(), nn.Linear(700, 600), nn.Tanh(), nn.Linear(600, 3))
    assert sum(p.numel() for p in module.parameters()) > TURNS * BLOCK
    sync = with_optimizer(module, ExecutionSettings(mode=mode, num_slots=4))
    plan = shares(BATCH, 4, 1, 0, mode, None if mode == "exact" else 5)
    seen = []
    for turn in range(TURNS):
        sync.measure(True, None, turn)
        run_step(sync, plan)
        assert sync.statistics.norms is not None
        seen.append((sync.statistics.parts["square"], sync.statistics.norms[0]))
        assert seen[-1][0] > seen[-1][1] > 0, "parts scatter about the whole, block by block"
        whole = sum(float(p.grad.double().square().sum()) for p in sync.replica.params)
        for p in sync.replica.params:
            p.grad = None
    assert sum(square for _, square in seen) / TURNS == pytest.approx(whole, rel=1e-5)
    if mode == "exact":
        assert len({square for _, square in seen}) == TURNS
