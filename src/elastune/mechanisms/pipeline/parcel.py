"""What goes from stage to stage: nested values of tensors as a line of text and one run of bytes.

A tensor arrives with the strides and the alignment that it had, because the bits of what is computed from it may
depend on both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from elastune.core.errors import UserError

ALIGNMENT = 64  # of memory that torch has newly allocated on a CPU
_PLAIN = (type(None), bool, int, float, str)


def pack(value: Any) -> tuple[str, torch.Tensor]:
    """``value`` (tensors, plain values, and tuples, lists and dicts of them) as a text that is equal for values of
    equal shape, and bytes.

    Raises:
        UserError: Where there is anything else in it.
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
    """What ``pack`` was given, on ``device``. Tensors share memory with ``payload`` and are no views of it."""
    payload = payload if device is None else payload.to(device)

    def found(part: Any) -> Any:
        kind, *rest = part
        if kind == "tensor":
            return _tensor(payload, *rest)
        if kind == "dict":
            return {key: found(each) for key, each in rest}
        if kind == "plain":
            return rest[0]
        return [found(each) for each in rest] if kind == "list" else tuple(found(each) for each in rest)

    return found(json.loads(text))


def blank(text: str) -> Any:
    """What ``pack`` described by ``text``, of zeros: a stand-in that needs gradients where it did."""
    return unpack(text, torch.zeros(_end(json.loads(text)), dtype=torch.uint8))


def _end(part: Any) -> int:
    """How many bytes the tensors of a description take at most."""
    if isinstance(part, list):
        if part[:1] == ["tensor"]:
            _, dtype_name, shape, stride, _, start = part
            spans = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True) if size)
            return int(start + spans * getattr(torch, dtype_name).itemsize)
        return max(map(_end, part), default=0)
    return 0


def shapes_of(value: Any) -> str:
    """Equal for values of equal structure, shapes and types."""
    return repr(map_tensors(lambda t: (str(t.dtype), tuple(t.shape)), value))


def map_tensors(act: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with ``act`` of every tensor in its place."""
    if isinstance(value, torch.Tensor):
        return act(value)
    if type(value) is dict:
        return {key: map_tensors(act, each) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map_tensors(act, each) for each in value)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in ``value``, in order."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, value)
    return found


def _dense_size(tensor: torch.Tensor) -> int:
    """How many elements of memory it fills if it fills a run of it, once each but for repeated ones; else 0."""
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
    else:  # memory with gaps: as the sender's
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        shift = start % ALIGNMENT
        room = torch.empty(shift + extent * dtype.itemsize, dtype=torch.uint8, device=payload.device)
        tensor = _fresh(room, shift, dtype, shape, stride)
        tensor.copy_(_fresh(payload, start, dtype, shape, _row_major(shape)))
    return tensor.requires_grad_() if requires_grad else tensor
