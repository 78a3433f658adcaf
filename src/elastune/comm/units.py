"""Squared norms unit by unit: numbers that do not show in which pieces a gradient was looked at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from elastune.comm.exactly import exact_sum
from elastune.core.leaves import UNIT


def unit_squares(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """The squared norm of each unit of flat ``pieces``, one after another; float64, on the CPU.

    A piece begins where a unit does and ends where one, or its leaf, does. Each unit's norm is taken by itself (a
    kernel over rows, whose bits do not depend on how many rows there are), in the precision that torch's own
    ``clip_grad_norm_`` takes norms in.
    """
    found: list[torch.Tensor] = []
    tails: list[tuple[int, torch.Tensor]] = []
    for piece in pieces:
        if piece.dtype not in (torch.float32, torch.float64):
            piece = piece.float()
        full = piece.numel() // UNIT * UNIT
        if full:
            found.append(torch.linalg.vector_norm(piece[:full].view(-1, UNIT), dim=1))
        if full < piece.numel():
            tails.append((len(found), piece[full:]))
            found.append(piece[:0])
    for (place, _), norm in zip(tails, torch._foreach_norm([tail for _, tail in tails]) if tails else (), strict=True):
        found[place] = norm.reshape(1)
    if not found:
        return torch.zeros(0, dtype=torch.float64)
    return torch.cat([norms.double() for norms in found]).cpu().square_()


def global_norm(squares: torch.Tensor) -> float:
    """The norm of all, from the squares of units: rounded once, whatever their order was."""
    return math.sqrt(exact_sum(squares.tolist()))


def clip_factor(norm: float, max_norm: float) -> float:
    """What a gradient of norm ``norm`` is to be multiplied with, as torch's ``clip_grad_norm_`` has it; NaN of NaN."""
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor >= 1.0 else factor


def gradient_squares(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """The squares of units of whole gradients."""
    return unit_squares([gradient.reshape(-1) for gradient in gradients])
