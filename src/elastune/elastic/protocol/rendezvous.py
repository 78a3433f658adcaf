"""What members of a view publish for each other: the addresses of its group, for the two newest views."""

from __future__ import annotations

from elastune.elastic.protocol.transport import ProtocolError

KEPT_VIEWS = 2
LIMIT_BYTES = 1 << 23


class RendezvousStore:
    """Values by key. A key begins with the number of its view and a slash: ``7/0/2``."""

    def __init__(self) -> None:
        self._views: dict[int, dict[str, str]] = {}
        self._newest = 0
        self._size_bytes = 0

    def begin(self, view: int) -> None:
        """``view`` is the newest now; what is older than the one before it is forgotten."""
        self._newest = max(self._newest, view)
        for old in [number for number in self._views if number <= self._newest - KEPT_VIEWS]:
            self._size_bytes -= sum(len(key) + len(value) for key, value in self._views.pop(old).items())

    def put(self, key: str, value: str) -> bool:
        """Keep it; False for a view that is forgotten. Raises ``ProtocolError`` for one to come, or for too much."""
        view = int(key.partition("/")[0])
        if view <= self._newest - KEPT_VIEWS:
            return False
        values = self._views.get(view, {})
        size = self._size_bytes + len(key) + len(value) - (len(key) + len(values[key]) if key in values else 0)
        if view > self._newest or size > LIMIT_BYTES:
            raise ProtocolError(f"it published {key!r} under view {self._newest}, {size} bytes in all")
        self._views.setdefault(view, {})[key] = value
        self._size_bytes = size
        return True

    def get(self, key: str) -> str | None:
        """What is kept under ``key``."""
        return self._views.get(int(key.partition("/")[0]), {}).get(key)

    def items(self) -> list[tuple[str, str]]:
        """All that is kept, oldest view first."""
        return [item for number in sorted(self._views) for item in self._views[number].items()]
