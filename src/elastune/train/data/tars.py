"""What to say where a stream of tar files, as WebDataset reads them, ends in the middle of a file or of a sample."""

from __future__ import annotations

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
    if not isinstance(error, KeyError) or not error.args:
        return None
    missing = error.args[0]
    for sample in (*items, *_samples_at_hand(error)):
        if isinstance(sample, Mapping) and URL in sample and KEY in sample and missing not in sample:
            has = ", ".join(str(name) for name in sample if not str(name).startswith("__"))
            value = f"{sample[URL]}: sample {sample[KEY]} has {has or 'nothing'}, and no {missing}"
            return UserError("a sample of a tar file has all its parts", value, f"was the file cut? {FIX}")
    return None


def _samples_at_hand(error: BaseException) -> Iterator[Any]:
    """What the lines that ``error`` came through were at, the innermost first."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        yield from list(frame.f_locals.values())
