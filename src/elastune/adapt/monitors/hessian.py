"""The top eigenvalue and the trace of a loss's Hessian, by products of the Hessian with vectors.

Sources. Product: Pearlmutter 1994, "Fast exact multiplication by the Hessian", here the gradient of the gradient times
the vector. Top eigenvalue: power iteration (Yao et al. 2020, "PyHessian"). Trace: Hutchinson 1990, "A stochastic
estimator of the trace of the influence matrix for Laplacian smoothing splines".

Bias and variance. Power iteration approaches the eigenvalue from the inside: its magnitude is too small by a relative
error of about (second / first)^(2 iterations), and by more where eigenvalues of opposite sign rival each other. On part
of a batch, the largest eigenvalue of a noisy matrix is too large on average. Hutchinson's estimate is unbiased; one
probe has variance 2 (|H|_F^2 - sum H_ii^2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Vector = list[Tensor]


def top_eigenvalue(
    loss: Tensor, params: Sequence[Tensor], iterations: int = 30, tolerance: float = 0.01, seed: int = 0
) -> float:
    """Return the eigenvalue of largest magnitude, with its sign, of the Hessian of the scalar ``loss`` by
    ``params``.

    ``loss`` can be backpropagated afterwards. No ``grad`` field, no hook of gradient accumulation and no global random
    state changes. Functions marked ``once_differentiable`` count as linear, without a warning: autograd skips its
    error.

    Args:
        loss: A scalar.
        params: The parameters.
        iterations: The most Hessian-vector products.
        tolerance: Stop once the value moves by less than this part of itself.
        seed: Seeds the first vector.

    Returns:
        The eigenvalue; 0 where ``loss`` is linear.

    Raises:
        RuntimeError: From torch, where ``loss`` cannot be differentiated twice.
    """
    used, product = _hessian(loss, params)
    generator = torch.Generator().manual_seed(seed)
    vector = _unit([torch.randn(p.shape, generator=generator).to(p) for p in used])
    eigenvalue = 0.0
    for _ in range(iterations if used else 0):
        image = product(vector)
        before, eigenvalue = eigenvalue, _dot(vector, image)
        if eigenvalue == before or abs(eigenvalue - before) < tolerance * abs(eigenvalue):
            break
        vector = _unit(image)
    return eigenvalue


def hessian_trace(loss: Tensor, params: Sequence[Tensor], probes: int = 1, seed: int = 0) -> float:
    """Return the mean of v'Hv over ``probes`` vectors of random signs, with H the Hessian of the scalar ``loss``.

    It leaves everything as ``top_eigenvalue`` does. With equal seeds, traces of several losses add up as the losses do.
    """
    used, product = _hessian(loss, params)
    generator = torch.Generator().manual_seed(seed)
    total = 0.0
    for _ in range(probes if used else 0):
        signs = [(torch.randint(0, 2, p.shape, generator=generator) * 2 - 1).to(p) for p in used]
        total += _dot(signs, product(signs))
    return total / probes


def _hessian(loss: Tensor, params: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[Vector], Vector]]:
    """The parameters in which the loss is not linear, and the product of its Hessian with a vector."""
    first = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True, materialize_grads=False)
    pairs = [(p, g) for p, g in zip(params, first, strict=True) if g is not None and g.requires_grad]
    used, gradients = [p for p, _ in pairs], [g for _, g in pairs]

    def product(vector: Vector) -> Vector:
        return list(torch.autograd.grad(gradients, used, vector, retain_graph=True, materialize_grads=True))

    return used, product


def _dot(a: Vector, b: Vector) -> float:
    return float(sum(torch.sum(x * y, dtype=torch.float64) for x, y in zip(a, b, strict=True)))


def _unit(vector: Vector) -> Vector:
    length = _dot(vector, vector) ** 0.5
    return [x / length for x in vector] if length > 0 else vector
