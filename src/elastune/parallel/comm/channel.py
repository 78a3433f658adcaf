"""Messages between the workers of a group whose sender does not wait: small threads send and receive them.

``Channel`` delivers every message in order. ``AsyncValues`` carries values that a receiver may take when it wants to:
a sender has one untaken value per receiver at most, so a slow link or worker lets nothing pile up.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from elastune.parallel.comm.group import ASYNC_VALUES_TAG, CHANNEL_TAG, LOOK, Group, GroupBroken

# [post] Messages between the workers of a group that nobody waits for when sending: small threads send and receive them.

HEAD = 6


@dataclass(frozen=True)
class ChannelMessage:
    """What one worker tells another.

    Attributes:
        number: Three numbers of the sender's choice.
        text: What the payload is made of, in the sender's words; equal ones travel once.
        payload: Bytes, on the CPU; aligned as a fresh tensor is.
    """

    number: tuple[int, int, int]
    text: str
    payload: torch.Tensor


@dataclass
class _Outbox:
    waiting: queue.SimpleQueue[ChannelMessage | None] = field(default_factory=queue.SimpleQueue)
    known: dict[str, int] = field(default_factory=dict)
    sent: threading.Event = field(default_factory=threading.Event)


class Channel:
    """This worker's messages to and from the others of ``group``. What one sends to another arrives in order.

    Several posts of a group differ by ``tag``. Groups of one have no post. Whatever ends the group ends its threads,
    and raises ``GroupBroken`` in ``next`` and ``send``.
    """

    def __init__(self, group: Group, tag: int = CHANNEL_TAG) -> None:
        self._group, self._tag = group, tag
        self._came: queue.SimpleQueue[tuple[int, ChannelMessage] | None] = queue.SimpleQueue()
        self._outboxes: dict[int, _Outbox] = {}
        for peer in range(group.size):
            if peer != group.rank:
                self._start(f"mail from {peer}", lambda peer=peer: self._receive_all(peer))  # type: ignore[misc]

    def send(self, to: int, message: ChannelMessage) -> None:
        """Send ``message`` to rank ``to`` as soon as the line is free; its payload must not change any more."""
        if self._group.broken:
            raise GroupBroken(f"no message can be sent: {self._group.why}")
        if to not in self._outboxes:
            box = self._outboxes[to] = _Outbox()
            self._start(f"mail to {to}", lambda: self._send_all(to, box))
        self._outboxes[to].waiting.put(message)

    def next(self, *, wait: bool = True) -> tuple[int, ChannelMessage] | None:
        """The next message that came, with its sender; None where there is none and ``wait`` is False."""
        while True:
            try:
                came = self._came.get(timeout=LOOK.total_seconds()) if wait else self._came.get_nowait()
            except queue.Empty:
                came = None
            if came is not None:
                return came
            if self._group.broken:
                raise GroupBroken(f"no more messages come: {self._group.why}")
            if not wait:
                return None

    def close(self, wait_s: float = 0.0) -> None:
        """Send what waits, then nothing more; return when it is sent, or after ``wait_s``. Threads that receive end
        with the group.
        """
        deadline = time.monotonic() + wait_s
        for box in self._outboxes.values():
            box.waiting.put(None)
        for box in self._outboxes.values():
            box.sent.wait(max(0.0, deadline - time.monotonic()))

    def _send_all(self, to: int, box: _Outbox) -> None:
        while (message := box.waiting.get()) is not None:
            new = message.text not in box.known and bool(message.text)
            layout = box.known.setdefault(message.text, len(box.known)) if message.text else -1
            text = torch.frombuffer(bytearray(message.text.encode()), dtype=torch.uint8) if new else torch.empty(0)
            sizes = [layout, len(text), message.payload.numel()]
            for part in (torch.tensor([*message.number, *sizes]), text, message.payload):
                if part.numel():
                    self._group.send_blocking(part, to, self._tag)
        box.sent.set()

    def _receive_all(self, source: int) -> None:
        texts: list[str] = []
        while True:
            head = torch.empty(HEAD, dtype=torch.int64)
            self._group.receive_blocking(head, source, self._tag)
            *number, layout, text_size, size = head.tolist()
            if text_size:
                texts.append(bytes(self._read(text_size, source).tolist()).decode())
            first, second, third = number
            message = ChannelMessage(
                (first, second, third), texts[layout] if layout >= 0 else "", self._read(size, source)
            )
            self._came.put((source, message))

    def _read(self, size: int, source: int) -> torch.Tensor:
        room = torch.empty(size, dtype=torch.uint8)
        if size:
            self._group.receive_blocking(room, source, self._tag)
        return room

    def _start(self, name: str, act: Callable[[], None]) -> None:
        def until_broken() -> None:
            try:
                act()
            except GroupBroken:
                self._came.put(None)  # wakes who waits for messages
            except Exception as error:  # noqa: BLE001 - nobody waits for a thread that has ended
                self._group.abandon(f"{name}: {type(error).__name__}: {error}")

        threading.Thread(target=until_broken, name=name, daemon=True).start()


# [offers] Values that workers offer each other without waiting: what has come is there to be taken, newest first.

_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class AsyncValue:
    """What came from another worker: ``number`` is the sender's, ``values`` are bytes on the CPU."""

    number: tuple[int, int, int]
    values: torch.Tensor


class AsyncValues:
    """This worker's offers to and from the others of a group over gloo, of several workers.

    Nobody waits: ``make`` hands an offer to a thread, ``take`` returns what has come. From one worker to each receiver
    there is one on its way, or untaken, at a time; while there is, no other one is made. So neither a slow link nor a
    slow worker lets offers pile up. ``served``: how many have used it, one after another; the same on all workers that
    come to it alike.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._channel = Channel(group, ASYNC_VALUES_TAG)
        self._untaken: set[int] = set()  # receivers
        self.served = 0

    @classmethod
    def of(cls, group: Group) -> AsyncValues:
        """The one of ``group``: its threads end with the group, so there is one for all who come."""
        found = group.kept.setdefault("offers", None)
        if found is None:
            found = group.kept["offers"] = cls(group)
        assert isinstance(found, cls)
        return found

    def make(self, to: int, number: tuple[int, int, int], values: torch.Tensor) -> bool:
        """Offer ``values`` (bytes on the CPU that must not change any more) to rank ``to``.

        ``number``: the first of the three is not negative, the second one tells the receiver there from all others.
        False where that has not taken the last ones yet: nothing is sent. Raises ``GroupBroken``.
        """
        receiver = number[1]
        if receiver in self._untaken:
            return False
        self._channel.send(to, ChannelMessage(number, "", values))
        self._untaken.add(receiver)
        self._group.count_sent(values.nbytes)
        return True

    def take(self) -> list[AsyncValue]:
        """All that have come, in the order in which they came. Raises ``GroupBroken``."""
        found: list[AsyncValue] = []
        while (came := self._channel.next(wait=False)) is not None:
            sender, letter = came
            kind, receiver, _ = letter.number
            if kind < 0:
                self._untaken.discard(receiver)
                continue
            self._channel.send(sender, ChannelMessage((-1, receiver, 0), "", _NOTHING))
            found.append(AsyncValue(letter.number, letter.payload))
        return found
