"""Messages between the workers of a group whose sender does not wait: small threads send and receive them.

``Channel`` delivers every message in order. ``AsyncValues`` carries values that a receiver takes at any time. A sender
has at most one untaken value per receiver, so a slow link or worker lets nothing pile up.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from elastune.parallel.comm.group import ASYNC_VALUES_TAG, CHANNEL_TAG, LOOK, Group, GroupBroken

HEAD = 6
"""Numbers before each message: three of the sender, the number of its text, and the sizes of text and payload."""
_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class ChannelMessage:
    """One message from one worker to another.

    Attributes:
        number: Three numbers of the sender's choice.
        text: Describes the payload, in the sender's format; equal texts travel once.
        payload: Bytes, on the CPU; aligned as a fresh tensor is.
    """

    number: tuple[int, int, int]
    text: str
    payload: torch.Tensor


class Channel:
    """This worker's messages to and from the other workers of ``group``. Messages of one sender arrive in order.

    Several channels of one group need different tags. In a group of one worker no message can be sent. When the group
    ends, the threads of the channel end, and ``next`` and ``send`` raise ``GroupBroken``.

    Example::

        channel = Channel(group)
        channel.send(1, ChannelMessage((step, 0, 0), "float32 8", payload))  # returns at once
        sender, message = channel.next()
    """

    def __init__(self, group: Group, tag: int = CHANNEL_TAG) -> None:
        self._group, self._tag = group, tag
        self._arrived: queue.SimpleQueue[tuple[int, ChannelMessage] | None] = queue.SimpleQueue()
        self._outboxes: dict[int, _Outbox] = {}
        for peer in range(group.size):
            if peer != group.rank:
                self._start(f"channel from {peer}", lambda peer=peer: self._receive_all(peer))  # type: ignore[misc]

    def send(self, to: int, message: ChannelMessage) -> None:
        """Queue ``message`` for rank ``to``; a thread sends it. The payload must not change any more."""
        if self._group.broken:
            raise GroupBroken(f"no message can be sent: {self._group.why}")
        if to not in self._outboxes:
            box = self._outboxes[to] = _Outbox()
            self._start(f"channel to {to}", lambda: self._send_all(to, box))
        self._outboxes[to].waiting.put(message)

    def next(self, *, wait: bool = True) -> tuple[int, ChannelMessage] | None:
        """Return the next message that arrived, with the rank of its sender.

        Returns None if no message has arrived and ``wait`` is False.
        """
        while True:
            try:
                arrived = self._arrived.get(timeout=LOOK.total_seconds()) if wait else self._arrived.get_nowait()
            except queue.Empty:
                arrived = None
            if arrived is not None:
                return arrived
            if self._group.broken:
                raise GroupBroken(f"no more messages come: {self._group.why}")
            if not wait:
                return None

    def close(self, wait_s: float = 0.0) -> None:
        """Send the waiting messages and no more; return when they are sent, or after ``wait_s``.

        The receiving threads end with the group.
        """
        deadline = time.monotonic() + wait_s
        for box in self._outboxes.values():
            box.waiting.put(None)
        for box in self._outboxes.values():
            box.sent.wait(max(0.0, deadline - time.monotonic()))

    def _send_all(self, to: int, box: _Outbox) -> None:
        while (message := box.waiting.get()) is not None:
            new = message.text not in box.text_numbers and bool(message.text)
            text_number = box.text_numbers.setdefault(message.text, len(box.text_numbers)) if message.text else -1
            text = torch.frombuffer(bytearray(message.text.encode()), dtype=torch.uint8) if new else torch.empty(0)
            sizes = [text_number, len(text), message.payload.numel()]
            for part in (torch.tensor([*message.number, *sizes]), text, message.payload):
                if part.numel():
                    self._group.send_blocking(part, to, self._tag)
        box.sent.set()

    def _receive_all(self, source: int) -> None:
        texts: list[str] = []
        while True:
            head = torch.empty(HEAD, dtype=torch.int64)
            self._group.receive_blocking(head, source, self._tag)
            *number, text_number, text_size, size = head.tolist()
            if text_size:
                texts.append(bytes(self._read(text_size, source).tolist()).decode())
            first, second, third = number
            message = ChannelMessage(
                (first, second, third), texts[text_number] if text_number >= 0 else "", self._read(size, source)
            )
            self._arrived.put((source, message))

    def _read(self, size: int, source: int) -> torch.Tensor:
        buffer = torch.empty(size, dtype=torch.uint8)
        if size:
            self._group.receive_blocking(buffer, source, self._tag)
        return buffer

    def _start(self, name: str, act: Callable[[], None]) -> None:
        def until_broken() -> None:
            try:
                act()
            except GroupBroken:
                self._arrived.put(None)  # wakes a thread that waits for messages
            except Exception as error:  # noqa: BLE001 - nobody waits for a thread that has ended
                self._group.abandon(f"{name}: {type(error).__name__}: {error}")

        threading.Thread(target=until_broken, name=name, daemon=True).start()


@dataclass
class _Outbox:
    """The messages to one rank. ``text_numbers``: the texts that the receiver has already, each with its number."""

    waiting: queue.SimpleQueue[ChannelMessage | None] = field(default_factory=queue.SimpleQueue)
    text_numbers: dict[str, int] = field(default_factory=dict)
    sent: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class AsyncValue:
    """Values from another worker: ``number`` is the sender's, ``values`` are bytes on the CPU."""

    number: tuple[int, int, int]
    values: torch.Tensor


class AsyncValues:
    """Values that the workers of a gloo group offer each other, without waiting for each other.

    ``make`` hands an offer to a thread, ``take`` returns the offers that have arrived. A sender has at most one offer
    per receiver that is in flight or not taken yet; until then ``make`` sends nothing. So offers never pile up behind
    a slow link or a slow worker. The group must have several workers.

    ``served`` counts the users of this object, one after another. Workers that use it alike have the same count.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._channel = Channel(group, ASYNC_VALUES_TAG)
        self._untaken: set[int] = set()  # receivers
        self.served = 0

    @classmethod
    def of(cls, group: Group) -> AsyncValues:
        """Return the object of ``group``, which all its users share: its threads end with the group."""
        shared = group.kept.setdefault("offers", None)
        if shared is None:
            shared = group.kept["offers"] = cls(group)
        assert isinstance(shared, cls)
        return shared

    def make(self, to: int, number: tuple[int, int, int], values: torch.Tensor) -> bool:
        """Offer ``values`` (bytes on the CPU that must not change any more) to rank ``to``.

        Args:
            to: The rank on which the receiver is.
            number: The first of the three is not negative; the second identifies the receiver on that rank.
            values: The values.

        Returns:
            False if the receiver has not taken the last values yet: nothing is sent.

        Raises:
            GroupBroken: If the group has ended.
        """
        receiver = number[1]
        if receiver in self._untaken:
            return False
        self._channel.send(to, ChannelMessage(number, "", values))
        self._untaken.add(receiver)
        self._group.count_sent(values.nbytes)
        return True

    def take(self) -> list[AsyncValue]:
        """Return all values that have arrived, in order of arrival. Raises ``GroupBroken``."""
        taken: list[AsyncValue] = []
        while (arrived := self._channel.next(wait=False)) is not None:
            sender, message = arrived
            kind, receiver, _ = message.number
            if kind < 0:
                self._untaken.discard(receiver)
                continue
            self._channel.send(sender, ChannelMessage((-1, receiver, 0), "", _NOTHING))
            taken.append(AsyncValue(message.number, message.payload))
        return taken
