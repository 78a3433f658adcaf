"""Silent errors on purpose (``--chaos corrupt:gradient``): one bit of what this worker computes, holds or sends.

A worker receives requests from its coordinator. Nothing here runs in a worker without one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from elastune.core.run import derive
from elastune.elastic.wire.messages import Corrupt
from elastune.parallel.mechanisms.base import Ready, Replica

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Corruptions:
    """The requests that this worker has received, at work.

    "gradient" is of each slot that the worker computes, "weights" and "optimizer" are before a step, and "transfer" is
    of the state that it sends to another worker.
    """

    def __init__(self) -> None:
        self._open: list[tuple[Corrupt, random.Random]] = []

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, request: Corrupt) -> None:
        """Act on ``request`` from now on."""
        self._open.append((request, random.Random(derive(request.seed, "corrupt", request.what))))

    def ready(self, count: int, put: Ready) -> Ready:
        """``put`` of a slot's ``count`` gradients, one of which gets a wrong bit."""
        for dice in self._due("gradient"):
            put = _spoiling(dice.randrange(count), dice, put)
        return put

    def step(self, replica: Replica) -> None:
        """Spoil weights and optimizer state before a step."""
        for dice in self._due("weights"):
            flip([p.detach() for p in replica.params], dice)
        for dice in self._due("optimizer"):
            kept = [
                value
                for state in replica.optimizer.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim()
            ]
            flip(kept or [p.detach() for p in replica.params], dice)

    def sent(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """``tensors`` as they arrive at another worker."""
        arrived = list(tensors)
        for dice in self._due("transfer"):
            arrived = [t.clone() for t in tensors]
            flip([t for t in arrived if t.is_floating_point()], dice)
        return arrived

    def _due(self, what: str) -> list[random.Random]:
        due = [dice for request, dice in self._open if request.what == what]
        self._open = [each for each in self._open if each[0].what != what or not each[0].once]
        return due


def _spoiling(place: int, dice: random.Random, put: Ready) -> Ready:
    left = [place]  # of several gradients that come in any order, the first from this place on that is there

    def spoil(i: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None and left and (i <= left[0]):
            left.clear()
            flip([gradient.detach()], dice)
        put(i, gradient)

    return spoil


def flip(tensors: Sequence[torch.Tensor], dice: random.Random) -> None:
    """Flip one bit of one of ``tensors``, in place."""
    whole = [t for t in tensors if t.numel()]
    if not whole:
        return
    tensor = dice.choice(whole)
    flat = tensor.contiguous().view(-1)
    at, bits = dice.randrange(flat.numel()), 8 * tensor.element_size()
    bit = dice.randrange(bits)
    word = flat[at : at + 1].view(_WORDS[tensor.element_size()])
    mask = 1 << bit if bit < bits - 1 or bits == 8 else -(1 << bit)
    word.bitwise_xor_(torch.tensor(mask, dtype=word.dtype, device=word.device))
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
