"""What a controller and its workers say to each other: JSON, one object a line, over a Unix socket.

Controller to worker: one ``Order``, then perhaps ``STOP``. Worker to controller: the records of its run
(``journal.records``). The end of the stream is a message too: the other side has gone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from elastune.core.run import Means, Place, Program, RunSpec

LINE_LIMIT_BYTES = 1 << 20
STOP = b'{"stop":true}\n'


class ProtocolError(Exception):
    """The other side sent what no honest peer sends."""


class Lines:
    """Cuts a byte stream into lines of at most ``limit_bytes``."""

    def __init__(self, limit_bytes: int = LINE_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
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
        if len(self._rest) + len(data) > self._limit_bytes:
            raise ProtocolError(f"a message exceeds {self._limit_bytes} bytes")
        self._rest += data


@dataclass(frozen=True)
class Order:
    """What one worker is to do, and the surroundings to do it in.

    ``entry`` is the ``module:function`` to call; ``environment`` the whole environment; ``folder`` the working
    directory; ``import_path`` Python's ``sys.path``. They are the controller's, as at the start of the run: the fork
    server may be older.
    """

    entry: str
    spec: RunSpec
    place: Place
    environment: dict[str, str]
    folder: str
    import_path: list[str]


def encode_order(order: Order) -> bytes:
    """One line of JSON with its line end. Raises ``TypeError`` where the configuration holds what JSON cannot."""
    return json.dumps(asdict(order), default=_path_as_text).encode() + b"\n"


def decode_order(line: bytes) -> Order:
    """The order in ``line``, as ``encode_order`` wrote it."""
    fields = json.loads(line)
    spec = fields["spec"]
    program = Program(Path(spec["program"]["path"]), spec["program"]["train"])
    known = {"program": program, "out": Path(spec["out"]), "means": Means(**spec["means"])}
    return Order(**{**fields, "spec": RunSpec(**{**spec, **known}), "place": Place(**fields["place"])})


def _path_as_text(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} is not JSON")
