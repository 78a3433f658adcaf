"""The leaves of one worker: those it computes with, the shares of them that it holds, and the optimizer's state.

Every leaf has one parameter object for the whole run; its storage is there while this worker computes with it. Of what
this worker holds there are *shards*: flat parameters that stand in the optimizer's groups in place of the user's.
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
    """What the optimizer sees of one held segment.

    ``parameter``: flat, of the segment's size; a view of the leaf's storage where there is one, else memory of its own.
    """

    segment: Segment
    parameter: nn.Parameter
    is_view: bool


@dataclass(frozen=True)
class Incoming:
    """What other workers have sent for a new layout: flat tensors by (segment, name), and the scalars of leaves.

    A segment may be any part of what is to be held or computed with. Scalars are those of leaves whose optimizer state
    this worker has not held before.
    """

    tensors: Mapping[tuple[Segment, str], torch.Tensor] = field(default_factory=dict)
    scalars: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


class ParameterStore:
    """What one worker has of the leaves of ``split``; ``parameters`` are their objects, by index.

    ``optimizer`` was built on a whole model whose parameters' names are ``tensor_of``; from here on its groups, which
    keep their order and options, hold shards. ``rebuild`` must be called before the first step.

    Attributes:
        computed: Indices of the leaves that this worker computes with: their parameters have storage and values.
        held: The segments whose state is here, in order of leaves; of leaves that others compute with as well.
        places: By the name of a tensor that the optimizer updates: its number in ``optimizer.state_dict()``.
        numbers: These numbers, by group.
        frees: Parameters have storage only while somebody uses them (``sharded``); shards have memory of their own.
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
        self.computed: tuple[int, ...] = tuple(
            range(len(split.param_blocks))
        )  # at the beginning everything is everywhere
        self.held: tuple[Segment, ...] = ()
        self.shards: tuple[ShardParameter, ...] = ()
        self.places: dict[str, int] = {}
        self.numbers: list[list[int]] = []
        self._group_of = self._groups(tensor_of)
        self._initial = {tensor_of[p]: dict(state) for p, state in optimizer.state.items()}
        self._by_leaf: dict[int, list[ShardParameter]] = {}

    def _groups(self, tensor_of: Mapping[torch.Tensor, str]) -> dict[int, int]:
        """By leaf: which group of the optimizer it is in."""
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

    # -- what is here -------------------------------------------------------------------------------------------------

    def names(self, param_block: int) -> list[str]:
        """The optimizer's tensors of the leaf's size, sorted; none before the first step that used it."""
        state = self._state_of(param_block)
        return sorted(name for name, value in state.items() if is_flat(value))

    def kinds(self, param_block: int) -> dict[str, str]:
        """The same with their dtypes, as "float32"."""
        state = self._state_of(param_block)
        return {name: str(state[name].dtype)[6:] for name in self.names(param_block)}

    def scalars(self, param_block: int) -> dict[str, Any]:
        """The rest of the optimizer's state of a held leaf (``step``): numbers, and tensors of one number."""
        return {name: value for name, value in self._state_of(param_block).items() if not is_flat(value)}

    def _state_of(self, param_block: int) -> Mapping[str, Any]:
        shards = self._by_leaf.get(param_block, ())
        return self.optimizer.state.get(shards[0].parameter, {}) if shards else {}

    def read(self, segment: Segment, name: str = VALUES) -> torch.Tensor:
        """The flat values of ``segment``, or of the optimizer's tensor ``name``; it lies within a held segment, or for
        values of leaves that lie here whole, anywhere. A view where that can be, so not to be kept.

        Raises:
            KeyError: Where it is not here.
        """
        for shard in self._by_leaf.get(segment.param_block, ()):
            if shard.segment.start <= segment.start and segment.stop <= shard.segment.stop:
                tensor = shard.parameter.detach() if name == VALUES else self.optimizer.state[shard.parameter][name]
                flat: torch.Tensor = tensor[segment.start - shard.segment.start : segment.stop - shard.segment.start]
                return flat
        if name == VALUES and self._computes(segment.param_block):
            return self._flat(segment.param_block)[segment.start : segment.stop]
        raise KeyError(f"{name} of {segment} is not here")

    def write(self, segment: Segment, name: str, values: torch.Tensor) -> None:
        """Overwrite a part of a held segment's values, or of the optimizer's tensor ``name``, which it may lack yet."""
        for shard in self._by_leaf[segment.param_block]:
            own = shard.segment
            if own.start <= segment.start and segment.stop <= own.stop:
                target = shard.parameter.detach()
                if name != VALUES:
                    state = self.optimizer.state.setdefault(shard.parameter, {})
                    target = state.setdefault(name, torch.zeros_like(target, dtype=values.dtype))
                target[segment.start - own.start : segment.stop - own.start] = values
        self.publish()

    def write_scalar(self, param_block: int, name: str, value: Any) -> None:
        """What the optimizer has for each held segment of ``param_block`` under ``name``."""
        for shard in self._by_leaf[param_block]:
            self.optimizer.state.setdefault(shard.parameter, {})[name] = _copied(value)

    def fill(self, param_block: int, values: Callable[[int, int], torch.Tensor]) -> None:
        """Overwrite what of a leaf's values is computed with or held here. ``values``: flat, from and to an element."""
        if self._computes(param_block):
            size = self.split.param_blocks[param_block].size
            self.write_values(Segment(param_block, 0, size), values(0, size))
        for shard in self._by_leaf.get(param_block, ()):
            if not shard.is_view:
                shard.parameter.detach().copy_(values(shard.segment.start, shard.segment.stop))

    def put_values(self, segment: Segment, values: torch.Tensor) -> None:
        """Overwrite values: what of ``segment`` is computed with or held here."""
        if self._computes(segment.param_block):
            self.write_values(segment, values)
        for shard in self._by_leaf.get(segment.param_block, ()):
            own = shard.segment
            low, high = max(own.start, segment.start), min(own.stop, segment.stop)
            if low < high and not shard.is_view:
                new = values[low - segment.start : high - segment.start]
                shard.parameter.detach()[low - own.start : high - own.start] = new

    def whole_values(self) -> list[tuple[Segment, torch.Tensor]]:
        """The flat values of every leaf that lies here whole."""
        there = [i for i in self.computed if self._computes(i)]
        return [(Segment(i, 0, self.split.param_blocks[i].size), self._flat(i)) for i in there]

    @property
    def home(self) -> torch.device:
        """Where the optimizer's tensors lie."""
        return torch.device("cpu") if self.offload else self.parameters[0].device

    def load(self, param_block: int, state: Mapping[str, Any]) -> None:
        """What an optimizer has for the whole tensor of ``param_block``, in place of what this one has of it."""
        for shard in self._by_leaf.get(param_block, ()):
            cut = {name: self._cut(name, value, shard.segment) for name, value in state.items()}
            if cut:
                self.optimizer.state[shard.parameter] = cut
            else:
                self.optimizer.state.pop(shard.parameter, None)
        self._place_steps()

    def _place_steps(self) -> None:
        """Kernels that update all at once count steps where the parameters are."""
        for group in self.optimizer.param_groups:
            if group.get("fused") or group.get("capturable"):
                for p in group["params"]:
                    step = self.optimizer.state.get(p, {}).get("step")
                    if isinstance(step, torch.Tensor):
                        self.optimizer.state[p]["step"] = step.to(p.device)

    def write_values(self, segment: Segment, values: torch.Tensor) -> None:
        """Overwrite the values of a part of a leaf that this worker computes with."""
        p = self.parameters[segment.param_block].data  # a graph that is under way does not see it
        if p.is_contiguous():
            p.view(-1)[segment.start : segment.stop].copy_(values)
        else:
            flat = p.reshape(-1)
            flat[segment.start : segment.stop] = values
            p.copy_(flat.view(p.shape))

    def _flat(self, param_block: int) -> torch.Tensor:
        """The leaf's values in the order of its indices; a view where its memory has that order."""
        return self.parameters[param_block].detach().reshape(-1)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def give(self, gradients: Mapping[int, Sequence[tuple[Segment, torch.Tensor]]]) -> None:
        """Every shard's gradient: a view of one of its leaf's ``gradients`` (a segment and its flat values)."""
        for shard in self.shards:
            own, found = shard.segment, None
            for segment, values in gradients.get(own.param_block, ()):
                if segment.start <= own.start and own.stop <= segment.stop:
                    found = values[own.start - segment.start : own.stop - segment.start]
            shard.parameter.grad = None if found is None else found.to(self.home)

    def scale(self, factor: float) -> None:
        """Multiply gradients that are copies of the sums that were given."""
        if self.home != self.parameters[0].device:
            for shard in self.shards:
                if shard.parameter.grad is not None:
                    shard.parameter.grad.mul_(factor)

    def clear(self) -> None:
        """No shard has a gradient."""
        for shard in self.shards:
            shard.parameter.grad = None

    def publish(self) -> None:
        """New values of shards that have memory of their own go into the leaves' storage, where that is here."""
        if not self.frees:
            for shard in self.shards:
                if not shard.is_view and self._computes(shard.segment.param_block):
                    self.write_values(shard.segment, shard.parameter.detach())

    # -- another layout -----------------------------------------------------------------------------------------------

    def rebuild(self, computed: Sequence[int], held: Sequence[Segment], incoming: Incoming | None = None) -> None:
        """Compute with the leaves ``computed`` and hold ``held`` from here on.

        What was here stays, what was not comes out of ``incoming``; values that are computed with and neither held nor
        in ``incoming`` come afterwards (``OwnedReplica.spread``). Gradients are dropped.

        Raises:
            KeyError: Where something of ``held`` is neither here nor in ``incoming``; then nothing has changed.
        """
        incoming = incoming or Incoming()
        there = set(computed)
        for i in there if not self.frees else ():
            take_in(self.parameters[i])
        prepared = [(segment, *self._prepared(segment, incoming)) for segment in held]
        fresh = {
            i: self._prepared_leaf(i, incoming)
            for i in computed
            if not self.frees and not has_storage(self.parameters[i])
        }
        # From here on nothing can fail.
        for i, values in fresh.items():
            allocate(self.parameters[i])
            self.parameters[i].detach().copy_(values.view(self.split.param_blocks[i].shape))
        shards = [self._shard(segment, values, segment.param_block in there) for segment, values, _ in prepared]
        for i, p in enumerate(self.parameters):
            p.grad = None
            if i not in there or self.frees:
                free(p)
        self.optimizer.state.clear()
        for shard, (_, _, state) in zip(shards, prepared, strict=True):
            if state:
                self.optimizer.state[shard.parameter] = state
        self.computed, self.held, self.shards = tuple(computed), tuple(held), tuple(shards)
        self._by_leaf = {}
        for shard in shards:
            self._by_leaf.setdefault(shard.segment.param_block, []).append(shard)
        for at, group in enumerate(self.optimizer.param_groups):
            group["params"] = [s.parameter for s in shards if self._group_of.get(s.segment.param_block) == at]
        self._place_steps()
        self._initial = {}

    def _shard(self, segment: Segment, values: torch.Tensor, stays: bool) -> ShardParameter:
        """The shard of a segment of values ``values``. ``stays``: its leaf has storage here."""
        p = self.parameters[segment.param_block]
        if self.frees or self.offload or not stays or not p.is_contiguous():
            own = values.to(self.home, copy=True)
            return ShardParameter(segment, nn.Parameter(own, p.requires_grad), is_view=False)
        view = p.detach().view(-1)[segment.start : segment.stop]
        if view.data_ptr() != values.data_ptr():
            view.copy_(values)
        return ShardParameter(segment, nn.Parameter(view, p.requires_grad), is_view=True)

    def _prepared(self, segment: Segment, incoming: Incoming) -> tuple[torch.Tensor, dict[str, Any]]:
        """The values and the optimizer's state of a segment that is to be held."""
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
        """Of the state that the program's optimizer had before it came here."""
        param_block = self.split.param_blocks[segment.param_block]
        if not hasattr(value, "shape") or len(value.shape) != len(param_block.box) or name == "step":
            return _copied(whole(value) if hasattr(value, "shape") else value)
        return elements(value, FlatRange(param_block.box, segment.start, segment.stop)).to(self.home, copy=True)

    def _prepared_leaf(self, param_block: int, incoming: Incoming) -> torch.Tensor:
        """The values of a leaf that is to be computed with, as far as they are known yet."""
        size = self.split.param_blocks[param_block].size
        found = torch.zeros(size, dtype=self.parameters[param_block].dtype, device=self.parameters[param_block].device)
        for segment, values in self._sources(param_block, VALUES, incoming):
            found[segment.start : segment.stop] = values
        return found

    def _collected(self, segment: Segment, name: str, incoming: Incoming) -> torch.Tensor:
        """All of ``segment``, from what is here and what has come; what is here already as it is."""
        if name != VALUES and (whole := incoming.tensors.get((segment, name))) is not None:
            return whole
        try:
            return self.read(segment, name)
        except KeyError:
            pass
        found: torch.Tensor | None = None
        left = [(segment.start, segment.stop)]
        for source, values in self._sources(segment.param_block, name, incoming):
            if found is None:
                found = torch.empty(segment.size, dtype=values.dtype, device=values.device)
            rest = []
            for start, stop in left:
                low, high = max(start, source.start), min(stop, source.stop)
                if low >= high:
                    rest.append((start, stop))
                    continue
                found[low - segment.start : high - segment.start] = values[low - source.start : high - source.start]
                rest += [(a, b) for a, b in ((start, low), (high, stop)) if a < b]
            left = rest
        if left or found is None:
            raise KeyError(
                f"{name} of {self.split.param_blocks[segment.param_block].name} is neither here nor has it come: {left}"
            )
        return found

    def _sources(self, param_block: int, name: str, incoming: Incoming) -> Iterable[tuple[Segment, torch.Tensor]]:
        if name == VALUES and self._computes(param_block):
            yield Segment(param_block, 0, self.split.param_blocks[param_block].size), self._flat(param_block)
        for shard in self._by_leaf.get(param_block, ()):
            if name == VALUES:
                yield shard.segment, shard.parameter.detach()
            elif name in (state := self.optimizer.state.get(shard.parameter, {})):
                yield shard.segment, state[name]
        for (segment, named), values in incoming.tensors.items():
            if segment.param_block == param_block and named == name:
                yield segment, values

    def _computes(self, param_block: int) -> bool:
        """Whether the leaf's whole values are here."""
        return param_block in self.computed and has_storage(self.parameters[param_block])


def has_storage(p: torch.Tensor) -> bool:
    """Whether ``p`` has values at all."""
    return p.numel() == 0 or p.untyped_storage().size() > 0


def allocate(p: torch.Tensor) -> None:
    """Give ``p`` memory of its own, of undefined values; kernels' bits depend on how it is aligned (64 bytes)."""
    p.data = torch.empty_like(p.data, memory_format=torch.preserve_format)


def free(p: torch.Tensor) -> None:
    """Take its memory from ``p``, which keeps its shape; whoever has a view of it keeps that."""
    if has_storage(p):
        hollow = torch.empty_like(p.data, memory_format=torch.preserve_format)
        hollow.untyped_storage().resize_(0)
        p.data = hollow


def is_flat(value: Any) -> bool:
    """Whether a value of the optimizer's state has an element for each of the parameter's."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
