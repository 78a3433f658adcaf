"""Files that are whole or not there: written beside their place, then renamed."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def atomic_write(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace the file ``path``: whoever opens it finds all of the old content or all of the new.

    ``mode``: who may read and write it, less what the process's umask forbids. Raises ``OSError``, and then leaves
    the old content in place and nothing beside it.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
