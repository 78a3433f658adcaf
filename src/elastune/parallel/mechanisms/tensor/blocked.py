"""A tensor that exists in blocks, and the operations that run on it block by block.

It lies between a layer divided by columns and one divided by rows; the user's forward pass sees the whole shape.
Activations, dropout, heads made by ``view`` and ``transpose``, attention, normalisation and pooling act on each
block: a kernel sees the same numbers in the same shape for any number of workers. For every other operation the
blocks are gathered and every worker computes the whole: slower, never wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from elastune.core.errors import UserError
from elastune.parallel.mechanisms.tensor.axis import BlockAxis, joined, parted, shared
from elastune.parallel.mechanisms.torch_private import tree_map


class Blocked:
    """A tensor in blocks along one dimension. It has the shape and most operations of a tensor.

    Attributes:
        axis: The axis whose workers have the blocks.
        parts: This worker's blocks.
        sizes: The sizes of all blocks along the dimension.
        along: The dimension.
    """

    def __init__(self, axis: BlockAxis, parts: Sequence[torch.Tensor], sizes: Sequence[int], along: int) -> None:
        self.axis = axis
        self.parts = list(parts)
        self.sizes = tuple(sizes)
        self.along = along % self.parts[0].dim()
        self._whole: torch.Tensor | None = None

    # -- as a tensor --------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        shape = list(self.parts[0].shape)
        shape[self.along] = sum(self.sizes)
        return torch.Size(shape)

    def size(self, dim: int | None = None) -> Any:
        """As a tensor's."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As a tensor's."""
        return len(self.shape)

    @property
    def ndim(self) -> int:
        """As a tensor's."""
        return len(self.shape)

    def numel(self) -> int:
        """As a tensor's."""
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """As a tensor's."""
        return self.parts[0].dtype

    @property
    def device(self) -> torch.device:
        """As a tensor's."""
        return self.parts[0].device

    @property
    def requires_grad(self) -> bool:
        """As a tensor's."""
        return self.parts[0].requires_grad

    is_nested = False
    is_sparse = False

    # -- whole, and in blocks -----------------------------------------------------------------------------------------

    def whole(self) -> torch.Tensor:
        """All blocks side by side, on every worker; gathered once."""
        if self._whole is None:
            self._whole = joined(self.axis, self.parts, self.sizes, self.along)
        return self._whole

    def each(self, act: Callable[..., torch.Tensor], *operands: Sequence[Any]) -> Blocked:
        """Apply ``act`` to every block and its entry of each of ``operands``. Blocks keep their sizes."""
        return Blocked(
            self.axis, [act(*args) for args in zip(self.parts, *operands, strict=True)], self.sizes, self.along
        )

    def for_each(self, other: Any, *, like: Sequence[int] | None = None) -> Sequence[Any] | None:
        """``other``, cut for an operation with each of this worker's blocks, by the rules of broadcasting.

        Args:
            other: A tensor, a tensor in blocks, or any other value.
            like: The shape of the operand in blocks; None: the shape of this tensor.

        Returns:
            A value for each block; None where ``other`` cannot be cut like the blocks.
        """
        rank = self.ndim if like is None else len(like)
        if isinstance(other, Blocked):
            fits = (other.sizes, other.along - other.ndim) == (self.sizes, self.along - rank)
            return other.parts if fits else None
        if not isinstance(other, torch.Tensor):
            return [other] * len(self.parts)
        dim = self.along - (rank - other.dim())
        if other.dim() > rank:
            return None
        if dim < 0 or other.shape[dim] == 1:
            return shared(self.axis, other) if other.requires_grad else [other] * len(self.parts)
        return parted(self.axis, other, self.sizes, dim) if other.shape[dim] == sum(self.sizes) else None

    def in_blocks_of(self, sizes: Sequence[int], dim: int) -> Blocked:
        """The same values, cut along ``dim`` into ``sizes``."""
        dim %= self.ndim
        if (dim, tuple(sizes)) == (self.along, self.sizes):
            return self
        return Blocked(self.axis, parted(self.axis, self.whole(), sizes, dim), sizes, dim)

    # -- operations of torch ------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        handler = HANDLERS.get(name)
        if handler is not None:
            result = handler(func, *args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        if name.endswith("_") and not name.endswith("__"):
            fix = "use the operation that returns a new tensor"
            raise UserError("what lies in blocks is not changed in place", name, fix)
        return func(*tree_map(as_whole, args), **tree_map(as_whole, dict(kwargs or {})))

    def __getattr__(self, name: str) -> Any:
        method = getattr(torch.Tensor, name, None)
        if name.startswith("__") or method is None:
            raise AttributeError(f"a tensor in blocks has no {name}")
        if not callable(method):
            return getattr(self.whole(), name)
        return lambda *args, **kwargs: self.__torch_function__(method, (), (self, *args), kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self.whole()[key]


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)

    def operate(self: Blocked, *args: Any) -> Any:
        return self.__torch_function__(method, (), (self, *args))

    return operate


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "neg", "matmul", "rmatmul"),
    *("eq", "ne", "lt", "le", "gt", "ge", "abs"),
):
    setattr(Blocked, f"__{_name}__", _operator(f"__{_name}__"))
Blocked.__hash__ = object.__hash__  # type: ignore[method-assign]


def as_whole(value: Any) -> Any:
    """``value``, gathered where it is in blocks."""
    return value.whole() if isinstance(value, Blocked) else value


# --- operations on each block ---

Handler = Callable[..., Any]
"""Gets a function of torch and its arguments, and returns the result or ``NotImplemented`` if it needs the whole."""


def _unary(func: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, Blocked) or any(isinstance(a, (Blocked, torch.Tensor)) for a in (*args, *kwargs.values())):
        return NotImplemented
    if kwargs.get("inplace") or func.__name__.endswith("_"):
        x._whole = None
    return x.each(lambda part: func(part, *args, **kwargs))


def _binary(func: Callable[..., Any], a: Any, b: Any, **kwargs: Any) -> Any:
    first = a if isinstance(a, Blocked) else b
    rank = max(x.ndim if isinstance(x, (Blocked, torch.Tensor)) else 0 for x in (a, b))
    if first.ndim < rank or any(isinstance(x, (Blocked, torch.Tensor)) for x in kwargs.values()):
        return NotImplemented
    left, right = first.for_each(a), first.for_each(b)
    if left is None or right is None:
        return NotImplemented
    return Blocked(
        first.axis,
        [
            func(x, y, **kwargs) if isinstance(x, torch.Tensor) else _from_right(func, x, y)
            for x, y in zip(left, right, strict=True)
        ],
        first.sizes,
        first.along,
    )


def _from_right(func: Callable[..., Any], number: Any, part: torch.Tensor) -> torch.Tensor:
    """The operation with a number as first operand: only the function ``torch.NAME`` takes that, not the method."""
    result: torch.Tensor = getattr(torch, func.__name__.strip("_"))(number, part)
    return result


def _dropout(func: Callable[..., Any], x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Draw the mask of the whole, as in an undivided model, and give each block its part."""
    if not isinstance(x, Blocked) or not training or p == 0:
        return x
    return _masked(x, torch.nn.functional.dropout(torch.ones(x.shape, dtype=x.dtype, device=x.device), p, True))


def _dropout2d(func: Callable[..., Any], x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Dropout of whole channels."""
    if not isinstance(x, Blocked) or x.ndim != 4 or x.along != 1:
        return NotImplemented
    if not training or p == 0:
        return x
    ones = torch.ones((*x.shape[:2], 1, 1), dtype=x.dtype, device=x.device)
    return _masked(x, torch.nn.functional.dropout2d(ones, p, True))


def _masked(x: Blocked, mask: torch.Tensor) -> Blocked:
    parts = x.for_each(mask)
    assert parts is not None
    return x.each(torch.mul, parts)


def _reshape(func: Callable[..., Any], x: Any, *shape: Any, **kwargs: Any) -> Any:
    if kwargs or not isinstance(x, Blocked):
        return NotImplemented
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else shape
    if not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    return reshaped(x, [int(size) for size in sizes])


def reshaped(x: Blocked, shape: list[int]) -> Any:
    """Reshape each block, if the dimension of the blocks is kept, cut (into heads) or joined with later dimensions."""
    if -1 in shape:
        shape[shape.index(-1)] = x.numel() // max(1, -prod(shape))
    before, length = prod(x.shape[: x.along]), x.shape[x.along]
    inner = prod(x.shape[x.along + 1 :])
    for dim, size in enumerate(shape):
        if prod(shape[:dim]) == before and size > 1:
            row = length * inner // size  # elements that one step along the new dimension skips
            if any(block * inner % row for block in x.sizes):
                break
            sizes = [block * inner // row for block in x.sizes]
            cut = [sizes[block] for block in x.axis.own_blocks]
            parts = [part.reshape(*shape[:dim], n, *shape[dim + 1 :]) for part, n in zip(x.parts, cut, strict=True)]
            return Blocked(x.axis, parts, sizes, dim)
    return NotImplemented


def _flatten(func: Callable[..., Any], x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = start_dim % x.ndim, end_dim % x.ndim
    return reshaped(x, [*x.shape[:start], prod(x.shape[start : end + 1]), *x.shape[end + 1 :]])


def _unflatten(func: Callable[..., Any], x: Any, dim: int, sizes: Sequence[int]) -> Any:
    dim %= x.ndim
    full_sizes = [s if s != -1 else x.shape[dim] // -prod(sizes) for s in sizes]
    return reshaped(x, [*x.shape[:dim], *full_sizes, *x.shape[dim + 1 :]])


def _permute(func: Callable[..., Any], x: Any, *dims: Any) -> Any:
    order = [d % x.ndim for d in (dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)]
    return Blocked(x.axis, [part.permute(order) for part in x.parts], x.sizes, order.index(x.along))


def _transpose(func: Callable[..., Any], x: Any, a: int, b: int) -> Any:
    order = list(range(x.ndim))
    order[a], order[b] = order[b], order[a]
    return _permute(func, x, order)


def _unsqueeze(func: Callable[..., Any], x: Any, dim: int) -> Any:
    dim %= x.ndim + 1
    return Blocked(x.axis, [part.unsqueeze(dim) for part in x.parts], x.sizes, x.along + (dim <= x.along))


def _along_another(func: Callable[..., Any], x: Any, dim: int | None = None, *args: Any, **kwargs: Any) -> Any:
    """Softmax and similar functions, over a dimension that is not cut."""
    if not isinstance(x, Blocked) or not isinstance(dim, int) or dim % x.ndim == x.along:
        return NotImplemented
    return x.each(lambda part: func(part, dim, *args, **kwargs))


def _masked_fill(func: Callable[..., Any], x: Any, mask: Any, value: Any) -> Any:
    masks = x.for_each(mask) if isinstance(x, Blocked) else None
    if masks is None or isinstance(value, Blocked) or getattr(value, "requires_grad", False):
        return NotImplemented
    return x.each(lambda part, block_mask: part.masked_fill(block_mask, value), masks)


def _matmul(func: Callable[..., Any], a: Any, b: Any) -> Any:
    """Products of matrices in a batch that is cut (heads)."""
    if not (isinstance(a, Blocked) and isinstance(b, Blocked)) or a.ndim != b.ndim or a.along >= a.ndim - 2:
        return NotImplemented
    return a.each(torch.matmul, b.parts) if (a.along, a.sizes) == (b.along, b.sizes) else NotImplemented


def _pooling(func: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Pooling of each channel."""
    if not isinstance(x, Blocked) or (x.ndim, x.along) != (4, 1) or kwargs.get("return_indices"):
        return NotImplemented
    return x.each(lambda part: func(part, *args, **kwargs))


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(
        (
            *(
                "relu",
                "relu6",
                "gelu",
                "silu",
                "mish",
                "tanh",
                "sigmoid",
                "leaky_relu",
                "elu",
                "celu",
                "selu",
                "softplus",
            ),
            *("hardtanh", "hardswish", "hardsigmoid", "softsign", "logsigmoid", "tanhshrink", "softshrink", "relu_"),
            *("exp", "log", "sqrt", "rsqrt", "square", "abs", "neg", "erf", "sin", "cos", "clamp", "reciprocal"),
            *("contiguous", "clone", "detach", "float", "double", "half", "bfloat16", "to", "__neg__", "__abs__"),
        ),
        _unary,
    ),
    **dict.fromkeys(
        (
            *("add", "sub", "mul", "div", "true_divide", "pow", "maximum", "minimum", "__add__", "__radd__", "__sub__"),
            *("__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__pow__", "__rpow__"),
        ),
        _binary,
    ),
    "dropout": _dropout,
    "dropout2d": _dropout2d,
    **dict.fromkeys(("view", "reshape"), _reshape),
    "flatten": _flatten,
    "unflatten": _unflatten,
    "permute": _permute,
    **dict.fromkeys(("transpose", "swapaxes"), _transpose),
    "unsqueeze": _unsqueeze,
    **dict.fromkeys(("softmax", "log_softmax"), _along_another),
    **dict.fromkeys(("masked_fill",), _masked_fill),
    **dict.fromkeys(("matmul", "__matmul__", "bmm"), _matmul),
    **dict.fromkeys(
        ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "interpolate"), _pooling
    ),
}


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

    def attend_block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale)

    return query.each(attend_block, key.parts, value.parts, masks)


def attention(
    query: Any, key: Any, value: Any, mask: torch.Tensor | None, dropout_p: float, scale: float | None
) -> tuple[Any, Any]:
    """Attention in separate operations, for calls that need the weights or dropout. Returns (values, weights)."""
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
    """Batch normalisation of channels in blocks. Weight, bias and running statistics are whole on every worker."""
    if not isinstance(x, Blocked) or x.along != 1 or (weight is None) != (bias is None):
        return NotImplemented
    axis, sizes = x.axis, x.sizes
    affine: list[Any] = [(None, None)] * len(axis.own_blocks)
    if weight is not None and bias is not None:
        affine = [tuple(both.unbind(0)) for both in parted(axis, torch.stack([weight, bias]), sizes, 1)]
    running: list[Any] = [(None, None)] * len(axis.own_blocks)
    if running_mean is not None and running_var is not None:
        running = [tuple(both.unbind(0)) for both in axis.parts(torch.stack([running_mean, running_var]), sizes, 1)]

    def normalise_block(part: torch.Tensor, weight_and_bias: Any, statistics: Any) -> torch.Tensor:
        (w, b), (mean, var) = weight_and_bias, statistics
        return F.batch_norm(part, mean, var, w, b, training, momentum, eps)

    normal = x.each(normalise_block, affine, running)
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
    """Layer normalisation over dimensions that are not cut (within heads, for example)."""
    if not isinstance(x, Blocked) or x.along >= x.ndim - len(normalized_shape):
        return NotImplemented
    weights, biases = x.for_each(weight), x.for_each(bias)
    assert weights is not None
    assert biases is not None
    return x.each(lambda part, w, b: func(part, normalized_shape, w, b, *args, **kwargs), weights, biases)


HANDLERS.update(scaled_dot_product_attention=attend, batch_norm=batch_norm, layer_norm=layer_norm)
