"""A plain training script as a program for elastune, in passes over its text; each pass reads the text of the last."""

from __future__ import annotations

from dataclasses import dataclass

from elastune.cli.convert.accumulation import with_turns, without_accumulation
from elastune.cli.convert.entry import renamed, with_entry, with_session
from elastune.cli.convert.launchers import without_launchers
from elastune.cli.convert.loops import with_loops, with_one_epoch
from elastune.cli.convert.objects import prepared
from elastune.cli.convert.settings_of_script import with_settings
from elastune.cli.convert.source_text import MARK


@dataclass(frozen=True)
class Conversion:
    """A converted script.

    Attributes:
        text: The program.
        marks: What could not be converted for certain: the line's number and the words of the comment there.
    """

    text: str
    marks: tuple[tuple[int, str], ...]


def convert(text: str, name: str) -> Conversion:
    """Convert the script ``text`` of the file ``name``.

    Raises:
        UserError: The text is no Python, or holds no training that is seen.

    Example:
        >>> convert(Path("plain.py").read_text(), "plain.py").text
    """
    text = text.removeprefix("\ufeff")
    text = without_launchers(text if text.endswith("\n") else f"{text}\n", name)
    text = with_entry(renamed(text, name), name)
    text = with_turns(without_accumulation(text, name), name)
    text, trained = prepared(text, name)
    text = with_one_epoch(with_loops(text, name, trained), name)
    text = with_session(with_settings(text, name), name)
    lines = enumerate(text.splitlines(), 1)
    marks = tuple((number, line.partition(MARK)[2]) for number, line in lines if line.lstrip().startswith(MARK))
    return Conversion(text, marks)
