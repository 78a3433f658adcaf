"""A worker's part of a checkpoint in host memory, and how it becomes a file of tensors.

Training stands still for the copy alone. The copy goes into memory that the next checkpoint uses again: memory that
the system has to find first takes several times as long.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError

from elastune.core.layout import whole_range
from elastune.parallel.mechanisms.tensor_storage import PartialTensor
from elastune.parallel.mechanisms.torch_private import foreach_copy_
from elastune.train.checkpoints.tree import Pieces, States, to_trees

Index = dict[str, Any]
"""For each tensor's name its dtype, its shape, and its pieces as [file, key in the file, box, start, stop]; JSON."""
BLOCK_BYTES = 8 << 20
ALIGNED = 8  # the header of a safetensors file fills so many bytes, or a multiple
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The names of types in safetensors files."""


@dataclass(frozen=True)
class CheckpointPart:
    """A worker's part of a checkpoint: JSON trees, and the tensors that they name.

    ``CheckpointPart.of`` refers to the tensors of training. ``HostBuffers.copy`` copies them: training does not change
    the copies.
    """

    trees: dict[str, Any]
    tensors: Pieces

    @classmethod
    def of(cls, states: States) -> CheckpointPart:
        """The part that has ``states``. Raises ``UserError`` for state that is no plain data."""
        tensors: Pieces = {}
        return cls(to_trees(states, tensors), tensors)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(values.nbytes for tensor in self.tensors.values() for values in _values(tensor))


class HostBuffers:
    """Host memory for the tensors of one checkpoint. The next copy replaces it, in the same memory where shapes agree.

    Example:
        >>> buffers = HostBuffers()
        >>> held = buffers.copy(CheckpointPart.of({"model": model.state_dict()}))
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, part: CheckpointPart) -> CheckpointPart:
        """``part`` with tensors of its own, until the next call."""
        earlier, self._buffers = self._buffers, {}
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []

        def buffer_of(key: str, values: torch.Tensor) -> torch.Tensor:
            buffer = earlier.pop(key, None)
            if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
                buffer = torch.empty(values.shape, dtype=values.dtype)
            self._buffers[key] = buffer
            targets.append(buffer)
            sources.append(values)
            return buffer

        def copy_of(name: str, tensor: torch.Tensor | PartialTensor) -> torch.Tensor | PartialTensor:
            if isinstance(tensor, torch.Tensor):
                return buffer_of(name, tensor)
            pieces = [(piece, buffer_of(f"{name}@{i}", values)) for i, (piece, values) in enumerate(tensor.pieces)]
            return replace(tensor, pieces=tuple(pieces))

        copies = {name: copy_of(name, each) for name, each in part.tensors.items()}
        if targets:
            with torch.no_grad():  # one call for all: a call for each costs a small tensor more than its copy
                foreach_copy_(targets, sources)
        return CheckpointPart(part.trees, copies)


# --- the file of a part's tensors ---


@dataclass(frozen=True)
class Written:
    """A writer's report of its file: name, size, digest, and the index of its content."""

    name: str
    size: int
    sha256: str
    index: Index


def file_name(number: int, count: int) -> str:
    """The name of the file of writer ``number`` (from 0) of ``count``."""
    return "tensors.safetensors" if count == 1 else f"tensors-{number + 1:05d}-of-{count:05d}.safetensors"


def write(folder: Path, name: str, tensors: Mapping[str, torch.Tensor | PartialTensor]) -> Written:
    """Write ``tensors``, whole ones and this worker's pieces of others, as one file. Returns once the disk has it.

    The file is in the format of safetensors. Its own writer holds Python's lock while it copies all of a tensor, so
    training would wait; this one writes and digests a few megabytes at a time.

    Raises:
        OSError, SafetensorError: The file cannot be written.
    """
    content: dict[str, torch.Tensor] = {}
    index: Index = {}
    for path, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            keyed = [(path, whole_range(tensor.shape), tensor)]
        else:
            keyed = [(f"{path}@{i}", range_, values) for i, (range_, values) in enumerate(tensor.pieces)]
        for key, _, values in keyed:
            content[key] = values.detach().to("cpu").contiguous()
        index[path] = {
            "dtype": str(tensor.dtype)[6:],
            "shape": list(tensor.shape),
            "pieces": [
                [name, key, [list(edge) for edge in range_.box], range_.start, range_.stop] for key, range_, _ in keyed
            ],
        }
    digest, size = hashlib.sha256(), 0
    with (folder / name).open("wb", buffering=0) as file:
        for block in _blocks(content):
            append(file, block)
            digest.update(block)
            size += block.nbytes
    sync(folder / name)
    return Written(name, size, digest.hexdigest(), index)


def append(file: BinaryIO, block: memoryview) -> None:
    """Write all of ``block``: a disk that is nearly full takes a part of it."""
    while block.nbytes:
        block = block[file.write(block) :]


def sync(path: Path) -> None:
    """Return once ``path`` is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _blocks(content: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of a safetensors file of ``content``: its header, and the values, the widest types first.

    In this order each tensor begins at a multiple of its type's size, as readers that map the file need it.
    """
    header: dict[str, Any] = {}
    names, at = sorted(content, key=lambda key: (-content[key].itemsize, key)), 0
    for key in names:
        values = content[key]
        if values.dtype not in NAMES:
            raise SafetensorError(f"{key} is of {values.dtype}, which safetensors files cannot hold")
        ends = [at, at + values.nbytes]
        header[key] = {"dtype": NAMES[values.dtype], "shape": list(values.shape), "data_offsets": ends}
        at = ends[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNED)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for key in names:
        if not content[key].nbytes:
            continue
        flat = content[key].reshape(-1).view(torch.uint8).numpy().data
        for first in range(0, flat.nbytes, BLOCK_BYTES):
            yield flat[first : first + BLOCK_BYTES]


def _values(tensor: torch.Tensor | PartialTensor) -> list[torch.Tensor]:
    return [tensor] if isinstance(tensor, torch.Tensor) else [values for _, values in tensor.pieces]
