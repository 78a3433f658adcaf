"""How a worker ends at once, from whatever thread, with all that it has started."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from pathlib import Path
from typing import NoReturn

ORPHANED_CODE = 70  # EX_SOFTWARE of sysexits.h: the coordinator is gone
ABANDONED_CODE = 75  # EX_TEMPFAIL: the coordinator is gone, nobody came in its place, and a checkpoint was written
DISCONNECTED_CODE = 76  # EX_PROTOCOL: the program closed this worker's connection


def end_process(why: str, code: int) -> NoReturn:
    """Say ``why`` in the log, and end this process and its family by ``code``."""
    with contextlib.suppress(OSError):
        os.write(2, f"elastune: {why}\n".encode(errors="replace"))
    _end_family()
    os._exit(code)


def _end_family() -> None:
    """SIGKILL to the data loaders of this process, and to all of its process group where that is its own."""
    for child in multiprocessing.active_children():  # they look for their parent only now and then
        with contextlib.suppress(OSError, ValueError):
            child.kill()
    if (own := os.getpid()) == os.getpgrp():
        for process in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
            with contextlib.suppress(OSError):
                if process != own and os.getpgid(process) == own:
                    os.kill(process, signal.SIGKILL)
