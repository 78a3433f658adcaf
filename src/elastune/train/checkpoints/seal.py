"""JSON that carries the digest of its own bytes: what was changed or cut off since is not taken for what was written.

A digest finds damage, not malice: whoever may write the file may write another digest.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

_OPENING = b'{"sha256": "'
_MIDDLE = b'", "checkpoint": '
_CLOSING = b"}"


def seal(tree: Any) -> bytes:
    """``{"sha256": digest, "checkpoint": tree}``; the digest is that of the tree's bytes as they stand there."""
    return _sealed(json.dumps(tree).encode())


def unseal(content: bytes) -> Any:
    """The tree in what ``seal`` wrote. Raises ``ValueError`` where a byte of it is another one."""
    body = content[len(_OPENING) + 64 + len(_MIDDLE) : -len(_CLOSING)]
    if content != _sealed(body):
        raise ValueError("its bytes do not have the digest that it was written with")
    return json.loads(body)


def is_sealed(content: bytes) -> bool:
    """Whether ``content`` begins as ``seal`` begins."""
    return content.startswith(_OPENING)


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sealed(body: bytes) -> bytes:
    return _OPENING + hashlib.sha256(body).hexdigest().encode() + _MIDDLE + body + _CLOSING
