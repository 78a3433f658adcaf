"""Which files a worker's program writes, and where: told to who looks whether all workers write the same one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, cast

FOLDER = "ELASTUNE_WATCH_WRITES"  # where workers tell it, each in a file; set by who looks
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class _Watch:
    """Notes every file that is opened to be written below a line of ``program``, first line by path."""

    def __init__(self, program: Path) -> None:
        self.found: dict[str, int] = {}
        self.watches = True
        self._program = str(program)

    def hear(self, event: str, given: tuple[Any, ...]) -> None:
        """An audit hook; those of Python cannot be taken away."""
        if self.watches and event == "open" and _writes(given[1], given[2]):
            self.note(given[0])

    def note(self, path: Any) -> None:
        line = self._line()
        if line and isinstance(path, (str, bytes, os.PathLike)):
            self.found.setdefault(os.path.abspath(os.fsdecode(path)), line)

    def _line(self) -> int:
        frame: Any = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename == self._program:
                return int(frame.f_lineno)
            frame = frame.f_back
        return 0


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & WRITING)


def watched(train: Callable[[Any], None], program: Path, folder: Path) -> Callable[[Any], None]:
    """``train``, whose written files are told in ``folder``, in one file for each worker."""

    @wraps(train)
    def told(session: Any) -> None:
        import torch  # a controller that loads programs of others need not have it

        watch, save = _Watch(program), cast(Any, torch.save)
        sys.addaudithook(watch.hear)

        def noted(given: Any, file: Any, *more: Any, **options: Any) -> None:  # it writes below Python
            watch.note(file)
            save(given, file, *more, **options)

        setattr(torch, "save", noted)  # noqa: B010 - its type is narrower
        try:
            train(session)
        finally:
            watch.watches, torch.save = False, save
            (folder / f"{session.rank}.json").write_text(json.dumps(watch.found))

    return told


def written_by_several(folder: Path) -> dict[str, int]:
    """The files that more than one worker has written, and the program's lines that do it."""
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    for file in sorted(folder.glob("*.json")):
        for path, line in json.loads(file.read_text()).items():
            lines.setdefault(path, line)
            counts[path] = counts.get(path, 0) + 1
    return {path: line for path, line in lines.items() if counts[path] > 1}
