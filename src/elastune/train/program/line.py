"""Where in the user's program a worker is."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path


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
