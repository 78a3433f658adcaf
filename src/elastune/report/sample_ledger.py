"""The ledger of samples: what workers claim to have trained on, held against what an epoch should have used.

A claim states that steps used places of the epoch's order of samples. The members of a view claim the same steps, each
for itself and in pieces of its own. Where a claim begins or ends there is a *mark*: a step boundary and a place. The
marks of all workers must agree; between two marks the steps and the places are the same for every worker. Places of
a learner that a round ended without lie within the claims of that round, and are recorded beside them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from elastune.core.formatting import count
from elastune.core.journal.records import Entry, LearnerLeftOut, Restarted, RunFinished, RunStarted, StepsCompleted
from elastune.report.lines import accepted_lines

Places = tuple[int, int]
"""From the first to the last place, the last one exclusive."""


@dataclass(frozen=True)
class EpochCoverage:
    """How often one epoch (counted from 0) used each of its ``length`` samples. ``ended``: training went past it.

    ``once``: the number of samples used once. ``missed``: places that training passed without using them.
    ``repeated``: places that several steps used. ``left_out``: samples of learners that a round ended without.
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
    """The epochs that training used, and the number of ``steps``. ``disputes``: contradictions between claims."""

    epochs: tuple[EpochCoverage, ...] = ()
    steps: int = 0
    disputes: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    """Accepted changes of the program or the data during training."""
    repeated: int = 0
    """Steps that were done again from a checkpoint, because no worker was left."""

    @property
    def exact(self) -> bool:
        """Whether training so far used every sample exactly once, or recorded it as left out."""
        return not self.disputes and not any(seen.missed or seen.repeated for seen in self.epochs)


def ledger(entries: Iterable[Entry]) -> Ledger:
    """Build the ledger from the journal of a run.

    A run that resumes from step k, and a view that begins with step k + 1, take back all claims of steps after k.
    That training was lost and done again.
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
    for epoch, of_epoch in sorted(by_epoch.items()):
        pieces, contradictions = _pieces(of_epoch)
        disputes += [f"epoch {epoch + 1}: {words}" for words in contradictions]
        taken += pieces
        length = max(of_epoch, key=lambda claim: (claim.last_step, claim.version)).length
        length = length or max(claim.stop for claim in of_epoch)  # a stream has no length: count what was used
        counted = _count(epoch, length, list(pieces.values()), complete or epoch < last)
        without, contradictions = _without(counted, [each for each in left if each.epoch == epoch])
        seen.append(without)
        disputes += [f"epoch {epoch + 1}: {words}" for words in contradictions]
    steps = sum(after - before for before, after in taken)
    for (_, before), (after, _) in pairwise([(0, 0), *sorted(taken)]):
        if before != after:
            disputes.append(f"steps {min(before, after) + 1} to {max(before, after)} are claimed by nobody, or twice")
    repeated = sum(record.repeated for record in records if isinstance(record, Restarted))
    return Ledger(tuple(seen), steps, tuple(disputes), accepted_lines(entries), repeated)


def left_out(entries: Iterable[Entry]) -> tuple[LearnerLeftOut, ...]:
    """The learners that rounds ended without, in order; steps that were done again do not count."""
    _, kept = _valid(entry.record for entry in entries)
    return tuple(sorted(kept, key=lambda each: (each.first_step, each.learner)))


def lines(result: Ledger, *, all_epochs: bool = True) -> tuple[str, ...]:
    """``epoch 1: 50,000/50,000 seen once``: a line for each epoch and a total.

    Without ``all_epochs``, epochs in which every sample was used once have no line.
    """
    text = [_line(seen) for seen in result.epochs if all_epochs or seen.missed or seen.repeated or seen.left_out]
    samples = sum(seen.once for seen in result.epochs)
    verdict = "each seen once" if result.exact else "NOT each seen once"
    if left := sum(seen.left_out for seen in result.epochs):
        verdict += f", {left:,} left out with learners that were lost or late"
    if result.repeated:
        verdict += f", {count(result.repeated, 'step')} repeated after all workers were lost"
    accepted = (f"after an accepted change {line}" for line in result.accepted)
    return (*text, *accepted, *result.disputes, f"ledger: {samples:,} samples in {result.steps:,} steps, {verdict}")


def _line(seen: EpochCoverage) -> str:
    so_far = "" if seen.ended or seen.once + seen.left_out == seen.length else " so far"
    text = f"epoch {seen.epoch + 1}: {seen.once:,}/{seen.length:,} seen once{so_far}"
    for what, places in (("missed", seen.missed), ("seen several times", seen.repeated)):
        if places:
            times = sum(stop - start for start, stop in places)
            named = ", ".join(f"{start}..{stop - 1}" for start, stop in places[:5])
            text += f", {times:,} {what} (places {named}{', ...' if len(places) > 5 else ''})"
    return f"{text}, {seen.left_out:,} left out" if seen.left_out else text


def _valid(records: Iterable[object]) -> tuple[list[StepsCompleted], list[LearnerLeftOut]]:
    """The claims that nothing took back, in order, and the learners left out of their steps."""
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
    # A resumed run may have taken no steps yet; its claims show where its checkpoint was in the order of samples.
    # A checkpoint does not record which learners were left out, so earlier records of them are kept.
    return [*done, *standing], list({**_standing(of_attempt, standing), **left}.values())


def _standing(
    records: Iterable[LearnerLeftOut], claims: Sequence[StepsCompleted]
) -> dict[tuple[int, int], LearnerLeftOut]:
    """The ``records`` whose steps lie within claims of the same view, by first step and learner."""
    spans = [(claim.version, claim.first_step, claim.last_step) for claim in claims]
    return {
        (each.first_step, each.learner): each
        for each in records
        if any(
            version == each.version and first <= each.first_step and each.last_step <= last
            for version, first, last in spans
        )
    }


def _settled(attempt: Sequence[StepsCompleted]) -> list[StepsCompleted]:
    """The claims of one controller that no later view took back."""
    standing: list[StepsCompleted] = []
    first_step: int | None = None
    for version in sorted({claim.version for claim in attempt}, reverse=True):
        of_version = [claim for claim in attempt if claim.version == version]
        if first_step is not None:
            of_version = _taken_back(of_version, first_step - 1, attempt)
        standing += of_version
        first = min(claim.first_step for claim in of_version) if of_version else first_step
        first_step = first if first_step is None or first is None else min(first_step, first)
    return standing


def _taken_back(
    claims: Sequence[StepsCompleted], step: int, marks_of: Sequence[StepsCompleted] = ()
) -> list[StepsCompleted]:
    """``claims`` without the steps after ``step``; a claim that goes beyond ``step`` is cut at the mark there."""
    marks = {(claim.epoch, claim.first_step - 1): claim.start for claim in (*marks_of, *claims)}
    marks |= {(claim.epoch, claim.last_step): claim.stop for claim in (*marks_of, *claims)}
    kept = []
    for claim in claims:
        if claim.last_step <= step:
            kept.append(claim)
        elif claim.first_step <= step:
            size, count = claim.stop - claim.start, claim.last_step - claim.first_step + 1
            evenly = claim.start + size // count * (step - claim.first_step + 1)
            stop = marks.get((claim.epoch, step), evenly)
            kept.append(replace(claim, stop=stop, last_step=step))
    return kept


def _pieces(claims: Sequence[StepsCompleted]) -> tuple[dict[tuple[int, int], Places], list[str]]:
    """Claims cut at all marks: (boundary before, boundary after) -> places; and contradictions in words."""
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


def _without(seen: EpochCoverage, records: Sequence[LearnerLeftOut]) -> tuple[EpochCoverage, list[str]]:
    """``seen`` without the samples that ``records`` leave out; and contradictions in words."""
    pieces = sorted((start, stop, each.learner) for each in records for start, stop in each.places)
    disputes = [
        f"place {start} was left out twice, with the learners {earlier} and {later}"
        for (_, before, earlier), (start, _, later) in pairwise(pieces)
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
    """Count how often ``pieces`` hold each place up to ``length`` (in an unfinished epoch: up to the last one used)."""
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
            _extend(repeated, start, stop)  # places beyond the epoch stand for samples that were used before
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
