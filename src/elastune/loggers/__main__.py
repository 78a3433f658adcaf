"""The process of one logger: ``python -m elastune.loggers OUT NAME[:OPTION=VALUE,...]``.

It follows the journal in OUT until its stdin ends, then logs what is left. A line on stdout says what went wrong, if
anything did; all else that is printed goes to OUT/logs.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from pathlib import Path

from elastune.core.errors import UserError
from elastune.core.formatting import plain
from elastune.loggers.follow import follow
from elastune.runtime.logger import parse_logger

NICENESS = 10


def main(out: Path, text: str) -> int:
    """Follow the journal in ``out`` with the logger ``text``. Returns the exit code."""
    os.nice(NICENESS)  # the training comes first
    over = threading.Event()
    threading.Thread(target=_wait_for_end, args=(over,), name="end", daemon=True).start()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as lines:
        _print_to(Path(os.devnull))
        try:
            logger = parse_logger(text)
            log = out / "logs" / f"logger-{logger.name}.log"
            follow(out, logger, over, opening=lambda: _print_to(log))
        except Exception as error:  # noqa: BLE001 - a tracker's package may raise anything
            traceback.print_exc()
            why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            lines.write(f"failed: {plain(why, 300)}\n")
            return 1
    return 0


def _print_to(file: Path) -> None:
    """Send what this process prints from now on to ``file``."""
    file.parent.mkdir(exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _wait_for_end(over: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    over.set()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
