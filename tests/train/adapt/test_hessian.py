"""The Hessian's top eigenvalue and trace against the dense Hessian, and what they leave untouched."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian

from elastune.train.adaptation.monitoring import hessian_trace, top_eigenvalue


def small_net(seed: int, scale: float = 1.0) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (64,), generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(scale)
    return net, x, y


def dense(net: nn.Module, x: Tensor, y: Tensor, sign: float = 1.0) -> Tensor:
    """The Hessian by all parameters, as a matrix."""
    names, values = zip(*net.named_parameters(), strict=True)
    sizes = [p.numel() for p in values]

    def loss(flat: Tensor) -> Tensor:
        pieces = flat.split(sizes)
        params = {name: piece.view_as(p) for name, piece, p in zip(names, pieces, values, strict=True)}
        return sign * F.cross_entropy(functional_call(net, params, (x,)), y)

    matrix = hessian(loss)(torch.cat([p.detach().flatten() for p in values]))
    assert isinstance(matrix, Tensor)
    return matrix


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["positive", "negative dominates"])
@pytest.mark.parametrize("seed", range(4))
def test_top_eigenvalue_is_that_of_the_dense_hessian(seed: int, sign: float) -> None:
    net, x, y = small_net(seed)
    eigenvalues = torch.linalg.eigvalsh(dense(net, x, y, sign))
    expected = eigenvalues[eigenvalues.abs().argmax()].item()
    assert expected * sign > 0
    loss = sign * F.cross_entropy(net(x), y)
    assert top_eigenvalue(loss, list(net.parameters()), 500, 1e-7) == pytest.approx(expected, rel=1e-3)
    assert top_eigenvalue(loss, list(net.parameters())) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_trace_converges_on_that_of_the_dense_hessian(seed: int) -> None:
    net, x, y = small_net(seed)
    matrix = dense(net, x, y)
    probes = 2000
    off_diagonal = matrix.square().sum() - matrix.diagonal().square().sum()
    error = (2 * off_diagonal / probes).sqrt().item()
    traced = hessian_trace(F.cross_entropy(net(x), y), list(net.parameters()), probes, seed)
    assert traced == pytest.approx(matrix.trace().item(), abs=3 * error)
    assert error < 0.05 * abs(matrix.trace().item())


def test_trace_is_exact_where_the_hessian_is_diagonal() -> None:
    p = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    assert hessian_trace((torch.tensor([1.0, 2.0, -5.0]) * p.square()).sum(), [p]) == pytest.approx(-4)


def test_traces_of_shares_add_up_with_equal_seeds() -> None:
    net, x, y = small_net(0)
    params = list(net.parameters())
    whole = hessian_trace(F.cross_entropy(net(x), y), params, 3, seed=7)
    halves = [hessian_trace(F.cross_entropy(net(x[i::2]), y[i::2]) / 2, params, 3, seed=7) for i in (0, 1)]
    assert sum(halves) == pytest.approx(whole, rel=1e-9)


def test_equal_seeds_give_equal_bits_and_others_differ() -> None:
    net, x, y = small_net(0)
    params = list(net.parameters())

    def both(seed: int) -> tuple[float, float]:
        loss = F.cross_entropy(net(x), y)
        return top_eigenvalue(loss, params, 3, seed=seed), hessian_trace(loss, params, 2, seed)

    assert both(1) == both(1)
    assert both(1)[0] != both(2)[0]
    assert both(1)[1] != both(2)[1]


def test_training_goes_on_as_if_nothing_had_been_measured() -> None:
    net, x, y = small_net(0)
    params = list(net.parameters())
    calls: list[int] = []
    for p in params:
        p.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    F.cross_entropy(net(x), y).backward()
    expected = [p.grad.clone() for p in params if p.grad is not None]
    net.zero_grad()
    calls.clear()
    before = torch.get_rng_state()
    loss = F.cross_entropy(net(x), y)
    top_eigenvalue(loss, params)
    hessian_trace(loss, params, 2)
    assert all(p.grad is None for p in params)
    assert not calls
    assert torch.equal(torch.get_rng_state(), before)
    loss.backward()
    assert len(calls) == len(params)
    for p, gradient in zip(params, expected, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, gradient)


def test_parameters_without_part_in_the_loss_or_in_its_bend_are_left_out() -> None:
    bent, straight, unused = (torch.ones(2, requires_grad=True) for _ in range(3))
    loss = (3 * bent.square()).sum() + straight.sum()
    assert top_eigenvalue(loss, [bent, straight, unused]) == pytest.approx(6)
    assert hessian_trace(loss, [unused, straight, bent]) == pytest.approx(12)
    assert top_eigenvalue(straight.sum(), [straight, unused]) == 0
    assert hessian_trace(straight.sum(), [straight, unused]) == 0
