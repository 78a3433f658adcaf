"""What this worker's policies propose, from the hook to the vote that settles it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from elastune.core.signals import Decision, Signal, Snapshot
from elastune.core.votes import VOTE, outcome, vote
from elastune.policies.host import Proposal

MOST_WAITING = 8  # proposals that could not ride with others
_ABSTENTION = (0.0,) * VOTE


@dataclass(frozen=True)
class Verdict:
    """``agreed``: what all workers decided in one vote; None where they decided differently.

    ``carried``: the proposals that it was about. ``refused``: those that will never be voted on.
    """

    agreed: Decision | None
    carried: tuple[Proposal, ...]
    refused: tuple[Proposal, ...] = ()


class Ballot:
    """Open proposals, in order: as many of the first as go together ride in one vote, the others in later ones."""

    def __init__(self) -> None:
        self._open: list[Proposal] = []

    def add(self, proposal: Proposal) -> None:
        """To be voted on."""
        self._open.append(proposal)

    def clear(self) -> None:
        """Nothing is proposed."""
        self._open = []

    def vote(self) -> Sequence[float]:
        """This worker's vote of the next step."""
        return vote(_bundle(self._open)[0]) if self._open else _ABSTENTION

    def settle(self, sums: Sequence[float], voters: int) -> Verdict | None:
        """What came of it, from the sums of all votes; None where nobody proposed anything."""
        if not self._open and not any(sums):
            return None
        _, carried, later, refused = _bundle(self._open)
        self._open = later[:MOST_WAITING]
        return Verdict(outcome(sums, voters), tuple(carried), (*refused, *later[MOST_WAITING:]))

    def to_json(self) -> list[dict[str, Any]]:
        """The open proposals."""
        return [
            {"policy": p.policy, "step": p.step, "decision": p.decision.to_json(), "cause": asdict(p.cause)}
            for p in self._open
        ]

    def take(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Go on from ``to_json``."""
        self._open = [Proposal(p["policy"], p["step"], Decision(**p["decision"]), _snapshot(p["cause"])) for p in told]


def _bundle(proposals: list[Proposal]) -> tuple[Decision, list[Proposal], list[Proposal], list[Proposal]]:
    """As many of the first as go together, as one decision; these; those to come later; those that contradict an
    earlier one, and were decided without knowing of it."""
    bundle = Decision()
    taken: list[Proposal] = []
    refused: list[Proposal] = []
    for place, proposal in enumerate(proposals):
        if bundle.contradicts(proposal.decision):
            refused.append(proposal)
        elif not bundle.goes_with(proposal.decision):
            return bundle, taken, proposals[place:], refused
        else:
            bundle = bundle.merged(proposal.decision)
            taken.append(proposal)
    return bundle, taken, [], refused


def _snapshot(told: Mapping[str, Any]) -> Snapshot:
    signals = {name: Signal(**signal) for name, signal in told["signals"].items()}
    return replace(Snapshot(**{**told, "signals": {}}), signals=signals)
