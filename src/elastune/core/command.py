"""A command line that can be given again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CommandGiven:
    """A command line as a journal keeps it, for ``elastune resume``.

    Options that are for one call alone (--out, --resume, --json, faults) are left out.

    Attributes:
        words: Such as ("run", "--workers=2", "--", "train.py").
        folder: The folder that it was given in.
    """

    words: tuple[str, ...]
    folder: str
