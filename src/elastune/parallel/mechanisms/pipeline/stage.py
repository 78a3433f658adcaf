"""One run of layers on one worker: forward passes, backward passes, and what is kept between the two.

A backward pass can run in two halves, for zero-bubble schedules (Qi et al., arXiv 2401.10241). The first half
computes the gradients that the previous stage waits for, the second those of weights. Autograd's graph is cut where
paths to weights branch off. Both halves compute what one backward pass does, by the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from elastune.core.errors import UserError
from elastune.parallel.mechanisms.pipeline.layers import Layers
from elastune.parallel.mechanisms.pipeline.messages import map_tensors, tensors_in

# [halves] A backward pass in two halves: what the stage before waits for first, gradients of weights when there is time.
#
# Zero-bubble schedules rest on this (Qi et al., arXiv 2401.10241). Autograd's graph is cut where ways to weights branch
# off from the ways to a stage's inputs: the first half runs the latter and keeps the gradients that come to each
# branching node; the second runs the branches. Both compute what one backward pass does, by the same kernels.

NodeGradients = tuple[torch.Tensor | None, ...]


@dataclass
class _Branch:
    """A node from which ways lead to inputs and, by themselves, to ``autograd_leaves`` (where gradients are accumulated)."""

    node: Node
    autograd_leaves: list[Node]
    gradients: NodeGradients = field(default=())


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
            wanted = [GradientEdge(autograd_leaf, 0) for autograd_leaf in branch.autograd_leaves]
            found = torch.autograd.grad(edges, wanted, gradients, retain_graph=True, allow_unused=True)
            for autograd_leaf, gradient in zip(branch.autograd_leaves, found, strict=True):
                if gradient is not None:
                    weight: torch.Tensor = autograd_leaf.variable  # type: ignore[attr-defined]
                    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        self._branches = []


def input_half(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], inputs: Sequence[GradientEdge]
) -> tuple[NodeGradients, WeightHalf] | None:
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
    def keep(gradients: NodeGradients) -> None:
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
        autograd_leaves = [autograd_leaf for autograd_leaf in beside if hasattr(autograd_leaf, "variable")]
        if used.intersection(beside):
            return None
        used.update(beside)
        if autograd_leaves:
            found.append(_Branch(node, autograd_leaves))
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


# [stage] One run of layers on one worker: forward passes, backward passes, and what is kept between the two.

Gradients = dict[int, torch.Tensor]
"""By leaf."""


@dataclass
class MicroBatchState:
    """A micro-batch that has gone forward through a chunk and not yet back.

    Attributes:
        outputs: The tensors of what it handed on that need gradients, in order; of the last chunk the loss.
        arrival: What came, and later its gradients.
        half: What is left of a backward pass that was run by halves.
    """

    outputs: list[torch.Tensor]
    arrival: _Arrival
    half: WeightHalf | None = None


@dataclass
class _Arrival:
    """The tensors that came and need gradients, unknown to autograd; and the gradients, once they are there."""

    tensors: list[torch.Tensor]
    edges: list[GradientEdge] = field(default_factory=list)
    gradients: Sequence[torch.Tensor | None] = ()


class _Arrive(torch.autograd.Function):
    """Makes of what came tensors that the next layer may even overwrite, and keeps their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, arrival: _Arrival) -> tuple[torch.Tensor, ...]:
        ctx.arrival = arrival
        ctx.set_materialize_grads(False)
        return tuple(arrival.tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None]:
        ctx.arrival.gradients = gradients
        return None, None


class Chunk:
    """The layers ``layers`` of ``model``.

    Attributes:
        takes: Names of the values that it is handed, or the model's inputs.
        gives: Names of the values that it hands on; none where it is the last.
        parameters: By leaf: the trained parameters that it uses.
        splits: Its backward pass may be run by halves.
    """

    def __init__(
        self,
        model: Layers,
        layers: range,
        parameters: dict[int, nn.Parameter],
        whole: Callable[[Any], Any] = lambda value: value,
        *,
        splits: bool = True,
    ) -> None:
        self._model = model
        self._whole = whole
        self._layers = layers
        self.takes = model.handed_on(layers.start) or model.inputs
        self.gives = model.handed_on(layers.stop)
        self.parameters = parameters
        self.splits = splits
        self._buffers = _buffers_of(model, layers)

    # -- forward ------------------------------------------------------------------------------------------------------

    def look(self, values: Sequence[Any]) -> Any:
        """A forward pass without anything kept: what is handed on, or what the model returns."""
        return self._whole(self._model.run(self._layers, dict(zip(self.takes, values, strict=True)), self.gives))

    def forward(self, values: Sequence[Any], *, came: bool) -> tuple[Any, MicroBatchState]:
        """A forward pass: what is handed on (or what the model returns), and what is kept.

        ``came``: from another stage, whose gradients it waits for.
        """
        arrival = _Arrival([t for t in tensors_in(list(values)) if came and t.requires_grad])
        if arrival.tensors:
            for tensor in arrival.tensors:
                tensor.requires_grad_(False)
            arrived = list(_Arrive.apply(torch.empty(0, requires_grad=True), arrival))  # type: ignore[no-untyped-call]
            arrival.edges = [get_gradient_edge(tensor) for tensor in arrived]
            by_place = {id(old): new for old, new in zip(arrival.tensors, arrived, strict=True)}
            values = map_tensors(lambda t: by_place.get(id(t), t), list(values))
        given = self.look(values)
        return given, MicroBatchState([t for t in tensors_in(given) if t.requires_grad], arrival)

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(
        self, flight: MicroBatchState, gradients: Sequence[torch.Tensor | None], earlier: Mapping[int, torch.Tensor]
    ) -> Gradients:
        """A whole backward pass: the gradients of ``parameters``, added to ``earlier`` ones of the same micro-batch.

        They are added where autograd adds up a parameter's uses, after ``earlier``: as in one process, where later
        layers' come first.
        """
        roots = [(t, g) for t, g in zip(flight.outputs, gradients, strict=True) if g is not None]
        roots += [(self.parameters[i], g) for i, g in earlier.items()]
        if roots:
            outputs, seeds = zip(*roots, strict=True)
            with self._keeping_buffers():
                torch.autograd.backward(outputs, seeds)
        flight.outputs = []
        return self._taken()

    def backward_to_inputs(
        self, flight: MicroBatchState, gradients: Sequence[torch.Tensor | None], earlier: Mapping[int, torch.Tensor]
    ) -> Gradients:
        """The half of ``backward`` that others wait for; ``backward_to_weights`` does the rest.

        A whole pass where it cannot be halved with the same bits: then the gradients of ``parameters`` are there.
        """
        roots = [(t, g) for t, g in zip(flight.outputs, gradients, strict=True) if g is not None]
        if self.splits and roots and flight.arrival.edges:
            outputs, seeds = zip(*roots, strict=True)
            with self._keeping_buffers():
                found = input_half(outputs, seeds, flight.arrival.edges)
            if found is not None:
                flight.arrival.gradients, flight.half = found
                flight.outputs = []
                return {}
        return self.backward(flight, gradients, earlier)

    def backward_to_weights(self, flight: MicroBatchState) -> Gradients:
        """What ``backward_to_inputs`` left."""
        if flight.half is not None:
            flight.half.run()
            flight.half = None
        return self._taken()

    def _taken(self) -> Gradients:
        found = {}
        for i, p in self.parameters.items():
            if p.grad is not None:
                found[i], p.grad = p.grad, None
        return found

    @contextmanager
    def _keeping_buffers(self) -> Iterator[None]:
        """Around a backward pass. Raises ``UserError`` where it moves buffers: those here are another micro-batch's."""
        before = [buffer._version for _, buffer, _, _ in self._buffers]
        yield
        if before != [buffer._version for _, buffer, _, _ in self._buffers]:
            rule = "what counts batches (BatchNorm) is not run again in the backward pass of a pipeline"
            raise UserError(rule, "a checkpoint around it", "leave it out of torch.utils.checkpoint")

    # -- buffers ------------------------------------------------------------------------------------------------------

    @contextmanager
    def moving(self) -> Iterator[dict[int, torch.Tensor]]:
        """Around a forward pass; what it yields has afterwards the buffers that were moved, by their place in the
        model.

        Normalising layers move tensors of this pass alone: autograd keeps them for the backward pass, and other
        micro-batches go forward before that.
        """
        found: dict[int, torch.Tensor] = {}
        before = [buffer._version for _, buffer, _, _ in self._buffers]
        lent = [
            (place, buffer, owner, name)
            for place, buffer, owner, name in self._buffers
            if owner.training and isinstance(owner, nn.modules.batchnorm._NormBase)
        ]
        for place, buffer, owner, name in lent:
            found[place] = owner._buffers[name] = buffer.detach().clone()
        try:
            yield found
        finally:
            for _, buffer, owner, name in lent:
                owner._buffers[name] = buffer
        for (place, buffer, _, _), version in zip(self._buffers, before, strict=True):
            if buffer._version != version:
                found[place] = buffer.detach().clone()


def _buffers_of(model: Layers, layers: range) -> list[tuple[int, torch.Tensor, nn.Module, str]]:
    """The buffers that ``layers`` may move: place among the model's, buffer, owner, name there."""
    places = {id(buffer): place for place, buffer in enumerate(model.module.buffers())}
    called = {id(part): part for module in model.modules_of(layers) for part in module.modules()}
    return [(places[id(b)], b, part, name) for part in called.values() for name, b in part.named_buffers(recurse=False)]
