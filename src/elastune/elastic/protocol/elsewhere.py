"""Where the next controller listens, where that is another machine than before: it says so in a file.

The file is believed nothing: who listens there has to prove that it has the token, as ever.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

LOOK_S = 1.0  # between two looks at the file, which may lie on a file system of the network
LIMIT_BYTES = 4096


def _looked_up(host: str) -> str:
    host.encode("idna")  # as ``socket`` does, which raises ``UnicodeError`` for a part that is empty or too long
    return host


HostName = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^\s/]+$"), AfterValidator(_looked_up)]
"""A name or an address that a file may say, and that can be asked for."""


@dataclass(frozen=True, config=ConfigDict(extra="ignore"))
class _Said:
    address: HostName


_ADAPTER = TypeAdapter(_Said)


def at_host(address: str, host: str) -> str:
    """The port of ``address`` ("host:port") at another ``host``."""
    port = address.rpartition(":")[2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Elsewhere:
    """Where to look for what has listened at ``home`` ("host:port"): at the same port of the host that ``file`` names
    by then, a JSON object with an ``address``; "": there is no such file. What it does not say is as before."""

    def __init__(self, home: str, file: str = "") -> None:
        self._where, self._file = home, file
        self._next_look = 0.0

    @property
    def now(self) -> str:
        """The address ("host:port"). The file is looked at once a second at most, however often that is asked."""
        if self._file and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            try:
                with Path(self._file).open("rb") as file:
                    said = _ADAPTER.validate_json(file.read(LIMIT_BYTES), strict=True)
            except (OSError, ValueError):  # nobody has come yet, a file system shows half of it, or it names no host
                return self._where
            self._where = at_host(self._where, said.address)
        return self._where
