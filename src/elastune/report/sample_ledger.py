"""The ledger of samples: what workers claim to have trained on, held against what an epoch should have used.

A claim says that steps used places of the epoch's order of samples. The members of a view claim the same steps, each
for itself and in pieces of its own. Where a claim begins or ends there is a *mark*: a step boundary and a place. The
marks of all workers must agree; between two marks the steps and the places are the same for every worker. Places of
a learner that a round ended without lie within the claims of that round, and are recorded beside them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from elastune.core.journal.records import Entry, LearnerLeftOut, RunFinished, RunStarted, StepsCompleted
from elastune.report.lines import accepted_lines

Places = tuple[int, int]
"""From the first to the last place, the last one exclusive."""


@dataclass(frozen=True)
class EpochCoverage:
    """One epoch (counted from 0) that should use ``length`` samples. ``ended``: training has gone past it.

    ``missed``: places that no step used, of those up to where training has come; ``repeated``: places that several did.
    ``left_out``: samples of learners that a round has ended without, as it was told.
    """

    epoch: int
    length: int
    once: int
    missed: tuple[Places, ...] = ()
    repeated: tuple[Places, ...] = ()
    ended: bool = True
    left_out: int = 0


@dataclass(frozen=True)
class Ledger:
    """The epochs that steps were taken of; ``steps`` is how many. ``disputes``: claims that contradict each other."""

    epochs: tuple[EpochCoverage, ...] = ()
    steps: int = 0
    disputes: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    """Changes of the program or the data that some of the steps were taken with."""

    @property
    def exact(self) -> bool:
        """Whether every sample was used exactly once, or told to be left out, up to where training has come."""
        return not self.disputes and not any(seen.missed or seen.repeated for seen in self.epochs)


def ledger(entries: Iterable[Entry]) -> Ledger:
    """What the journal of a run says of its samples.

    A run that was resumed from step k, and a version that begins with step k + 1, take back what was claimed of the
    steps after it: that training is lost, and was done again.
    """
    entries = list(entries)
    records = [entry.record for entry in entries]
    claims, left = _valid(records)
    ends = [record for record in records if isinstance(record, RunFinished)]
    complete = bool(ends) and ends[-1].stopped == "complete"
    by_epoch: dict[int, list[StepsCompleted]] = defaultdict(list)
    for claim in claims:
        by_epoch[claim.epoch].append(claim)
    last = max(by_epoch, default=0)
    seen, disputes = [], []
    taken: list[tuple[int, int]] = []
    for epoch, own in sorted(by_epoch.items()):
        pieces, contradictions = _pieces(own)
        disputes += [f"epoch {epoch + 1}: {words}" for words in contradictions]
        taken += pieces
        length = max(own, key=lambda claim: (claim.last_step, claim.version)).length
        length = length or max(claim.stop for claim in own)  # of a stream nobody knows it: all that was used counts
        counted = _count(epoch, length, list(pieces.values()), complete or epoch < last)
        without, contradictions = _without(counted, [each for each in left if each.epoch == epoch])
        seen.append(without)
        disputes += [f"epoch {epoch + 1}: {words}" for words in contradictions]
    steps = sum(after - before for before, after in taken)
    for (_, before), (after, _) in pairwise([(0, 0), *sorted(taken)]):
        if before != after:
            disputes.append(f"steps {min(before, after) + 1} to {max(before, after)} are claimed by nobody, or twice")
    return Ledger(tuple(seen), steps, tuple(disputes), accepted_lines(entries))


def left_out(entries: Iterable[Entry]) -> tuple[LearnerLeftOut, ...]:
    """What rounds have ended without, in order, less what was done again."""
    _, told = _valid(entry.record for entry in entries)
    return tuple(sorted(told, key=lambda each: (each.first_step, each.learner)))


def lines(found: Ledger, *, all_epochs: bool = True) -> tuple[str, ...]:
    """``epoch 1: 50,000/50,000 seen once``, a line an epoch (or an epoch that is not as it should be), and a total."""
    told = [_line(seen) for seen in found.epochs if all_epochs or seen.missed or seen.repeated or seen.left_out]
    samples = sum(seen.once for seen in found.epochs)
    verdict = "each seen once" if found.exact else "NOT each seen once"
    if left := sum(seen.left_out for seen in found.epochs):
        verdict += f", {left:,} left out with learners that were lost or late"
    accepted = (f"after an accepted change {line}" for line in found.accepted)
    return (*told, *accepted, *found.disputes, f"ledger: {samples:,} samples in {found.steps:,} steps, {verdict}")


def _line(seen: EpochCoverage) -> str:
    so_far = "" if seen.ended or seen.once + seen.left_out == seen.length else " so far"
    text = f"epoch {seen.epoch + 1}: {seen.once:,}/{seen.length:,} seen once{so_far}"
    for what, places in (("missed", seen.missed), ("seen several times", seen.repeated)):
        if places:
            count = sum(stop - start for start, stop in places)
            named = ", ".join(f"{start}..{stop - 1}" for start, stop in places[:5])
            text += f", {count:,} {what} (places {named}{', ...' if len(places) > 5 else ''})"
    return f"{text}, {seen.left_out:,} left out" if seen.left_out else text


def _valid(records: Iterable[object]) -> tuple[list[StepsCompleted], list[LearnerLeftOut]]:
    """The claims that stand, in order, and what was left out in their steps."""
    done: list[StepsCompleted] = []
    attempt: list[StepsCompleted] = []
    left: dict[tuple[int, int], LearnerLeftOut] = {}
    of_attempt: list[LearnerLeftOut] = []
    for record in records:
        if isinstance(record, RunStarted):
            step, standing = record.resumed_step or 0, _settled(attempt)
            done = _taken_back([*done, *standing], step)
            left = {**_standing(of_attempt, standing), **left}
            left = {key: each for key, each in left.items() if each.last_step <= step}
            attempt, of_attempt = [], []
        elif isinstance(record, StepsCompleted):
            attempt.append(record)
        elif isinstance(record, LearnerLeftOut):
            of_attempt.append(record)
    standing = _settled(attempt)
    # A resumed run may have nothing new to say; what it has says where its checkpoint was in the order of samples.
    # (Nor does a checkpoint say whose learners were left out: what was told before it is kept.)
    return [*done, *standing], list({**_standing(of_attempt, standing), **left}.values())


def _standing(
    told: Iterable[LearnerLeftOut], claims: Sequence[StepsCompleted]
) -> dict[tuple[int, int], LearnerLeftOut]:
    """Of what was ``told`` to be left out what no later version has taken back, by first step and learner."""
    spans = [(claim.version, claim.first_step, claim.last_step) for claim in claims]
    return {
        (each.first_step, each.learner): each
        for each in told
        if any(
            version == each.version and first <= each.first_step and each.last_step <= last
            for version, first, last in spans
        )
    }


def _settled(attempt: Sequence[StepsCompleted]) -> list[StepsCompleted]:
    """Of one controller's claims those that no later version has taken back."""
    standing: list[StepsCompleted] = []
    begun: int | None = None
    for version in sorted({claim.version for claim in attempt}, reverse=True):
        own = [claim for claim in attempt if claim.version == version]
        if begun is not None:
            own = _taken_back(own, begun - 1, attempt)
        standing += own
        first = min(claim.first_step for claim in own) if own else begun
        begun = first if begun is None or first is None else min(begun, first)
    return standing


def _taken_back(
    claims: Sequence[StepsCompleted], step: int, marks_of: Sequence[StepsCompleted] = ()
) -> list[StepsCompleted]:
    """``claims`` without what they say of the steps after ``step``; one that goes beyond is cut at the mark there."""
    known = {(claim.epoch, claim.first_step - 1): claim.start for claim in (*marks_of, *claims)}
    known |= {(claim.epoch, claim.last_step): claim.stop for claim in (*marks_of, *claims)}
    kept = []
    for claim in claims:
        if claim.last_step <= step:
            kept.append(claim)
        elif claim.first_step <= step:
            size, count = claim.stop - claim.start, claim.last_step - claim.first_step + 1
            evenly = claim.start + size // count * (step - claim.first_step + 1)
            stop = known.get((claim.epoch, step), evenly)
            kept.append(replace(claim, stop=stop, last_step=step))
    return kept


def _pieces(claims: Sequence[StepsCompleted]) -> tuple[dict[tuple[int, int], Places], list[str]]:
    """Claims cut at all marks: (boundary before, boundary after) -> places; and what contradicts itself, in words."""
    marks: dict[int, int] = {}
    disputes: dict[str, None] = {}
    for claim in claims:
        for boundary, place in ((claim.first_step - 1, claim.start), (claim.last_step, claim.stop)):
            if marks.setdefault(boundary, place) != place:
                words = f"after step {boundary} one worker is at place {marks[boundary]}, another one at {place}"
                disputes[words] = None
    pieces: dict[tuple[int, int], Places] = {}
    for claim in claims:
        within = sorted(b for b in marks if claim.first_step - 1 <= b <= claim.last_step)
        places = [claim.start, *(marks[b] for b in within[1:-1]), claim.stop]
        if places != sorted(places):
            disputes[f"worker {claim.worker} claims places of steps {claim.first_step} to {claim.last_step} twice"] = (
                None
            )
            places = sorted(places)
        for steps, piece in zip(pairwise(within), pairwise(places), strict=True):
            pieces.setdefault(steps, piece)
    return pieces, list(disputes)


def _without(seen: EpochCoverage, told: Sequence[LearnerLeftOut]) -> tuple[EpochCoverage, list[str]]:
    """``seen``, less what was ``told`` to be left out; and where that cannot be, in words."""
    pieces = sorted((start, stop, each.learner) for each in told for start, stop in each.places)
    disputes = [
        f"place {start} was left out twice, with the learners {one} and {other}"
        for (_, before, one), (start, _, other) in pairwise(pieces)
        if start < before
    ]
    gaps = [*seen.missed, *seen.repeated]
    disputes += [
        f"learner {learner} was left out with places {start} to {stop - 1}, which were not used once"
        for start, stop, learner in pieces
        if stop > seen.length or any(start < last and first < stop for first, last in gaps)
    ]
    left = sum(stop - start for start, stop, _ in pieces)
    return replace(seen, once=seen.once - left, left_out=left), disputes


def _count(epoch: int, length: int, pieces: Sequence[Places], ended: bool) -> EpochCoverage:
    """How often each place up to ``length`` (of an unfinished epoch: up to the last one used) is in ``pieces``."""
    changes: dict[int, int] = defaultdict(int)
    for start, stop in pieces:
        changes[start] += 1
        changes[stop] -= 1
    reach = length if ended else max((stop for _, stop in pieces), default=0)
    depth, once = 0, 0
    missed: list[Places] = []
    repeated: list[Places] = []
    for start, stop in pairwise(sorted({0, reach, length, *changes})):
        depth += changes[start]
        if depth and start >= length:
            _extend(repeated, start, stop)  # there are no such places: they stand for samples of somewhere else
        elif depth == 1:
            once += stop - start
        elif depth == 0 and stop <= reach:
            _extend(missed, start, stop)
        elif depth > 1:
            _extend(repeated, start, stop)
    return EpochCoverage(epoch, length, once, tuple(missed), tuple(repeated), ended)


def _extend(ranges: list[Places], start: int, stop: int) -> None:
    if ranges and ranges[-1][1] == start:
        ranges[-1] = (ranges[-1][0], stop)
    else:
        ranges.append((start, stop))
