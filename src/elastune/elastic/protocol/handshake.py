"""Who may come, settled without telling the secret: each side proves that it has the token, and neither sends it.

    server  elastune-1 NONCE
    client  NONCE PROOF          and at once what it has to say
    server  PROOF                and at once its answer

A proof is the HMAC-SHA256, by the token, of the side that proves, what its server is for, and both nonces. So it holds
for one connection, one side and one kind of server: it cannot be replayed, reflected, or carried elsewhere. All is
ASCII of fixed length, so no byte more than that is read of a stranger. Bytes in, bytes out: connections are others'.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from elastune.elastic.protocol.tls import MARK, fingerprint_of
from elastune.elastic.protocol.transport import ProtocolError

PROTOCOL = b"elastune-1"
NONCE_DIGITS, PROOF_DIGITS = 32, 64
SALT_DIGITS = 32
CHALLENGE_BYTES = len(PROTOCOL) + 1 + NONCE_DIGITS + 1
RESPONSE_BYTES = NONCE_DIGITS + 1 + PROOF_DIGITS + 1
PROOF_BYTES = PROOF_DIGITS + 1
REFUSAL = b"this is not the token".ljust(PROOF_DIGITS) + b"\n"
"""What a server says in place of its proof, to who has another token."""
BUSY = b"too many came at once".ljust(PROOF_DIGITS) + b"\n"
"""Likewise, to one whose proof it has not looked at: come again."""
DIGITS = frozenset(b"0123456789abcdef")


class TokenRefused(ProtocolError):
    """The other side has another token."""


def new_nonce() -> bytes:
    """For one connection, never again."""
    return secrets.token_hex(NONCE_DIGITS // 2).encode()


def challenge(nonce: bytes) -> bytes:
    """The server's first line."""
    return b"%b %b\n" % (PROTOCOL, nonce)


def respond(token: str, purpose: str, challenged: bytes, nonce: bytes) -> tuple[bytes, bytes]:
    """What a client says to the line ``challenged``, and what none but its server can say then.

    ``purpose``: what the server is for; ``nonce``: the client's. Raises ``ProtocolError`` for what is no challenge.
    """
    theirs = challenged[len(PROTOCOL) + 1 : -1]
    if challenged != challenge(theirs) or not _is_nonce(theirs):
        raise ProtocolError(f"it does not speak {PROTOCOL.decode()}")
    response = b"%b %b\n" % (nonce, _proof(token, "client", purpose, theirs, nonce))
    return response, _proof(token, "server", purpose, theirs, nonce) + b"\n"


def admit(token: str, purpose: str, nonce: bytes, response: bytes) -> bytes:
    """The server's proof, for a client that has answered its ``nonce`` with ``response``.

    Raises ``TokenRefused`` for who has another token, ``ProtocolError`` for what is no response.
    """
    theirs, proof = response[:NONCE_DIGITS], response[NONCE_DIGITS + 1 : -1]
    if response != b"%b %b\n" % (theirs, proof) or len(proof) != PROOF_DIGITS or not _is_nonce(theirs):
        raise ProtocolError(f"it does not speak {PROTOCOL.decode()}")
    if not hmac.compare_digest(proof, _proof(token, "client", purpose, nonce, theirs)):
        raise TokenRefused("it has another token")
    return _proof(token, "server", purpose, nonce, theirs) + b"\n"


def verify(said: bytes, expected: bytes) -> None:
    """Whether what a server ``said`` is the proof that was ``expected``. Raises ``ProtocolError`` where it is not."""
    if said == REFUSAL:
        raise TokenRefused("it has another token")
    if not hmac.compare_digest(said, expected):
        raise ProtocolError("it has not proved that it has the token")


def derived(token: str, salt: str = "") -> str:
    """A token that begins with ``salt`` (by default a new one), by which alone all who have ``token`` can make it.

    Its server has the same certificate, where ``token`` names one.
    """
    salt = salt or secrets.token_hex(SALT_DIGITS // 2)
    text = b"%b derived %b" % (PROTOCOL, salt.encode())
    certificate = fingerprint_of(token)
    return salt + hmac.new(token.encode(), text, hashlib.sha256).hexdigest() + (certificate and MARK + certificate)


def _proof(token: str, side: str, purpose: str, servers: bytes, clients: bytes) -> bytes:
    # No part but the first two can vary in length, and those are words of our own without a space.
    text = b" ".join((PROTOCOL, side.encode(), purpose.encode(), servers, clients))
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest().encode()


def _is_nonce(text: bytes) -> bool:
    return len(text) == NONCE_DIGITS and DIGITS.issuperset(text)
