"""Which streams can be divided: those with ``shard(index, count)``, Hugging Face's, and WebDataset's tar files."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

OpenPart = Callable[[Any, int, int], Any]
"""Opens part ``index`` of ``count`` of a stream: an iterable of its items."""


def divided_by(stream: Any, count: int) -> OpenPart | None:
    """The function that opens a part of ``stream``; None where it cannot be divided into ``count`` parts."""
    if _has_shard(stream):
        return open_shard
    return open_whole if count == 1 and seeks(stream) else None


def seeks(opened: Any) -> bool:
    """Whether a stream, or a part of it, has a state that it can go on from."""
    return all(callable(getattr(opened, name, None)) for name in ("state_dict", "load_state_dict"))


def _has_shard(stream: Any) -> bool:
    shard = getattr(stream, "shard", None)
    if not callable(shard):
        return False
    try:
        return {"index", "count"} <= inspect.signature(shard).parameters.keys()
    except (TypeError, ValueError):
        return False


def open_whole(stream: Any, index: int, count: int) -> Any:
    """The stream itself, as its only part."""
    return stream


def open_shard(stream: Any, index: int, count: int) -> Any:
    """A part of a stream with ``shard``."""
    return stream.shard(index=index, count=count)
