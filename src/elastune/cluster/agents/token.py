"""The secret that agents and their controller share: a file that its owner alone can read."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from elastune.core.errors import UserError
from elastune.journal.atomic import atomic_write

BYTES, LIMIT_BYTES = 32, 4096
SHORTEST = 16  # characters


def make_token(path: Path) -> str:
    """A new token in a new file ``path``. Raises ``UserError`` where there is one or none can be made."""
    if os.path.lexists(path):
        raise UserError("a new token needs a new file", path, "use the one that is there, or remove it")
    token = secrets.token_urlsafe(BYTES)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, token.encode() + b"\n", mode=0o600)
    except OSError as error:
        raise UserError("a token needs a file", f"{path}: {error.strerror}", "choose another folder") from None
    return token


def read_token(path: Path) -> str:
    """The token in ``path``. Raises ``UserError`` where it holds none, or others may read it."""
    try:
        with path.open("rb") as file:
            mode, text = os.fstat(file.fileno()).st_mode, file.read(LIMIT_BYTES)
    except OSError as error:
        fix = "copy the file that the controller made to this machine"
        raise UserError("--token-file must name a file with a token", f"{path}: {error.strerror}", fix) from None
    if stat.S_IMODE(mode) & 0o077:
        value = f"{path} has mode {stat.S_IMODE(mode):o}"
        raise UserError("a token is for its owner alone", value, f"chmod 600 {path}")
    token = text.strip()
    if len(token) < SHORTEST or not all(33 <= byte < 127 for byte in token):
        fix = "copy the file that the controller made to this machine"
        raise UserError(f"a token has {SHORTEST} characters or more, none of them a space", path, fix)
    return token.decode("ascii")
