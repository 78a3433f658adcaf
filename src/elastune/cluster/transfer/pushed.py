"""The files that agents push, and the runs that they are of."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

from elastune.cluster.elastic_run import ElasticRun
from elastune.cluster.transfer.server import FileServer
from elastune.elastic.protocol.handshake import SALT_DIGITS


class PushedFiles:
    """Of the runs of one controller. ``address``, ``token``, ``tls``: see ``FileServer``; ``tell`` takes lines for the
    user. ``ring``: has the controller look; any thread calls it."""

    def __init__(self, address: str, token: str, tls: ssl.SSLContext | None, tell: Callable[[str], None]) -> None:
        self.ring: Callable[[], None] = lambda: None
        self._tell = tell
        self._server = FileServer(address, token, tls=tls, ring=lambda: self.ring(), tell=tell)
        self.port = self._server.port
        self._runs: dict[str, ElasticRun] = {}  # by the salts of their tokens, which agents know

    def add(self, run: ElasticRun, *, goes_on: bool) -> None:
        """Take what is pushed of ``run``. ``goes_on``: a controller before this one had it."""
        salt = run.coordinator.token[:SALT_DIGITS]
        self._runs[salt] = run
        self._server.open_run(salt, run.spec.out, run.spec.parent, goes_on=goes_on)

    def forget(self, out: Path) -> None:
        """Nobody goes on with the run in ``out``: what may still come of it is not to meet what begins there now."""
        for salt in [salt for salt, run in self._runs.items() if run.spec.out == out]:
            del self._runs[salt]
            self._server.close_run(salt)

    def look(self) -> None:
        """Tell runs what has come of their checkpoints, and take no more of those that are over."""
        for salt, record in self._server.news():
            if salt in self._runs:
                self._runs[salt].tell(record)
        for salt, run in list(self._runs.items()):
            if run.closed:
                del self._runs[salt]
                for lacks in self._server.close_run(salt):
                    self._tell(f"{run.spec.out.name}: a checkpoint is not complete, and is not used: {lacks}")

    def close(self) -> None:
        """Idempotent."""
        self._server.close()
