"""Guards on gradients that lie elsewhere, and which optimizers may be cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn, optim

from elastune.core.errors import UserError
from elastune.core.layout import UNIT
from elastune.parallel.comm.norms import clip_factor, global_norm, halved_squares, unit_squares
from elastune.parallel.mechanisms.guards import GradientGuard, refuse_unless_elementwise

Make = Callable[[list[nn.Parameter]], optim.Optimizer]


def guarded() -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(3))]
    for p in parameters:
        p.grad = GradientGuard.of(p)
    return parameters


@pytest.mark.parametrize(
    "use",
    [
        lambda ps: nn.utils.clip_grad_norm_(ps, 1.0),
        lambda ps: nn.utils.clip_grad_value_(ps, 1.0),
        lambda ps: ps[0].grad.norm(),
        lambda ps: ps[0].grad.mul_(0.5),
        lambda ps: torch.cat([p.grad.view(-1) for p in ps]),
    ],
)
def test_a_gradient_that_is_not_here_cannot_be_used(use: Callable[[list[nn.Parameter]], object]) -> None:
    with pytest.raises(UserError, match=r"session\.clip_grad_norm_"):
        use(guarded())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_it_can_be_cleared(set_to_none: bool) -> None:
    optim.SGD(guarded()).zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
        lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
        optim.AdamW,
        lambda ps: optim.AdamW(ps, fused=True),
        lambda ps: optim.Adam(ps, amsgrad=True, lr=0.0),  # the beginning of a warm-up
        optim.RMSprop,
        optim.Adagrad,
        optim.Adadelta,
    ],
)
def test_optimizers_that_may_be_cut(make: Make) -> None:
    parameters = guarded()
    optimizer = make(parameters)
    before = [p.detach().clone() for p in parameters], {k: dict(v) for k, v in optimizer.state.items()}
    optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    refuse_unless_elementwise(optimizer)
    assert all(torch.equal(p, old) for p, old in zip(parameters, before[0], strict=True))
    assert {k: dict(v) for k, v in optimizer.state.items()} == before[1], "the program's optimizer is as it was"


class _Normalised(optim.SGD):
    """Scales each parameter's gradient by its norm, as LARS does."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad /= p.grad.norm()
        super().step()


@pytest.mark.parametrize("make", [optim.LBFGS, optim.Adafactor, lambda ps: _Normalised(ps, lr=0.1)])
def test_optimizers_that_may_not_be_cut(make: Make) -> None:
    with pytest.raises(UserError, match="must update each element by itself"):
        refuse_unless_elementwise(make(guarded()))


@pytest.mark.parametrize("squares", [unit_squares, halved_squares])
def test_squares_do_not_show_the_pieces(squares: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
    """``halved_squares`` is what a GPU runs. Here its arithmetic is tested; a GPU's kernels are in ``test_gpu``."""
    torch.manual_seed(0)
    flat = torch.randn(9 * UNIT + 17) * 10
    whole = squares([flat])
    for cuts in ([4], [1, 2, 3], list(range(1, 10))):
        bounds = [0, *(c * UNIT for c in cuts), len(flat)]
        pieces = [torch.cat([torch.zeros(3), flat[a:b]])[3:] for a, b in itertools.pairwise(bounds)]
        assert torch.equal(squares(pieces), whole)
    assert global_norm(whole) == pytest.approx(float(flat.double().norm()))
    assert global_norm(whole.flip(0)) == global_norm(whole)


def test_clip_factors_are_torchs() -> None:
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) == pytest.approx(0.25)
    assert clip_factor(float("inf"), 1.0) == 0.0
    assert clip_factor(float("nan"), 1.0) != clip_factor(float("nan"), 1.0)
