"""Attention and normalisation block by block."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from elastune.mechanisms.tensor.blocked import HANDLERS, Blocked
from elastune.mechanisms.tensor.passing import parted


def attend(
    func: Callable[..., Any],
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """``scaled_dot_product_attention`` of heads that lie in blocks; see there for shapes."""
    three = (query, key, value)
    if enable_gqa or not all(isinstance(x, Blocked) and x.ndim == 4 and x.along == 1 for x in three):
        return NotImplemented
    if not query.sizes == key.sizes == value.sizes:
        return NotImplemented
    if dropout_p:
        return attention(query, key, value, _with_causal(query, key, attn_mask, is_causal), dropout_p, scale)[0]
    masks = query.for_each(attn_mask)
    if masks is None:
        return NotImplemented

    def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale)

    return query.each(one, key.parts, value.parts, masks)


def attention(
    query: Any, key: Any, value: Any, mask: torch.Tensor | None, dropout_p: float, scale: float | None
) -> tuple[Any, Any]:
    """The same, written out: what attends to what is needed, or thinned out. Returns (values, weights)."""
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor).matmul(key.transpose(-2, -1))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights: Any = F.dropout(F.softmax(scores, dim=-1), dropout_p, training=True)
    return weights.matmul(value), weights


def _with_causal(query: Blocked, key: Blocked, mask: torch.Tensor | None, is_causal: bool) -> torch.Tensor | None:
    if not is_causal:
        return mask
    return torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()


def batch_norm(
    func: Callable[..., Any],
    x: Any,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Of channels that lie in blocks. Weight, bias and running statistics are whole on every worker."""
    if not isinstance(x, Blocked) or x.along != 1 or (weight is None) != (bias is None):
        return NotImplemented
    axis, sizes = x.axis, x.sizes
    affine: list[Any] = [(None, None)] * len(axis.own)
    if weight is not None and bias is not None:
        affine = [tuple(both.unbind(0)) for both in parted(axis, torch.stack([weight, bias]), sizes, 1)]
    running: list[Any] = [(None, None)] * len(axis.own)
    if running_mean is not None and running_var is not None:
        running = [tuple(both.unbind(0)) for both in axis.parts(torch.stack([running_mean, running_var]), sizes, 1)]

    def one(part: torch.Tensor, own: Any, statistics: Any) -> torch.Tensor:
        (w, b), (mean, var) = own, statistics
        return F.batch_norm(part, mean, var, w, b, training, momentum, eps)

    normal = x.each(one, affine, running)
    if training and running_mean is not None and running_var is not None:
        with torch.no_grad():
            mean, var = axis.join_forward([torch.stack(both) for both in running], sizes, 1)
            running_mean.copy_(mean)
            running_var.copy_(var)
    return normal


def layer_norm(
    func: Callable[..., Any],
    x: Any,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Over dimensions that are not cut (within heads, say)."""
    if not isinstance(x, Blocked) or x.along >= x.ndim - len(normalized_shape):
        return NotImplemented
    weights, biases = x.for_each(weight), x.for_each(bias)
    assert weights is not None
    assert biases is not None
    return x.each(lambda part, w, b: func(part, normalized_shape, w, b, *args, **kwargs), weights, biases)


HANDLERS.update(scaled_dot_product_attention=attend, batch_norm=batch_norm, layer_norm=layer_norm)
