"""Which samples of a global batch a worker runs, and in which passes: arithmetic over slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from elastune.core.errors import UserError
from elastune.core.run import Mode
from elastune.core.slots import cut, dealt


@dataclass(frozen=True)
class BatchSlice:
    """One forward and backward pass: the samples ``samples`` (offsets into the global batch) of slot ``slot``.

    ``weight`` is the part of the global batch it stands for; weights over all workers add up to 1. A worker without
    samples runs a copy of what another does with weight 0, so that every worker takes every step. ``ends_slot`` and
    ``ends_step`` mark the last pass of a slot and of this worker's step. Where all workers make equally many passes
    ``ending`` tells, by worker, the slot that ends there in this one; -1: none does.

    Where a worker trains several learners (``core.sync_plan``) a slice is of ``learner``, and weights over all of that
    learner's slices between two of its own steps add up to 1; ``counts`` is the part of the round that these samples
    are. ``ends_update``: the learner's own optimizer step follows; ``ends_local_step``: it is the last one of this
    worker's learners.

    ``batch`` is the number of samples of its global batch.

    Where the workers of a replica run slots of their own (``apart``), ``together`` has what all of them run in this
    pass, by their place along the tensor axis.
    """

    samples: range
    slot: int
    weight: float
    ends_slot: bool
    ends_step: bool
    ending: tuple[int, ...] = ()
    learner: int = 0
    counts: float = 1.0
    ends_update: bool = False
    ends_local_step: bool = False
    batch: int = 0
    together: tuple[BatchSlice, ...] = ()


def shares(
    batch: int,
    num_slots: int,
    workers: int,
    rank: int,
    mode: Mode,
    micro_batch: int | None,
    least: int = 1,
    *,
    even: bool = False,
    in_turn: bool = False,
) -> list[BatchSlice]:
    """The passes of worker ``rank`` of ``workers`` over a global batch of ``batch`` samples, in order.

    ``exact``: one pass a slot, or more where a slot exceeds ``micro_batch``. ``fast``: the worker's slots as one pass,
    or more where they exceed ``micro_batch``. ``slot`` is then the first slot of the worker's run.
    ``least``: samples that a pass must have, where the batch has as many (``samples_of_slots``) and ``micro_batch``,
    which is a bound, lets it; so must a copy.
    ``even``: all workers make as many passes as the one with most; further ones come first, copies without weight.
    ``in_turn``: in ``exact`` mode slots are dealt out in turn, so that in each pass workers end slots that lie side by
    side.
    """
    deal = dealt if in_turn and mode == "exact" else cut
    everyone = _portions(samples_of_slots(batch, num_slots, workers, mode, least), workers, mode)
    plans = [_passes(batch, everyone, run, micro_batch) for run in deal(num_slots, workers)]
    if not even:
        return plans[rank]
    most = max(map(len, plans))
    plans = [[replace(own[0], weight=0.0, ends_slot=True, ends_step=False)] * (most - len(own)) + own for own in plans]
    ending = [
        tuple(each.slot if each.weight and each.ends_slot else -1 for each in passes)
        for passes in zip(*plans, strict=True)
    ]
    return [replace(own, ending=ends) for own, ends in zip(plans[rank], ending, strict=True)]


def apart(passes: Sequence[BatchSlice], workers: int, place: int) -> list[BatchSlice]:
    """Of a replica's ``passes``, each a whole slot, those that worker ``place`` of its ``workers`` runs.

    They are dealt out in turn, so that what workers run at one time lies side by side. All make equally many passes:
    who has none left runs a copy of the first, without weight.

    Raises:
        UserError: Where a slot has several passes.
    """
    if not all(each.ends_slot for each in passes):
        rule = "workers that run slots of a replica apart take each slot in one pass"
        raise UserError(rule, "a smaller micro-batch", "leave --micro-batch out, or use more --slots")
    found = []
    for start in range(0, len(passes), workers):
        ends = start + workers >= len(passes)
        row = [replace(each, ends_step=False) for each in passes[start : start + workers]]
        row += [replace(passes[0], weight=0.0, ends_step=False)] * (workers - len(row))
        found.append(replace(row[place], ends_step=ends, together=tuple(row)))
    return found


def slices_of_round(
    batches: Sequence[int],
    num_slots: int,
    learners: int,
    carried: range,
    mode: Mode,
    micro_batch: int | None,
    least: int = 1,
) -> list[BatchSlice]:
    """The passes of a worker that trains the learners ``carried``, over a round of global ``batches``, in order.

    Of each batch a learner has what worker ``learner`` of ``learners`` would have; one without samples runs a copy of
    another's with weight 0, and its own optimizer step then finds no gradient. ``samples`` count from the round's
    first.
    """
    total, start = sum(batches), 0
    found: list[BatchSlice] = []
    for batch in batches:
        for learner in carried:
            passes = shares(batch, num_slots, learners, learner, mode, micro_batch, least)
            own = sum(len(each.samples) for each in passes if each.weight)
            found += [
                replace(
                    each,
                    samples=range(start + each.samples.start, start + each.samples.stop),
                    weight=len(each.samples) / own if own else 0.0,
                    learner=learner,
                    counts=own / total,
                    ends_step=False,
                    ends_update=each.ends_step,
                    ends_local_step=each.ends_step and learner == carried[-1],
                )
                for each in passes
            ]
        start += batch
    return [*found[:-1], replace(found[-1], ends_step=True)]


def places_of_learner(
    batches: Sequence[int], num_slots: int, learners: int, learner: int, mode: Mode, least: int = 1
) -> list[range]:
    """Which samples of a round of global ``batches`` one learner has, counted from the round's first, in order."""
    own = slices_of_round(batches, num_slots, learners, range(learner, learner + 1), mode, None, least)
    found: list[range] = []
    for samples in (each.samples for each in own if each.weight):
        if found and found[-1].stop == samples.start:
            found[-1] = range(found[-1].start, samples.stop)
        else:
            found.append(samples)
    return found


def _passes(batch: int, everyone: list[tuple[int, range]], run: range, micro_batch: int | None) -> list[BatchSlice]:
    """Those of the worker that has the slots ``run``; ``everyone``: what all workers do."""
    scale = 1.0
    portions = [(slot, samples) for slot, samples in everyone if slot in run and samples]
    if not portions:
        portions, scale = [max(everyone, key=lambda portion: len(portion[1]))], 0.0
    passes = [(slot, piece) for slot, samples in portions for piece in _pieces(samples, micro_batch)]
    return [
        BatchSlice(
            samples=piece,
            slot=slot,
            weight=scale * len(piece) / batch,
            ends_slot=i + 1 == len(passes) or passes[i + 1][0] != slot,
            ends_step=i + 1 == len(passes),
            batch=batch,
        )
        for i, (slot, piece) in enumerate(passes)
    ]


def _pieces(samples: range, micro_batch: int | None) -> Iterator[range]:
    for piece in cut(len(samples), 1 if micro_batch is None else -(-len(samples) // micro_batch)):
        yield samples[piece.start : piece.stop]


def _portions(slots: list[range], workers: int, mode: Mode) -> list[tuple[int, range]]:
    """What all workers do, in order: a slot (``fast``: a worker's first) and its samples (those of all its slots)."""
    runs = cut(len(slots), len(slots) if mode == "exact" else workers)
    return [(run.start, range(slots[run.start].start, slots[run.stop - 1].stop)) for run in runs if run]


def samples_of_slots(batch: int, num_slots: int, workers: int, mode: Mode, least: int) -> list[range]:
    """Which samples of a global batch each slot has.

    Where a pass (in ``exact`` mode a slot, in ``fast`` mode all that a worker has) would get fewer than ``least`` but
    not none, the batch goes to as many slots as can have that many, spread over all; in ``exact`` mode whatever the
    workers. A batch of fewer than ``least`` is one slot's.
    """
    slots = cut(batch, num_slots)
    if not any(0 < len(samples) < least for _, samples in _portions(slots, workers, mode)):
        return slots
    filled = max(1, batch // least)
    edges = [batch * (filled * slot // num_slots) // filled for slot in range(num_slots + 1)]
    return [range(low, high) for low, high in pairwise(edges)]


def contributors(batch: int, num_slots: int, workers: int, mode: Mode, least: int = 1) -> int:
    """How many of ``workers`` have at least one sample of a global batch of ``batch``; see ``shares``."""
    slots = samples_of_slots(batch, num_slots, workers, mode, least)
    return sum(any(slots[slot] for slot in run) for run in cut(num_slots, workers))
