"""Layers in virtual blocks: linear, convolution, embedding, attention and torch's transformer layers.

A layer stays the user's object: its class changes, and each parameter becomes blocks. Every worker has a parameter
for every block and computes with its own blocks. Divided by *columns*, each block gives a part of the layer's outputs.
Divided by *rows*, each block uses a part of its inputs. (These are the words of Megatron-LM and of
``torch.distributed.tensor.parallel``. For an embedding, columns are features and rows are the vocabulary.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from elastune.core.errors import UserError
from elastune.core.layout import Box
from elastune.parallel.mechanisms.tensor.axis import BlockAxis, joined, parted, shared, summed
from elastune.parallel.mechanisms.tensor.blocked import Blocked, as_whole, attention
from elastune.parallel.mechanisms.tensor_storage import is_memory_mapped

ParallelStyle = Literal["columns", "rows"]


@dataclass(frozen=True)
class BlockOf:
    """One block of a parameter.

    Attributes:
        key: The name of the block's parameter in the layer.
        box: The place of the block in the whole parameter.
        block: The number of the block on the axis.
        role: The part of a parameter that combines several (attention's query, key and value projections).
    """

    key: str
    box: Box
    block: int
    role: int = 0

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index."""
        return tuple(slice(start, stop) for start, stop in self.box)


def blocks_along(name: str, shape: Sequence[int], dim: int, sizes: Sequence[int]) -> tuple[BlockOf, ...]:
    """The blocks of the parameter ``name``, cut along ``dim``."""
    blocks, start = [], 0
    for block, size in enumerate(sizes):
        box = tuple((start, start + size) if d == dim else (0, length) for d, length in enumerate(shape))
        blocks.append(BlockOf(f"{name}#{block}", box, block))
        start += size
    return tuple(blocks)


class Divided(nn.Module):
    """Base of all divided layers.

    Attributes:
        divided: The blocks of each parameter that is cut, by its name in this layer.
        sizes: The sizes of the blocks along the cut.
        parallel_style: By columns or by rows.
    """

    _axis: BlockAxis
    divided: dict[str, tuple[BlockOf, ...]]
    sizes: tuple[int, ...]
    parallel_style: ParallelStyle

    def own_blocks(self, name: str, role: int = 0) -> list[torch.Tensor]:
        """This worker's blocks of a parameter, in order."""
        wanted = self._axis.own_blocks
        blocks = [self._parameters[b.key] for b in self.divided[name] if b.block in wanted and b.role == role]
        return [p for p in blocks if p is not None]

    def own_blocks_or_none(self, name: str, role: int = 0) -> Sequence[torch.Tensor | None]:
        """As ``own_blocks``, for a parameter that the layer may not have or may not cut."""
        return self.own_blocks(name, role) if name in self.divided else [None] * len(self._axis.own_blocks)

    def __getattr__(self, name: str) -> Any:
        divided = self.__dict__.get("divided", {})
        if name not in divided:
            return super().__getattr__(name)
        if not self._axis.computes:
            fix = f"named_parameters() has its blocks {divided[name][0].key}, ..."
            raise UserError("a divided parameter is whole in a forward pass only", f"{type(self).__name__}.{name}", fix)
        return self._gathered(name)

    def _gathered(self, name: str) -> torch.Tensor:
        """The whole parameter, for a forward pass that reads it without calling the layer."""
        blocks = self.divided[name]
        dims = [d for d, edges in enumerate(zip(*(b.box for b in blocks), strict=True)) if len(set(edges)) > 1]
        roles = sorted({b.role for b in blocks})
        parts = []
        for role in roles:
            of_role = [b for b in blocks if b.role == role]
            sizes = [b.box[dims[0]][1] - b.box[dims[0]][0] for b in of_role]
            parts.append(joined(self._axis, self.own_blocks(name, role), sizes, dims[0]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dims[0])

    # -- under the user's names ---------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with self._without_blocks() as kept:
            super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, blocks in self.divided.items():
            values = [kept[b.key] for b in blocks]
            if not all(has_values(value) for value in values):
                fix = "save by session.save: the checkpoint loads with tensor=1 too"
                raise UserError("a state_dict needs the whole model on one worker", f"not all of {prefix}{name}", fix)
            destination[prefix + name] = whole_of(blocks, values)

    def _load_from_state_dict(
        self,
        state: dict[str, Any],
        prefix: str,
        meta: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        state = dict(state)
        with self._without_blocks() as kept:
            for name, blocks in self.divided.items():
                whole, shape = state.pop(prefix + name, None), shape_of(blocks)
                if whole is None:
                    missing.append(prefix + name)
                elif tuple(whole.shape) != shape:
                    errors.append(f"size mismatch for {prefix}{name}: {tuple(whole.shape)}, the model's is {shape}")
                else:
                    with torch.no_grad():
                        for b in blocks:
                            if has_values(kept[b.key]):
                                kept[b.key].copy_(whole[b.slices])
            super()._load_from_state_dict(state, prefix, meta, strict, missing, unexpected, errors)

    @contextmanager
    def _without_blocks(self) -> Iterator[dict[str, nn.Parameter]]:
        """Context in which the layer has no parameters for blocks. Yields these parameters."""
        parameters = dict(self._parameters)
        blocks = {b.key: self.get_parameter(b.key) for parts in self.divided.values() for b in parts}
        for key in blocks:
            del self._parameters[key]
        yield blocks
        self._parameters.clear()
        self._parameters.update(parameters)


def has_values(p: torch.Tensor) -> bool:
    """Whether this worker has the block's values. Blocks of other workers have empty storage."""
    return p.numel() == 0 or p.untyped_storage().size() > 0


def shape_of(blocks: Sequence[BlockOf]) -> tuple[int, ...]:
    """The shape of the parameter that consists of ``blocks``."""
    return tuple(max(stops) for stops in zip(*([stop for _, stop in b.box] for b in blocks), strict=True))


def whole_of(blocks: Sequence[BlockOf], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parameter that consists of ``blocks``."""
    whole = torch.empty(shape_of(blocks), dtype=values[0].dtype, device=values[0].device)
    for b, value in zip(blocks, values, strict=True):
        whole[b.slices] = value.detach()
    return whole


class DividedLinear(Divided, nn.Linear):
    """``nn.Linear`` in blocks. The bias belongs to the outputs: in blocks by columns, whole by rows."""

    def forward(self, input: Any) -> Any:  # noqa: A002 - torch's own name
        axis = self._axis
        if self.parallel_style == "columns":
            parts = [
                F.linear(x, w, b)
                for x, w, b in zip(
                    shared(axis, as_whole(input)),
                    self.own_blocks("weight"),
                    self.own_blocks_or_none("bias"),
                    strict=True,
                )
            ]
            return Blocked(axis, parts, self.sizes, -1)
        blocks = in_blocks(axis, input, self.sizes, -1)
        total = summed(axis, [F.linear(x, w) for x, w in zip(blocks, self.own_blocks("weight"), strict=True)])
        return total if self.bias is None else total + self.bias


class DividedConv2d(Divided, nn.Conv2d):
    """``nn.Conv2d`` of one group, in blocks of output channels (columns) or input channels (rows)."""

    def forward(self, input: Any) -> Any:  # noqa: A002 - torch's own name
        axis, channels = self._axis, -3
        if self.parallel_style == "columns":
            parts = [
                self._conv_forward(x, w, b)
                for x, w, b in zip(
                    shared(axis, as_whole(input)),
                    self.own_blocks("weight"),
                    self.own_blocks_or_none("bias"),
                    strict=True,
                )
            ]
            return Blocked(axis, parts, self.sizes, channels)
        blocks = in_blocks(axis, input, self.sizes, channels)
        total = summed(
            axis, [self._conv_forward(x, w, None) for x, w in zip(blocks, self.own_blocks("weight"), strict=True)]
        )
        return total if self.bias is None else total + self.bias.view(-1, 1, 1)


class DividedEmbedding(Divided, nn.Embedding):
    """``nn.Embedding`` in blocks of features (columns) or of the vocabulary (rows).

    A sum over the blocks of the vocabulary has only one term that is not zero.
    """

    def forward(self, input: torch.Tensor) -> Any:  # noqa: A002 - torch's own name
        axis = self._axis
        if self.parallel_style == "columns":
            parts = [F.embedding(input, w, self.padding_idx) for w in self.own_blocks("weight")]
            return Blocked(axis, parts, self.sizes, -1)
        parts = []
        for block, w in zip(axis.own_blocks, self.own_blocks("weight"), strict=True):
            start = sum(self.sizes[:block])
            outside = (input < start) | (input >= start + self.sizes[block])
            padding = None if self.padding_idx is None else self.padding_idx - start
            padding_row = padding if padding is not None and 0 <= padding < self.sizes[block] else None
            rows = F.embedding((input - start).clamp(0, self.sizes[block] - 1), w, padding_row)
            parts.append(rows.masked_fill(outside.unsqueeze(-1), 0.0))
        return summed(axis, parts)


def in_blocks(axis: BlockAxis, whole: Any, sizes: Sequence[int], dim: int) -> list[torch.Tensor]:
    """This worker's blocks of ``whole``, which may be a plain tensor or in blocks."""
    if not isinstance(whole, Blocked):
        return parted(axis, whole, sizes, dim % whole.dim())
    return whole.in_blocks_of(sizes, dim).parts


def divide_parameters(
    layer: nn.Module,
    kind: type[Divided],
    axis: BlockAxis,
    parallel_style: ParallelStyle,
    sizes: Sequence[int],
    blocks: Mapping[str, tuple[BlockOf, ...]],
    tied: dict[int, dict[Box, nn.Parameter]],
) -> None:
    """Change the class of ``layer`` to ``kind`` and replace the parameters that ``blocks`` names by blocks.

    ``tied``: the blocks made so far, by the id of the whole parameter, so that layers with tied weights share them.
    """
    layer.__class__ = kind
    assert isinstance(layer, Divided)
    layer._axis, layer.parallel_style, layer.sizes, layer.divided = axis, parallel_style, tuple(sizes), dict(blocks)
    for name, parts in blocks.items():
        whole = layer._parameters.pop(name)
        assert whole is not None
        made = tied.setdefault(id(whole), {})
        for b in parts:
            if b.box not in made:
                value = whole.detach()[b.slices]
                if not is_memory_mapped(
                    whole
                ):  # a memory-mapped block is read later, by the workers that compute with it
                    value = value.clone(memory_format=torch.contiguous_format)
                made[b.box] = nn.Parameter(value, requires_grad=whole.requires_grad)
            layer.register_parameter(b.key, made[b.box])


PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class DividedAttention(Divided, nn.MultiheadAttention):
    """``nn.MultiheadAttention`` in blocks of heads, each with its rows of the output projection.

    ``sizes``: the features of each block.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As torch's ``forward``, with the same shapes, masks and errors."""
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal needs an attn_mask")
        batched = query.dim() == 3
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        q, k, v = self._heads(query, key, value)
        if is_causal and key_padding_mask is None and not need_weights:
            mask = None
        else:
            is_causal, mask = False, self._mask(q, attn_mask, key_padding_mask)
        dropout = self.dropout if self.training else 0.0
        weights: Any = None
        if need_weights:
            values, weights = attention(q, k, v, mask, dropout, None)
        else:
            values = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)  # type: ignore[arg-type]
        out = self.out_proj(values.permute(2, 0, 1, 3).flatten(2))  # by length first, as torch: dropout sees strides
        if need_weights:
            weights = weights.whole()
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        if not batched:
            return out.squeeze(1), weights
        return (out.transpose(0, 1) if self.batch_first else out), weights

    def _heads(self, *inputs: torch.Tensor) -> list[Blocked]:
        """Queries, keys and values, each (batch, heads, length, features of a head)."""
        shared_inputs: dict[int, list[torch.Tensor]] = {}
        heads_of = []
        for role, x in enumerate(inputs):
            if id(x) not in shared_inputs:
                rows = x.unsqueeze(0) if x.dim() == 2 else x if self.batch_first else x.transpose(0, 1)
                shared_inputs[id(x)] = shared(self._axis, rows)
            separate = PROJECTIONS[role] in self.divided
            weights = self.own_blocks(PROJECTIONS[role]) if separate else self.own_blocks("in_proj_weight", role)
            biases = self.own_blocks_or_none("in_proj_bias", role)
            parts = [F.linear(*operands) for operands in zip(shared_inputs[id(x)], weights, biases, strict=True)]
            projected = Blocked(self._axis, parts, self.sizes, -1)
            heads = projected.view(*projected.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            assert isinstance(heads, Blocked)
            heads_of.append(heads)
        return heads_of

    def _mask(
        self, query: Blocked, attn_mask: torch.Tensor | None, padding: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The sum of all masks, to be added to scores. Its shape is (batch or 1, heads or 1, queries, keys)."""
        masks = []
        if attn_mask is not None:
            shape = (-1, self.num_heads, *attn_mask.shape[-2:]) if attn_mask.dim() == 3 else (1, 1, *attn_mask.shape)
            masks.append(attn_mask.view(shape))
        if padding is not None:
            masks.append(padding[:, None, None, :])
        added = [
            torch.zeros_like(m, dtype=query.dtype).masked_fill(m, float("-inf")) if m.dtype == torch.bool else m
            for m in masks
        ]
        return sum(added[1:], added[0]).to(query.dtype) if added else None


class DividedEncoderLayer(nn.TransformerEncoderLayer):
    """``nn.TransformerEncoderLayer`` with divided parts. The fused kernel would need whole weights."""

    def forward(
        self,
        src: torch.Tensor,
        src_mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """As torch's ``forward``, without the fused kernel."""
        masks = (src_mask, src_key_padding_mask, is_causal)
        if self.norm_first:
            src = src + self._sa_block(self.norm1(src), *masks)
            return src + self._ff_block(self.norm2(src))
        src = self.norm1(src + self._sa_block(src, *masks))
        return torch.as_tensor(self.norm2(src + self._ff_block(src)))
