"""What workers tell each other of a collective that the program has called by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch

from elastune.comm.post import Letter

Kind = Literal["allreduce", "broadcast", "gather"]
Key = tuple[str, int]
"""A name, and how often it was called before."""
GIVEN, RESULT, DONE = range(3)
"""What a letter has: the sender's tensor, the result, or that the sender needs nothing more of this call."""
DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
}


@dataclass(frozen=True)
class Root:
    """Of a broadcast: the ``rank`` that the program named, and which ``worker`` that was then."""

    rank: int
    worker: int


def letter_of(
    what: int, key: Key, kind: Kind, root: Root, tensors: Sequence[torch.Tensor], workers: Sequence[int] = ()
) -> Letter:
    """A letter with ``tensors``; of a result with the ``workers`` that took part in it."""
    told = {
        "name": key[0],
        "kind": kind,
        "root": [root.rank, root.worker],
        "workers": list(workers),
        "tensors": [[str(t.dtype), list(t.shape)] for t in tensors],
    }
    parts = [t.reshape(-1).view(torch.uint8) for t in tensors if t.numel()]
    # One tensor is this worker's own copy, which nobody changes: not to be copied again.
    payload = parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8), *parts])
    return Letter((what, key[1], 0), json.dumps(told), payload)


def done_letter(key: Key) -> Letter:
    """A letter without tensors."""
    return Letter((DONE, key[1], 0), json.dumps({"name": key[0]}), torch.empty(0, dtype=torch.uint8))


def key_of(letter: Letter) -> Key:
    """Which call it is of."""
    return str(json.loads(letter.text)["name"]), letter.number[1]


def tensors_in(told: Mapping[str, Any], payload: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a letter whose text is ``told``. Raises ``ValueError`` where it does not hold what it says."""
    found, at = [], 0
    for name, shape in told["tensors"]:
        dtype = DTYPES[name]
        size = prod(shape) * dtype.itemsize
        part = payload if (at, size) == (0, len(payload)) else payload[at : at + size].clone()  # aligned
        if len(part) != size:
            raise ValueError(f"a message of {len(payload)} bytes is too short for {told['tensors']}")
        found.append(part.view(dtype).view(shape))
        at += size
    return found
