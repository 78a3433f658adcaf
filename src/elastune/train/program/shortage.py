"""Whether an error says that memory ran out, and how much was wanted."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from elastune.core.text import byte_count
from elastune.train.program.causes import text_of

_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_WANTED = re.compile(
    r"(?:tried to allocate|unable to allocate) ([0-9]{1,20}(?:\.[0-9]{1,6})?) ?(bytes|[KMGT]iB)", re.IGNORECASE
)
"""torch's allocators on CPU and CUDA, and numpy's."""
_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "std::bad_alloc", "unable to mmap")


def lacks_memory(error: BaseException) -> bool:
    """Whether ``error``, or what it was raised from, is one of memory that ran out."""
    for each in _chain(error):
        if isinstance(each, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(each, Exception) and any(sign in text_of(each).lower() for sign in _SIGNS):
            return True
    return False


def wanted_bytes(error: BaseException) -> int | None:
    """The bytes of the allocation that failed; None where the error does not tell."""
    for each in _chain(error):
        if found := _WANTED.search(text_of(each)):
            return round(float(found[1]) * _UNITS[found[2].lower()])
    return None


def told_of_memory(wanted: int | None, detail: str) -> str:
    """``detail`` of an error of memory that ran out, with what was wanted in front."""
    return detail if wanted is None else f"wanted {byte_count(wanted)} more ({wanted:,} bytes); {detail}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        yield found
        seen.append(found)
        found = found.__cause__ or found.__context__
