"""The workers that are connected to a coordinator, and what was last heard of each: who is silent, who lags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from elastune.elastic.stragglers import HeartbeatSample, Pace, Stall, Straggler, find_stall, straggler
from elastune.elastic.wire.messages import Beat, Message, Report
from elastune.elastic.wire.server import Connection

BEATS = 5  # heartbeats that a worker has to miss before it counts as silent
BEATS_WAITED_FOR = 3  # the same, for a worker whose round can end without it
LONGEST_BEAT_S, LEAST_BEAT_S = 0.5, 0.05
STANDING = ("reducing", "forming")  # activities in which a worker waits for others
LOOKS_APART_S = 1.5  # an agent reports processes once a second: two looks closer together may see one report
BEATS_A_SECOND = 4096  # of all workers: beyond that they beat less often, as far as ``BEATS`` allows


def beat_every_s(heartbeat_s: float, workers: int) -> float:
    """The interval at which each of so many ``workers`` sends a heartbeat, if one is silent after ``heartbeat_s``."""
    return min(heartbeat_s / BEATS, max(LONGEST_BEAT_S, workers / BEATS_A_SECOND))


def least_beat_s(workers: int) -> float:
    """The shortest interval at which each of so many ``workers`` may send heartbeats."""
    return max(LEAST_BEAT_S, workers / BEATS_A_SECOND)


@dataclass(frozen=True)
class ProcessStatus:
    """The system's record of a process: its ``state`` as in proc(5), and the processor time that it has used."""

    state: str
    cpu_s: float

    @property
    def lives(self) -> bool:
        """Whether the process can go on by itself: it has not ended, and it is not stopped or traced."""
        return self.state not in "TtZX"

    def works_since(self, before: ProcessStatus | None) -> bool:
        """Whether the process runs, waits for a disk, or has run since ``before``; never true of a stopped process."""
        if not self.lives:
            return False
        return self.state in "RD" or (before is not None and self.cpu_s > before.cpu_s)


ProcessStatusOf = Callable[[int], ProcessStatus | None]


@dataclass
class Peer:
    """A connected worker, with what its messages and its process show.

    Attributes:
        received_at: When its newest message came.
        beat_at: When its newest heartbeat came.
        loading: Its newest heartbeat reported that it loads its program.
        excused_at: When it was last found silent but at work.
        vitals: The status of its process in the middle of a silence, seen at ``looked_at``.
        waits_s: How long it may be silent in a round that can end without it.
        stands_at: The step that it cannot end by itself, according to its newest message.
    """

    worker: int
    connection: Connection
    host: str
    received_at: float
    beat_at: float
    beat: Beat = field(default_factory=Beat)
    loading: bool = True
    excused_at: float = -inf
    vitals: ProcessStatus | None = None
    looked_at: float | None = None
    waits_s: float = inf
    stands_at: int | None = None

    @property
    def counts_from(self) -> float:
        """The time from which its silence is counted."""
        return max(self.received_at, self.excused_at)


class WorkerConnections:
    """The connected workers by number, and the rules by which a silent one counts as lost.

    A worker is silent after ``heartbeat_s`` without a message. While it loads its program, the limit is ``loading_s``,
    because some libraries let no other thread run for seconds when they are imported.

    Slow is not dead. If ``vitals_of`` sees the worker's process at work (one long call may hold Python's lock), the
    worker is excused for another heartbeat. If no worker at all is heard, the network may be away, or this machine was
    suspended: then all workers are waited for, up to ``pause_s``, except those whose process is seen to be dead. A
    worker that is alone is waited for only if its process is seen to live.
    """

    def __init__(
        self,
        heartbeat_s: float,
        loading_s: float,
        vitals_of: ProcessStatusOf = lambda worker: None,
        pause_s: float = 0.0,
    ) -> None:
        self._pause_s = pause_s
        self._vitals_of = vitals_of
        self._excused: list[Straggler] = []
        self._heartbeat_s = heartbeat_s
        self._loading_s = loading_s
        self._least_due_s = heartbeat_s  # the shortest limit of any worker so far
        self._peers: dict[int, Peer] = {}
        self._pace = Pace()
        self._named: set[tuple[int, int]] = set()
        self.next_silence = 0.0
        """Before this time no worker can have been silent for long enough."""

    def __contains__(self, worker: int) -> bool:
        return worker in self._peers

    def get(self, worker: int) -> Peer | None:
        """``worker``, if it is connected."""
        return self._peers.get(worker)

    @property
    def step(self) -> int:
        """The highest step that any worker is in. Any thread may read it."""
        return max((peer.beat.step for peer in list(self._peers.values())), default=0)

    def add(self, worker: int, connection: Connection, host: str, now: float) -> None:
        """Note that ``worker`` has connected."""
        self._peers[worker] = Peer(worker, connection, host, now, now)

    def remove(self, worker: int) -> Connection | None:
        """Forget ``worker``. Returns its connection, if it had one."""
        peer = self._peers.pop(worker, None)
        return peer.connection if peer else None

    def connections(self, but: int | None = None) -> list[Connection]:
        """The connections of all workers ``but`` one."""
        return [peer.connection for worker, peer in self._peers.items() if worker != but]

    def message_received(self, worker: int, now: float, message: Message) -> None:
        """Note that ``worker`` has sent ``message``."""
        peer = self._peers[worker]
        peer.received_at, peer.looked_at = now, None
        if isinstance(message, Beat):
            peer.loading = message.doing == "loading"
            peer.waits_s = peer.waits_s if message.doing == "reducing" else inf
            peer.stands_at = message.step if message.doing in STANDING else None
        elif not isinstance(message, Report):
            peer.loading = False

    def beaten(self, worker: int, beat: Beat, now: float) -> None:
        """Note the heartbeat of ``worker``."""
        peer = self._peers[worker]
        peer.beat, peer.beat_at = beat, now
        self._pace.message_received(now, beat.step)

    def waits(self, beat_s: float, worker: int, step: int, grace_s: float, now: float) -> None:
        """Shorten the patience with ``worker``: it takes part in a round that can end without it, after ``grace_s``.

        The limit holds as long as another worker is heard that waits in the same step. If there is none, the exchange
        is over, and the worker may do something else that it has not reported yet. A worker that has not reached the
        step is bound by the limit until its next heartbeat.

        Args:
            beat_s: The interval of heartbeats, if the worker has reported no other one.
            worker: The worker.
            step: The step at whose end the workers wait.
            grace_s: The grace period of the round.
            now: The time now.
        """
        if (peer := self._peers.get(worker)) is None:
            return
        if self._vitals_of(worker) is not None:  # else only silence shows a death, and a slow network is silent, too
            beat_s = max(peer.beat.every_s or beat_s, min(beat_s, grace_s))  # the grace may just have become longer
        peer.stands_at = step
        peer.waits_s = min(self._heartbeat_s, grace_s + BEATS_WAITED_FOR * beat_s)
        self._least_due_s = min(self._least_due_s, peer.waits_s)
        if (halfway := peer.counts_from + peer.waits_s / 2) < now:
            self._look_at(peer, now)
        self.next_silence = min(self.next_silence, max(halfway, now + beat_s))

    def why_silent(self, worker: int) -> str:
        """The reason why ``worker``, which is silent, counts as lost."""
        peer = self._peers[worker]
        if peer.waits_s < self._heartbeat_s:
            return f"it has been silent for {peer.waits_s:g} s at the end of a round that needs a quorum alone (grace)"
        host = f"host {peer.host}: " if len({each.host for each in self._peers.values()}) > 1 else ""
        return f"{host}it has been silent for {self._heartbeat_s:g} s (--heartbeat)"

    def excuse(self, now: float) -> None:
        """Note that no worker could be heard until ``now``, through no fault of theirs."""
        for peer in self._peers.values():
            peer.received_at = now

    def silent(self, now: float, due: float) -> list[int]:
        """The workers that are silent at ``now``.

        ``due``: the latest time at which this method should have been called.
        """
        late = now - due
        for peer in self._peers.values() if late > self._least_due_s / 2 else ():
            # This process itself did not run: messages that the workers sent meanwhile may still be in flight.
            if late > self._due_s(peer) / 2:
                peer.received_at = min(now, peer.received_at + late)
        if now < self.next_silence:
            return []
        newest = max((peer.received_at for peer in self._peers.values()), default=now)
        silent = {worker for worker, peer in self._peers.items() if self._is_silent(peer, now, newest)}
        waits = [self._next_look(peer, now) for worker, peer in self._peers.items() if worker not in silent]
        # A worker that connects or finishes loading meanwhile is checked in time, too.
        self.next_silence = min([*waits, now + self._heartbeat_s / 2])
        return sorted(silent)

    def take_excused(self) -> list[Straggler]:
        """Remove and return the workers that were silent but at work; each silence is returned once."""
        excused, self._excused = self._excused, []
        return excused

    def _is_silent(self, peer: Peer, now: float, newest: float) -> bool:
        """Whether ``peer`` counts as lost. Its process is looked at halfway and at the end: has it worked in between?

        ``newest``: when any worker was heard last.
        """
        patience_s, waited_s = self._patience_s(peer, now), now - peer.counts_from
        if waited_s >= patience_s / 2:
            self._look_at(peer, now)
        if waited_s < patience_s:
            return False
        vitals = self._vitals_of(peer.worker)
        pauses = self._all_pause(peer, vitals, now, newest)
        if not pauses and (vitals is None or not vitals.works_since(peer.vitals)):
            return vitals is None or not vitals.lives or now >= self._compares_at(peer)
        if peer.excused_at < peer.received_at:
            line = (
                f"worker {peer.worker} has been silent for {now - peer.received_at:.1f} s, longer than "
                + f"{patience_s:g} s "
                + ("(--heartbeat), but " if patience_s >= self._heartbeat_s else "(grace), but ")
                + ("so have all" if pauses else "its process works")
                + ": it is waited for "
                + ("(is the network away?)" if pauses else "(does one call hold Python's lock?)")
            )
            self._excused.append(Straggler(peer.worker, peer.beat.step, line))
        peer.excused_at, peer.looked_at = now, None
        return False

    def _look_at(self, peer: Peer, now: float) -> None:
        """Record the status of its process, once in a silence."""
        if peer.looked_at is None:
            peer.looked_at, peer.vitals = now, self._vitals_of(peer.worker)

    def _compares_at(self, peer: Peer) -> float:
        """The time from which two statuses of its process can be compared."""
        return -inf if peer.looked_at is None else peer.looked_at + min(LOOKS_APART_S, self._heartbeat_s / 2)

    def _all_pause(self, peer: Peer, vitals: ProcessStatus | None, now: float, newest: float) -> bool:
        """Whether ``peer`` may be silent because no worker at all can be heard."""
        if now - newest < self._due_s(peer) / 2 or now - peer.received_at >= self._pause_s:
            return False
        return len(self._peers) > 1 if vitals is None else vitals.lives

    def _next_look(self, peer: Peer, now: float) -> float:
        due = peer.counts_from + self._patience_s(peer, now) / (2 if peer.looked_at is None else 1)
        return due if due > now else max(due, self._compares_at(peer))

    def _patience_s(self, peer: Peer, now: float) -> float:
        if peer.loading:
            return self._loading_s
        return self._due_s(peer) if self._is_waited_for(peer, now) else self._heartbeat_s

    def _is_waited_for(self, peer: Peer, now: float) -> bool:
        """Whether another worker is heard that waits in the same step as ``peer``."""
        return peer.waits_s < self._heartbeat_s and any(
            other.stands_at == peer.stands_at and now - other.received_at < peer.waits_s
            for other in self._peers.values()
            if other is not peer
        )

    def _due_s(self, peer: Peer) -> float:
        """The time that a healthy ``peer`` which has loaded its program may be silent."""
        return min(self._heartbeat_s, peer.waits_s)

    def look(
        self, members: Sequence[int], now: float, limit_s: float, last_line: Callable[[int], str]
    ) -> Stall | Straggler | None:
        """Look for a member that makes the others wait.

        Args:
            members: The members, by rank.
            now: The time now.
            limit_s: The members wait this long for one member at most.
            last_line: Returns the last line of a worker's log.

        Returns:
            The reason why the members will never come together; or else the member that keeps the others waiting, once
            for each of its steps; or None.
        """
        sights = self._sights(members, now)
        if (apart := find_stall(sights, limit_s)) is not None:
            return apart
        slowest = straggler(sights, self._pace.patience_s, last_line)
        if slowest is None or (slowest.worker, slowest.step) in self._named:
            return None
        self._named.add((slowest.worker, slowest.step))
        return slowest

    def _sights(self, members: Sequence[int], now: float) -> list[HeartbeatSample]:
        return [
            HeartbeatSample(worker, rank, peer.host, peer.beat, now - peer.beat_at)
            for rank, worker in enumerate(members)
            if (peer := self._peers.get(worker)) is not None
        ]
