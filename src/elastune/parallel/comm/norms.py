"""Squared norms and means whose bits depend neither on the order of numbers nor on who holds them.

Norms are computed unit by unit, so it does not show in which pieces a gradient was read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

import torch
import torch.nn.functional as F

from elastune.core.layout import UNIT, unit_heads
from elastune.parallel.comm.group import Group

# [exactly] Sums and means of numbers that do not depend on their order, nor on which worker held which.


def exact_sum(values: Iterable[float]) -> float:
    """The sum, rounded once (Shewchuk 1997, as ``math.fsum``); of infinities and NaN what adding them gives."""
    numbers = list(values)
    if wild := [x for x in numbers if not math.isfinite(x)]:
        return sum(wild)  # them alone: finite numbers could overflow on the way, in one order and not in another
    try:
        return math.fsum(numbers)
    except OverflowError:  # of a partial sum, perhaps not of the whole
        return _rounded(sum(map(Fraction, numbers), Fraction(0)))


def exact_mean(values: Iterable[float], weights: Iterable[float] | None = None) -> float:
    """The (weighted) mean, rounded once: equal values have exactly their own value as mean. NaN of nothing."""
    numbers = list(values)
    parts = [1.0] * len(numbers) if weights is None else list(weights)
    if wild := [x for x in numbers if not math.isfinite(x)]:
        return sum(wild)
    total = sum(map(Fraction, parts), Fraction(0))
    if total == 0:
        return math.nan
    return float(sum((Fraction(x) * Fraction(w) for x, w in zip(numbers, parts, strict=True)), Fraction(0)) / total)


def _rounded(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


# [units] Squared norms unit by unit: numbers that do not show in which pieces a gradient was looked at.

AT_ONCE = 1024 * UNIT


def unit_squares(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """The squared norm of each unit of flat ``pieces``, one after another; float64, on the CPU.

    A piece begins where a unit does and ends where one, or its leaf, does. On a CPU each unit's norm is taken by itself
    (a kernel over rows, whose bits do not depend on how many rows there are), in the precision that torch's own
    ``clip_grad_norm_`` takes norms in. A GPU's kernel divides its work by the number of rows, and its bits show that
    (seen on an H100), so there units are added up half on half.
    """
    if any(piece.device.type != "cpu" for piece in pieces):
        return torch.cat([halved_squares(group) for group in _groups(pieces)]).cpu()
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


def halved_squares(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """As ``unit_squares``, by additions of whole tensors: on any device each number is rounded by itself, whatever
    is added beside it. float64, where ``pieces`` are.
    """
    padded = [F.pad(piece, (0, -piece.numel() % UNIT)) for piece in pieces]
    squares = torch.cat(padded).view(-1, UNIT).double().square_()
    while squares.shape[1] > 1:
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    return squares.view(-1)


def _groups(pieces: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """``pieces`` in order, so many at once that copies in float64 stay small; long ones in parts of whole units."""
    group: list[torch.Tensor] = []
    size = 0
    for part in (part for piece in pieces for part in piece.split(AT_ONCE)):
        if group and size + part.numel() > AT_ONCE:
            yield group
            group, size = [], 0
        group.append(part)
        size += part.numel()
    if group:
        yield group


def squares_of_rows(param_blocks: Sequence[tuple[Sequence[range], torch.Tensor]], group: Group) -> torch.Tensor:
    """The squares of all units of ``param_blocks`` that workers of ``group`` have in parts; equal on all, in any order.

    Each is given by the elements that each worker has, and by this worker's. Parts end inside of units, so their first
    elements travel to where the unit begins.
    """
    outgoing: list[list[torch.Tensor]] = [[] for _ in range(group.size)]
    incoming: list[list[tuple[int, int]]] = [[] for _ in range(group.size)]
    pieces: list[list[torch.Tensor]] = []
    for rows, flat in param_blocks:
        begun = 0
        for worker, reducer, head in unit_heads(rows):
            if worker == group.rank:
                begun = len(head)
                outgoing[reducer].append(flat[:begun])
            if reducer == group.rank:
                incoming[worker].append((len(pieces), len(head)))
        pieces.append([flat[begun:]])
    sizes, out_sizes = [sum(map(len, each)) for each in outgoing], [sum(n for _, n in each) for each in incoming]
    data = [head.double().to(group.wire) for each in outgoing for head in each]  # one type for all, and no bit less
    received = torch.empty(sum(out_sizes), dtype=torch.float64, device=group.wire)
    group.all_to_all(received, torch.cat([received[:0], *data]), out_sizes, sizes).wait()
    expected = [place for each in incoming for place in each]
    for (param_block, _), head in zip(expected, received.split([n for _, n in expected]), strict=True):
        pieces[param_block].append(head.to(pieces[param_block][0]))
    whole = [torch.cat(parts) for parts in pieces]
    return torch.cat(group.gather_tensors(unit_squares([piece for piece in whole if len(piece)])))


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
