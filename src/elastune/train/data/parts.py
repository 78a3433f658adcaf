"""Which streams can be divided, and how a part of one is opened: with ``shard``, of Hugging Face, of WebDataset.

Neither package is imported before a stream of theirs has imported it.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

OpenPart = Callable[[Any, int, int], Any]
"""Opens part ``index`` of ``count`` of a stream: an iterable of its items."""

_SPLITTERS = {"split_by_node", "single_node_only", "split_by_worker"}  # WebDataset's, for processes of other launchers
_ONE_BY_ONE = {  # stages of WebDataset that give a sample before they take the next one
    *("_map", "_decode", "_to_tuple", "_rename", "_rename_keys", "_extract_keys", "_map_dict", "_map_tuple"),
    *("_select", "_xdecode", "_log_keys", "check_empty", "group_by_keys", "tar_file_expander", "StreamingOpen"),
}


@dataclass(frozen=True)
class Division:
    """How a stream is divided.

    Attributes:
        open_part: Opens a part.
        price: What it costs that the stream lacks something, in words; "": it lacks nothing.
    """

    open_part: OpenPart
    price: str = ""


def division_of(stream: Any, count: int) -> Division | str:
    """How ``stream`` is divided into ``count`` parts; where it cannot be, what that costs, in words ("": nothing)."""
    kind, again = type(stream).__name__, "a worker that joins reads the parts of its slots again from their beginning"
    if _has_shard(stream):
        sought = seeks(stream.shard(index=0, count=count))
        return Division(open_shard, "" if sought else f"stream {kind}: {again}, as they have no state_dict")
    if _is_hugging_face(stream) and stream.num_shards >= count:
        buffers = _has_buffer(stream)
        return Division(open_hugging_face, f"stream {kind}: {again}, as its shuffle buffer has no state" * buffers)
    if _is_webdataset(stream) and len(_urls(stream)) >= count:
        sought = isinstance(open_tars(stream, 0, count), TarPart)
        return Division(open_tars, "" if sought else f"stream {kind}: {again}, as a stage of it keeps samples back")
    if count == 1:
        return Division(open_whole) if seeks(stream) and not _is_hugging_face(stream) else ""
    return (
        f"stream {kind}: every worker reads all of it, and a worker that joins reads all items before its place; "
        f"with shard(index, count) for {count} slots each would read its own"
    )


def seeks(opened: Any) -> bool:
    """Whether a stream, or a part of it, has a state that it can go on from."""
    return all(callable(getattr(opened, name, None)) for name in ("state_dict", "load_state_dict"))


class Unsought:
    """A part of a stream without a state."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def __iter__(self) -> Iterator[Any]:
        return iter(self._part)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the part, if it has one."""
        if callable(set_epoch := getattr(self._part, "set_epoch", None)):
            set_epoch(epoch)


# --- a stream with shard(index, count) ---


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


# --- Hugging Face's streaming data sets ---


def _is_hugging_face(stream: Any) -> bool:
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(stream, datasets.IterableDataset)


def _has_buffer(stream: Any) -> bool:
    """Whether it shuffles in a buffer, which its ``state_dict`` leaves out."""
    todo, kinds = [getattr(stream, "_ex_iterable", None)], set()
    while todo:
        each = todo.pop()
        kinds.add(type(each).__name__)
        inner = (getattr(each, "ex_iterable", None), *(getattr(each, "ex_iterables", None) or ()))
        todo += [part for part in inner if part is not None]
    return any("BufferShuffled" in kind for kind in kinds)


def open_hugging_face(stream: Any, index: int, count: int) -> Any:
    """A part of a streaming data set: that of ``split_dataset_by_node``, if its shards can be dealt out evenly."""
    if stream.num_shards % count == 0:
        from datasets.distributed import split_dataset_by_node

        part = split_dataset_by_node(stream, rank=index, world_size=count)
    else:
        part = stream.shard(num_shards=count, index=index, contiguous=False)
    return Unsought(part) if _has_buffer(stream) else part


# --- WebDataset's tar files ---


def _is_webdataset(stream: Any) -> bool:
    webdataset = sys.modules.get("webdataset")
    if webdataset is None or not isinstance(stream, webdataset.DataPipeline) or not stream.pipeline:
        return False
    plain = stream.repetitions == 1 and stream.nsamples <= 0
    return plain and isinstance(stream.pipeline[0], webdataset.SimpleShardList)


def _urls(stream: Any) -> list[str]:
    return [each["url"] for each in stream.pipeline[0]]


def _stage_name(stage: Any) -> str:
    function = getattr(stage, "f", stage)
    return str(getattr(function, "__name__", type(function).__name__))


def _is_idle(stage: Any) -> bool:
    """Whether it is the shuffle of ``shardshuffle=False``."""
    return _stage_name(stage) == "_shuffle" and not any(getattr(stage, "args", (True,))[:1])


def open_tars(stream: Any, index: int, count: int) -> Any:
    """Every ``count``-th tar file of a stream from ``index`` on."""
    urls = _urls(stream)[index::count]
    stages = [stage for stage in stream.pipeline[1:] if _stage_name(stage) not in _SPLITTERS and not _is_idle(stage)]
    names = [_stage_name(stage) for stage in stages]
    if set(names) <= _ONE_BY_ONE and names.count("group_by_keys") == 1 and len(set(urls)) == len(urls):
        return TarPart(stream, urls, stages)
    part = copy.copy(stream)
    part.pipeline = [[{"url": url} for url in urls], *stages]
    return Unsought(part)


class TarPart:
    """Some tar files of WebDataset's, whose state is a file's number and how many samples of it were read.

    Args:
        stream: The stream.
        urls: The files.
        stages: The stages behind the list of files: none keeps samples back.
    """

    def __init__(self, stream: Any, urls: list[str], stages: list[Any]) -> None:
        self._stream, self._urls, self._stages = stream, urls, stages
        self._file, self._samples, self._skipped = 0, 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"file": self._file, "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._file, self._skipped = state["file"], state["samples"]

    def __iter__(self) -> Iterator[Any]:
        source: Any = iter([{"url": url} for url in self._urls[self._file :]])
        for stage in self._stages:
            source = self._stream.invoke(stage, source)
            if _stage_name(stage) == "group_by_keys":
                source = self._counted(source)
        return iter(source)

    def _counted(self, samples: Iterator[Any]) -> Iterator[Any]:
        """The samples, counted in each file, without those that were read before."""
        begun = self._file
        for sample in samples:
            file = self._urls.index(sample["__url__"], self._file)
            if file != self._file:
                self._file, self._samples = file, 0
            self._samples += 1
            if file > begun or self._samples > self._skipped:
                yield sample
