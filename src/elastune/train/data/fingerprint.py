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

# [content] Do all workers read the same data? Each reads the same few samples of a pass, and their checksums are compared.
#
# A data set that augments at random, and not from the random numbers that elastune seeds for each sample, reads otherwise
# each time: that is no difference between workers. So samples are read more than once.
#
# What is not seen: a difference in some samples alone, until a pass happens to look at one of them; data of an evaluation
# beyond their number; and what differs from read to read.

READS = 2  # in each pass
PRIME = 4093  # sums of up to 4096 workers' checksums are exact in single precision
MORE_READS = 8  # where checksums differ, before it is believed
MOST_TENSOR_BYTES = 1 << 16  # of a tensor; of a larger one numbers at equal distances
CHANGES = 0  # the checksum of what is not the same when read again


def content(batches: Sequence[Any]) -> int:
    """The checksum of what was read several times, or ``CHANGES``."""
    found = {checksum_of(batch) for batch in batches}
    return found.pop() if len(found) == 1 else CHANGES


def checksum_of(value: Any) -> int:
    """Of tensors, text and numbers in it, and of what kind anything else is."""
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


# [fingerprint] What tells one data set from another: a digest of some of its samples, how they are made, and its classes.
#
# A few samples at fixed places are enough to see that the data are others; they cannot prove that all are the same.
# Random augmentation is drawn from streams of its own, so the same samples give the same digest in every run. Samples
# that are others when they are read again are not compared. Reading them changes no stream of random numbers, nor a
# generator that the data set holds.

SAMPLES = 16  # looked at: decoding a large image takes some 10 ms
MOST_DATASET_BYTES = 1_000_000  # looked at of them, and the rest of the sample in which that is reached
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
        if size > MOST_DATASET_BYTES:
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


# [seen] The training set of a run, compared with what the run, or its study, was trained on before.

OTHER_DATA = "training goes on with the data that it was begun with"
MOST_LOOKS = 3  # at the data sets of passes: a program whose passes differ is known by then


class TrainingDataHistory:
    """What is known of a run's training sets.

    ``expected``: what a study's trials were trained on; None: not known. ``accepts``: other data are told, not refused.
    ``tell`` is called with a text for each difference that was accepted. Data sets are looked at before the first step
    of a run that goes on, and where a checkpoint is written, by whoever writes it.
    """

    def __init__(self, expected: dict[str, Any] | None, *, accepts: bool, tell: Callable[[str], None]) -> None:
        self._expected = [] if expected is None else [DataContext(**expected)]
        self._accepts = accepts
        self._tell = tell
        self._newest: Any = None
        self._looked: tuple[Any, int] | None = None  # at which data set, in which epoch
        self._contexts: list[DataContext] = []  # those that differ from each other
        self._looks = 0

    def load(self, kept: object) -> None:
        """Go on from a checkpoint that has ``kept`` this of the run's data; None: nothing."""
        if isinstance(kept, list):
            self._expected = [DataContext(**each) for each in kept]

    def begin_pass(self, dataset: Any, epoch: int) -> None:
        """A training pass over ``dataset`` begins.

        Raises:
            UserError: Where these are other data than before.
        """
        self._newest = dataset
        if not self._expected:
            return
        now = self._look(epoch)
        # Where passes differed from each other, they may again.
        told = difference(self._expected[0], now) if len(self._expected) == 1 else ""
        self._expected = []
        if told and not self._accepts:
            raise UserError(OTHER_DATA, told, "restore them, or add --accept-changes to go on with these")
        if told:
            self._tell(told)

    def kept(self, epoch: int) -> list[dict[str, Any]]:
        """What a checkpoint keeps of them, in JSON's types."""
        if self._newest is not None:
            self._look(epoch)
        return [asdict(each) for each in self._contexts]

    def context(self) -> DataContext:
        """The newest one, for the record of a run's end."""
        if self._newest is None:
            return DataContext()
        if self._looked is None or self._looked[0] is not self._newest:
            return data_context(self._newest)
        return self._contexts[-1]

    def _look(self, epoch: int) -> DataContext:
        known = self._looked is not None and self._looked[0] is self._newest and self._looked[1] == epoch
        if self._contexts and (known or self._looks >= MOST_LOOKS):
            return self._contexts[-1]
        self._looks += 1
        found = data_context(self._newest)
        self._looked = self._newest, epoch
        if found not in self._contexts:
            self._contexts.append(found)
        return found


def difference(before: DataContext, now: DataContext) -> str:
    """Return in what two training sets differ, in words; "" where they do not, or nobody knows."""
    if before.samples and now.samples and before.samples != now.samples:
        return f"data: {now.samples:,} samples, had {before.samples:,}"
    if before.sample and now.sample and before.sample != now.sample:
        return f"data: a sample is {now.sample}, was {before.sample}"
    if before.digest and now.digest and before.digest != now.digest:
        return "data: other values in the samples that were compared"
    return ""
