"""The workers that are connected to a coordinator, and what was last heard of each: who is silent, who lags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from elastune.elastic.coordinator.connections import Connection
from elastune.elastic.coordinator.stragglers import Pace, Sight, Straggler, straggler
from elastune.elastic.protocol.messages import Beat, Message, Report


@dataclass
class Peer:
    """A connected worker: its newest beat came at ``beat_at``, anything at all at ``heard_at``.

    ``loading``: it said last that it loads its program.
    """

    worker: int
    connection: Connection
    host: str
    heard_at: float
    beat_at: float
    beat: Beat = field(default_factory=Beat)
    loading: bool = True


class WorkerConnections:
    """Workers by number. One that is not heard for ``heartbeat_s`` is silent; for ``loading_s``, while it loads its
    program: some libraries let no other thread run for seconds when they are imported."""

    def __init__(self, heartbeat_s: float, loading_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._loading_s = loading_s
        self._peers: dict[int, Peer] = {}
        self._pace = Pace()
        self._told: set[tuple[int, int]] = set()
        self.next_silence = 0.0
        """Before this nobody can have been silent for long enough."""

    def __contains__(self, worker: int) -> bool:
        return worker in self._peers

    def get(self, worker: int) -> Peer | None:
        """``worker``, if it is connected."""
        return self._peers.get(worker)

    @property
    def step(self) -> int:
        """The furthest step that any of them is in. Any thread may ask."""
        return max((peer.beat.step for peer in list(self._peers.values())), default=0)

    def add(self, worker: int, connection: Connection, host: str, now: float) -> None:
        """``worker`` has come."""
        self._peers[worker] = Peer(worker, connection, host, now, now)

    def remove(self, worker: int) -> Connection | None:
        """``worker`` has gone; its connection, if it had one."""
        peer = self._peers.pop(worker, None)
        return peer.connection if peer else None

    def connections(self, but: int | None = None) -> list[Connection]:
        """Those of all workers ``but`` one."""
        return [peer.connection for worker, peer in self._peers.items() if worker != but]

    def heard(self, worker: int, now: float, message: Message) -> None:
        """``worker`` has said something."""
        peer = self._peers[worker]
        peer.heard_at = now
        if isinstance(message, Beat):
            peer.loading = message.doing == "loading"
        elif not isinstance(message, Report):
            peer.loading = False

    def beaten(self, worker: int, beat: Beat, now: float) -> None:
        """``worker`` has told what it is doing."""
        peer = self._peers[worker]
        peer.beat, peer.beat_at = beat, now
        self._pace.heard(now, beat.step)

    def excuse(self, now: float) -> None:
        """Nobody could be heard until ``now``, and that was nobody's fault."""
        for peer in self._peers.values():
            peer.heard_at = now

    def silent(self, now: float, due: float) -> list[int]:
        """Who is silent. ``due``: when this question was to be asked at the latest."""
        if (late := now - due) > self._heartbeat_s / 2:
            # This process itself did not run: what the workers said meanwhile may not be here yet.
            for peer in self._peers.values():
                peer.heard_at = min(now, peer.heard_at + late)
        if now < self.next_silence:
            return []
        silent = [worker for worker, peer in self._peers.items() if now - peer.heard_at >= self._patience_s(peer)]
        others = [peer for worker, peer in self._peers.items() if worker not in silent]
        # What is heard from now on only moves it.
        self.next_silence = self._heartbeat_s + min((now if o.loading else o.heard_at for o in others), default=now)
        return silent

    def _patience_s(self, peer: Peer) -> float:
        return self._loading_s if peer.loading else self._heartbeat_s

    def straggler(self, members: Sequence[int], now: float, last_line: Callable[[int], str]) -> Straggler | None:
        """Which of ``members``, by rank, keeps the others waiting; told once for each of its steps."""
        sights = [
            Sight(worker, rank, peer.host, peer.beat, now - peer.beat_at)
            for rank, worker in enumerate(members)
            if (peer := self._peers.get(worker)) is not None
        ]
        found = straggler(sights, self._pace.patience_s, last_line)
        if found is None or (found.worker, found.step) in self._told:
            return None
        self._told.add((found.worker, found.step))
        return found
