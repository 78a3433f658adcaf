"""The tensors of a checkpoint: safetensors files, one a writer, and the index that tells which piece lies where."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from elastune.core.errors import UserError
from elastune.core.layout import intersection
from elastune.core.stretches import Stretch, fills, whole_stretch
from elastune.mechanisms.scattered import Scattered, copy_common
from elastune.train.checkpoints.seal import digest_of

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
Index = dict[str, Any]
"""By a tensor's name: its dtype, its shape, its pieces as [file, key in the file, box, start, stop]; a JSON value."""


class NoRoom(UserError):
    """There is no room on the disk for a checkpoint."""


def is_full(error: OSError | SafetensorError) -> bool:
    """Whether ``error`` says that a disk is full, or a quota used up."""
    if isinstance(error, OSError):
        return error.errno in FULL
    return any(f"(os error {number})" in str(error) for number in FULL)  # what safetensors has from the system


def file_name(number: int, count: int) -> str:
    """Of the file of writer ``number`` (from 0) of ``count``."""
    return "tensors.safetensors" if count == 1 else f"tensors-{number + 1:05d}-of-{count:05d}.safetensors"


@dataclass(frozen=True)
class Written:
    """What a writer tells of its file: its name, size, digest, and the index of what is in it."""

    name: str
    size: int
    sha256: str
    index: Index


def write(folder: Path, name: str, tensors: Mapping[str, torch.Tensor | Scattered]) -> Written:
    """Write ``tensors``, whole ones and this worker's pieces of others, as one file; it is on the disk afterwards.

    Raises:
        OSError, SafetensorError: Where it cannot be written.
    """
    content: dict[str, torch.Tensor] = {}
    index: Index = {}
    for path, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            keyed = [(path, whole_stretch(tensor.shape), tensor)]
        else:
            keyed = [(f"{path}@{i}", stretch, values) for i, (stretch, values) in enumerate(tensor.pieces)]
        for key, _, values in keyed:
            content[key] = values.detach().to("cpu", copy=True).contiguous()
        index[path] = {
            "dtype": str(tensor.dtype)[6:],
            "shape": list(tensor.shape),
            "pieces": [[name, key, [list(edge) for edge in of.box], of.start, of.stop] for key, of, _ in keyed],
        }
    file = folder / name
    save_file(content, file)
    with ThreadPoolExecutor(1) as disk:  # the digest is made while the disk writes
        synced = disk.submit(sync, file)
        digest = digest_of(file)
        synced.result()
    return Written(name, file.stat().st_size, digest, index)


def merged(indices: Sequence[Index]) -> Index:
    """One index of what several writers have written.

    Raises:
        ValueError: Where a tensor is not there whole, or an element of it twice.
    """
    found: Index = {}
    for index in indices:
        for path, entry in index.items():
            known = found.setdefault(path, {**entry, "pieces": []})
            if (known["dtype"], known["shape"]) != (entry["dtype"], entry["shape"]):
                raise ValueError(f"{path} is {known['dtype']} {known['shape']} and {entry['dtype']} {entry['shape']}")
            known["pieces"] = [*known["pieces"], *entry["pieces"]]
    for path, entry in found.items():
        if not fills(entry["shape"], [_stretch(piece) for piece in entry["pieces"]]):
            raise ValueError(f"the pieces of {path} are not each element of it once")
    return found


class Shelf(Mapping[str, "OnDisk"]):
    """The tensors of a checkpoint by name, read when they are asked for.

    The files stay open, so that they can be read whatever becomes of the folder.
    """

    def __init__(self, folder: Path, files: Sequence[str], index: Index) -> None:
        self._index = index
        self._files = {name: safe_open(folder / name, "pt") for name in files}

    def __getitem__(self, name: str) -> OnDisk:
        entry = self._index[name]
        dtype = getattr(torch, entry["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} is of {entry['dtype']}")
        pieces = [(self._files[piece[0]], piece[1], _stretch(piece)) for piece in entry["pieces"]]
        return OnDisk(tuple(entry["shape"]), dtype, tuple(pieces))

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


@dataclass(frozen=True)
class OnDisk:
    """A tensor of ``shape`` that lies in ``pieces``: an open file, the key in it, and which stretch that is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[Any, str, Stretch], ...]

    def read(self, stretch: Stretch) -> torch.Tensor:
        """The flat values of a stretch, whatever pieces they were written in; no more than one piece is read at a time.

        Raises:
            ValueError: Where a piece is not what the index says.
        """
        found = torch.empty(stretch.size, dtype=self.dtype)
        for file, key, piece in self.pieces:
            reach = _common(piece, stretch)
            if reach is None:
                continue
            values, reach = _read(file, key, piece, reach)
            if (values.dtype, len(values)) != (self.dtype, reach.size):
                raise ValueError(f"{key} has {len(values)} numbers of {values.dtype}, not {reach.size} of {self.dtype}")
            copy_common(stretch, found, reach, values)
        return found


def _read(file: Any, key: str, piece: Stretch, reach: Stretch) -> tuple[torch.Tensor, Stretch]:
    """The flat values of ``reach``, a part of ``piece``, or of whole rows around it; and which stretch they are."""
    stored = file.get_slice(key)
    shape = stored.get_shape()
    if not shape:
        return file.get_tensor(key).reshape(-1), piece
    row = prod(shape[1:])
    first, last = (reach.start - piece.start) // row, -(-(reach.stop - piece.start) // row)
    return stored[first:last].reshape(-1), Stretch(piece.box, piece.start + first * row, piece.start + last * row)


def _common(piece: Stretch, wanted: Stretch) -> Stretch | None:
    """The shortest stretch of ``piece`` that has all that ``wanted`` has of it; None: it has nothing."""
    if piece.box == wanted.box:
        start, stop = max(piece.start, wanted.start), min(piece.stop, wanted.stop)
        return Stretch(piece.box, start, stop) if start < stop else None
    ends = []
    for box, at in piece.boxes:
        for own, _ in wanted.boxes:
            common = intersection(box, own)
            if common is not None:
                ends += [at + _place(common, box, 0), at + _place(common, box, 1) + 1]
    return Stretch(piece.box, piece.start + min(ends), piece.start + max(ends)) if ends else None


def _place(inner: Sequence[tuple[int, int]], outer: Sequence[tuple[int, int]], last: int) -> int:
    """Where in the flat ``outer`` the first element of ``inner`` is; with ``last`` 1, its last one."""
    found = 0
    for (start, stop), (first, end) in zip(inner, outer, strict=True):
        found = found * (end - first) + (stop - 1 if last else start) - first
    return found


def _stretch(piece: Sequence[Any]) -> Stretch:
    _, _, box, start, stop = piece
    return Stretch(tuple((int(first), int(last)) for first, last in box), int(start), int(stop))


def sync(path: Path) -> None:
    """Return once ``path`` is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
