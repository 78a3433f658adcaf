"""Sums, means and norms whose bits depend neither on the order of numbers nor on the workers that hold them.

Norms are computed unit by unit (``core.layout.UNIT`` elements), so the pieces of a gradient do not change the bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

import torch
import torch.nn.functional as F

from elastune.core.layout import UNIT, unit_heads
from elastune.parallel.comm.group import Group

AT_ONCE = 1024 * UNIT
"""Elements of which ``unit_squares`` makes a copy in float64 at one time, on a GPU."""


def exact_sum(values: Iterable[float]) -> float:
    """The sum, rounded once (Shewchuk 1997, as ``math.fsum``); with infinities or NaN, the sum of these alone."""
    numbers = list(values)
    if wild := [x for x in numbers if not math.isfinite(x)]:
        return sum(wild)  # without finite numbers, whose partial sums overflow in one order and not in another
    try:
        return math.fsum(numbers)
    except OverflowError:  # of a partial sum; the whole sum may be finite
        return _rounded(sum(map(Fraction, numbers), Fraction(0)))


def exact_mean(values: Iterable[float], weights: Iterable[float] | None = None) -> float:
    """The (weighted) mean, rounded once: the mean of equal values is exactly that value. NaN without values."""
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


def unit_squares(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """The squared norm of each unit of flat ``pieces``, one after another; float64, on the CPU.

    A piece begins at the start of a unit, and ends at the end of a unit or of its parameter block. On a CPU a kernel
    over rows computes the norm of each unit, in the precision of torch's ``clip_grad_norm_``. Its bits do not depend
    on the number of rows. A GPU's kernel divides its work by the number of rows, and its bits depend on it (seen on an
    H100). So on a GPU the halves of each unit are added to each other (``halved_squares``).
    """
    if any(piece.device.type != "cpu" for piece in pieces):
        return torch.cat([halved_squares(group) for group in _groups(pieces)]).cpu()
    norms_of_pieces: list[torch.Tensor] = []
    tails: list[tuple[int, torch.Tensor]] = []
    for piece in pieces:
        if piece.dtype not in (torch.float32, torch.float64):
            piece = piece.float()
        full = piece.numel() // UNIT * UNIT
        if full:
            norms_of_pieces.append(torch.linalg.vector_norm(piece[:full].view(-1, UNIT), dim=1))
        if full < piece.numel():
            tails.append((len(norms_of_pieces), piece[full:]))
            norms_of_pieces.append(piece[:0])
    # The short tails of all pieces have their norms in one call.
    for (place, _), norm in zip(tails, torch._foreach_norm([tail for _, tail in tails]) if tails else (), strict=True):
        norms_of_pieces[place] = norm.reshape(1)
    if not norms_of_pieces:
        return torch.zeros(0, dtype=torch.float64)
    return torch.cat([norms.double() for norms in norms_of_pieces]).cpu().square_()


def halved_squares(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """As ``unit_squares``, by additions of whole tensors; float64, on the device of ``pieces``.

    On any device an addition rounds each number by itself, whatever it adds beside it.
    """
    padded = [F.pad(piece, (0, -piece.numel() % UNIT)) for piece in pieces]
    squares = torch.cat(padded).view(-1, UNIT).double().square_()
    while squares.shape[1] > 1:
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    return squares.view(-1)


def _groups(pieces: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """``pieces`` in order, in groups whose copies in float64 stay small; long pieces are cut into whole units."""
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
    """The squares of all units of ``param_blocks`` whose parts the workers of ``group`` hold; equal on all workers.

    The squares come in no particular order. A part may begin inside a unit; its first elements then travel to the
    worker on which the unit begins.

    Args:
        param_blocks: For each parameter block the elements of each worker, and the values of this worker's elements.
        group: The workers; all call it.
    """
    outgoing: list[list[torch.Tensor]] = [[] for _ in range(group.size)]
    incoming: list[list[tuple[int, int]]] = [[] for _ in range(group.size)]
    pieces: list[list[torch.Tensor]] = []
    for rows, flat in param_blocks:
        head_size = 0
        for worker, reducer, head in unit_heads(rows):
            if worker == group.rank:
                head_size = len(head)
                outgoing[reducer].append(flat[:head_size])
            if reducer == group.rank:
                incoming[worker].append((len(pieces), len(head)))
        pieces.append([flat[head_size:]])
    sizes, out_sizes = (
        [sum(map(len, per_worker)) for per_worker in outgoing],
        [sum(n for _, n in per_worker) for per_worker in incoming],
    )
    data = [
        head.double().to(group.wire) for per_worker in outgoing for head in per_worker
    ]  # one dtype for all, which keeps every bit
    received = torch.empty(sum(out_sizes), dtype=torch.float64, device=group.wire)
    group.all_to_all(received, torch.cat([received[:0], *data]), out_sizes, sizes).wait()
    expected = [place for per_worker in incoming for place in per_worker]
    for (param_block, _), head in zip(expected, received.split([n for _, n in expected]), strict=True):
        pieces[param_block].append(head.to(pieces[param_block][0]))
    whole = [torch.cat(parts) for parts in pieces]
    return torch.cat(group.gather_tensors(unit_squares([piece for piece in whole if len(piece)])))


def global_norm(squares: torch.Tensor) -> float:
    """The norm of a whole gradient, from the squares of its units; rounded once, so their order does not matter."""
    return math.sqrt(exact_sum(squares.tolist()))


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor that clips a gradient of norm ``norm``, as in torch's ``clip_grad_norm_``; NaN if the norm is NaN."""
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor >= 1.0 else factor


def gradient_squares(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """The squares of units of whole gradients."""
    return unit_squares([gradient.reshape(-1) for gradient in gradients])
