"""What to say where a stream of tar files, as WebDataset reads them, ends in the middle of a file or of a sample."""

from __future__ import annotations

import re
import tarfile
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from elastune.core.errors import UserError

FIX = "write the file anew, or leave it out"
URL, KEY = "__url__", "__key__"  # WebDataset's names for where a sample comes from


def damaged_tar(error: BaseException, items: Iterable[Any] = ()) -> UserError | None:
    """What the user is told where ``error``, met in reading samples or in collating ``items``, is of a tar file that
    was cut; None where it is of something else."""
    if isinstance(error, tarfile.ReadError):  # whoever opened the file has added its name
        told = [each.strip().splitlines()[-1] for each in error.args if isinstance(each, str) and each.strip()]
        return UserError("a tar file of a stream is whole", ": ".join(reversed(told)) or "one that ends early", FIX)
    missing = _missing(error)
    for sample in (*items, *_samples_at_hand(error)) if missing else ():
        if isinstance(sample, Mapping) and URL in sample and KEY in sample and not _known(sample) & missing:
            has = ", ".join(str(name) for name in sample if not str(name).startswith("__"))
            value = f"{sample[URL]}: sample {sample[KEY]} has {has or 'nothing'}, and no {' or '.join(sorted(missing))}"
            return UserError("a sample of a tar file has all its parts", value, f"was the file cut? {FIX}")
    return None


def _missing(error: BaseException) -> set[str]:
    """The parts, any of which was asked for where ``error`` was raised, and none was there."""
    if isinstance(error, KeyError):
        return {name for name in error.args[:1] if isinstance(name, str)}
    told = re.match(r"didn't find \[(.*?)\] in \[", str(error)) if isinstance(error, ValueError) else None
    return set() if told is None else set(re.findall(r"'([^']+)'", told[1]))  # what WebDataset's to_tuple says


def _known(sample: Mapping[Any, Any]) -> set[str]:
    """The names of its parts; and text in them, which a program may look up in a table of its own, in vain."""
    return {each for each in (*sample, *sample.values()) if isinstance(each, str)}


def _samples_at_hand(error: BaseException) -> Iterator[Any]:
    """What the lines that ``error`` came through were at, the innermost first."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        yield from list(frame.f_locals.values())
