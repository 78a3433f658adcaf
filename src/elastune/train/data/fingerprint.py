"""What tells one data set from another: a digest of some of its samples, how they are made, and its classes.

A few samples at fixed places are enough to see that the data are others; they cannot prove that all are the same.
Random augmentation is drawn from streams of its own, so the same samples give the same digest in every run. Samples
that are others when they are read again are not compared. Reading them changes no stream of random numbers, nor a
generator that the data set holds.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from elastune.journal.records import DataContext
from elastune.train.rng import SeededSamples, streams_kept

SAMPLES = 16  # looked at: decoding a large image takes some 10 ms
MOST_BYTES = 1_000_000  # looked at of them, and the rest of the sample in which that is reached
MOST_OBJECTS, DEEPEST = 500, 4  # of a data set, in which generators are looked for
MOST_LABELS = 100_000  # counted, evenly spaced


def data_context(dataset: Any) -> DataContext:
    """What ``dataset`` (map-style) is, by ``SAMPLES`` evenly spaced samples and its integer targets.

    A data set whose samples cannot be fetched (any more) is not known: an empty digest, equal to no other's. Nor
    is a stream, which would have to be read once more.
    """
    if isinstance(dataset, IterableDataset):
        return DataContext()
    length = len(dataset)
    seeded = SeededSamples(dataset, 0, 0)
    places = [i * length // SAMPLES for i in range(SAMPLES)] if length > SAMPLES else list(range(length))
    try:
        with streams_kept(), _generators_kept(dataset):
            sample, digest = _read(seeded, length, places)
            if digest and _read(seeded, length, places) != (sample, digest):
                digest = ""
    except Exception:  # noqa: BLE001 - the user's; training has used the data without: knowing them less is no failure
        return DataContext(length)
    labels = _labels(dataset)
    labels = labels[:: max(1, len(labels) // MOST_LABELS)]
    counts = np.unique(labels, return_counts=True)[1] if len(labels) else np.zeros(0)
    largest = float(counts.max() / counts.sum()) if len(counts) else 0.0
    return DataContext(length, digest, sample, len(counts), largest)


def _read(dataset: SeededSamples, length: int, places: Sequence[int]) -> tuple[str, str]:
    """How a sample is made, and the digest of those at ``places``, up to ``MOST_BYTES``."""
    digest, shape, size = hashlib.sha256(str(length).encode()), "", 0
    for place in places:
        sample = dataset[place]
        shape = shape or _shape(sample)
        for part in _parts(sample):
            digest.update(part)
            size += len(part)
        if size > MOST_BYTES:
            break
    return shape, digest.hexdigest()[:16]


@contextmanager
def _generators_kept(dataset: Any) -> Iterator[None]:
    """Whatever is drawn inside from generators that ``dataset`` holds shows in none of them afterwards."""
    found = list(_generators_in(dataset))
    states = [_state_of(each) for each in found]
    try:
        yield
    finally:
        for each, state in zip(found, states, strict=True):
            _restore(each, state)


def _generators_in(dataset: Any) -> Iterator[Any]:
    """The generators among the attributes of ``dataset``, and of what these are made of."""
    todo: list[tuple[Any, int]] = [(dataset, 0)]
    known: set[int] = set()
    while todo and len(known) < MOST_OBJECTS:
        value, depth = todo.pop()
        if id(value) in known:
            continue
        known.add(id(value))
        if isinstance(value, random.Random | np.random.Generator | np.random.RandomState | torch.Generator):
            yield value
        elif depth < DEEPEST and not isinstance(value, torch.Tensor | np.ndarray | type | str | bytes):
            inside = value.values() if isinstance(value, dict) else getattr(value, "__dict__", {}).values()
            inside = value if isinstance(value, list | tuple) else inside
            todo += [(each, depth + 1) for each in list(inside)[:MOST_OBJECTS]]


def _state_of(generator: Any) -> Any:
    match generator:
        case random.Random():
            return generator.getstate()
        case np.random.Generator():
            return generator.bit_generator.state
    return generator.get_state()


def _restore(generator: Any, state: Any) -> None:
    match generator:
        case random.Random():
            generator.setstate(state)
        case np.random.Generator():
            generator.bit_generator.state = state
        case _:
            generator.set_state(state)


def _parts(value: Any) -> Iterator[bytes]:
    """The contents of a sample as bytes, with what tells apart values of other types and shapes."""
    match value:
        case torch.Tensor():
            plain = value.detach().cpu().to_dense() if value.layout != torch.strided else value.detach().cpu()
            yield f"{plain.dtype}{tuple(plain.shape)}".encode()
            yield plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        case Mapping():
            for name in value:
                yield f"{name!r}:".encode()
                yield from _parts(value[name])
        case str():
            yield value.encode("utf-8", "surrogatepass")
        case bytes() | bytearray():
            yield bytes(value)
        case bool() | int():
            yield f"int {int(value)}".encode()
        case float():
            yield struct.pack("<d", value)
        case np.ndarray() | np.generic() if np.asarray(value).dtype != object:
            array = np.asarray(value)
            yield f"{array.dtype}{array.shape}".encode()
            yield np.ascontiguousarray(array).tobytes()
        case Sequence():
            yield f"{len(value)} parts".encode()
            for part in value:
                yield from _parts(part)
        case _ if hasattr(value, "__array_interface__"):  # images of PIL
            yield from _parts(np.asarray(value))
        case _:
            yield type(value).__qualname__.encode()


def _shape(value: Any) -> str:
    """How a sample is made, in words: "float32[1, 8, 8], int64[]"."""
    match value:
        case torch.Tensor():
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        case np.ndarray() | np.generic():
            return f"{value.dtype}{list(value.shape)}"
        case str() | bytes() | bytearray():
            return type(value).__name__
        case Mapping():
            return "{" + ", ".join(f"{name}: {_shape(part)}" for name, part in value.items()) + "}"
        case Sequence():
            return ", ".join(_shape(part) for part in value)
    return type(value).__name__


def _labels(dataset: Any) -> np.ndarray[Any, Any]:
    """The integer targets of a data set that lets them be seen without fetching its samples; empty for others."""
    if isinstance(dataset, Subset):
        labels = _labels(dataset.dataset)
        return labels[np.asarray(dataset.indices)] if len(labels) == len(dataset.dataset) else labels[:0]  # type: ignore[arg-type]
    found = dataset.tensors[-1] if type(dataset) is TensorDataset else getattr(dataset, "targets", None)
    try:
        labels = np.asarray(found.detach().cpu() if isinstance(found, torch.Tensor) else found)
    except (ValueError, TypeError):  # ragged, or no numbers
        return np.zeros(0, dtype=int)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or len(labels) != len(dataset):
        return np.zeros(0, dtype=int)
    return labels
