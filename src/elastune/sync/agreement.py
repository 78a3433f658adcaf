"""How workers come to one decision at one place of training, whatever brings their votes together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

Proposed = TypeVar("Proposed", contravariant=True)
Outcome = TypeVar("Outcome", covariant=True)


class AgreementProtocol(Protocol[Proposed, Outcome]):
    """One worker's ballot. Numbers go out, sums over workers come back, and all draw the same conclusion from them.

    In the reduction: ``vote`` rides in a step's control vector, and the sums are there when the step is. By the
    coordinator: they go to it and come back as a message, to take effect at a round that nobody has reached.
    """

    def add(self, proposal: Proposed) -> None:
        """To be voted on."""
        ...

    def vote(self) -> list[float]:
        """This worker's votes in the next round, always of the same length; equal votes for equal proposals."""
        ...

    def count_votes(self, sums: Sequence[float], voters: int) -> Sequence[Outcome]:
        """What came of the votes of ``voters`` workers, from their sums."""
        ...
