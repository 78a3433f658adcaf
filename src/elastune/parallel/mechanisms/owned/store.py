"""The parameter blocks of one worker: those it computes with, the shares that it holds, and the optimizer's state.

Every block has one parameter object for the whole run. It has storage while this worker computes with it. For each
segment that this worker holds there is a *shard*: a flat parameter in the optimizer's groups, in place of the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.core.layout import FlatRange, Segment, Split
from elastune.parallel.mechanisms.owned.placement import VALUES
from elastune.parallel.mechanisms.tensor_storage import elements, take_in, whole


@dataclass
class ShardParameter:
    """The flat parameter that the optimizer has for one held segment.

    ``parameter`` is a view of the block's storage if the block has one here (``is_view``), else memory of its own.
    """

    segment: Segment
    parameter: nn.Parameter
    is_view: bool


@dataclass(frozen=True)
class Incoming:
    """State from other workers for a new layout: flat tensors by (segment, name), and scalars by parameter block.

    A segment may be any part of the state to hold or to compute with. Scalars are those of blocks whose optimizer state
    this worker has not held before.
    """

    tensors: Mapping[tuple[Segment, str], torch.Tensor] = field(default_factory=dict)
    scalars: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


class ParameterStore:
    """One worker's part of the parameter blocks of ``split``; ``parameters`` are the blocks' objects, by index.

    ``optimizer`` was built on a whole model whose parameters' names are ``tensor_of``. From now on its groups, which
    keep their order and options, contain shards. ``rebuild`` must be called before the first step.

    Attributes:
        computed: The indices of the blocks that this worker computes with: their parameters have storage and values.
        held: The segments whose state this worker holds, in order of blocks, also of blocks that others compute with.
        shards: The shard of each held segment.
        places: The number in ``optimizer.state_dict()`` of each tensor that the optimizer updates, by name.
        numbers: These numbers, for each group.
        frees: Parameters have storage only while a pass uses them (``sharded``); shards have memory of their own.
        offload: The optimizer's tensors lie in the CPU's memory.
    """

    def __init__(
        self,
        split: Split,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        tensor_of: Mapping[torch.Tensor, str],
        *,
        frees: bool = False,
        offload: bool = False,
    ) -> None:
        self.split = split
        self.parameters = list(parameters)
        self.optimizer = optimizer
        self.frees = frees
        self.offload = offload
        self.computed: tuple[int, ...] = tuple(range(len(split.param_blocks)))  # at first each worker has everything
        self.held: tuple[Segment, ...] = ()
        self.shards: tuple[ShardParameter, ...] = ()
        self.places: dict[str, int] = {}
        self.numbers: list[list[int]] = []
        self._group_of = self._groups(tensor_of)
        self._initial = {tensor_of[p]: dict(state) for p, state in optimizer.state.items()}
        self._by_block: dict[int, list[ShardParameter]] = {}

    def _groups(self, tensor_of: Mapping[torch.Tensor, str]) -> dict[int, int]:
        """For each trained block the number of its optimizer group."""
        groups: dict[str, int] = {}
        for at, group in enumerate(self.optimizer.param_groups):
            for p in group["params"]:
                if p not in tensor_of:
                    rule = "the optimizer must be built on the model's parameters"
                    raise UserError(rule, f"one of shape {tuple(p.shape)} is not in it", "give it model.parameters()")
                groups[tensor_of[p]] = at
                self.places[tensor_of[p]] = len(self.places)
            self.numbers.append([self.places[tensor_of[p]] for p in group["params"]])
        param_blocks = self.split.param_blocks
        return {
            i: groups[param_block.tensor] for i, param_block in enumerate(param_blocks) if param_block.tensor in groups
        }

    # -- state on this worker -----------------------------------------------------------------------------------------

    def names(self, param_block: int) -> list[str]:
        """The sorted names of the optimizer's tensors of the block's size. Empty before its first step."""
        state = self._state_of(param_block)
        return sorted(name for name, value in state.items() if is_flat(value))

    def kinds(self, param_block: int) -> dict[str, str]:
        """The same with their dtypes, as "float32"."""
        state = self._state_of(param_block)
        return {name: str(state[name].dtype)[6:] for name in self.names(param_block)}

    def scalars(self, param_block: int) -> dict[str, Any]:
        """The other entries of the optimizer's state of a held block (``step``): numbers, and tensors of one number."""
        return {name: value for name, value in self._state_of(param_block).items() if not is_flat(value)}

    def _state_of(self, param_block: int) -> Mapping[str, Any]:
        shards = self._by_block.get(param_block, ())
        return self.optimizer.state.get(shards[0].parameter, {}) if shards else {}

    def read(self, segment: Segment, name: str = VALUES) -> torch.Tensor:
        """The flat values of ``segment``, or its part of the optimizer's tensor ``name``; often a view.

        The segment must lie within a held one. Of values it may also lie in a block whose values are whole here.

        Raises:
            KeyError: This worker does not have it.
        """
        for shard in self._by_block.get(segment.param_block, ()):
            if shard.segment.start <= segment.start and segment.stop <= shard.segment.stop:
                tensor = shard.parameter.detach() if name == VALUES else self.optimizer.state[shard.parameter][name]
                flat: torch.Tensor = tensor[segment.start - shard.segment.start : segment.stop - shard.segment.start]
                return flat
        if name == VALUES and self._computes(segment.param_block):
            return self._flat(segment.param_block)[segment.start : segment.stop]
        raise KeyError(f"{name} of {segment} is not here")

    def write(self, segment: Segment, name: str, values: torch.Tensor) -> None:
        """Overwrite a part of a held segment's values, or of the optimizer's tensor ``name``, which it may lack yet."""
        for shard in self._by_block[segment.param_block]:
            held = shard.segment
            if held.start <= segment.start and segment.stop <= held.stop:
                target = shard.parameter.detach()
                if name != VALUES:
                    state = self.optimizer.state.setdefault(shard.parameter, {})
                    target = state.setdefault(name, torch.zeros_like(target, dtype=values.dtype))
                target[segment.start - held.start : segment.stop - held.start] = values
        self.publish()

    def write_scalar(self, param_block: int, name: str, value: Any) -> None:
        """Set the entry ``name`` of the optimizer's state for each held segment of ``param_block``."""
        for shard in self._by_block[param_block]:
            self.optimizer.state.setdefault(shard.parameter, {})[name] = _copied(value)

    def fill(self, param_block: int, values: Callable[[int, int], torch.Tensor]) -> None:
        """Overwrite a block's values, as far as this worker computes with them or holds them.

        ``values`` returns the flat values from one element to another.
        """
        if self._computes(param_block):
            size = self.split.param_blocks[param_block].size
            self.write_values(Segment(param_block, 0, size), values(0, size))
        for shard in self._by_block.get(param_block, ()):
            if not shard.is_view:
                shard.parameter.detach().copy_(values(shard.segment.start, shard.segment.stop))

    def put_values(self, segment: Segment, values: torch.Tensor) -> None:
        """Overwrite the values of ``segment``, as far as this worker computes with them or holds them."""
        if self._computes(segment.param_block):
            self.write_values(segment, values)
        for shard in self._by_block.get(segment.param_block, ()):
            held = shard.segment
            low, high = max(held.start, segment.start), min(held.stop, segment.stop)
            if low < high and not shard.is_view:
                new = values[low - segment.start : high - segment.start]
                shard.parameter.detach()[low - held.start : high - held.start] = new

    def whole_values(self) -> list[tuple[Segment, torch.Tensor]]:
        """The flat values of every block whose values are whole on this worker."""
        computed = [i for i in self.computed if self._computes(i)]
        return [(Segment(i, 0, self.split.param_blocks[i].size), self._flat(i)) for i in computed]

    @property
    def home(self) -> torch.device:
        """The device of the optimizer's tensors."""
        return torch.device("cpu") if self.offload else self.parameters[0].device

    def load(self, param_block: int, state: Mapping[str, Any]) -> None:
        """Replace the optimizer's state of ``param_block`` by the matching part of ``state``, of the whole tensor."""
        for shard in self._by_block.get(param_block, ()):
            cut = {name: self._cut(name, value, shard.segment) for name, value in state.items()}
            if cut:
                self.optimizer.state[shard.parameter] = cut
            else:
                self.optimizer.state.pop(shard.parameter, None)
        self._place_steps()

    def _place_steps(self) -> None:
        """Move step counters to the parameters' device for fused and capturable optimizers, which need them there."""
        for group in self.optimizer.param_groups:
            if group.get("fused") or group.get("capturable"):
                for p in group["params"]:
                    step = self.optimizer.state.get(p, {}).get("step")
                    if isinstance(step, torch.Tensor):
                        self.optimizer.state[p]["step"] = step.to(p.device)

    def write_values(self, segment: Segment, values: torch.Tensor) -> None:
        """Overwrite a part of the values of a block that this worker computes with."""
        p = self.parameters[segment.param_block].data  # autograd does not see it
        if p.is_contiguous():
            p.view(-1)[segment.start : segment.stop].copy_(values)
        else:
            flat = p.reshape(-1)
            flat[segment.start : segment.stop] = values
            p.copy_(flat.view(p.shape))

    def _flat(self, param_block: int) -> torch.Tensor:
        """The block's values in the order of its indices; a view if its memory has that order."""
        return self.parameters[param_block].detach().reshape(-1)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def give(self, gradients: Mapping[int, Sequence[tuple[Segment, torch.Tensor]]]) -> None:
        """Set every shard's gradient: a view of one of its block's ``gradients`` (a segment and its flat values)."""
        for shard in self.shards:
            held, gradient = shard.segment, None
            for segment, values in gradients.get(held.param_block, ()):
                if segment.start <= held.start and held.stop <= segment.stop:
                    gradient = values[held.start - segment.start : held.stop - segment.start]
            shard.parameter.grad = None if gradient is None else gradient.to(self.home)

    def scale(self, factor: float) -> None:
        """Multiply the gradients that are copies of the sums. (Others are views, which the caller scales.)"""
        if self.home != self.parameters[0].device:
            for shard in self.shards:
                if shard.parameter.grad is not None:
                    shard.parameter.grad.mul_(factor)

    def clear(self) -> None:
        """Drop the gradients of all shards."""
        for shard in self.shards:
            shard.parameter.grad = None

    def publish(self) -> None:
        """Copy the values of shards with memory of their own into the storage of their blocks, if that is here."""
        if not self.frees:
            for shard in self.shards:
                if not shard.is_view and self._computes(shard.segment.param_block):
                    self.write_values(shard.segment, shard.parameter.detach())

    # -- another layout -----------------------------------------------------------------------------------------------

    def rebuild(self, computed: Sequence[int], held: Sequence[Segment], incoming: Incoming | None = None) -> None:
        """Compute with the blocks ``computed`` and hold ``held`` from now on.

        State on this worker stays, and the rest comes from ``incoming``. Values to compute with that are in neither
        come afterwards (``OwnedReplica.spread``). Gradients are dropped.

        Raises:
            KeyError: A part of ``held`` is neither on this worker nor in ``incoming``. Nothing has changed.
        """
        incoming = incoming or Incoming()
        is_computed = set(computed)
        for i in is_computed if not self.frees else ():
            take_in(self.parameters[i])
        prepared = [(segment, *self._prepared(segment, incoming)) for segment in held]
        fresh = {
            i: self._prepared_block(i, incoming)
            for i in computed
            if not self.frees and not has_storage(self.parameters[i])
        }
        # Nothing below can fail.
        for i, values in fresh.items():
            allocate(self.parameters[i])
            self.parameters[i].detach().copy_(values.view(self.split.param_blocks[i].shape))
        shards = [self._shard(segment, values, segment.param_block in is_computed) for segment, values, _ in prepared]
        for i, p in enumerate(self.parameters):
            p.grad = None
            if i not in is_computed or self.frees:
                free(p)
        self.optimizer.state.clear()
        for shard, (_, _, state) in zip(shards, prepared, strict=True):
            if state:
                self.optimizer.state[shard.parameter] = state
        self.computed, self.held, self.shards = tuple(computed), tuple(held), tuple(shards)
        self._by_block = {}
        for shard in shards:
            self._by_block.setdefault(shard.segment.param_block, []).append(shard)
        for at, group in enumerate(self.optimizer.param_groups):
            group["params"] = [s.parameter for s in shards if self._group_of.get(s.segment.param_block) == at]
        self._place_steps()
        self._initial = {}

    def _shard(self, segment: Segment, values: torch.Tensor, stays: bool) -> ShardParameter:
        """The shard of a segment with ``values``. ``stays``: its block has storage on this worker."""
        p = self.parameters[segment.param_block]
        if self.frees or self.offload or not stays or not p.is_contiguous():
            flat = values.to(self.home, copy=True)
            return ShardParameter(segment, nn.Parameter(flat, p.requires_grad), is_view=False)
        view = p.detach().view(-1)[segment.start : segment.stop]
        if view.data_ptr() != values.data_ptr():
            view.copy_(values)
        return ShardParameter(segment, nn.Parameter(view, p.requires_grad), is_view=True)

    def _prepared(self, segment: Segment, incoming: Incoming) -> tuple[torch.Tensor, dict[str, Any]]:
        """The values and the optimizer's state of a segment to hold."""
        param_block = self.split.param_blocks[segment.param_block]
        values = self._collected(segment, VALUES, incoming)
        if param_block.tensor in self._initial:
            state = self._initial[param_block.tensor]
            return values, {name: self._cut(name, value, segment) for name, value in state.items()}
        names = {name for of, name in incoming.tensors if of.param_block == segment.param_block and name != VALUES}
        names |= set(self.names(segment.param_block))
        scalars = self.scalars(segment.param_block) or incoming.scalars.get(segment.param_block, {})
        state = {name: _copied(value) for name, value in scalars.items()}
        return values, state | {name: self._collected(segment, name, incoming) for name in sorted(names)}

    def _cut(self, name: str, value: Any, segment: Segment) -> Any:
        """The part in ``segment`` of an entry of the state of a whole tensor."""
        param_block = self.split.param_blocks[segment.param_block]
        if not hasattr(value, "shape") or len(value.shape) != len(param_block.box) or name == "step":
            return _copied(whole(value) if hasattr(value, "shape") else value)
        return elements(value, FlatRange(param_block.box, segment.start, segment.stop)).to(self.home, copy=True)

    def _prepared_block(self, param_block: int, incoming: Incoming) -> torch.Tensor:
        """The values of a block to compute with, as far as they are known; zeros elsewhere."""
        size = self.split.param_blocks[param_block].size
        flat = torch.zeros(size, dtype=self.parameters[param_block].dtype, device=self.parameters[param_block].device)
        for segment, values in self._sources(param_block, VALUES, incoming):
            flat[segment.start : segment.stop] = values
        return flat

    def _collected(self, segment: Segment, name: str, incoming: Incoming) -> torch.Tensor:
        """The whole tensor ``name`` of ``segment``, from this worker's state and ``incoming``.

        If this worker has all of it, the result is the tensor itself.
        """
        if name != VALUES and (whole := incoming.tensors.get((segment, name))) is not None:
            return whole
        try:
            return self.read(segment, name)
        except KeyError:
            pass
        collected: torch.Tensor | None = None
        left = [(segment.start, segment.stop)]
        for source, values in self._sources(segment.param_block, name, incoming):
            if collected is None:
                collected = torch.empty(segment.size, dtype=values.dtype, device=values.device)
            rest = []
            for start, stop in left:
                low, high = max(start, source.start), min(stop, source.stop)
                if low >= high:
                    rest.append((start, stop))
                    continue
                collected[low - segment.start : high - segment.start] = values[low - source.start : high - source.start]
                rest += [(a, b) for a, b in ((start, low), (high, stop)) if a < b]
            left = rest
        if left or collected is None:
            raise KeyError(
                f"{name} of {self.split.param_blocks[segment.param_block].name} is neither here nor has it come: {left}"
            )
        return collected

    def _sources(self, param_block: int, name: str, incoming: Incoming) -> Iterable[tuple[Segment, torch.Tensor]]:
        if name == VALUES and self._computes(param_block):
            yield Segment(param_block, 0, self.split.param_blocks[param_block].size), self._flat(param_block)
        for shard in self._by_block.get(param_block, ()):
            if name == VALUES:
                yield shard.segment, shard.parameter.detach()
            elif name in (state := self.optimizer.state.get(shard.parameter, {})):
                yield shard.segment, state[name]
        for (segment, named), values in incoming.tensors.items():
            if segment.param_block == param_block and named == name:
                yield segment, values

    def _computes(self, param_block: int) -> bool:
        """Whether this worker has the block's whole values."""
        return param_block in self.computed and has_storage(self.parameters[param_block])


def has_storage(p: torch.Tensor) -> bool:
    """Whether ``p`` has storage for its values."""
    return p.numel() == 0 or p.untyped_storage().size() > 0


def allocate(p: torch.Tensor) -> None:
    """Give ``p`` new memory with undefined values. Its alignment (64 bytes) matters: kernels' bits depend on it."""
    p.data = torch.empty_like(p.data, memory_format=torch.preserve_format)


def free(p: torch.Tensor) -> None:
    """Free the memory of ``p``, which keeps its shape. Existing views keep the memory."""
    if has_storage(p):
        hollow = torch.empty_like(p.data, memory_format=torch.preserve_format)
        hollow.untyped_storage().resize_(0)
        p.data = hollow


def is_flat(value: Any) -> bool:
    """Whether an entry of the optimizer's state has one element for each element of the parameter."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
