"""What a worker has heard from its coordinator, and how its main thread waits for more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from elastune.elastic.protocol import messages
from elastune.elastic.protocol.messages import Message
from elastune.elastic.protocol.rendezvous import RendezvousStore
from elastune.elastic.protocol.transport import ProtocolError
from elastune.elastic.protocol.view import View


class RunOver(Exception):
    """The run has ended, or this worker is cut off from it: there is nothing to wait for."""


class News:
    """Of worker ``worker``. ``note`` is called by the thread that hears; the main thread asks and waits."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.abandoned = False
        """Whether the coordinator is gone and nobody came in its place: this worker ends at its next checkpoint."""
        self.turned_away = False
        """Whether this worker lost its connection, came back, and the run goes on without it."""
        self._news = threading.Condition()
        self._latest: View | None = None
        self._forced = self._confirmed = 0
        self._board = RendezvousStore()
        self._over = ""
        self._stop = False

    def note(self, message: Message) -> None:
        """Hear ``message``. Raises ``ProtocolError`` for what no coordinator sends."""
        with self._news:
            self._take(message)
            self._news.notify_all()

    def _take(self, message: Message) -> None:
        match message:
            case messages.InstallView(version):
                self._latest = version
                self._board.begin(version.number)
                if not version.scheduled:
                    self._forced = version.number
            case messages.Confirmed(version):
                self._confirmed = version
            case messages.Publish(key, value):
                self._board.put(key, value)
            case messages.Stop():
                self._stop = True
            case messages.Bye():
                self._over = "the run is over"
            case messages.Beat():
                pass
            case _:
                raise ProtocolError(f"it sent {message.kind!r}")

    def stop_requested(self) -> bool:
        """Whether the run is to write a checkpoint and end."""
        return self._stop

    @property
    def latest(self) -> View | None:
        """The newest version that was proclaimed."""
        return self._latest

    def pending(self, current: int) -> View | None:
        """A scheduled view newer than ``current``."""
        latest = self._latest
        return latest if latest is not None and latest.scheduled and latest.number > current else None

    def superseded(self, number: int) -> bool:
        """Whether version ``number`` is over: a newer one took effect at once, or the run has ended."""
        return self._forced > number or bool(self._over)

    def await_version(self, after: int, timeout_s: float) -> View:
        """Block until there is a version newer than ``after`` that this worker has to enter at once.

        That is one which takes effect at once, or takes this worker in. Raises ``TimeoutError`` and ``RunOver``.
        """
        self._wait(lambda: self._to_enter(after) is not None, timeout_s)
        version = self._to_enter(after)
        if version is None:
            raise TimeoutError(f"no version after {after} within {timeout_s:g} s")
        return version

    def await_pending(self, current: int) -> View | None:
        """Block until a scheduled view newer than ``current`` was proclaimed; None once ``current`` is over, and where
        nobody proclaims anything any more."""
        with suppress(RunOver):
            self._wait(lambda: self.pending(current) is not None or self.superseded(current), None)
        return None if self.superseded(current) else self.pending(current)

    def await_confirmed(self, version: int) -> bool:
        """Block until this joiner is a member of ``version`` for good; False if a newer version comes first.

        Raises ``RunOver``.
        """
        self._wait(lambda: self._confirmed >= version or self._is_newer(version), None)
        return self._confirmed >= version

    def await_bye(self, after: int) -> View | None:
        """Block until the run is over (None), or there is a version newer than ``after`` to be entered at once."""
        try:
            self._wait(lambda: self._to_enter(after) is not None, None)
        except RunOver:
            return None
        return self._to_enter(after)

    def read(self, keys: list[str], timeout_s: float | None) -> list[str] | None:
        """What is published under ``keys``, once all is; None if not within ``timeout_s``.

        Raises ``RunOver`` as soon as the version that they belong to is superseded.
        """
        version = min(int(key.partition("/")[0]) for key in keys)
        found: list[str | None] = []

        def there() -> bool:
            found[:] = [self._board.get(key) for key in keys]
            return None not in found or self.superseded(version)

        self._wait(there, timeout_s)
        if None not in found:
            return [value for value in found if value is not None]
        if self.superseded(version):
            raise RunOver(f"version {version} is superseded")
        return None

    def published(self, key: str) -> bool:
        """Whether anything is published under ``key``."""
        with self._news:
            return self._board.get(key) is not None

    def _to_enter(self, after: int) -> View | None:
        latest = self._latest
        if latest is None or latest.number <= after or self.worker not in latest.members:
            return None
        return latest if not latest.scheduled or self.worker in latest.joiners else None

    def _is_newer(self, version: int) -> bool:
        return self._latest is not None and self._latest.number > version

    def _wait(self, there: Callable[[], bool], timeout_s: float | None) -> None:
        with self._news:
            self._news.wait_for(lambda: there() or bool(self._over) or self.abandoned, timeout_s)
            if (self._over or self.abandoned) and not there():
                raise RunOver(self._over or "the coordinator is gone")
