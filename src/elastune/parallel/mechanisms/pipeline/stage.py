"""One stage of a pipeline: its messages to the stages beside it, its passes, and the state kept between passes.

A backward pass can run in two halves, for zero-bubble schedules (Qi et al., arXiv 2401.10241). The first half
computes the gradients that the previous stage waits for, the second those of weights. Autograd's graph is cut where
paths to weights branch off from paths to the stage's inputs. The first half keeps the gradients that reach each such
node, and the second runs the branches. Together they run the same kernels as one backward pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from elastune.core.errors import UserError
from elastune.parallel.comm.channel import Channel, ChannelMessage
from elastune.parallel.comm.group import Group, GroupBroken
from elastune.parallel.mechanisms import torch_private
from elastune.parallel.mechanisms.pipeline.layers import Layers

# Messages between the stages of one pipeline, and the packing of nested values of tensors into them.
#
# ``StageChannel`` sends and receives. ``pack`` turns a value into a line of text and one run of bytes, and ``unpack``
# turns them back. A tensor keeps its strides and its alignment, because the bits of later results may depend on both.

Kind = Literal["forward", "backward", "shape", "look", "seen", "dropped", "failure"]
"""``forward`` and ``backward`` go from chunk to chunk in training, ``look`` in an evaluation. ``shape`` describes the
model's output in training, ``seen`` is the output in an evaluation. ``dropped``: a stage has given up the step.
``failure``: a stage cannot go on."""
_KINDS: tuple[Kind, ...] = get_args(Kind)
_CHUNKS = 1 << 16
FAILURE_SEND_S = 2.0  # seconds in which a stage that cannot go on may send its reason to the others


class StageFailed(RuntimeError):
    """Another stage could not go on. The message is its reason."""


class StageChannel:
    """This worker's messages in the pipeline ``group``, of which it is stage ``rank`` of ``size``.

    Each message belongs to a round: a step, or an evaluated batch. All stages go through the same rounds. So a message
    of a round that is over on this worker belongs to a dropped step, and is ignored.

    ``described``: the calls of the model whose output the last stage has described to the others.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.rank, self.size = group.rank, group.size
        self.group = group
        self.described: set[str] = set()
        self._channel = Channel(group)
        self._device = device
        self._received: dict[tuple[Kind, int, int, int], ChannelMessage] = {}
        self._steps = self._evaluated = self._dropped = 0

    def begin_step(self) -> None:
        """Begin the next step."""
        self._steps += 1
        self._drop_old()

    def begin_evaluated_batch(self) -> None:
        """Begin the next evaluated batch."""
        self._evaluated += 1
        self._drop_old()

    def give(self, kind: Kind, chunk: int, batch: int, value: Any) -> None:
        """Send ``value`` (see ``pack``) to the worker of ``chunk``."""
        text, payload = pack(value)
        self._send(chunk % self.size, kind, chunk, batch, text, payload)

    def send_to_all(self, kind: Kind, batch: int, text: str, payload: torch.Tensor | None = None) -> None:
        """Send one message to every other worker."""
        for to in range(self.size):
            if to != self.rank:
                self._send(to, kind, 0, batch, text, torch.empty(0, dtype=torch.uint8) if payload is None else payload)

    def has(self, kind: Kind, chunk: int, batch: int) -> bool:
        """Whether this message has arrived."""
        while (came := self._channel.next(wait=False)) is not None:
            self._sort(came[1])
        return (kind, self._round(kind), chunk, batch) in self._received

    def wait(self) -> None:
        """Wait until another message arrives. Raises ``GroupBroken`` where another stage has given up this step."""
        if 0 < self._steps <= self._dropped:
            raise GroupBroken("another stage has given the step up")
        came = self._channel.next()
        assert came is not None
        self._sort(came[1])

    def take(self, kind: Kind, chunk: int, batch: int) -> Any:
        """Wait for a message and return its value."""
        message = self._await(kind, chunk, batch, lambda: False)
        return unpack(message.text, message.payload, self._device)

    def take_text(self, kind: Kind, batch: int, meanwhile: Callable[[], bool]) -> str:
        """Wait for a message and return its text. ``meanwhile`` is called repeatedly as long as it returns True."""
        return self._await(kind, 0, batch, meanwhile).text

    @contextmanager
    def failures_reported(self) -> Iterator[None]:
        """Make an error inside fail on every stage, so that none waits for a stage that cannot go on."""
        try:
            yield
        except (GroupBroken, GeneratorExit):
            raise
        except UserError as error:
            self._send_failure(error.parts)
            raise
        except Exception as error:
            line = " ".join(str(error).split())[:300]
            self._send_failure([f"stage {self.rank} of the pipeline failed: {type(error).__name__}: {line}"])
            raise

    def close(self) -> None:
        """Close the channel: this worker sends nothing more."""
        self._channel.close()

    def drop_step(self) -> None:
        """Report to the others, which may wait for this worker, that it gives up the step."""
        with suppress(GroupBroken):  # the others then notice it anyway
            self.send_to_all("dropped", 0, "")

    def _send_failure(self, lines: Sequence[str]) -> None:
        with suppress(GroupBroken):  # the others then notice it anyway
            self.send_to_all("failure", 0, json.dumps(lines))
            self._channel.close(FAILURE_SEND_S)

    def _await(self, kind: Kind, chunk: int, batch: int, meanwhile: Callable[[], bool]) -> ChannelMessage:
        key = kind, self._round(kind), chunk, batch
        while not self.has(kind, chunk, batch):
            if not meanwhile():
                self.wait()
        return self._received.pop(key)

    def _send(self, to: int, kind: Kind, chunk: int, batch: int, text: str, payload: torch.Tensor) -> None:
        number = self._round(kind), _KINDS.index(kind) * _CHUNKS + chunk, batch
        self._channel.send(to, ChannelMessage(number, text, payload))

    def _sort(self, message: ChannelMessage) -> None:
        number, what, batch = message.number
        kind, chunk = _KINDS[what // _CHUNKS], what % _CHUNKS
        if kind == "failure":
            lines = json.loads(message.text)
            raise UserError(*lines) if len(lines) > 1 else StageFailed(lines[0])
        if kind == "dropped":
            self._dropped = max(self._dropped, number)
        elif number >= self._round(kind):
            self._received[kind, number, chunk, batch] = message

    def _round(self, kind: Kind) -> int:
        return self._evaluated if kind in ("look", "seen") else self._steps

    def _drop_old(self) -> None:
        self._received = {key: message for key, message in self._received.items() if key[1] >= self._round(key[0])}


ALIGNMENT = 64  # bytes, of memory that torch allocates on a CPU
_PLAIN = (type(None), bool, int, float, str)


def pack(value: Any) -> tuple[str, torch.Tensor]:
    """Turn ``value`` (tensors, plain values, and tuples, lists and dicts of them) into a text and bytes.

    Returns:
        The text, which describes the structure and is equal for values of equal shapes; and the tensors' bytes.

    Raises:
        UserError: Where ``value`` contains anything else.
    """
    tensors: list[tuple[int, torch.Tensor]] = []
    end = 0

    def described(part: Any) -> Any:
        nonlocal end
        if isinstance(part, torch.Tensor):
            start = -(-end // ALIGNMENT) * ALIGNMENT + part.data_ptr() % ALIGNMENT
            tensors.append((start, part))
            size = _dense_size(part) or part.numel()
            end = start + size * part.element_size()
            return ["tensor", str(part.dtype)[6:], list(part.shape), list(part.stride()), part.requires_grad, start]
        if isinstance(part, (list, tuple)) and not hasattr(part, "_fields"):
            return ["list" if isinstance(part, list) else "tuple", *map(described, part)]
        if type(part) is dict and all(isinstance(key, str) for key in part):
            return ["dict", *([key, described(each)] for key, each in part.items())]
        if isinstance(part, _PLAIN):
            return ["plain", part]
        rule = "stages hand on tensors, numbers, and tuples, lists and dicts of them"
        raise UserError(rule, type(part).__name__, "cut the pipeline elsewhere, or let the model return one of these")

    text = json.dumps(described(value))
    payload = torch.empty(end, dtype=torch.uint8)
    for start, tensor in tensors:
        source = tensor.detach()
        if _dense_size(source):
            once = source[tuple(slice(1) if stride == 0 else slice(None) for stride in source.stride())]
            _fresh(payload, start, source.dtype, once.shape, once.stride()).copy_(once)
        else:
            _fresh(payload, start, source.dtype, source.shape, _row_major(source.shape)).copy_(source)
    return text, payload


def unpack(text: str, payload: torch.Tensor, device: torch.device | None = None) -> Any:
    """The value that ``pack`` turned into ``text`` and ``payload``, on ``device``.

    Tensors share memory with ``payload``, but autograd does not treat them as views of it.
    """
    payload = payload if device is None else payload.to(device)

    def rebuilt(part: Any) -> Any:
        kind, *rest = part
        if kind == "tensor":
            return _tensor(payload, *rest)
        if kind == "dict":
            return {key: rebuilt(each) for key, each in rest}
        if kind == "plain":
            return rest[0]
        return [rebuilt(each) for each in rest] if kind == "list" else tuple(rebuilt(each) for each in rest)

    return rebuilt(json.loads(text))


def blank(text: str) -> Any:
    """A value of zeros with the structure ``text``. Its tensors need gradients where those of the original did."""
    return unpack(text, torch.zeros(_end(json.loads(text)), dtype=torch.uint8))


def _end(part: Any) -> int:
    """The largest end, in bytes, of the tensors of a description."""
    if isinstance(part, list):
        if part[:1] == ["tensor"]:
            _, dtype_name, shape, stride, _, start = part
            spans = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True) if size)
            return int(start + spans * getattr(torch, dtype_name).itemsize)
        return max(map(_end, part), default=0)
    return 0


def shapes_of(value: Any) -> str:
    """A text that is equal for values of equal structure, shapes and types."""
    return repr(map_tensors(lambda t: (str(t.dtype), tuple(t.shape)), value))


def map_tensors(act: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with every tensor replaced by ``act`` of it."""
    if isinstance(value, torch.Tensor):
        return act(value)
    if type(value) is dict:
        return {key: map_tensors(act, each) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map_tensors(act, each) for each in value)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in ``value``, in order."""
    tensors: list[torch.Tensor] = []
    map_tensors(tensors.append, value)
    return tensors


def _dense_size(tensor: torch.Tensor) -> int:
    """The number of elements of memory that ``tensor`` fills without gaps (a stride of 0 repeats them), else 0."""
    used = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride:
            if stride != used:
                return 0
            used *= size
    return used if tensor.numel() else 0


def _fresh(payload: torch.Tensor, start: int, dtype: torch.dtype, shape: Any, stride: Any) -> torch.Tensor:
    storage = payload.untyped_storage()
    tensor = torch.empty(0, dtype=dtype, device=payload.device)
    return tensor.set_(storage, start // dtype.itemsize, torch.Size(shape), tuple(stride))


def _row_major(shape: Any) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return strides[::-1]


def _tensor(
    payload: torch.Tensor, dtype_name: str, shape: list[int], stride: list[int], requires_grad: bool, start: int
) -> torch.Tensor:
    dtype = getattr(torch, dtype_name)
    like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    if _dense_size(like) or not like.numel():
        tensor = _fresh(payload, start, dtype, shape, stride)
    else:  # memory with gaps, as on the sender
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        shift = start % ALIGNMENT
        room = torch.empty(shift + extent * dtype.itemsize, dtype=torch.uint8, device=payload.device)
        tensor = _fresh(room, shift, dtype, shape, stride)
        tensor.copy_(_fresh(payload, start, dtype, shape, _row_major(shape)))
    return tensor.requires_grad_() if requires_grad else tensor


# One run of layers on one worker: forward passes, backward passes, and the state kept between the two.

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
