"""The certificate of a controller that encrypts: self-signed, and known to agents by its SHA-256 in their token."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

from elastune.core.errors import UserError
from elastune.journal.atomic import atomic_write

NAME = "elastune"
YEARS = 10  # nobody looks at it: agents know one certificate, for as long as they have its token


def make_certificate(path: Path) -> bytes:
    """A new key and its certificate in the new file ``path``, for its owner alone; the certificate in DER.

    Raises ``UserError`` where what makes them is not installed, ``OSError`` where the file cannot be written.
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
    words = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain) + certificate.public_bytes(pem)
    atomic_write(path, words, mode=0o600)
    return certificate.public_bytes(serialization.Encoding.DER)
