"""Encrypted connections, where a token says by which certificate its server is known. No authority is asked.

A token that ends in ``:sha256:`` and 64 digits is of a server that has the certificate with that SHA-256. Its clients
go on with no other one, and nothing is said before. Python's own ``ssl`` does all the rest: TLS 1.3, nothing else.
"""

from __future__ import annotations

import hashlib
import re
import socket
import ssl
import threading
from pathlib import Path

from elastune.elastic.protocol.transport import ProtocolError

MARK = ":sha256:"
_NAMED = re.compile(f"{MARK}([0-9a-f]{{64}})")


class TlsSocket(ssl.SSLSocket):
    """An encrypted connection that is used as a plain one: by two threads, one that reads and one that writes.

    Where it does not block, ``recv`` raises ``BlockingIOError`` for half of what was encrypted, too.
    """

    using = threading.Lock()  # OpenSSL allows one call at a time; each has its own, once it is made

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        try:
            with self.using:
                return super().recv(buflen, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def send(self, data: bytes | bytearray | memoryview, flags: int = 0) -> int:  # type: ignore[override]
        try:
            with self.using:
                return super().send(data, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self, how)  # that of SSLSocket would let another thread write on in clear


def fingerprint_of(token: str) -> str:
    """The SHA-256 of the certificate that ``token`` names; "" for none: connections are not encrypted."""
    found = _NAMED.search(token)
    return found[1] if found and found.end() == len(token) else ""


def fingerprint(certificate: bytes) -> str:
    """Of ``certificate`` in DER, as tokens name it."""
    return hashlib.sha256(certificate).hexdigest()


def server_context(path: Path) -> ssl.SSLContext:
    """For ``served``: with the key and the certificate in the PEM file ``path``. Raises ``OSError``."""
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    context.num_tickets = 0  # nobody resumes, and a ticket would look like news that has nothing to read
    return context


def served(connection: socket.socket, context: ssl.SSLContext) -> TlsSocket:
    """The server's end of ``connection``; ``do_handshake`` is still to be called until it does not raise."""
    return _wrapped(context, connection, server=True)


def pinned(connection: socket.socket, wanted: str, limit_s: float) -> TlsSocket:
    """The client's end, to a server with the certificate of this fingerprint; in place of ``connection``.

    Raises ``OSError`` where the server closes or is silent, ``ProtocolError`` where it is another.
    """
    secured = of_anybody(connection, limit_s)
    if fingerprint(secured.getpeercert(binary_form=True) or b"") != wanted:
        secured.close()
        raise ProtocolError("its certificate is not the one that the token names")
    return secured


def of_anybody(connection: socket.socket, limit_s: float) -> TlsSocket:
    """As ``pinned``, with whatever certificate: nothing may be believed of such a server, nor said to it."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # by no authority: by what the token names, in ``pinned``
    secured = _wrapped(context, connection, server=False)
    try:
        secured.settimeout(limit_s)
        secured.do_handshake()
    except ssl.SSLEOFError:
        secured.close()
        raise ConnectionError("the other side closed the connection") from None
    except ssl.SSLError:
        secured.close()
        raise ProtocolError("it does not encrypt, as the token says (TLS 1.3)") from None
    except BaseException:
        secured.close()
        raise
    return secured


def decrypted(connection: socket.socket) -> int:
    """Bytes that were received, decrypted and not yet read: no selector tells of them."""
    return connection.pending() if isinstance(connection, TlsSocket) else 0


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = TlsSocket
    return context


def _wrapped(context: ssl.SSLContext, connection: socket.socket, *, server: bool) -> TlsSocket:
    secured = context.wrap_socket(connection, server_side=server, do_handshake_on_connect=False)
    assert isinstance(secured, TlsSocket)
    secured.using = threading.Lock()
    return secured
