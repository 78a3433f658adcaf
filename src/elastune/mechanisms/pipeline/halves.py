"""A backward pass in two halves: what the stage before waits for first, gradients of weights when there is time.

Zero-bubble schedules rest on this (Qi et al., arXiv 2401.10241). Autograd's graph is cut where ways to weights branch
off from the ways to a stage's inputs: the first half runs the latter and keeps the gradients that come to each
branching node; the second runs the branches. Both compute what one backward pass does, by the same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[torch.Tensor | None, ...]


@dataclass
class _Branch:
    """A node from which ways lead to inputs and, by themselves, to ``leaves`` (where gradients are accumulated)."""

    node: Node
    leaves: list[Node]
    gradients: Gradients = field(default=())


class WeightHalf:
    """What is left of a backward pass whose inputs have their gradients."""

    def __init__(self, branches: list[_Branch]) -> None:
        self._branches = branches

    def run(self) -> None:
        """Accumulate the gradients of weights into their ``grad``."""
        for branch in self._branches:
            outputs = [(GradientEdge(branch.node, i), g) for i, g in enumerate(branch.gradients) if g is not None]
            if not outputs:
                continue
            edges, gradients = zip(*outputs, strict=True)
            wanted = [GradientEdge(leaf, 0) for leaf in branch.leaves]
            found = torch.autograd.grad(edges, wanted, gradients, retain_graph=True, allow_unused=True)
            for leaf, gradient in zip(branch.leaves, found, strict=True):
                if gradient is not None:
                    weight: torch.Tensor = leaf.variable  # type: ignore[attr-defined]
                    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        self._branches = []


def input_half(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], inputs: Sequence[GradientEdge]
) -> tuple[Gradients, WeightHalf] | None:
    """Gradients of ``inputs``, and what is then left to do.

    None, and nothing is done, where the pass cannot be cut in two with the same bits: a weight is used more than once,
    or has a way to the outputs that does not go along one to an input.
    """
    roots = [get_gradient_edge(output).node for output in outputs]
    branches = _branches(roots, {edge.node for edge in inputs})
    if branches is None:
        return None
    handles = [branch.node.register_prehook(_keeper(branch)) for branch in branches]
    try:
        found = torch.autograd.grad(outputs, list(inputs), gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(found), WeightHalf(branches)


def _keeper(branch: _Branch) -> Any:
    def keep(gradients: Gradients) -> None:
        branch.gradients = gradients

    return keep


def _branches(roots: Sequence[Node], inputs: set[Node]) -> list[_Branch] | None:
    """Where ways to weights branch off, in the order in which a backward pass comes there; None: see ``input_half``."""
    order = _topological(roots, inputs)
    leads: set[Node] = set(inputs)  # nodes with a way to an input
    for node in reversed(order):
        if any(following in leads for following, _ in node.next_functions):
            leads.add(node)
    if any(root not in leads for root in roots):
        return None
    found: list[_Branch] = []
    used: set[Node] = set()
    for node in order:
        if node not in leads or node in inputs:
            continue
        sides = [following for following, _ in node.next_functions if following is not None and following not in leads]
        beside = _topological(sides, set())
        leaves = [leaf for leaf in beside if hasattr(leaf, "variable")]
        if used.intersection(beside):
            return None
        used.update(beside)
        if leaves:
            found.append(_Branch(node, leaves))
    return found


def _topological(roots: Sequence[Node], ends: set[Node]) -> list[Node]:
    """Every node behind ``roots``, each before those that it leads to; nothing behind ``ends``."""
    found: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            found.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            if node not in ends:
                stack.extend((following, False) for following, _ in node.next_functions if following is not None)
    return found[::-1]
