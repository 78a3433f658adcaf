"""Values that workers offer each other without waiting: what has come is there to be taken, newest first."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elastune.comm.group import Group
from elastune.comm.post import Letter, Post
from elastune.comm.tags import OFFERS_TAG

_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class Offered:
    """What came from another worker: ``number`` is the sender's, ``values`` are bytes on the CPU."""

    number: tuple[int, int, int]
    values: torch.Tensor


class Offers:
    """This worker's offers to and from the others of a group over gloo, of several workers.

    Nobody waits: ``make`` hands an offer to a thread, ``take`` returns what has come. From one worker to each receiver
    there is one on its way, or untaken, at a time; while there is, no other one is made. So neither a slow link nor a
    slow worker lets offers pile up. ``served``: how many have used it, one after another; the same on all workers that
    come to it alike.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._post = Post(group, OFFERS_TAG)
        self._untaken: set[int] = set()  # receivers
        self.served = 0

    @classmethod
    def of(cls, group: Group) -> Offers:
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
        self._post.send(to, Letter(number, "", values))
        self._untaken.add(receiver)
        self._group.count_sent(values.nbytes)
        return True

    def take(self) -> list[Offered]:
        """All that have come, in the order in which they came. Raises ``GroupBroken``."""
        found: list[Offered] = []
        while (came := self._post.next(wait=False)) is not None:
            sender, letter = came
            kind, receiver, _ = letter.number
            if kind < 0:
                self._untaken.discard(receiver)
                continue
            self._post.send(sender, Letter((-1, receiver, 0), "", _NOTHING))
            found.append(Offered(letter.number, letter.payload))
        return found
