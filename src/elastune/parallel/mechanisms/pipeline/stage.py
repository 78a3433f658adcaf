"""One run of layers on one worker: forward passes, backward passes, and the state kept between the two.

A backward pass can run in two halves, for zero-bubble schedules (Qi et al., arXiv 2401.10241). The first half
computes the gradients that the previous stage waits for, the second those of weights. Autograd's graph is cut where
paths to weights branch off from paths to the stage's inputs. The first half keeps the gradients that reach each such
node, and the second runs the branches. Together they run the same kernels as one backward pass.
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
from elastune.parallel.mechanisms import torch_private
from elastune.parallel.mechanisms.pipeline.layers import Layers
from elastune.parallel.mechanisms.pipeline.messages import map_tensors, tensors_in

Gradients = dict[int, torch.Tensor]
"""Gradients by the number of the parameter block."""
NodeGradients = tuple[torch.Tensor | None, ...]


class Chunk:
    """The passes through one run of layers of a model on this worker.

    Attributes:
        takes: The names of the values from the previous chunk, or of the model's inputs.
        gives: The names of the values for the next chunk; empty for the last one.
        parameters: The trained parameters that the layers use, by the number of the parameter block.
        splits: The backward pass may run in halves.
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

    def evaluate(self, values: Sequence[Any]) -> Any:
        """Run a forward pass and keep nothing: return the values for the next chunk, or the model's result."""
        return self._whole(self._model.run(self._layers, dict(zip(self.takes, values, strict=True)), self.gives))

    def forward(self, values: Sequence[Any], *, from_stage: bool) -> tuple[Any, MicroBatchState]:
        """Run a forward pass: return the values for the next chunk (or the model's result), and the state to keep.

        ``from_stage``: the values come from another stage, which waits for their gradients.
        """
        received = _Received([t for t in tensors_in(list(values)) if from_stage and t.requires_grad])
        if received.tensors:
            for tensor in received.tensors:
                tensor.requires_grad_(False)
            detached = list(_Enter.apply(torch.empty(0, requires_grad=True), received))  # type: ignore[no-untyped-call]
            received.edges = [get_gradient_edge(tensor) for tensor in detached]
            by_place = {id(old): new for old, new in zip(received.tensors, detached, strict=True)}
            values = map_tensors(lambda t: by_place.get(id(t), t), list(values))
        outputs = self.evaluate(values)
        return outputs, MicroBatchState([t for t in tensors_in(outputs) if t.requires_grad], received)

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(
        self, state: MicroBatchState, gradients: Sequence[torch.Tensor | None], earlier: Mapping[int, torch.Tensor]
    ) -> Gradients:
        """Run a whole backward pass and return the gradients of ``parameters``.

        They are added to the ``earlier`` gradients of the same micro-batch, where autograd adds up a parameter's uses.
        As in one process, the gradients of later layers come first.
        """
        roots = [(t, g) for t, g in zip(state.outputs, gradients, strict=True) if g is not None]
        roots += [(self.parameters[i], g) for i, g in earlier.items()]
        if roots:
            outputs, seeds = zip(*roots, strict=True)
            with self._keeping_buffers():
                torch.autograd.backward(outputs, seeds)
        state.outputs = []
        return self._taken()

    def backward_to_inputs(
        self, state: MicroBatchState, gradients: Sequence[torch.Tensor | None], earlier: Mapping[int, torch.Tensor]
    ) -> Gradients:
        """Run the half of ``backward`` that the previous stage waits for; ``backward_to_weights`` runs the rest.

        Where the pass cannot be halved with the same bits, the whole pass runs and returns the gradients.
        """
        roots = [(t, g) for t, g in zip(state.outputs, gradients, strict=True) if g is not None]
        if self.splits and roots and state.received.edges:
            outputs, seeds = zip(*roots, strict=True)
            with self._keeping_buffers():
                halves = input_half(outputs, seeds, state.received.edges)
            if halves is not None:
                state.received.gradients, state.half = halves
                state.outputs = []
                return {}
        return self.backward(state, gradients, earlier)

    def backward_to_weights(self, state: MicroBatchState) -> Gradients:
        """Run the half that ``backward_to_inputs`` left and return the gradients of ``parameters``."""
        if state.half is not None:
            state.half.run()
            state.half = None
        return self._taken()

    def _taken(self) -> Gradients:
        gradients = {}
        for i, p in self.parameters.items():
            if p.grad is not None:
                gradients[i], p.grad = p.grad, None
        return gradients

    @contextmanager
    def _keeping_buffers(self) -> Iterator[None]:
        """Context for a backward pass. Raises ``UserError`` if it changes buffers, which are another micro-batch's."""
        before = [buffer._version for _, buffer, _, _ in self._buffers]
        yield
        if before != [buffer._version for _, buffer, _, _ in self._buffers]:
            rule = "what counts batches (BatchNorm) is not run again in the backward pass of a pipeline"
            raise UserError(rule, "a checkpoint around it", "leave it out of torch.utils.checkpoint")

    # -- buffers ------------------------------------------------------------------------------------------------------

    @contextmanager
    def moving(self) -> Iterator[dict[int, torch.Tensor]]:
        """Context for a forward pass. Afterwards the yielded dict has the changed buffers, by their place in the model.

        Normalisation layers get buffers of their own for this pass: autograd keeps them for the backward pass, and
        other micro-batches run forward before that.
        """
        moved: dict[int, torch.Tensor] = {}
        before = [buffer._version for _, buffer, _, _ in self._buffers]
        replaced = [
            (place, buffer, owner, name)
            for place, buffer, owner, name in self._buffers
            if owner.training and isinstance(owner, torch_private.NormWithStatistics)
        ]
        for place, buffer, owner, name in replaced:
            moved[place] = owner._buffers[name] = buffer.detach().clone()
        try:
            yield moved
        finally:
            for _, buffer, owner, name in replaced:
                owner._buffers[name] = buffer
        for (place, buffer, _, _), version in zip(self._buffers, before, strict=True):
            if buffer._version != version:
                moved[place] = buffer.detach().clone()


@dataclass
class MicroBatchState:
    """A micro-batch between its forward and its backward pass through a chunk.

    Attributes:
        outputs: The tensors that it handed on and that need gradients, in order; for the last chunk the loss.
        received: The tensors from the previous stage, and later their gradients.
        half: The second half of a backward pass that runs in halves.
    """

    outputs: list[torch.Tensor]
    received: _Received
    half: WeightHalf | None = None


@dataclass
class _Received:
    """Tensors from the previous stage that need gradients, outside of autograd; and later their gradients."""

    tensors: list[torch.Tensor]
    edges: list[GradientEdge] = field(default_factory=list)
    gradients: Sequence[torch.Tensor | None] = ()


class _Enter(torch.autograd.Function):
    """Makes received tensors part of the graph, so that a layer may even overwrite them, and keeps their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, received: _Received) -> tuple[torch.Tensor, ...]:
        ctx.received = received
        ctx.set_materialize_grads(False)
        return tuple(received.tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None]:
        ctx.received.gradients = gradients
        return None, None


def _buffers_of(model: Layers, layers: range) -> list[tuple[int, torch.Tensor, nn.Module, str]]:
    """The buffers that ``layers`` may change: place among the model's buffers, buffer, owner, name in the owner."""
    places = {id(buffer): place for place, buffer in enumerate(model.module.buffers())}
    called = {id(part): part for module in model.modules_of(layers) for part in module.modules()}
    return [(places[id(b)], b, part, name) for part in called.values() for name, b in part.named_buffers(recurse=False)]


def input_half(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], inputs: Sequence[GradientEdge]
) -> tuple[NodeGradients, WeightHalf] | None:
    """Run the first half of a backward pass.

    Returns:
        The gradients of ``inputs``, and the second half. None, with nothing computed, where the pass cannot be cut with
        the same bits: a weight is used more than once, or its path to the outputs shares no node with one to an input.
    """
    roots = [get_gradient_edge(output).node for output in outputs]
    branches = _branches(roots, {edge.node for edge in inputs})
    if branches is None:
        return None
    handles = [branch.node.register_prehook(_keeper(branch)) for branch in branches]
    try:
        input_gradients = torch.autograd.grad(outputs, list(inputs), gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(input_gradients), WeightHalf(branches)


class WeightHalf:
    """The second half of a backward pass: the first half has computed the gradients of inputs."""

    def __init__(self, branches: list[_Branch]) -> None:
        self._branches = branches

    def run(self) -> None:
        """Accumulate the gradients of weights into their ``grad``."""
        for branch in self._branches:
            outputs = [(GradientEdge(branch.node, i), g) for i, g in enumerate(branch.gradients) if g is not None]
            if not outputs:
                continue
            edges, gradients = zip(*outputs, strict=True)
            wanted = [GradientEdge(accumulator, 0) for accumulator in branch.accumulators]
            gradients_of_weights = torch.autograd.grad(edges, wanted, gradients, retain_graph=True, allow_unused=True)
            for accumulator, gradient in zip(branch.accumulators, gradients_of_weights, strict=True):
                if gradient is not None:
                    weight: torch.Tensor = accumulator.variable  # type: ignore[attr-defined]
                    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        self._branches = []


@dataclass
class _Branch:
    """A node with paths to inputs and separate paths to ``accumulators`` (autograd's nodes of weights)."""

    node: Node
    accumulators: list[Node]
    gradients: NodeGradients = field(default=())


def _keeper(branch: _Branch) -> Any:
    def keep(gradients: NodeGradients) -> None:
        branch.gradients = gradients

    return keep


def _branches(roots: Sequence[Node], inputs: set[Node]) -> list[_Branch] | None:
    """The nodes where paths to weights branch off, in the order of a backward pass; None: see ``input_half``."""
    order = _topological(roots, inputs)
    leads: set[Node] = set(inputs)  # nodes with a path to an input
    for node in reversed(order):
        if any(following in leads for following, _ in node.next_functions):
            leads.add(node)
    if any(root not in leads for root in roots):
        return None
    branches: list[_Branch] = []
    used: set[Node] = set()
    for node in order:
        if node not in leads or node in inputs:
            continue
        sides = [following for following, _ in node.next_functions if following is not None and following not in leads]
        beside = _topological(sides, set())
        accumulators = [accumulator for accumulator in beside if hasattr(accumulator, "variable")]
        if used.intersection(beside):
            return None
        used.update(beside)
        if accumulators:
            branches.append(_Branch(node, accumulators))
    return branches


def _topological(roots: Sequence[Node], ends: set[Node]) -> list[Node]:
    """Every node that ``roots`` lead to, each before its successors; no successors of ``ends``."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            if node not in ends:
                stack.extend((following, False) for following, _ in node.next_functions if following is not None)
    return order[::-1]
