"""Layers in virtual blocks: linear, convolution, embedding, attention and torch's transformer layers.

A layer stays the user's object: its class changes, and each parameter becomes blocks. Every worker has a parameter
for every block and computes with its own. Divided by *columns*, a layer gives a part of its outputs for each block;
by *rows*, it uses a part of its inputs (the words of Megatron-LM; of an embedding: features and vocabulary).
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

# [layers] Layers in virtual blocks. A layer stays the user's object: its class changes, and each parameter becomes blocks.
#
# Every worker has a parameter for every block, and computes with those of its own. Divided by *columns* a layer gives a
# part of its outputs for each block, divided by *rows* it uses a part of its inputs (the words of Megatron-LM and of
# ``torch.distributed.tensor.parallel``; of an embedding: features and vocabulary).

ParallelStyle = Literal["columns", "rows"]


@dataclass(frozen=True)
class BlockOf:
    """One block of a parameter: what the layer calls it, where it lies in the whole, and which block of the axis it is.

    ``role``: of parameters that are several in one (attention's projections) which of them.
    """

    key: str
    box: Box
    block: int
    role: int = 0

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where it lies, as an index."""
        return tuple(slice(start, stop) for start, stop in self.box)


def blocks_along(name: str, shape: Sequence[int], dim: int, sizes: Sequence[int]) -> tuple[BlockOf, ...]:
    """The blocks of parameter ``name`` that is cut along ``dim``."""
    found, start = [], 0
    for block, size in enumerate(sizes):
        box = tuple((start, start + size) if d == dim else (0, length) for d, length in enumerate(shape))
        found.append(BlockOf(f"{name}#{block}", box, block))
        start += size
    return tuple(found)


class Divided(nn.Module):
    """What all of them share. ``divided``: the blocks of each parameter that is cut, by its name in this layer."""

    _axis: BlockAxis
    divided: dict[str, tuple[BlockOf, ...]]
    sizes: tuple[int, ...]
    parallel_style: ParallelStyle

    def own(self, name: str, role: int = 0) -> list[torch.Tensor]:
        """This worker's blocks of a parameter, in order."""
        wanted = self._axis.own
        found = [self._parameters[b.key] for b in self.divided[name] if b.block in wanted and b.role == role]
        return [p for p in found if p is not None]

    def own_or_none(self, name: str, role: int = 0) -> Sequence[torch.Tensor | None]:
        """The same of a parameter that the layer may not have."""
        return self.own(name, role) if name in self.divided else [None] * len(self._axis.own)

    def __getattr__(self, name: str) -> Any:
        divided = self.__dict__.get("divided", {})
        if name not in divided:
            return super().__getattr__(name)
        if not self._axis.computes:
            fix = f"named_parameters() has its blocks {divided[name][0].key}, ..."
            raise UserError("a divided parameter is whole in a forward pass only", f"{type(self).__name__}.{name}", fix)
        return self._gathered(name)

    def _gathered(self, name: str) -> torch.Tensor:
        """The whole parameter, for a pass that uses it otherwise than by calling the layer."""
        blocks = self.divided[name]
        dims = [d for d, edges in enumerate(zip(*(b.box for b in blocks), strict=True)) if len(set(edges)) > 1]
        roles = sorted({b.role for b in blocks})
        parts = []
        for role in roles:
            of_role = [b for b in blocks if b.role == role]
            sizes = [b.box[dims[0]][1] - b.box[dims[0]][0] for b in of_role]
            parts.append(joined(self._axis, self.own(name, role), sizes, dims[0]))
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
        """What torch looks at inside has no blocks; these it gives."""
        parameters = dict(self._parameters)
        blocks = {b.key: self.get_parameter(b.key) for parts in self.divided.values() for b in parts}
        for key in blocks:
            del self._parameters[key]
        yield blocks
        self._parameters.clear()
        self._parameters.update(parameters)


def has_values(p: torch.Tensor) -> bool:
    """Whether the block is here: the storage of others is empty."""
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
    """``nn.Linear``. Bias goes with the outputs: in blocks by columns, whole by rows."""

    def forward(self, input: Any) -> Any:  # noqa: A002 - torch's own name
        axis = self._axis
        if self.parallel_style == "columns":
            parts = [
                F.linear(x, w, b)
                for x, w, b in zip(
                    shared(axis, as_whole(input)), self.own("weight"), self.own_or_none("bias"), strict=True
                )
            ]
            return Blocked(axis, parts, self.sizes, -1)
        blocks = in_blocks(axis, input, self.sizes, -1)
        total = summed(axis, [F.linear(x, w) for x, w in zip(blocks, self.own("weight"), strict=True)])
        return total if self.bias is None else total + self.bias


class DividedConv2d(Divided, nn.Conv2d):
    """``nn.Conv2d`` of one group: by output channels, or by input channels."""

    def forward(self, input: Any) -> Any:  # noqa: A002 - torch's own name
        axis, channels = self._axis, -3
        if self.parallel_style == "columns":
            parts = [
                self._conv_forward(x, w, b)
                for x, w, b in zip(
                    shared(axis, as_whole(input)), self.own("weight"), self.own_or_none("bias"), strict=True
                )
            ]
            return Blocked(axis, parts, self.sizes, channels)
        blocks = in_blocks(axis, input, self.sizes, channels)
        total = summed(axis, [self._conv_forward(x, w, None) for x, w in zip(blocks, self.own("weight"), strict=True)])
        return total if self.bias is None else total + self.bias.view(-1, 1, 1)


class DividedEmbedding(Divided, nn.Embedding):
    """``nn.Embedding``: by features, or by vocabulary. Sums over the vocabulary have one term that is not zero."""

    def forward(self, input: torch.Tensor) -> Any:  # noqa: A002 - torch's own name
        axis = self._axis
        if self.parallel_style == "columns":
            parts = [F.embedding(input, w, self.padding_idx) for w in self.own("weight")]
            return Blocked(axis, parts, self.sizes, -1)
        parts = []
        for block, w in zip(axis.own, self.own("weight"), strict=True):
            start = sum(self.sizes[:block])
            outside = (input < start) | (input >= start + self.sizes[block])
            padding = None if self.padding_idx is None else self.padding_idx - start
            here = padding if padding is not None and 0 <= padding < self.sizes[block] else None
            rows = F.embedding((input - start).clamp(0, self.sizes[block] - 1), w, here)
            parts.append(rows.masked_fill(outside.unsqueeze(-1), 0.0))
        return summed(axis, parts)


def in_blocks(axis: BlockAxis, whole: Any, sizes: Sequence[int], dim: int) -> list[torch.Tensor]:
    """The own blocks of ``whole``, whichever way it comes."""
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
    known: dict[int, dict[Box, nn.Parameter]],
) -> None:
    """Make ``layer`` a ``kind``, with the parameters that ``blocks`` names in blocks.

    ``known``: blocks of parameters that other layers have too (tied weights), by the whole one's id.
    """
    layer.__class__ = kind
    assert isinstance(layer, Divided)
    layer._axis, layer.parallel_style, layer.sizes, layer.divided = axis, parallel_style, tuple(sizes), dict(blocks)
    for name, parts in blocks.items():
        whole = layer._parameters.pop(name)
        assert whole is not None
        made = known.setdefault(id(whole), {})
        for b in parts:
            if b.box not in made:
                value = whole.detach()[b.slices]
                if not is_memory_mapped(whole):  # else each worker takes in what it computes with
                    value = value.clone(memory_format=torch.contiguous_format)
                made[b.box] = nn.Parameter(value, requires_grad=whole.requires_grad)
            layer.register_parameter(b.key, made[b.box])


# [attention] Attention, and the transformer layers of torch, in blocks of heads.

PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class DividedAttention(Divided, nn.MultiheadAttention):
    """``nn.MultiheadAttention``: each block has some of the heads, and their rows of the projection at the end.

    ``sizes``: features of each block.
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
        """As torch's, to the shapes, masks and errors."""
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
        parallel_styles: dict[int, list[torch.Tensor]] = {}
        found = []
        for role, x in enumerate(inputs):
            if id(x) not in parallel_styles:
                rows = x.unsqueeze(0) if x.dim() == 2 else x if self.batch_first else x.transpose(0, 1)
                parallel_styles[id(x)] = shared(self._axis, rows)
            separate = PROJECTIONS[role] in self.divided
            weights = self.own(PROJECTIONS[role]) if separate else self.own("in_proj_weight", role)
            biases = self.own_or_none("in_proj_bias", role)
            parts = [F.linear(*operands) for operands in zip(parallel_styles[id(x)], weights, biases, strict=True)]
            projected = Blocked(self._axis, parts, self.sizes, -1)
            heads = projected.view(*projected.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            assert isinstance(heads, Blocked)
            found.append(heads)
        return found

    def _mask(
        self, query: Blocked, attn_mask: torch.Tensor | None, padding: torch.Tensor | None
    ) -> torch.Tensor | None:
        """One mask of what is added to scores; (batch or 1, heads or 1, queries, keys)."""
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
    """``nn.TransformerEncoderLayer`` whose parts are divided: without the fused kernel, which wants them whole."""

    def forward(
        self,
        src: torch.Tensor,
        src_mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """As torch's."""
        masks = (src_mask, src_key_padding_mask, is_causal)
        if self.norm_first:
            src = src + self._sa_block(self.norm1(src), *masks)
            return src + self._ff_block(self.norm2(src))
        src = self.norm1(src + self._sa_block(src, *masks))
        return torch.as_tensor(self.norm2(src + self._ff_block(src)))
