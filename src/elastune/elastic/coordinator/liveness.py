"""The workers that are connected to a coordinator, and what was last heard of each: who is silent, who lags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from elastune.elastic.stragglers import HeartbeatSample, Pace, Stall, Straggler, find_stall, straggler
from elastune.elastic.wire.messages import Beat, Message, Report
from elastune.elastic.wire.server import Connection

BEATS = 5  # of a worker, before it counts as silent
BEATS_WAITED_FOR = 3  # of a worker that waits where others can do without it
LONGEST_BEAT_S, LEAST_BEAT_S = 0.5, 0.05
STANDING = ("reducing", "forming")  # where others are waited for
LOOKS_APART_S = 1.5  # an agent tells of its host's processes once a second: what was seen sooner may be the same sight
BEATS_A_SECOND = 4096  # of all workers: more of them beat more seldom, as far as ``BEATS`` allows


def beat_every_s(heartbeat_s: float, workers: int) -> float:
    """How often each of so many ``workers`` says that it lives, where one counts as silent after ``heartbeat_s``."""
    return min(heartbeat_s / BEATS, max(LONGEST_BEAT_S, workers / BEATS_A_SECOND))


def least_beat_s(workers: int) -> float:
    """How often each of them may say it at most."""
    return max(LEAST_BEAT_S, workers / BEATS_A_SECOND)


@dataclass(frozen=True)
class ProcessStatus:
    """What the system says of a process: its ``state`` as in proc(5), and the processor time that it has used."""

    state: str
    cpu_s: float

    @property
    def lives(self) -> bool:
        """Whether it can go on by itself: it has not ended, and nobody has stopped it."""
        return self.state not in "TtZX"

    def works_since(self, before: ProcessStatus | None) -> bool:
        """Whether it runs, waits for a disk, or has run since ``before``; a stopped or traced one never does."""
        if not self.lives:
            return False
        return self.state in "RD" or (before is not None and self.cpu_s > before.cpu_s)


ProcessStatusOf = Callable[[int], ProcessStatus | None]


@dataclass
class Peer:
    """A connected worker: its newest beat came at ``beat_at``, anything at all at ``heard_at``.

    ``loading``: it said last that it loads its program. ``excused_at``: when it was last found silent and at work;
    ``vitals``: what was seen of its process halfway to that, at ``looked_at``. ``waits_s``: how long it may be silent
    while it waits for others, or they for it, which need not. ``stands_at``: the step that it said last that it cannot
    end by itself.
    """

    worker: int
    connection: Connection
    host: str
    heard_at: float
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
        """When its patience began to run."""
        return max(self.heard_at, self.excused_at)


class WorkerConnections:
    """Workers by number. One that is not heard for ``heartbeat_s`` is silent; for ``loading_s``, while it loads its
    program: some libraries let no other thread run for seconds when they are imported.

    Slow is not dead: where ``vitals_of`` can see the worker's process, one that works (it may hold Python's lock in one
    long call) is excused for another heartbeat. Nor is it a death when nobody at all is heard any more: the network is
    away, or this machine was. Then all are waited for, up to ``pause_s``, but for those whose process is seen not to
    live; one alone is, where its process is seen to.
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
        self._least_due_s = heartbeat_s  # of any worker so far
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
        peer.heard_at, peer.looked_at = now, None
        if isinstance(message, Beat):
            peer.loading = message.doing == "loading"
            peer.waits_s = peer.waits_s if message.doing == "reducing" else inf
            peer.stands_at = message.step if message.doing in STANDING else None
        elif not isinstance(message, Report):
            peer.loading = False

    def beaten(self, worker: int, beat: Beat, now: float) -> None:
        """``worker`` has told what it is doing."""
        peer = self._peers[worker]
        peer.beat, peer.beat_at = beat, now
        self._pace.heard(now, beat.step)

    def waits(self, beat_s: float, worker: int, step: int, grace_s: float, now: float) -> None:
        """``worker``, which beats every ``beat_s`` if it has not told of another pace, waits in ``step`` for others, or
        they for it, which can do without it and give it ``grace_s``.

        As long as another one is heard that waits there, too, it may not be silent for a whole heartbeat: where none
        is, the exchange is over, and what it does since then it has not told yet. One that is not there yet is bound by
        that until it beats again.
        """
        if (peer := self._peers.get(worker)) is None:
            return
        if self._vitals_of(worker) is not None:  # else silence is all that tells, and a network may be as long silent
            beat_s = max(peer.beat.every_s or beat_s, min(beat_s, grace_s))  # a grace may just have become longer
        peer.stands_at = step
        peer.waits_s = min(self._heartbeat_s, grace_s + BEATS_WAITED_FOR * beat_s)
        self._least_due_s = min(self._least_due_s, peer.waits_s)
        if (halfway := peer.counts_from + peer.waits_s / 2) < now:
            self._look_at(peer, now)
        self.next_silence = min(self.next_silence, max(halfway, now + beat_s))

    def why_silent(self, worker: int) -> str:
        """Why ``worker``, who is silent, counts as lost."""
        peer = self._peers[worker]
        if peer.waits_s < self._heartbeat_s:
            return f"it has been silent for {peer.waits_s:g} s at the end of a round that needs a quorum alone (grace)"
        host = f"host {peer.host}: " if len({each.host for each in self._peers.values()}) > 1 else ""
        return f"{host}it has been silent for {self._heartbeat_s:g} s (--heartbeat)"

    def excuse(self, now: float) -> None:
        """Nobody could be heard until ``now``, and that was nobody's fault."""
        for peer in self._peers.values():
            peer.heard_at = now

    def silent(self, now: float, due: float) -> list[int]:
        """Who is silent. ``due``: when this question was to be asked at the latest."""
        late = now - due
        for peer in self._peers.values() if late > self._least_due_s / 2 else ():
            # This process itself did not run: what the workers said meanwhile may not be here yet.
            if late > self._due_s(peer) / 2:
                peer.heard_at = min(now, peer.heard_at + late)
        if now < self.next_silence:
            return []
        newest = max((peer.heard_at for peer in self._peers.values()), default=now)
        silent = {worker for worker, peer in self._peers.items() if self._is_silent(peer, now, newest)}
        waits = [self._next_look(peer, now) for worker, peer in self._peers.items() if worker not in silent]
        # Whoever comes, or has loaded its program, meanwhile is looked at in time.
        self.next_silence = min([*waits, now + self._heartbeat_s / 2])
        return sorted(silent)

    def take_excused(self) -> list[Straggler]:
        """Who was found silent and at work; told once for each silence."""
        told, self._excused = self._excused, []
        return told

    def _is_silent(self, peer: Peer, now: float, newest: float) -> bool:
        """Halfway its process is looked at, and at the end again: has it worked in between?

        ``newest``: when anybody was heard last.
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
        if peer.excused_at < peer.heard_at:
            line = (
                f"worker {peer.worker} has been silent for {now - peer.heard_at:.1f} s, longer than {patience_s:g} s "
                + ("(--heartbeat), but " if patience_s >= self._heartbeat_s else "(grace), but ")
                + ("so have all" if pauses else "its process works")
                + ": it is waited for "
                + ("(is the network away?)" if pauses else "(does one call hold Python's lock?)")
            )
            self._excused.append(Straggler(peer.worker, peer.beat.step, line))
        peer.excused_at, peer.looked_at = now, None
        return False

    def _look_at(self, peer: Peer, now: float) -> None:
        """See what its process has done so far, once in a silence."""
        if peer.looked_at is None:
            peer.looked_at, peer.vitals = now, self._vitals_of(peer.worker)

    def _compares_at(self, peer: Peer) -> float:
        """When it can be told whether its process has worked since it was looked at."""
        return -inf if peer.looked_at is None else peer.looked_at + min(LOOKS_APART_S, self._heartbeat_s / 2)

    def _all_pause(self, peer: Peer, vitals: ProcessStatus | None, now: float, newest: float) -> bool:
        """Whether ``peer``, which is silent, may be so because nobody can be heard."""
        if now - newest < self._due_s(peer) / 2 or now - peer.heard_at >= self._pause_s:
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
        """Whether another one is heard that waits where ``peer`` does."""
        return peer.waits_s < self._heartbeat_s and any(
            other.stands_at == peer.stands_at and now - other.heard_at < peer.waits_s
            for other in self._peers.values()
            if other is not peer
        )

    def _due_s(self, peer: Peer) -> float:
        """How long a healthy ``peer`` that has loaded its program may be silent."""
        return min(self._heartbeat_s, peer.waits_s)

    def look(
        self, members: Sequence[int], now: float, limit_s: float, last_line: Callable[[int], str]
    ) -> Stall | Straggler | None:
        """Why ``members``, by rank, will never come together, if so: they wait for one for ``limit_s`` at most.

        Else which of them keeps the others waiting; told once for each of its steps.
        """
        sights = self._sights(members, now)
        if (apart := find_stall(sights, limit_s)) is not None:
            return apart
        found = straggler(sights, self._pace.patience_s, last_line)
        if found is None or (found.worker, found.step) in self._told:
            return None
        self._told.add((found.worker, found.step))
        return found

    def _sights(self, members: Sequence[int], now: float) -> list[HeartbeatSample]:
        return [
            HeartbeatSample(worker, rank, peer.host, peer.beat, now - peer.beat_at)
            for rank, worker in enumerate(members)
            if (peer := self._peers.get(worker)) is not None
        ]
