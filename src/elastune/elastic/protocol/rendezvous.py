"""What members of a version publish for each other: the addresses of its group, for the two newest versions."""

from __future__ import annotations

from elastune.elastic.protocol.transport import ProtocolError

KEPT_VERSIONS = 2
LIMIT_BYTES = 1 << 23


class RendezvousStore:
    """Values by key. A key begins with the number of its version and a slash: ``7/0/2``."""

    def __init__(self) -> None:
        self._versions: dict[int, dict[str, str]] = {}
        self._newest = 0
        self._size_bytes = 0

    def begin(self, version: int) -> None:
        """``version`` is the newest now; what is older than the one before it is forgotten."""
        self._newest = max(self._newest, version)
        for old in [number for number in self._versions if number <= self._newest - KEPT_VERSIONS]:
            self._size_bytes -= sum(len(key) + len(value) for key, value in self._versions.pop(old).items())

    def put(self, key: str, value: str) -> bool:
        """Keep it; False for a version that is forgotten. Raises ``ProtocolError`` for one to come, or for too much."""
        version = int(key.partition("/")[0])
        if version <= self._newest - KEPT_VERSIONS:
            return False
        values = self._versions.get(version, {})
        size = self._size_bytes + len(key) + len(value) - (len(key) + len(values[key]) if key in values else 0)
        if version > self._newest or size > LIMIT_BYTES:
            raise ProtocolError(f"it published {key!r} under version {self._newest}, {size} bytes in all")
        self._versions.setdefault(version, {})[key] = value
        self._size_bytes = size
        return True

    def get(self, key: str) -> str | None:
        """What is kept under ``key``."""
        return self._versions.get(int(key.partition("/")[0]), {}).get(key)

    def items(self) -> list[tuple[str, str]]:
        """All that is kept, oldest version first."""
        return [item for number in sorted(self._versions) for item in self._versions[number].items()]
