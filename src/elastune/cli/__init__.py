"""Parse, call, print."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence

__all__ = ["main"]

# As it ends, Python would search all that torch has made for garbage, which takes half a second.
atexit.register(gc.freeze)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command: see ``elastune.cli.app.main``. Here nothing is imported yet, so that what goes wrong while the
    rest is (Ctrl-C, a library that the system cannot load) is one line, too."""
    try:
        from elastune.cli.app import main as run

        return run(arguments)
    except KeyboardInterrupt:
        why, code = "interrupted", 130
    except (ImportError, MemoryError, OSError) as error:
        why, code = _cannot_load(error), 2
    sys.stderr.write(f"elastune: {' '.join(why.split())}\n")
    return code


def _cannot_load(error: Exception) -> str:
    from elastune.core.plugins import missing_extra

    got = f"{type(error).__name__}: {error}"
    rule = f"the libraries must load (got {got}): reinstall what it names, or give it more memory (ulimit -v)"
    return (missing_extra(error) if isinstance(error, ImportError) else None) or rule
