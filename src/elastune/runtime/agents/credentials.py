"""The secret that agents and their controller share: a token file that its owner alone can read.

With ``--tls`` the token also names the controller's certificate by its SHA-256. The certificate is self-signed; it
lies with its key beside the controller's token file.
"""

from __future__ import annotations

import datetime
import os
import secrets
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path

from elastune.core.errors import UserError
from elastune.core.journal.files import atomic_write
from elastune.elastic.wire.transport import MARK, fingerprint, fingerprint_of, server_context

NAME = "elastune"
YEARS = 10  # not checked: agents accept one certificate for as long as they have its token


def make_certificate(path: Path) -> bytes:
    """Write a new key and its certificate into the new file ``path``, which its owner alone can read.

    Returns:
        The certificate in DER form.

    Raises:
        UserError: If the package that makes them is not installed, or the file exists.
        OSError: If the file cannot be written.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        rule = "a certificate is made by the package cryptography"
        raise UserError(rule, "it is not installed", "pip install 'elastune[tls]'") from None
    if os.path.lexists(path):
        raise UserError("a new certificate needs a new file", path, "remove it with the token file that it belongs to")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=365 * YEARS))
    certificate = builder.sign(key, hashes.SHA256())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    content = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain) + certificate.public_bytes(pem)
    atomic_write(path, content, mode=0o600)
    return certificate.public_bytes(serialization.Encoding.DER)


BYTES, LIMIT_BYTES = 32, 4096
SHORTEST = 16  # characters


@dataclass(frozen=True)
class Credentials:
    """The secret with which a controller listens. ``tls``: the certificate that ``token`` names, if it names one."""

    token: str = field(repr=False)
    tls: ssl.SSLContext | None = None


def credentials(path: Path, *, tls: bool = False) -> Credentials:
    """Read the credentials from the token file ``path``, or make them if the file does not exist.

    Args:
        path: The token file.
        tls: Whether connections must be encrypted. They are also encrypted if an existing file names a certificate.

    Raises:
        UserError: If the file or its certificate is not right.
    """
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
        digest = fingerprint(ssl.PEM_cert_to_DER_cert(_certificate_in(_read_private(beside))))
        context = server_context(beside)
    except (OSError, ValueError) as error:
        value = f"{beside}: {getattr(error, 'strerror', None) or error}"
        raise UserError("a token's certificate and its key must lie beside it", value, fix) from None
    if digest != wanted:
        raise UserError("a token must name the certificate beside it", f"{beside} holds another", fix)
    return Credentials(token, context)


def certificate_path(path: Path) -> Path:
    """The file with the certificate, and its key, of the token file ``path``."""
    return path.with_name(f"{path.name}.pem")


def make_token(path: Path, *, tls: bool = False) -> str:
    """Write a new token into the new file ``path``. Raises ``UserError`` if it exists or cannot be written."""
    if os.path.lexists(path):
        raise UserError("a new token needs a new file", path, "use the existing file, or remove it")
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
    """Return the token in ``path``. Raises ``UserError`` if it holds none, or others may read it."""
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
    """Return the content of ``path``. Raises ``OSError``, and ``UserError`` if others than its owner may read it."""
    with path.open("rb") as file:
        mode, text = os.fstat(file.fileno()).st_mode, file.read(LIMIT_BYTES)
    if stat.S_IMODE(mode) & 0o077:
        value = f"{path} has mode {stat.S_IMODE(mode):o}"
        raise UserError("a token and its key are for their owner alone", value, f"chmod 600 {path}")
    return text


def _certificate_in(text: bytes) -> str:
    """Return the certificate in ``text``, which holds its key, too."""
    return text[text.find(ssl.PEM_HEADER.encode()) :].decode("ascii")
