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

INDEX = ".metadata"

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
"""The dtypes as safetensors names them."""


def export_run(run: Path, dcp: Path | None, safetensors: Path | None) -> list[str]:
    """Write the newest checkpoint of the run in ``run`` as a DCP checkpoint, or its model as one safetensors file.

    Args:
        run: The folder of the run.
        dcp: The folder for the DCP checkpoint, if one is wanted.
        safetensors: The file for the model, if one is wanted.

    Returns:
        A line for each thing that was written.

    Raises:
        UserError: There is no checkpoint, or the target exists or cannot be written.
    """
    newest = load_newest(run / "checkpoints", whole_parts=False)
    if newest is None:
        fix = "name the folder of a run that has written one, or of a trial (STUDY/trials/7)"
        raise UserError("weights are exported from a checkpoint", f"none in {run}", fix)
    path, checkpoint = newest
    lines = []
    try:
        if dcp is not None:
            if dcp.exists() and (not dcp.is_dir() or any(dcp.iterdir())):
                raise UserError("--dcp names a new or empty folder", dcp, "name another one")
            write_dcp(dcp, checkpoint.states["model"], checkpoint.states["optimizer"])
            lines.append(f"dcp     {dcp} (step {checkpoint.position.step})")
        if safetensors is not None:
            write_model(safetensors, checkpoint.states["model"])
            lines.append(f"model   {safetensors} (step {checkpoint.position.step})")
    except OSError as error:
        raise UserError(UNWRITABLE, error, f"free space, or export {path} elsewhere") from None
    return lines


def write_model(file: Path, model: Mapping[str, Any]) -> None:
    """Write the tensors of ``model`` as one safetensors file; tied ones once, under their first name.

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


# --- torch.distributed.checkpoint ---


def read_dcp(folder: Path) -> dict[str, DcpTensor]:
    """The tensors of the DCP checkpoint in ``folder`` by name, read on demand with ``torch.load(weights_only=True)``.

    Raises:
        UserError: There is no such checkpoint, or its index holds other objects than those of tensors.
    """
    rule = "--from-dcp names a checkpoint of torch.distributed.checkpoint"
    fix = f"name the folder that has its {INDEX}"
    try:
        with (folder / INDEX).open("rb") as file:
            index = _IndexReader(file).load()
        tensors = {}
        for name, entry in index.state_dict_metadata.items():
            if isinstance(entry, index_of.TensorStorageMetadata):
                chunks = tuple(_chunk(folder, index, name, chunk) for chunk in entry.chunks)
                tensors[name] = DcpTensor(tuple(entry.size), entry.properties.dtype, chunks)
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(rule, f"{folder}: {type(error).__name__}: {error}", fix) from None
    return tensors


@dataclass(frozen=True)
class DcpTensor:
    """A tensor in ``chunks``: for each its range, the file, and the offset and length of its values there."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[tuple[FlatRange, Path, int, int], ...]

    def read(self, wanted: FlatRange) -> torch.Tensor:
        """The flat values of the range ``wanted``. One chunk at a time is in memory."""
        values = torch.empty(wanted.size, dtype=self.dtype)
        for chunk, file, at, length in self.chunks:
            if any(intersection(chunk.box, box) is not None for box, _ in wanted.boxes):
                with file.open("rb") as opened:
                    opened.seek(at)
                    part = torch.load(io.BytesIO(opened.read(length)), map_location="cpu", weights_only=True)
                copy_common(wanted, values, chunk, part.detach().reshape(-1))
        return values


_INDEX_CLASSES = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        *(index_of.Metadata, index_of.TensorStorageMetadata, index_of.BytesStorageMetadata),
        *(index_of.ChunkStorageMetadata, index_of.MetadataIndex, index_of.TensorProperties, index_of.StorageMeta),
        *(index_of._MEM_FORMAT_ENCODING, filesystem._StorageInfo, torch.Size),
    )
}


class _IndexReader(pickle.Unpickler):
    """An unpickler that makes the plain objects of an index, and refuses everything else: no code of a file runs."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(member := getattr(torch, name, None), torch.dtype | torch.layout):
            return member
        if (module, name) in {("pathlib", "PosixPath"), ("pathlib", "Path"), ("pathlib._local", "PosixPath")}:
            return Path
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda layout: getattr(torch, layout.removeprefix("torch."))
        if (module, name) not in _INDEX_CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name} is nothing of an index")
        return _INDEX_CLASSES[module, name]


def _chunk(folder: Path, index: Any, name: str, chunk: Any) -> tuple[FlatRange, Path, int, int]:
    stored = index.storage_data[index_of.MetadataIndex(name, chunk.offsets)]
    if getattr(stored, "transform_descriptors", None):
        raise ValueError(f"{name} is compressed")
    box = tuple((int(at), int(at + size)) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
    range_ = FlatRange(box, 0, whole_range(chunk.sizes).size)
    return range_, folder / Path(stored.relative_path).name, int(stored.offset), int(stored.length)


def states_of_dcp(tensors: Mapping[str, Stored]) -> dict[str, dict[str, Any]]:
    """The state of the ``model`` and, by parameter name, of the ``optimizer``, from the result of ``read_dcp``.

    The names are those of ``torch.distributed.checkpoint.state_dict``: "model.NAME" (or the name alone), and
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


def write_dcp(folder: Path, model: Mapping[str, Stored], optimizer: Mapping[str, Any]) -> None:
    """Write a DCP checkpoint, with the names of ``get_state_dict`` of torch.distributed.checkpoint.

    Args:
        folder: The folder to make; it must be empty.
        model: Tensors by name.
        optimizer: ``state`` by parameter name, and ``param_groups``.
    """
    late: dict[int, Stored] = {}
    stand_ins = []  # kept alive, as their ids are keys

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
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as intended
        save(state, storage_writer=writer, planner=_OneAtATime(late), no_dist=True)


class _OneAtATime(DefaultSavePlanner):
    """Reads each stored tensor only when its stand-in is written."""

    def __init__(self, late: Mapping[int, Stored]) -> None:
        super().__init__()
        self._late = late

    def lookup_object(self, index: Any) -> Any:
        stand_in = super().lookup_object(index)
        return whole(self._late[id(stand_in)]) if id(stand_in) in self._late else stand_in
