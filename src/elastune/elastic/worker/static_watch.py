"""Workers that another launcher started have no coordinator: each tells the others what it does, and looks for itself.

They tell it in the store by which they found each other, once in a while, from a thread that nothing waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from elastune.elastic.coordinator.standstill import Standstill, standstill
from elastune.elastic.coordinator.stragglers import COLLECTIVES, Sight
from elastune.elastic.protocol.messages import Beat, decode, encode
from elastune.elastic.worker.group import WorkerGroup

EVERY_S = 0.5
STUCK_S = 5.0  # a library that does not let go of the main thread by then never will


class Apart(Exception):
    """The workers of a static run will never come together; ``found`` says why."""

    def __init__(self, found: Standstill) -> None:
        super().__init__(found.detail)
        self.found = found


class StaticWatch:
    """Watches over ``workers`` from now until ``end``, by way of ``store``.

    ``limit_s``: how long they may wait for one that does something else. ``on_stuck``: called in this object's thread
    where they will never come together and this worker cannot be told, since its main thread is held by a library.
    """

    def __init__(
        self, workers: WorkerGroup, store: Store, limit_s: float, on_stuck: Callable[[Apart], None] = lambda why: None
    ) -> None:
        self._workers = workers
        self._store = store
        self._limit_s = limit_s
        self._on_stuck = on_stuck
        self._found: Standstill | None = None
        self._told = 0  # how often this worker has told what it does
        self._seen: dict[int, tuple[bytes, float]] = {}  # what each other one told last, and since when that is known
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, name="static watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Look no more."""
        self._ended.set()

    @property
    def found(self) -> Standstill | None:
        """Why a collective that has failed here could not succeed; another worker may have found it first, and ended.

        Raises ``RuntimeError`` where the store is gone.
        """
        return self._found or self._compare(self._workers.failed or self._workers.beat())

    def _compare(self, own: Beat) -> Standstill | None:
        """What follows from ``own``, which the others are told, and from what they told."""
        self._tell(own)
        sights = [Sight(self._workers.rank, self._workers.rank, "", own, 0.0)]
        for rank in set(range(self._workers.size)) - {self._workers.rank}:
            if self._store.check([_key(rank)]):
                told = self._store.get(_key(rank))
                beat = decode(told.partition(b" ")[2])
                assert isinstance(beat, Beat)
                sights.append(Sight(rank, rank, "", beat, self._known_s(rank, told)))
        return standstill(sights, self._limit_s)

    def _known_s(self, rank: int, told: bytes) -> float:
        """For how long it is known here that ``rank`` has ``told`` this, and nothing since. No clock is compared with
        another's: those of hosts differ, and jump."""
        with self._lock:
            if self._seen.get(rank, (b"", 0.0))[0] != told:
                self._seen[rank] = told, time.monotonic()
            return time.monotonic() - self._seen[rank][1]

    def _tell(self, own: Beat) -> None:
        with self._lock:
            self._told += 1
            self._store.set(_key(self._workers.rank), f"{self._told} {encode(own).decode()}")

    def _live(self) -> None:
        try:
            while not self._ended.wait(EVERY_S):
                own = self._workers.beat()
                if own.doing not in COLLECTIVES:
                    self._tell(own)
                elif (found := self._compare(own)) is not None and not self._ended.is_set():
                    self._found = found
                    self._workers.group.abandon(found.detail)
                    if not self._ended.wait(STUCK_S):
                        self._on_stuck(Apart(found))
                    return
        except RuntimeError:  # the store went with its worker: what waits for that one ends by its connections
            return


def _key(rank: int) -> str:
    return f"elastune/doing/{rank}"
