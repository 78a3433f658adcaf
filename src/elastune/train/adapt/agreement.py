"""What this worker's program and policies propose, until it is voted on; each has a vote of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from elastune.core.errors import UserError
from elastune.core.signals import Decision, Snapshot
from elastune.core.votes import VOTE, outcome, vote
from elastune.policies.arguments import MOST
from elastune.policies.runtime.host import Proposal

_ABSTENTION = [0.0] * VOTE
PROGRAM = "program"  # proposes what the training function asks of ``session.change``


@dataclass(frozen=True)
class Agreed:
    """What came of a vote.

    Attributes:
        policy: What was voted on is its proposal, or the program's.
        decision: What all workers decided; None where they decided differently.
        own: What this worker proposed, if anything.
    """

    policy: str
    decision: Decision | None
    own: Proposal | None


class Agreement:
    """Open proposals of the program and of each policy; of each one rides in a vote, the others in later ones.

    The program always has a vote: whether it will ever use it is not known when the length of a step's control vector
    must be.
    """

    def __init__(self, policies: Sequence[str]) -> None:
        self._open: dict[str, list[Proposal]] = {name: [] for name in (PROGRAM, *policies)}
        self.abstention = _ABSTENTION * len(self._open)

    def add(self, proposal: Proposal) -> None:
        """To be voted on."""
        self._open[proposal.policy].append(proposal)

    def vote(self) -> list[float]:
        """This worker's votes in the next step: the program's, then policy by policy."""
        if not any(self._open.values()):
            return self.abstention
        return [x for own in self._open.values() for x in (vote(own[0].decision) if own else _ABSTENTION)]

    def count_votes(self, sums: Sequence[float], voters: int) -> list[Agreed]:
        """What came of the votes of ``voters`` workers, from their sums; nothing of a policy that nobody spoke for."""
        found = []
        for place, (name, own) in enumerate(self._open.items()):
            part = sums[place * VOTE : (place + 1) * VOTE]
            if own or any(part):
                found.append(Agreed(name, outcome(part, voters), own.pop(0) if own else None))
        return found

    def to_json(self) -> list[dict[str, Any]]:
        """The open proposals."""
        return [
            {**asdict(replace(p, decision=Decision())), "decision": p.decision.to_json()}
            for own in self._open.values()
            for p in own
        ]

    def load(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Go on from ``to_json``, without what policies propose that there are no more."""
        for own in self._open.values():
            own.clear()
        for p in told:
            if p["policy"] in self._open:
                cause = Snapshot.from_json(p["cause"])
                self.add(Proposal(**{**p, "decision": Decision(**p["decision"]), "cause": cause}))


def wished(batch_size: int | None, lr: float | None) -> Decision:
    """The decision that ``session.change`` asks for. Raises ``UserError`` for what cannot be."""
    whole = isinstance(batch_size, int) and not isinstance(batch_size, bool)
    if batch_size is not None and not (whole and 1 <= batch_size <= MOST):
        raise UserError("a batch holds a whole number of samples, at least 1", batch_size, "session.change(...)")
    number = isinstance(lr, int | float) and not isinstance(lr, bool)
    if lr is not None and not (number and math.isfinite(lr) and lr >= 0):
        raise UserError("a learning rate must be finite and not negative", lr, "session.change(lr=0.1)")
    return Decision(batch_size=batch_size, lr=None if lr is None else float(lr))
