"""What an exception of the program says, in one line with its place, and the line where the program is now.

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

# [causes] What an exception says, in one line with its place: whatever it is, its text be huge or impossible to get.

LONGEST_TEXT = 2000  # characters: what is longer hides its reason rather than tells it
LONGEST_TRACE_LINE = 2000
DEEPEST_TRACE = 500  # calls, the newest: more of them take minutes to format where a recursion has a million
# How torch hands on what was raised in a process of a data loader: the text of a traceback inside of the text.
_HANDED_ON = re.compile(r"\s*Original Traceback \(most recent call last\):\n(.*)", re.DOTALL)
_FRAME = re.compile(r'^  File "(.+)", line ([0-9]+)', re.MULTILINE)


def cause_of(error: BaseException, program: str = "") -> str:
    """``error`` in one line: its type, its text, and where it came up; the newest line of the file ``program`` if any
    is on the way, since what lies below is not the user's."""
    text = text_of(error)
    handed_on = _HANDED_ON.search(text)
    # Not by extract_tb, which looks up the source line of each call.
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if handed_on is not None:
        lines = handed_on[1].rstrip().split("\n")
        said = next((at for at, line in enumerate(lines) if line and not line.startswith(" ")), len(lines) - 1)
        text = f"{text[: handed_on.start()]} {' '.join(lines[said:])}"
        places += [(name, int(number)) for name, number in _FRAME.findall(handed_on[1])]
    if isinstance(error, SystemExit):
        told = f"the program called sys.exit({_safely(lambda: repr(error.code))})"
    else:
        text = " ".join(text.split())
        told = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno or 0))
        told = f"{type(error).__name__}: {error.msg}"
    own = [place for place in places if place[0] == program] or places
    at = f" ({os.path.basename(own[-1][0])}:{own[-1][1]})" if own else ""
    return printable(cut(told, LONGEST_TEXT) + at)


def text_of(error: BaseException) -> str:
    """``str(error)``, or why there is none."""
    return _safely(lambda: str(error))


def trace_of(error: BaseException) -> str:
    """The traceback of the newest calls, its lines cut where they are very long."""
    at, depth = error.__traceback__, sum(1 for _ in traceback.walk_tb(error.__traceback__))
    for _ in range(depth - DEEPEST_TRACE):
        at = None if at is None else at.tb_next
    lines = "".join(traceback.format_exception(type(error), error, at, limit=-DEEPEST_TRACE)).split("\n")
    return "\n".join(cut(line, LONGEST_TRACE_LINE) for line in lines)


def _safely(say: Callable[[], str]) -> str:
    try:
        return say()
    except BaseException as second:  # noqa: BLE001 - a user's __str__ may raise anything; the first error is the cause
        return f"(its text cannot be had: {type(second).__name__})"


# [line] Where in the user's program a worker is.


class ProgramLine:
    """Tells the line of the program in ``path`` that the thread which made this object is at ("train.py:34").

    Any thread may ask, at any time; nothing has to be noted down while the program runs. "" outside of the program.
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
