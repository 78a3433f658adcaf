"""Do all workers, and all parts of a run, read the same data? Digests of a few samples are compared.

A few samples at fixed places show that data differ; they cannot prove that all samples are equal. A data set whose
random augmentation does not follow elastune's seeds reads differently each time, so it is read again before anyone
is blamed.
"""

from __future__ import annotations

import hashlib
import random
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from elastune.core.errors import UserError
from elastune.core.journal.records import DataContext
from elastune.train.rng import SeededSamples, streams_kept

OTHER_DATA = "training goes on with the data that it was begun with"
MOST_LOOKS = 3  # digests in a run: by then it is known whether passes differ

READS = 2  # of the same samples in each pass
PRIME = 4093  # sums of up to 4096 workers' checksums are exact in single precision
MORE_READS = 8  # if checksums differ, before the difference is believed
MOST_TENSOR_BYTES = 1 << 16  # read of a tensor; from a larger one numbers at equal distances
CHANGES = 0  # the checksum of samples that differ when they are read again

SAMPLES = 16  # in a digest: decoding a large image takes some 10 ms
MOST_DATASET_BYTES = 1_000_000  # in a digest, up to the end of the sample that reaches it
MOST_OBJECTS, DEEPEST = 500, 4  # of a data set, that are searched for generators
MOST_LABELS = 100_000  # counted, evenly spaced


class TrainingDataHistory:
    """Compares a run's training sets with those that the run, or its study, was trained on before.

    Data sets are looked at before the first step of a run that goes on, and by the worker that writes a checkpoint.

    Args:
        expected: The data of a study's trials; None: unknown.
        accepts: Whether other data are accepted, and reported, instead of refused.
        tell: Called with a text for each accepted difference.
    """

    def __init__(self, expected: dict[str, Any] | None, *, accepts: bool, notify: Callable[[str], None]) -> None:
        self._expected = [] if expected is None else [DataContext(**expected)]
        self._accepts = accepts
        self._notify = notify
        self._newest: Any = None
        self._looked: tuple[Any, int] | None = None  # the newest data set that was looked at, and its epoch
        self._contexts: list[DataContext] = []  # all different ones
        self._looks = 0

    def load(self, contexts: object) -> None:
        """Go on from a checkpoint that holds these ``contexts`` of the run's data; None: it holds none."""
        if isinstance(contexts, list):
            self._expected = [DataContext(**each) for each in contexts]

    def begin_pass(self, dataset: Any, epoch: int) -> None:
        """Note that a training pass over ``dataset`` begins.

        Raises:
            UserError: The run was begun with other data.
        """
        self._newest = dataset
        if not self._expected:
            return
        now = self._look(epoch)
        # If passes differed from each other before, a difference means nothing.
        text = difference(self._expected[0], now) if len(self._expected) == 1 else ""
        self._expected = []
        if text and not self._accepts:
            raise UserError(OTHER_DATA, text, "restore them, or add --accept-changes to go on with these")
        if text:
            self._notify(text)

    def kept(self, epoch: int) -> list[dict[str, Any]]:
        """The contexts of the data for a checkpoint, as JSON values."""
        if self._newest is not None:
            self._look(epoch)
        return [asdict(each) for each in self._contexts]

    def context(self) -> DataContext:
        """The context of the newest data set, for the record of a run's end."""
        if self._newest is None:
            return DataContext()
        if self._looked is None or self._looked[0] is not self._newest:
            return data_context(self._newest)
        return self._contexts[-1]

    def _look(self, epoch: int) -> DataContext:
        unchanged = self._looked is not None and self._looked[0] is self._newest and self._looked[1] == epoch
        if self._contexts and (unchanged or self._looks >= MOST_LOOKS):
            return self._contexts[-1]
        self._looks += 1
        context = data_context(self._newest)
        self._looked = self._newest, epoch
        if context not in self._contexts:
            self._contexts.append(context)
        return context


def difference(before: DataContext, now: DataContext) -> str:
    """The difference between two training sets, in words; "" if there is none, or it is unknown."""
    if before.samples and now.samples and before.samples != now.samples:
        return f"data: {now.samples:,} samples, had {before.samples:,}"
    if before.sample and now.sample and before.sample != now.sample:
        return f"data: a sample is {now.sample}, was {before.sample}"
    if before.digest and now.digest and before.digest != now.digest:
        return "data: other values in the samples that were compared"
    return ""


# --- digests of data sets, to compare runs ---


def data_context(dataset: Any) -> DataContext:
    """Describe ``dataset`` (map-style) by ``SAMPLES`` evenly spaced samples and its integer targets.

    The digest is empty, which equals no other digest, if samples cannot be read, or differ when they are read again. A
    stream has no digest, as it would have to be read once more. Reading the samples changes no stream of random
    numbers, nor a generator that the data set holds.
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
    except Exception:  # noqa: BLE001 - the user's data set may raise anything, and training can do without the digest
        return DataContext(length)
    labels = _labels(dataset)
    labels = labels[:: max(1, len(labels) // MOST_LABELS)]
    counts = np.unique(labels, return_counts=True)[1] if len(labels) else np.zeros(0)
    largest = float(counts.max() / counts.sum()) if len(counts) else 0.0
    return DataContext(length, digest, sample, len(counts), largest)


def _read(dataset: SeededSamples, length: int, places: Sequence[int]) -> tuple[str, str]:
    """The description of a sample, and the digest of those at ``places``, up to ``MOST_DATASET_BYTES``."""
    digest, shape, size = hashlib.sha256(str(length).encode()), "", 0
    for place in places:
        sample = dataset[place]
        shape = shape or _shape(sample)
        for part in _parts(sample):
            digest.update(part)
            size += len(part)
        if size > MOST_DATASET_BYTES:
            break
    return shape, digest.hexdigest()[:16]


def _labels(dataset: Any) -> np.ndarray[Any, Any]:
    """The integer targets of a data set that offers them without its samples; empty for others."""
    if isinstance(dataset, Subset):
        labels = _labels(dataset.dataset)
        complete = len(labels) == len(dataset.dataset)  # type: ignore[arg-type]
        return labels[np.asarray(dataset.indices)] if complete else labels[:0]
    targets = dataset.tensors[-1] if type(dataset) is TensorDataset else getattr(dataset, "targets", None)
    try:
        labels = np.asarray(targets.detach().cpu() if isinstance(targets, torch.Tensor) else targets)
    except (ValueError, TypeError):  # ragged, or no numbers
        return np.zeros(0, dtype=int)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or len(labels) != len(dataset):
        return np.zeros(0, dtype=int)
    return labels


def _shape(value: Any) -> str:
    """The types and shapes in a sample, in words: "float32[1, 8, 8], int64[]"."""
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


def _parts(value: Any) -> Iterator[bytes]:
    """The contents of a sample as bytes, with types and shapes, so that different values differ."""
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


@contextmanager
def _generators_kept(dataset: Any) -> Iterator[None]:
    """Restore the generators that ``dataset`` holds afterwards."""
    generators = list(_generators_in(dataset))
    states = [_state_of(each) for each in generators]
    try:
        yield
    finally:
        for each, state in zip(generators, states, strict=True):
            _restore(each, state)


def _generators_in(dataset: Any) -> Iterator[Any]:
    """The generators among the attributes of ``dataset``, and in these attributes, down to ``DEEPEST``."""
    todo: list[tuple[Any, int]] = [(dataset, 0)]
    seen: set[int] = set()
    while todo and len(seen) < MOST_OBJECTS:
        value, depth = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, random.Random | np.random.Generator | np.random.RandomState | torch.Generator):
            yield value
        elif depth < DEEPEST and not isinstance(value, torch.Tensor | np.ndarray | type | str | bytes):
            inner = value.values() if isinstance(value, dict) else getattr(value, "__dict__", {}).values()
            inner = value if isinstance(value, list | tuple) else inner
            todo += [(each, depth + 1) for each in list(inner)[:MOST_OBJECTS]]


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


# --- checksums of the samples of a pass, to compare workers ---


def content(batches: Sequence[Any]) -> int:
    """The checksum of samples that were read several times; ``CHANGES`` if they differ from read to read.

    Such data augment at random without elastune's seeds, which is no difference between workers. Differences in samples
    that no pass happens to compare, and in data of evaluations beyond their number, stay unseen.
    """
    checksums = {checksum_of(batch) for batch in batches}
    return checksums.pop() if len(checksums) == 1 else CHANGES


def checksum_of(value: Any) -> int:
    """The checksum of the tensors, texts and numbers in ``value``, and of the type of anything else."""
    return _checksum(value, 1)


def _checksum(value: Any, start: int) -> int:
    if isinstance(value, torch.Tensor):
        return zlib.crc32(_bytes_of(value), zlib.crc32(f"{value.dtype}{tuple(value.shape)}".encode(), start))
    if isinstance(value, Mapping):
        for key, item in value.items():
            start = _checksum(item, zlib.crc32(repr(key).encode(), start))
        return start
    if isinstance(value, (str, bytes, bool, int, float)) or value is None:
        return zlib.crc32(repr(value).encode(), start)
    if isinstance(value, Sequence):
        for item in value:
            start = _checksum(item, start)
        return start
    return zlib.crc32(type(value).__name__.encode(), start)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return b""
    flat = tensor.detach().cpu().reshape(-1)
    step = max(1, flat.numel() * flat.element_size() // MOST_TENSOR_BYTES)
    return flat[::step].contiguous().view(torch.uint8).numpy().tobytes()
