"""What a worker would tell a coordinator that knows nothing of it: where it stands, and what it has reported."""

from __future__ import annotations

import time
from collections import deque

from elastune.elastic.protocol.messages import (
    Broken,
    Done,
    Exit,
    LayersFound,
    Message,
    Noticed,
    Ready,
    Report,
    Returned,
    RoundTaken,
    Running,
    encode,
)
from elastune.elastic.protocol.transport import LINE_LIMIT_BYTES
from elastune.elastic.protocol.view import View
from elastune.journal.records import Record


class Whereabouts:
    """Where a worker stands by what it has said, and the records that may not be in the journal yet.

    ``member``: it holds the run's state for good; ``exit``: its last words. ``keeps``: whether records are kept until
    they are in the journal.
    """

    def __init__(self, keeps: bool) -> None:
        self.member = False
        self.exit: Exit | None = None
        self._keeps = keeps
        self._ready = self._done = False
        self._running = Running(0, 0)
        self._broken = self._reported = self._layers = 0
        self._goes_at: float | None = None
        self._round: RoundTaken | None = None
        self._unkept: deque[tuple[int, bytes]] = deque()
        self.unkept_bytes = 0

    def say(self, message: Message) -> None:
        """The worker says ``message``."""
        match message:
            case Ready():
                self._ready = True
            case Running():
                self._running = message
            case LayersFound(layers):
                self._layers = layers
            case Broken(version):
                self._broken = version
            case Done():
                self._done = True
            case RoundTaken():
                self._round = message
            case Noticed(seconds):
                self._goes_at = time.monotonic() + seconds

    def report(self, record: Record) -> bytes:
        """The line that reports ``record``, kept until ``kept`` says otherwise.

        Raises ``ValueError`` where it is longer than the coordinator accepts.
        """
        line = encode(Report(record, self._reported + self._keeps))
        if len(line) > LINE_LIMIT_BYTES:
            raise ValueError(f"a {record.kind} record has {len(line)} bytes, at most {LINE_LIMIT_BYTES} can be sent")
        self._reported += self._keeps
        if self._keeps:
            self._unkept.append((self._reported, line))
            self.unkept_bytes += len(line)
        return line

    def kept(self, nth: int) -> None:
        """Records up to the ``nth`` are in the journal."""
        while self._unkept and self._unkept[0][0] <= nth:
            self.unkept_bytes -= len(self._unkept.popleft()[1])

    def lines(self, heard: View | None, stops: bool) -> list[bytes]:
        """All that a new coordinator has to be told first. ``heard``: the newest view; ``stops``: was it told to."""
        goes_s = None if self._goes_at is None else max(0.0, self._goes_at - time.monotonic())
        told = Returned(
            member=self.member,
            ready=self._ready,
            heard=heard,
            version=self._running.version,
            step=self._running.step,
            layers=self._layers,
            broken=self._broken,
            done=self._done,
            stops=stops,
            noticed_s=goes_s,
            records=self._reported,
        )
        # Who waits at the end of a round would count as late to it; of a round that is over it says nothing new.
        waits = [] if self._round is None else [encode(self._round)]
        last = [] if self.exit is None else [encode(self.exit)]
        return [encode(told), *waits, *(line for _, line in self._unkept), *last]
