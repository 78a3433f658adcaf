"""A server that speaks the protocol properly, but has another token than its clients."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType

from elastune.elastic.wire.contact import NONCE_DIGITS, challenge, new_nonce, respond


class Impostor:
    """Answers each client as a server with ``token`` would, whatever the client proves, and sends its first message.

    Args:
        purpose: The purpose of the server that it pretends to be, such as "run".
        welcome: What it sends behind its proof: a message that the client waits for.
        token: Its own token; None: it sends the client's own proof back.
    """

    def __init__(self, purpose: str, welcome: bytes, token: str | None) -> None:
        self._purpose, self._welcome, self._token = purpose, welcome, token
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.clients = 0
        """How many clients have sent their proof."""
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                connection, _ = self._listener.accept()
                with connection, suppress(OSError):
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        challenged = challenge(new_nonce())
        connection.sendall(challenged)
        reader = connection.makefile("rb")
        response = reader.readline()
        self.clients += 1
        nonce, _, proof = response.rstrip(b"\n").partition(b" ")
        assert len(nonce) == NONCE_DIGITS
        own_proof = proof + b"\n" if self._token is None else respond(self._token, self._purpose, challenged, nonce)[1]
        connection.sendall(own_proof + self._welcome)
        reader.read()  # until the client closes

    def __enter__(self) -> Impostor:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10.0)
