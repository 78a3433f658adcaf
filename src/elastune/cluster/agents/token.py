"""The secret that agents and their controller share: a file that its owner alone can read.

With ``--tls`` the token names the controller's certificate, which lies with its key beside the controller's file.
"""

from __future__ import annotations

import os
import secrets
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path

from elastune.cluster.agents.certificate import make_certificate
from elastune.core.errors import UserError
from elastune.elastic.protocol.tls import MARK, fingerprint, fingerprint_of, server_context
from elastune.journal.atomic import atomic_write

BYTES, LIMIT_BYTES = 32, 4096
SHORTEST = 16  # characters


@dataclass(frozen=True)
class Credentials:
    """What a controller listens with. ``tls``: the certificate that ``token`` names, if it does."""

    token: str = field(repr=False)
    tls: ssl.SSLContext | None = None


def credentials(path: Path, *, tls: bool = False) -> Credentials:
    """Those of the token file ``path``, made where there is none. ``tls``: its connections must be encrypted; they are
    also where a file that is there says so. Raises ``UserError``."""
    token = read_token(path) if os.path.lexists(path) else make_token(path, tls=tls)
    wanted = fingerprint_of(token)
    if not wanted:
        if tls:
            fix = "remove it, so that a new one is made, and copy that to the hosts"
            raise UserError("with --tls a token file must name a certificate", f"{path} names none", fix)
        return Credentials(token)
    beside = certificate_path(path)
    fix = "put back the file that was made with the token, or remove the token, so that both are made anew"
    try:
        found = fingerprint(ssl.PEM_cert_to_DER_cert(_certificate_in(_read_private(beside))))
        context = server_context(beside)
    except (OSError, ValueError) as error:
        value = f"{beside}: {getattr(error, 'strerror', None) or error}"
        raise UserError("a token's certificate and its key must lie beside it", value, fix) from None
    if found != wanted:
        raise UserError("a token must name the certificate beside it", f"{beside} holds another", fix)
    return Credentials(token, context)


def certificate_path(path: Path) -> Path:
    """Of the certificate, and its key, of the token file ``path``."""
    return path.with_name(f"{path.name}.pem")


def make_token(path: Path, *, tls: bool = False) -> str:
    """A new token in a new file ``path``. Raises ``UserError`` where there is one or none can be made."""
    if os.path.lexists(path):
        raise UserError("a new token needs a new file", path, "use the one that is there, or remove it")
    token = secrets.token_urlsafe(BYTES)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if tls:
            token += MARK + fingerprint(make_certificate(certificate_path(path)))
        atomic_write(path, token.encode() + b"\n", mode=0o600)
    except OSError as error:
        raise UserError("a token needs a file", f"{path}: {error.strerror}", "choose another folder") from None
    return token


def read_token(path: Path) -> str:
    """The token in ``path``. Raises ``UserError`` where it holds none, or others may read it."""
    try:
        text = _read_private(path)
    except OSError as error:
        fix = "copy the file that the controller made to this machine"
        raise UserError("--token-file must name a file with a token", f"{path}: {error.strerror}", fix) from None
    token = text.strip()
    if len(token) < SHORTEST or not all(33 <= byte < 127 for byte in token):
        fix = "copy the file that the controller made to this machine"
        raise UserError(f"a token has {SHORTEST} characters or more, none of them a space", path, fix)
    return token.decode("ascii")


def _read_private(path: Path) -> bytes:
    """What ``path`` holds. Raises ``OSError``, and ``UserError`` where others than its owner may read it."""
    with path.open("rb") as file:
        mode, text = os.fstat(file.fileno()).st_mode, file.read(LIMIT_BYTES)
    if stat.S_IMODE(mode) & 0o077:
        value = f"{path} has mode {stat.S_IMODE(mode):o}"
        raise UserError("a token and its key are for their owner alone", value, f"chmod 600 {path}")
    return text


def _certificate_in(text: bytes) -> str:
    """The certificate in a file that holds its key, too."""
    return text[text.find(ssl.PEM_HEADER.encode()) :].decode("ascii")
