"""A model as one file that carries its own digest: safetensors with JSON in the header. Reading runs none of it.

The header has the SHA-256 of the whole file, taken with zeros in the digest's place. A changed byte, a cut and an
addition are all found before anything is parsed. A digest finds damage, not malice: whoever may write the file may
write another digest. So the content is checked as well.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from elastune.core.errors import UserError
from elastune.journal.atomic import atomic_write

Content = TypeVar("Content")
KEY, DIGEST = "elastune", "sha256"
LONGEST = 1 << 24  # characters of JSON
_LONGEST_HEADER = 100_000_000  # bytes; the bound of safetensors
_ZEROS = b"0" * 64
_SEALED = re.compile(rb'"sha256":"([0-9a-f]{64})"')
_CHUNK = 1 << 20


def write_model_file(path: Path, content: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a description and tensors; the file appears whole or not at all.

    Args:
        path: The file; one that is there is replaced.
        content: What the header tells: JSON values.
        tensors: By their names; no two share memory.

    Raises:
        UserError: Where the file cannot be written, or a tensor holds what is no number.
    """
    unfit = not_numbers(tensors)
    if unfit is not None:
        raise UserError("a model that is written has numbers as weights", f"NaN in {unfit}", "leave that trial out")
    metadata = {KEY: json.dumps(content), DIGEST: _ZEROS.decode()}
    unsealed = save({name: one.detach().cpu().contiguous() for name, one in tensors.items()}, metadata)
    digest = hashlib.sha256(unsealed).hexdigest().encode()
    try:
        atomic_write(path, unsealed.replace(b'"sha256":"' + _ZEROS, b'"sha256":"' + digest, 1))
    except OSError as error:
        raise UserError("a model must be writable", error, "free space, or name a file in another folder") from None


def read_model_file(path: Path, schema: type[Content], what: str) -> tuple[Content, dict[str, torch.Tensor]]:
    """Return the description and the tensors in the file at ``path``.

    Args:
        path: A file from ``write_model_file``.
        schema: The dataclass that the description must fit.
        what: The kind of model, such as "an ensemble"; for messages.

    Raises:
        UserError: For any other file, and one that has changed since it was written.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")
        _check_digest(path, what)
        with safe_open(path, "pt") as opened:
            text = (opened.metadata() or {}).get(KEY, "")
            if not text or len(text) > LONGEST:
                raise ValueError(f"it is not {what}")
            content = TypeAdapter(schema).validate_python(json.loads(text))
            tensors = {name: opened.get_tensor(name) for name in list(opened.keys())}
        unfit = not_numbers(tensors)
        if unfit is not None:
            raise ValueError(f"NaN in {unfit}")
        return content, tensors
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        why = str(error)
    raise not_a_model_file(path, why, what)


def not_a_model_file(path: Path, why: str, what: str) -> UserError:
    """Return the error for a file that is not ``what``."""
    return UserError(f"{what} is a file that elastune has written", f"{path}: {why[:200]}", "write it again")


def not_numbers(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the first tensor that has a NaN. Infinities may be meant, as in a mask of attention."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and math.isnan(float(tensor.sum())) and bool(tensor.isnan().any()):
            return name
    return None


def _check_digest(path: Path, what: str) -> None:
    """Raise ``ValueError`` where the file does not have the digest that it carries."""
    with path.open("rb") as file:
        length = file.read(8)
        size = int.from_bytes(length, "little")
        if len(length) < 8 or size > min(_LONGEST_HEADER, path.stat().st_size - 8):
            raise ValueError(f"it is not {what}")
        header = file.read(size)
        carried = _SEALED.findall(header)
        if len(carried) != 1:  # in the description's JSON its quotation marks are escaped
            raise ValueError(f"it is not {what}, or it was damaged since")
        digest = hashlib.sha256(length + header.replace(carried[0], _ZEROS, 1))
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest().encode() != carried[0]:
        raise ValueError("its bytes do not have the digest that it was written with")
