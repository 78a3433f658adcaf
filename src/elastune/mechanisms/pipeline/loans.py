"""Parameters that layers on several workers use (tied weights): one worker has them, the others borrow their values.

The first layer that uses a parameter decides whose it is. Its values go along with the first micro-batch of a step (or
of an evaluated batch) to later chunks that use it, and are dropped at its end. The gradients of a micro-batch come back
with the gradients of activations, and each chunk's is added to those of later ones: the order in which autograd adds
them up in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn


class Loans:
    """What worker ``rank`` of ``workers`` lends and borrows.

    Args:
        parameters: By leaf.
        used: By chunk: the parameters that it uses. Chunk c lies on worker ``c % workers``.
        workers: Stages of the pipeline.
        rank: Which of them this one is.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], used: Sequence[Sequence[nn.Parameter]], workers: int, rank: int
    ) -> None:
        self._parameters = parameters
        leaf_of = {id(p): leaf for leaf, p in enumerate(parameters)}
        users: dict[int, list[int]] = {}
        for chunk, own in enumerate(used):
            for p in own:
                users.setdefault(leaf_of[id(p)], []).append(chunk)
        self._users = {leaf: chunks for leaf, chunks in users.items() if len(chunks) > 1}
        self._borrowed_at = {
            leaf: [c for c in chunks if c % workers != chunks[0] % workers] for leaf, chunks in self._users.items()
        }
        self._borrows = {leaf for leaf, at in self._borrowed_at.items() if any(c % workers == rank for c in at)}
        self._passed_on: dict[int, torch.Tensor] = {}
        self._own: dict[int, torch.Tensor] = {}

    def shares(self, chunk: int) -> bool:
        """Whether ``chunk`` uses a parameter that another chunk uses too."""
        return any(chunk in chunks for chunks in self._users.values())

    def is_used_before(self, leaf: int, chunk: int) -> bool:
        """Whether a chunk before ``chunk`` uses ``leaf``."""
        return leaf in self._users and self._users[leaf][0] < chunk

    def lend(self, chunk: int) -> dict[str, torch.Tensor]:
        """What goes to ``chunk``: the values that it or a later one borrows, and that are here."""
        return {
            str(leaf): self._passed_on.get(leaf, self._parameters[leaf].detach())
            for leaf, at in self._borrowed_at.items()
            if at and at[-1] >= chunk > self._users[leaf][0]
        }

    def receive(self, lent: Mapping[str, torch.Tensor]) -> None:
        """What came for a chunk of this worker, or goes through it."""
        for name, values in lent.items():
            leaf = int(name)
            self._passed_on[leaf] = values
            if leaf in self._borrows and leaf not in self._own:
                self._own[leaf] = self._parameters[leaf].data
                self._parameters[leaf].data = values

    def drop(self) -> None:
        """The round is over: parameters are as they were before ``receive``."""
        for leaf, before in self._own.items():
            self._parameters[leaf].data = before
        self._own, self._passed_on = {}, {}
