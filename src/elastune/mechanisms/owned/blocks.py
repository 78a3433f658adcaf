"""Which leaves of a model are needed together: blocks that a forward pass goes through one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Others reach into them, so they cannot tell when they are used."""


@dataclass(frozen=True)
class Block:
    """A module whose leaves are needed while it runs, forward or backward, and by no other block."""

    module: nn.Module
    leaves: tuple[int, ...]


def blocks_of(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[Block]:
    """The blocks of ``model``; ``parameters``: its leaves' objects.

    The first one is the whole model, for the leaves that are in no other block or in several (tied weights). The others
    are the children of its outermost ``ModuleList`` and ``Sequential`` containers, such as a transformer's layers.
    """
    places = {p: i for i, p in enumerate(parameters)}
    parts = [(module, {places[p] for p in module.parameters() if p in places}) for module in _parts(model)]
    counts: dict[int, int] = {}
    for _, leaves in parts:
        for leaf in leaves:
            counts[leaf] = counts.get(leaf, 0) + 1
    outside = {places[p] for p in _outside(model, {module for module, _ in parts}) if p in places}
    shared = {leaf for leaf, count in counts.items() if count > 1} | outside
    found = [Block(module, tuple(sorted(leaves - shared))) for module, leaves in parts if leaves - shared]
    taken = {leaf for block in found for leaf in block.leaves}
    return [Block(model, tuple(i for i in range(len(parameters)) if i not in taken)), *found]


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Children of the outermost containers in ``module``, itself perhaps one."""
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not isinstance(child, _NEVER_CALLED):
            yield child
        else:
            yield from _parts(child)


def _outside(model: nn.Module, parts: set[nn.Module]) -> Iterator[nn.Parameter]:
    """Parameters of modules that lie in no part."""
    yield from model.parameters(recurse=False)
    for child in model.children():
        if child not in parts:
            yield from _outside(child, parts)
