"""The rendezvous of a version's process group, carried by the members' connections to the coordinator."""

from __future__ import annotations

import base64
from datetime import timedelta

from torch._C._distributed_c10d import Store

from elastune.elastic.worker.client import CoordinatorClient
from elastune.elastic.worker.news import RunOver

DEFAULT_S = 300.0


class MemberStore(Store):
    """What the members of a version tell each other. Every key begins with the version's number and a slash, so it is
    used through ``PrefixStore(str(version), store)``. Keep a reference to it: torch's own does not keep the methods.

    A wait raises as soon as the version is superseded. ``add`` and the rest of a ``Store`` are not there: no two
    members ever write the same key.
    """

    def __init__(self, member: CoordinatorClient) -> None:
        super().__init__()
        self._member = member

    def set(self, key: str, value: bytes | str) -> None:
        """Tell everybody."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._member.publish(key, base64.b64encode(data).decode())

    def get(self, key: str) -> bytes:
        """What somebody has told; waits for it."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """As ``get``, for each."""
        return [base64.b64decode(value) for value in self._read(keys, None)]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all are there. Raises ``RuntimeError``."""
        self._read(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return all(self._member.published(key) for key in keys)

    def _read(self, keys: list[str], timeout: timedelta | None) -> list[str]:
        limit_s = DEFAULT_S if timeout is None else timeout.total_seconds()
        try:
            values = self._member.read(keys, limit_s)
        except RunOver as error:
            raise RuntimeError(str(error)) from None
        if values is None:
            raise RuntimeError(f"nobody published {', '.join(keys)} within {limit_s:g} s")
        return values
