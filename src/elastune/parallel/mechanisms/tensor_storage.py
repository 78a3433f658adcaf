"""Tensors that are not whole in this worker's memory: they lie on several workers, or in files.

``PartialTensor`` describes a tensor of a run's state by the pieces on this worker.
``memory_mapped_parameters`` builds a model that fits into no worker's memory. Its parameters are mapped to unnamed
files, and their pages leave memory after each operation. So at most one tensor at a time is in memory, and a worker
that needs a part of a parameter reads only that part. Initial values are those of a plain construction.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from elastune.core.layout import FlatRange, intersection, whole_range
from elastune.core.run import ExecutionSettings


@dataclass(frozen=True)
class PartialTensor:
    """A tensor of which this worker writes ``pieces``: ranges of elements with their flat values.

    Two ``PartialTensor`` with the same ``name`` are the same tensor (tied weights). ``shape``: of the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[FlatRange, torch.Tensor], ...]


class Stored(Protocol):
    """A tensor that lies elsewhere and is read in parts."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, stretch: FlatRange) -> torch.Tensor:
        """The flat values of a range of elements, in memory of their own."""
        ...


def elements(value: torch.Tensor | Stored, part: FlatRange) -> torch.Tensor:
    """The flat values of a range of ``value``. Of a tensor in memory the result may be a view.

    Raises:
        ValueError: Where the range does not lie in ``value``.
    """
    shape = tuple(value.shape)
    if len(shape) != len(part.box) or any(stop > size for (_, stop), size in zip(part.box, shape, strict=True)):
        raise ValueError(f"a part {part.box} of a tensor of shape {shape}")
    if not isinstance(value, torch.Tensor):
        return value.read(part)
    return value.detach()[tuple(slice(*edge) for edge in part.box)].reshape(-1)[part.start : part.stop]


def whole(value: torch.Tensor | Stored) -> torch.Tensor:
    """All of ``value``, in its shape."""
    if isinstance(value, torch.Tensor):
        return value
    return value.read(whole_range(value.shape)).view(value.shape)


def copy_common(to: FlatRange, into: torch.Tensor, source: FlatRange, values: torch.Tensor) -> None:
    """Copy the common elements of two ranges of one tensor.

    Args:
        to: The range to fill.
        into: The flat values of ``to``, which are overwritten.
        source: The range to copy from.
        values: The flat values of ``source``.
    """
    if to.box == source.box:
        start, stop = max(to.start, source.start), min(to.stop, source.stop)
        if start < stop:
            into[start - to.start : stop - to.start] = values[start - source.start : stop - source.start]
        return
    for box, at in source.boxes:
        source_values = values[at : at + _size(box)].view(_shape(box))
        for target_box, offset in to.boxes:
            common = intersection(target_box, box)
            if common is not None:
                target = into[offset : offset + _size(target_box)].view(_shape(target_box))
                target[_inside(common, target_box)] = source_values[_inside(common, box)]


def _shape(box: Sequence[tuple[int, int]]) -> list[int]:
    return [stop - start for start, stop in box]


def _size(box: Sequence[tuple[int, int]]) -> int:
    return prod(_shape(box))


def _inside(box: Sequence[tuple[int, int]], outer: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True))


SMALLEST_BYTES = 1 << 16
"""A parameter of fewer bytes stays in memory."""
_MAPPED: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()
"""The memory map of each storage, by the storage's address."""


@contextmanager
def memory_mapped_parameters(folder: Path) -> Iterator[None]:
    """Put parameters that modules register inside into unnamed files in ``folder``.

    The folder needs as much space as the parameters. A file vanishes with its parameter, or with the process.
    Parameters on other devices than the CPU and small parameters stay where they are.
    """

    def move_to_file(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or parameter.nbytes < SMALLEST_BYTES or is_memory_mapped(parameter):
            return
        if parameter.device.type != "cpu" or not parameter.is_contiguous():
            return
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(parameter.nbytes)
            memory = mmap.mmap(file.fileno(), parameter.nbytes)
        values = torch.frombuffer(memory, dtype=parameter.dtype).view(parameter.shape)
        values.copy_(parameter.detach())
        parameter.data = values
        _MAPPED[values.untyped_storage().data_ptr()] = memory
        let_go(parameter)

    hook = register_module_parameter_registration_hook(move_to_file)
    try:
        with _LettingGo():
            yield
    finally:
        hook.remove()


def built_in_parts(execution: ExecutionSettings, folder: Path) -> AbstractContextManager[None]:
    """The context in which to build a model: ``memory_mapped_parameters`` if no worker will have all parameters.

    The files lie in ``folder``, or among the machine's temporary files if ``folder`` does not exist. If each worker
    will have all parameters, the context does nothing.
    """
    parts = execution.parts
    if parts.state != "sharded" and not parts.tensor and not parts.pipeline:
        return nullcontext()
    return memory_mapped_parameters(folder if folder.is_dir() else Path(tempfile.gettempdir()))


class _LettingGo(TorchFunctionMode):
    """Takes the pages of memory-mapped arguments out of memory after each operation."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = MappingProxyType({}),
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in (*args, *(kwargs or {}).values()):  # torch.nn.init passes by name
            if isinstance(value, torch.Tensor):
                let_go(value)
        return result


def _mapping(tensor: torch.Tensor) -> mmap.mmap | None:
    if tensor.device.type != "cpu" or not _MAPPED:
        return None
    return _MAPPED.get(tensor.untyped_storage().data_ptr())


def is_memory_mapped(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is mapped to a file."""
    return _mapping(tensor) is not None


def let_go(tensor: torch.Tensor) -> None:
    """Take the pages of ``tensor`` out of this process's memory if it is memory-mapped. Its values stay in the file."""
    memory = _mapping(tensor)
    if memory is not None:
        memory.madvise(mmap.MADV_DONTNEED)


def take_in(parameter: torch.Tensor) -> None:
    """Give ``parameter`` ordinary memory if it is memory-mapped."""
    if is_memory_mapped(parameter):
        mapped = parameter.detach()
        parameter.data = mapped.clone()
        let_go(mapped)
