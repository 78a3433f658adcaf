"""A model whose layers are divided into virtual blocks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from elastune.comm.comms import Comms
from elastune.core.batch_slices import BatchSlice
from elastune.core.errors import UserError
from elastune.core.layout import Box
from elastune.core.leaves import Leaf, Split
from elastune.core.mesh import Mesh
from elastune.core.slots import cut
from elastune.journal.records import LayersDivided
from elastune.mechanisms.division import Division
from elastune.mechanisms.tensor.attention import PROJECTIONS, DividedAttention, DividedEncoderLayer
from elastune.mechanisms.tensor.axis import BlockAxis
from elastune.mechanisms.tensor.blocked import as_whole
from elastune.mechanisms.tensor.layers import (
    BlockOf,
    Divided,
    DividedConv2d,
    DividedEmbedding,
    DividedLinear,
    Way,
    blocks_along,
    divide_parameters,
)

KINDS: Mapping[type[nn.Module], type[Divided]] = {
    nn.Conv2d: DividedConv2d,
    nn.Embedding: DividedEmbedding,
    nn.MultiheadAttention: DividedAttention,
}


class TensorDivision(Division):
    """Layers of ``module`` are divided; what is not is computed by every worker of the axis, with equal bits.

    Args:
        module: the user's model, which is changed in place.
        ways: the layers to divide, by name, in the order of the model (``plan.chosen``).
        axis: the blocks.
    """

    def __init__(self, module: nn.Module, ways: Mapping[str, Way], axis: BlockAxis) -> None:
        self.axis, self.rescue = axis, axis.rescue
        self._ways = dict(ways)
        self.module = self.model = module
        self.whole_s = 0.0
        first_names: dict[int, str] = {}
        for name, p in module.named_parameters(remove_duplicate=False):
            first_names.setdefault(id(p), name)
        originals = {name: module.get_parameter(name) for name in first_names.values()}  # keeps ids in use
        made = _divide_layers(module, ways, axis)
        of_block = {id(p): (first_names[whole], box) for whole, parts in made.items() for box, p in parts.items()}
        number = {
            id(p): block for layer in module.modules() if isinstance(layer, Divided) for block, p in _numbered(layer)
        }
        leaves, self.parameters = [], []
        for name, p in module.named_parameters():
            tensor, box = of_block.get(id(p), (name, tuple((0, size) for size in p.shape)))
            dtype = str(p.dtype).removeprefix("torch.")
            leaves.append(Leaf(name, tensor, box, dtype, block=number.get(id(p)), trained=p.requires_grad))
            self.parameters.append(p)
        del originals
        self.split = Split(tuple(leaves), blocks=axis.count)
        self._since = 0.0
        module.register_forward_pre_hook(self._begins)
        module.register_forward_hook(self._ends, always_call=True)

    def enter(self, comms: Comms) -> None:
        self.axis.enter(comms.group("tensor"))

    def told(self, mesh: Mesh) -> tuple[LayersDivided, ...]:
        sizes = {True: 0, False: 0}
        for leaf in self.split.leaves:
            sizes[leaf.block is not None] += leaf.size if leaf.trained else 0
        return (LayersDivided(self.axis.count, sizes[True], sizes[False], self.apart),)

    def backward(self, loss: torch.Tensor, part: BatchSlice) -> Iterable[BatchSlice]:
        self._raise_if_failed()
        since = time.perf_counter()
        self.axis.computes = True  # activation checkpointing runs parts of the forward pass again
        try:
            for done in self._back(loss, part):
                self.whole_s += time.perf_counter() - since
                self._raise_if_failed()
                yield done
                since = time.perf_counter()
        finally:
            self.axis.computes = False

    def _back(self, loss: torch.Tensor, part: BatchSlice) -> Iterable[BatchSlice]:
        """See ``Division.backward``."""
        return super().backward(loss, part)

    @contextmanager
    def passing(self) -> Iterator[None]:
        computed, self.axis.computes = self.axis.computes, True
        try:
            yield
        finally:
            self.axis.computes = computed
        self._raise_if_failed()

    def in_parts(self, called: Sequence[str]) -> frozenset[str]:
        found, inside = set(), False
        for name in called:
            way = self._ways.get(name)
            inside = inside and way != "columns"
            if inside:
                found.add(name)
            inside = way == "columns" or (inside and way is None)
        return frozenset(found)

    def whole(self, value: Any) -> Any:
        return tree_map(as_whole, value)

    def _raise_if_failed(self) -> None:
        if self.axis.failed is not None:
            raise self.axis.failed

    @property
    def divided_share(self) -> float:
        """Which part of the passes' time was spent inside of divided layers, traffic included; NaN before any pass."""
        return self.axis.divided_s / self.whole_s if self.whole_s else float("nan")

    def _begins(self, module: nn.Module, inputs: Any) -> None:
        self.axis.computes = True
        self._since = time.perf_counter()

    def _ends(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        self.axis.computes = False
        output = tree_map(as_whole, output)
        self.whole_s += time.perf_counter() - self._since
        if self.axis.failed is not None:
            self.rescue.meet(self.axis.failed)
        return output


# -- layer by layer ----------------------------------------------------------------------------------------------------


def _divide_layers(module: nn.Module, ways: Mapping[str, Way], axis: BlockAxis) -> dict[int, dict[Box, nn.Parameter]]:
    """Divide the layers of ``ways``; the blocks of each parameter, by its id."""
    _refuse_half_tied(module, ways)
    made: dict[int, dict[Box, nn.Parameter]] = {}
    before: int | None = None  # what the layer by columns before gives, in features or channels
    for name, way in ways.items():
        layer: Any = module.get_submodule(name)
        if isinstance(layer, nn.MultiheadAttention):
            _divide_attention(layer, axis, made)
            before = None
            continue
        sizes, outputs = _sizes(layer, way, axis.count, before)
        dims = (0, 1) if isinstance(layer, (nn.Linear, nn.Conv2d)) else (1, 0)
        blocks = {"weight": blocks_along("weight", layer.weight.shape, dims[way == "rows"], sizes)}
        if way == "columns" and getattr(layer, "bias", None) is not None:
            blocks["bias"] = blocks_along("bias", layer.bias.shape, 0, sizes)
        kind = DividedLinear if isinstance(layer, nn.Linear) else KINDS[type(layer)]
        divide_parameters(layer, kind, axis, way, sizes, blocks, made)
        before = outputs if way == "columns" else None
    for part in module.modules():
        if type(part) is nn.TransformerEncoderLayer and isinstance(part.self_attn, Divided):
            part.__class__ = DividedEncoderLayer
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False  # its fast path looks into the layers' weights
    return made


def _sizes(layer: Any, way: Way, count: int, before: int | None) -> tuple[list[int], int]:
    """Sizes of the blocks along what is cut, and all of it. Rows come in the blocks that the layer before gave:
    of each channel all places, where a convolution's output was flattened.
    """
    if isinstance(layer, nn.Linear):
        total = layer.out_features if way == "columns" else layer.in_features
    elif isinstance(layer, nn.Conv2d):
        total = layer.out_channels if way == "columns" else layer.in_channels
    else:
        total = layer.embedding_dim if way == "columns" else layer.num_embeddings
    unit = total // before if way == "rows" and before and before >= count and total % before == 0 else 1
    return [len(block) * unit for block in cut(total // unit, count)], total


def _divide_attention(layer: nn.MultiheadAttention, axis: BlockAxis, made: dict[int, dict[Box, nn.Parameter]]) -> None:
    features = layer.embed_dim
    sizes = [features // axis.count] * axis.count
    blocks: dict[str, tuple[BlockOf, ...]] = {}
    for name in ("in_proj_weight", "in_proj_bias"):
        if (whole := getattr(layer, name)) is not None:
            blocks[name] = _thirds(name, whole.shape, sizes)
    for name in PROJECTIONS:
        if (whole := getattr(layer, name)) is not None:
            blocks[name] = blocks_along(name, whole.shape, 0, sizes)
    divide_parameters(layer, DividedAttention, axis, "columns", sizes, blocks, made)
    out = {"weight": blocks_along("weight", layer.out_proj.weight.shape, 1, sizes)}
    divide_parameters(layer.out_proj, DividedLinear, axis, "rows", sizes, out, made)


def _thirds(name: str, shape: Sequence[int], sizes: Sequence[int]) -> tuple[BlockOf, ...]:
    """Queries', keys' and values' rows lie one below the other."""
    found = []
    for role, letter in enumerate("qkv"):
        for b in blocks_along(name, shape, 0, sizes):
            start, stop = (edge + role * sum(sizes) for edge in b.box[0])
            found.append(BlockOf(f"{name}#{letter}{b.block}", ((start, stop), *b.box[1:]), b.block, role))
    return tuple(found)


def _refuse_half_tied(module: nn.Module, ways: Mapping[str, Way]) -> None:
    """Raise ``UserError`` where layers share a weight and are not divided along the same dimension of it."""
    seen: dict[int, tuple[str, int | None]] = {}
    for name, layer in module.named_modules():
        for key, p in layer.named_parameters(recurse=False):
            dim = None
            if name in ways and key == "weight":
                dim = int((ways[name] == "rows") != isinstance(layer, nn.Embedding))
            other, of_other = seen.setdefault(id(p), (name, dim))
            if dim != of_other:
                fix = "an embedding RowwiseParallel() and its output layer ColwiseParallel(), or neither"
                raise UserError(
                    "layers that share a weight are divided along the same dimension", f"{other}, {name}", fix
                )


def _numbered(layer: Divided) -> list[tuple[int, nn.Parameter]]:
    return [(b.block, layer.get_parameter(b.key)) for blocks in layer.divided.values() for b in blocks]
