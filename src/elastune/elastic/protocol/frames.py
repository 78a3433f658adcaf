"""Messages on a byte stream: lines of bounded length."""

from __future__ import annotations

LINE_LIMIT_BYTES = 1 << 20


class ProtocolError(Exception):
    """The other side sent what no honest peer sends."""


class Lines:
    """Cuts a byte stream into lines of at most ``limit_bytes``."""

    def __init__(self, limit_bytes: int = LINE_LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes, without their ends. Raises ``ProtocolError`` where one is too long."""
        *ends, rest = data.split(b"\n")
        lines: list[bytes] = []
        for end in ends:
            self._extend(end)
            lines.append(bytes(self._rest))
            self._rest.clear()
        self._extend(rest)
        return lines

    def _extend(self, data: bytes) -> None:
        if len(self._rest) + len(data) > self.limit_bytes:
            raise ProtocolError(f"a message exceeds {self.limit_bytes} bytes")
        self._rest += data
