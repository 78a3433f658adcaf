"""Tensors that are not whole in this worker's memory: they lie with several workers, or in files.

``PartialTensor`` describes a tensor of a run's state by the pieces that are here.
``memory_mapped_parameters`` builds a model that fits into no worker's memory. Its parameters are mapped to files without
names, and their pages leave memory after each operation. Initial values are those of a plain construction.
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

# [scattered] Tensors of a run's state that are not whole here: lying with several workers, or in files.


@dataclass(frozen=True)
class PartialTensor:
    """The tensor ``name`` of ``shape``, of which this worker has ``pieces`` to write: stretches with flat values.

    What has the same name is the same tensor (tied weights).
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
        """The flat values of a stretch of it, in memory of their own."""
        ...


def elements(value: torch.Tensor | Stored, stretch: FlatRange) -> torch.Tensor:
    """The flat values of a stretch of ``value``; of a tensor that is here perhaps a view.

    Raises:
        ValueError: Where ``value`` is no tensor that has them.
    """
    shape = tuple(value.shape)
    if len(shape) != len(stretch.box) or any(stop > size for (_, stop), size in zip(stretch.box, shape, strict=True)):
        raise ValueError(f"a part {stretch.box} of a tensor of shape {shape}")
    if not isinstance(value, torch.Tensor):
        return value.read(stretch)
    return value.detach()[tuple(slice(*edge) for edge in stretch.box)].reshape(-1)[stretch.start : stretch.stop]


def whole(value: torch.Tensor | Stored) -> torch.Tensor:
    """All of ``value``, in its shape."""
    if isinstance(value, torch.Tensor):
        return value
    return value.read(whole_range(value.shape)).view(value.shape)


def copy_common(to: FlatRange, into: torch.Tensor, source: FlatRange, values: torch.Tensor) -> None:
    """Copy what two stretches of one tensor have in common: out of the flat ``values`` of one ``into`` the other's."""
    if to.box == source.box:
        start, stop = max(to.start, source.start), min(to.stop, source.stop)
        if start < stop:
            into[start - to.start : stop - to.start] = values[start - source.start : stop - source.start]
        return
    for box, at in source.boxes:
        theirs = values[at : at + _size(box)].view(_shape(box))
        for own, place in to.boxes:
            common = intersection(own, box)
            if common is not None:
                room = into[place : place + _size(own)].view(_shape(own))
                room[_inside(common, own)] = theirs[_inside(common, box)]


def _shape(box: Sequence[tuple[int, int]]) -> list[int]:
    return [stop - start for start, stop in box]


def _size(box: Sequence[tuple[int, int]]) -> int:
    return prod(_shape(box))


def _inside(box: Sequence[tuple[int, int]], outer: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True))


# [parked] Parameters parked in files while a model is built that fits into no worker's memory.
#
# Whatever draws or changes initial values runs as ever (no value differs from those of a plain construction), but on
# memory that is mapped to a file without a name: after each operation its pages are let go of, so that no more than
# one tensor at a time is in memory. Whoever takes a part of such a parameter reads that part alone.

SMALLEST_BYTES = 1 << 16
"""A parameter of fewer bytes stays in memory."""
_MAPPED: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()
"""By the address of a storage: what it is mapped to, while it lasts."""


@contextmanager
def memory_mapped_parameters(folder: Path) -> Iterator[None]:
    """Parameters that modules get meanwhile lie in a file in ``folder``, which needs as much room as they have.

    The file has no name: it is gone with the last parameter, or the process. Parameters on other devices than the CPU,
    and small ones, stay where they are.
    """

    def park(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
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

    hook = register_module_parameter_registration_hook(park)
    try:
        with _LettingGo():
            yield
    finally:
        hook.remove()


def built_in_parts(execution: ExecutionSettings, folder: Path) -> AbstractContextManager[None]:
    """Where to build a model of which no worker will have all parameters: in ``folder``, or where there is none, among
    the machine's temporary files. Nothing special, where each worker will have all of them.
    """
    name = execution.parts
    if name.state != "sharded" and not name.tensor and not name.pipeline:
        return nullcontext()
    return memory_mapped_parameters(folder if folder.is_dir() else Path(tempfile.gettempdir()))


class _LettingGo(TorchFunctionMode):
    """After each operation the parked tensors that it was given are in memory no more."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = MappingProxyType({}),
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for given in (*args, *(kwargs or {}).values()):  # torch.nn.init passes by name
            if isinstance(given, torch.Tensor):
                let_go(given)
        return result


def _mapping(tensor: torch.Tensor) -> mmap.mmap | None:
    if tensor.device.type != "cpu" or not _MAPPED:
        return None
    return _MAPPED.get(tensor.untyped_storage().data_ptr())


def is_memory_mapped(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` lies in a file."""
    return _mapping(tensor) is not None


def let_go(tensor: torch.Tensor) -> None:
    """Take the pages of ``tensor`` out of this process's memory, where it is parked; its values stay."""
    memory = _mapping(tensor)
    if memory is not None:
        memory.madvise(mmap.MADV_DONTNEED)


def take_in(parameter: torch.Tensor) -> None:
    """Give ``parameter`` ordinary memory, where it is parked."""
    if is_memory_mapped(parameter):
        parked = parameter.detach()
        parameter.data = parked.clone()
        let_go(parked)
