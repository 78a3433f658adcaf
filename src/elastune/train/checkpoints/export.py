"""Checkpoints for other programs: torch.distributed.checkpoint (DCP), and a file of the model alone.

One process works on one tensor at a time. The index of DCP, ``.metadata``, is a pickle: the reader knows the plain
classes of such an index and refuses everything else. Import this file late: torch's DCP takes long to import.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as index_of
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from elastune.core.errors import UserError
from elastune.core.layout import FlatRange, intersection, whole_range
from elastune.parallel.mechanisms.tensor_storage import Stored, copy_common, whole
from elastune.train.checkpoints.checkpoint import UNWRITABLE, load_newest

# [dcp] Checkpoints of torch.distributed.checkpoint (DCP), read and written one tensor at a time by one process.
#
# Its index, ``.metadata``, is a pickle: it is read by an unpickler that knows the plain classes of such an index and
# refuses everything else, so that nothing of a file is ever run. Tensors are read with ``torch.load(weights_only=True)``.

INDEX = ".metadata"
_KNOWN = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        *(index_of.Metadata, index_of.TensorStorageMetadata, index_of.BytesStorageMetadata),
        *(index_of.ChunkStorageMetadata, index_of.MetadataIndex, index_of.TensorProperties, index_of.StorageMeta),
        *(index_of._MEM_FORMAT_ENCODING, filesystem._StorageInfo, torch.Size),
    )
}


class _IndexReader(pickle.Unpickler):
    """Makes the plain objects of an index, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype | torch.layout):
            return found
        if (module, name) in {("pathlib", "PosixPath"), ("pathlib", "Path"), ("pathlib._local", "PosixPath")}:
            return Path
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda layout: getattr(torch, layout.removeprefix("torch."))
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name} is nothing of an index")
        return _KNOWN[module, name]


@dataclass(frozen=True)
class DcpTensor:
    """A tensor that lies in ``chunks``: a box of it, and the file, the place and the length of what has its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[tuple[FlatRange, Path, int, int], ...]

    def read(self, stretch: FlatRange) -> torch.Tensor:
        """The flat values of a stretch; a chunk at a time is in memory."""
        found = torch.empty(stretch.size, dtype=self.dtype)
        for chunk, file, at, length in self.chunks:
            if any(intersection(chunk.box, box) is not None for box, _ in stretch.boxes):
                with file.open("rb") as opened:
                    opened.seek(at)
                    values = torch.load(io.BytesIO(opened.read(length)), map_location="cpu", weights_only=True)
                copy_common(stretch, found, chunk, values.detach().reshape(-1))
        return found


def read_dcp(folder: Path) -> dict[str, DcpTensor]:
    """The tensors of the DCP checkpoint in ``folder`` by name, to be read when they are needed.

    Raises:
        UserError: Where it is none, or one with what is no plain tensor's index.
    """
    rule = "--from-dcp names a checkpoint of torch.distributed.checkpoint"
    fix = f"name the folder that has its {INDEX}"
    try:
        with (folder / INDEX).open("rb") as file:
            index = _IndexReader(file).load()
        found = {}
        for name, entry in index.state_dict_metadata.items():
            if isinstance(entry, index_of.TensorStorageMetadata):
                chunks = tuple(_chunk(folder, index, name, chunk) for chunk in entry.chunks)
                found[name] = DcpTensor(tuple(entry.size), entry.properties.dtype, chunks)
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(rule, f"{folder}: {type(error).__name__}: {error}", fix) from None
    return found


def _chunk(folder: Path, index: Any, name: str, chunk: Any) -> tuple[FlatRange, Path, int, int]:
    stored = index.storage_data[index_of.MetadataIndex(name, chunk.offsets)]
    if getattr(stored, "transform_descriptors", None):
        raise ValueError(f"{name} is compressed")
    box = tuple((int(at), int(at + size)) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
    stretch = FlatRange(box, 0, whole_range(chunk.sizes).size)
    return stretch, folder / Path(stored.relative_path).name, int(stored.offset), int(stored.length)


def states_of_dcp(tensors: Mapping[str, Stored]) -> dict[str, dict[str, Any]]:
    """The state of ``model``, and that of the ``optimizer`` by parameter name, in what ``read_dcp`` gave.

    Names are those that ``torch.distributed.checkpoint.state_dict`` gives: "model.NAME" (or the name alone), and
    "optimizer.state.NAME.KEY".
    """
    optimizer: dict[str, dict[str, Stored]] = {}
    rest: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer.state."):
            parameter, _, key = name.removeprefix("optimizer.state.").rpartition(".")
            optimizer.setdefault(parameter, {})[key] = tensor
        elif not name.startswith("optimizer."):
            rest[name] = tensor
    inside = {name.removeprefix("model."): tensor for name, tensor in rest.items() if name.startswith("model.")}
    return {"model": inside or rest, "optimizer": optimizer}


class _OneAtATime(DefaultSavePlanner):
    """Gets the values of tensors that stand for stored ones when they are written."""

    def __init__(self, late: Mapping[int, Stored]) -> None:
        super().__init__()
        self._late = late

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        return whole(self._late[id(found)]) if id(found) in self._late else found


def write_dcp(folder: Path, model: Mapping[str, Stored], optimizer: Mapping[str, Any]) -> None:
    """Write a DCP checkpoint, as ``get_state_dict`` of torch.distributed.checkpoint names things.

    Args:
        folder: Is made; must be empty.
        model: Tensors by name.
        optimizer: ``state`` by parameter name, and ``param_groups``.
    """
    late: dict[int, Stored] = {}
    stand_ins = []  # each lives as long as its number is used

    def stand_in(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: stand_in(inner) for key, inner in value.items()}
        if not hasattr(value, "read") or not hasattr(value, "dtype"):
            return value
        stand_ins.append(torch.empty(value.shape, dtype=value.dtype, device="meta"))
        late[id(stand_ins[-1])] = value
        return stand_ins[-1]

    state = {"model": stand_in(model), "optimizer": stand_in(optimizer)}
    writer = filesystem.FileSystemWriter(folder, single_file_per_rank=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # it is meant to be
        save(state, storage_writer=writer, planner=_OneAtATime(late), no_dist=True)


# [export] A run's newest checkpoint for other programs, one tensor at a time: DCP, and a file of the model alone.

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As safetensors names them."""


def export_run(run: Path, dcp: Path | None, safetensors: Path | None) -> list[str]:
    """Write the newest checkpoint of the run in ``run`` as a DCP checkpoint, or its model as one safetensors file.

    Returns:
        A line for each thing that was written.

    Raises:
        UserError: Where there is no checkpoint, or something is in the way.
    """
    found = load_newest(run / "checkpoints", whole_parts=False)
    if found is None:
        fix = "name the folder of a run that has written one, or of a trial (STUDY/trials/7)"
        raise UserError("weights are exported from a checkpoint", f"none in {run}", fix)
    path, kept = found
    said = []
    try:
        if dcp is not None:
            if dcp.exists() and (not dcp.is_dir() or any(dcp.iterdir())):
                raise UserError("--dcp names a new or empty folder", dcp, "name another one")
            write_dcp(dcp, kept.states["model"], kept.states["optimizer"])
            said.append(f"dcp     {dcp} (step {kept.position.step})")
        if safetensors is not None:
            write_model(safetensors, kept.states["model"])
            said.append(f"model   {safetensors} (step {kept.position.step})")
    except OSError as error:
        raise UserError(UNWRITABLE, error, f"free space, or export {path} elsewhere") from None
    return said


def write_model(file: Path, model: Mapping[str, Any]) -> None:
    """The tensors of ``model`` as one safetensors file, tied ones under their first name alone.

    The format: the length of a JSON header (8 bytes, little-endian), the header, the tensors' bytes one after another.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chosen: list[Stored] = []
    seen: set[Any] = set()
    at = 0
    for name, tensor in model.items():
        if not hasattr(tensor, "read") or (place := tensor.pieces) in seen:
            continue
        seen.add(place)
        chosen.append(tensor)
        size = torch.Size(tensor.shape).numel() * tensor.dtype.itemsize
        offsets = [at, at + size]
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for tensor in chosen:
            opened.write(whole(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
