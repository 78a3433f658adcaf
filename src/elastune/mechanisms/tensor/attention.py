"""Attention, and the transformer layers of torch, in blocks of heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elastune.mechanisms.tensor.blocked import Blocked
from elastune.mechanisms.tensor.kernels import attention
from elastune.mechanisms.tensor.layers import Divided
from elastune.mechanisms.tensor.passing import shared

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
        ways: dict[int, list[torch.Tensor]] = {}
        found = []
        for role, x in enumerate(inputs):
            if id(x) not in ways:
                rows = x.unsqueeze(0) if x.dim() == 2 else x if self.batch_first else x.transpose(0, 1)
                ways[id(x)] = shared(self._axis, rows)
            separate = PROJECTIONS[role] in self.divided
            weights = self.own(PROJECTIONS[role]) if separate else self.own("in_proj_weight", role)
            biases = self.own_or_none("in_proj_bias", role)
            parts = [F.linear(*operands) for operands in zip(ways[id(x)], weights, biases, strict=True)]
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
