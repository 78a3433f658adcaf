"""A run's newest checkpoint for other programs, one tensor at a time: DCP, and a file of the model alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from elastune.core.errors import UserError
from elastune.mechanisms.scattered import Stored, whole
from elastune.train.checkpoints.checkpoint import UNWRITABLE, load_newest
from elastune.train.checkpoints.dcp import write_dcp

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
