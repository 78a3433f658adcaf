"""The text of a program's exception in one line with its place, and the line where the program is now.

The text of an exception may be huge, or raise an error itself.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from elastune.core.formatting import cut, printable

LONGEST_TEXT = 2000  # characters: a longer text hides its reason
LONGEST_TRACE_LINE = 2000
DEEPEST_TRACE = 500  # of the newest calls: all calls of a deep recursion take minutes to format
# torch reports an exception of a data loader's process as the text of a traceback inside of the exception's text.
_HANDED_ON = re.compile(r"\s*Original Traceback \(most recent call last\):\n(.*)", re.DOTALL)
_FRAME = re.compile(r'^  File "(.+)", line ([0-9]+)', re.MULTILINE)


def cause_of(error: BaseException, program: str = "") -> str:
    """``error`` in one line: its type, its text, and its place.

    The place is the newest line of the file ``program`` in the traceback, if any: code below is not the user's.
    """
    text = text_of(error)
    handed_on = _HANDED_ON.search(text)
    # extract_tb would look up the source line of each call.
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if handed_on is not None:
        lines = handed_on[1].rstrip().split("\n")
        start = next((at for at, line in enumerate(lines) if line and not line.startswith(" ")), len(lines) - 1)
        text = f"{text[: handed_on.start()]} {' '.join(lines[start:])}"
        places += [(name, int(number)) for name, number in _FRAME.findall(handed_on[1])]
    if isinstance(error, SystemExit):
        summary = f"the program called sys.exit({_safely(lambda: repr(error.code))})"
    else:
        text = " ".join(text.split())
        summary = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno or 0))
        summary = f"{type(error).__name__}: {error.msg}"
    in_program = [place for place in places if place[0] == program] or places
    at = f" ({os.path.basename(in_program[-1][0])}:{in_program[-1][1]})" if in_program else ""
    return printable(cut(summary, LONGEST_TEXT) + at)


def text_of(error: BaseException) -> str:
    """``str(error)``, or the reason why it cannot be had."""
    return _safely(lambda: str(error))


def trace_of(error: BaseException) -> str:
    """The traceback of the newest calls; very long lines are cut."""
    at, depth = error.__traceback__, sum(1 for _ in traceback.walk_tb(error.__traceback__))
    for _ in range(depth - DEEPEST_TRACE):
        at = None if at is None else at.tb_next
    lines = "".join(traceback.format_exception(type(error), error, at, limit=-DEEPEST_TRACE)).split("\n")
    return "\n".join(cut(line, LONGEST_TRACE_LINE) for line in lines)


def _safely(text: Callable[[], str]) -> str:
    try:
        return text()
    except BaseException as second:  # noqa: BLE001 - a user's __str__ may raise anything; the first error is the cause
        return f"(its text cannot be had: {type(second).__name__})"


class ProgramLine:
    """Returns the line of the program in ``path`` that the thread which made this object is at: "train.py:34".

    Any thread may call it at any time; the program does nothing for it. Outside of the program it returns "".
    """

    def __init__(self, path: Path) -> None:
        self._file = str(path.resolve())
        self._name = os.path.basename(self._file)
        self._thread = threading.get_ident()

    def __call__(self) -> str:
        frame = sys._current_frames().get(self._thread)
        while frame is not None:
            if frame.f_code.co_filename == self._file:
                return f"{self._name}:{frame.f_lineno}"
            frame = frame.f_back
        return ""
