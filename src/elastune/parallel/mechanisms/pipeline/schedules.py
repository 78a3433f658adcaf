"""The order in which a stage's worker runs its passes: pure lists of actions, one for each worker.

A model is cut into ``workers x chunks`` runs of layers, numbered in the order in which a sample goes through them.
Chunk c lies on worker ``c % workers``. The lists of a schedule never deadlock together: some worker can always run the
first action that it has not done. Tests run all lists.

Sources: GPipe: Huang et al., arXiv 1811.06965. 1F1B: PipeDream-Flush in Narayanan et al., arXiv 2006.09503.
Interleaved 1F1B: Narayanan et al., arXiv 2104.04473, section 2.2.2. Zero bubble (ZB-H1): Qi et al., arXiv 2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from elastune.core.run import Schedule

Kind = Literal["forward", "backward", "input", "weight"]
"""``backward`` is a whole backward pass; ``input`` and ``weight`` are its halves, which may lie apart."""
CHUNKS = 2
"""Chunks of layers on each worker of an interleaved pipeline, if the model has enough layers."""


@dataclass(frozen=True)
class Action:
    """One pass of micro-batch ``batch`` (counted from 0 in each step) through chunk ``chunk``."""

    kind: Kind
    chunk: int
    batch: int


def gpipe(workers: int, worker: int, batches: int, chunks: int = 1) -> list[Action]:
    """All forward passes, then all backward passes. In flight: all ``batches``."""
    own_chunks = [worker + workers * i for i in range(chunks)]
    forward = [Action("forward", chunk, k) for chunk in own_chunks for k in range(batches)]
    return forward + [Action("backward", chunk, k) for chunk in reversed(own_chunks) for k in range(batches)]


def one_f_one_b(workers: int, worker: int, batches: int, chunks: int = 1) -> list[Action]:
    """Each backward pass as soon as possible. In flight on worker p: at most ``workers - p``."""
    return _alternate(
        [Action("forward", worker, k) for k in range(batches)],
        [[Action("backward", worker, k)] for k in range(batches)],
        workers - 1 - worker,
    )


def zero_bubble(workers: int, worker: int, batches: int, chunks: int = 1) -> list[Action]:
    """ZB-H1: 1F1B that delays gradients of weights, so that they fill idle time.

    Worker p delays them by p micro-batches. So every worker has at most ``workers`` micro-batches in flight, as many as
    the first worker of 1F1B.
    """
    back = []
    for k in range(batches):
        late = [Action("weight", worker, k - worker)] if k >= worker else []
        back.append([Action("input", worker, k), *late])
    rest = [Action("weight", worker, k) for k in range(max(0, batches - worker), batches)]
    return _alternate([Action("forward", worker, k) for k in range(batches)], back, workers - 1 - worker) + rest


def interleaved(workers: int, worker: int, batches: int, chunks: int = CHUNKS) -> list[Action]:
    """1F1B over ``chunks`` chunks a worker: a bubble ``chunks`` times shorter, and as many times the messages.

    Micro-batches go through the chunks in rounds of ``workers`` micro-batches. The last round may be shorter, a case
    that the source does not treat: forward passes then all run first.
    """
    if chunks == 1:
        return one_f_one_b(workers, worker, batches)
    passes = [
        (turn, k)
        for start in range(0, batches, workers)
        for turn in range(chunks)
        for k in range(start, min(start + workers, batches))
    ]
    forward = [Action("forward", worker + workers * turn, k) for turn, k in passes]
    back = [[Action("backward", worker + workers * (chunks - 1 - turn), k)] for turn, k in passes]
    ahead = 2 * (workers - 1 - worker) + (chunks - 1) * workers
    return _alternate(forward, back, ahead if batches % workers == 0 else len(forward))


def _alternate(forward: list[Action], back: list[list[Action]], ahead: int) -> list[Action]:
    """``ahead`` forward passes, then alternately a forward pass and an item of ``back``, then the rest of ``back``."""
    ahead = min(ahead, len(forward))
    actions = forward[:ahead]
    for i, group in enumerate(back):
        actions += [*forward[ahead + i : ahead + i + 1], *group]
    return actions


SCHEDULES: Mapping[Schedule, Callable[[int, int, int, int], list[Action]]] = MappingProxyType(
    {"1f1b": one_f_one_b, "gpipe": gpipe, "interleaved": interleaved, "zero-bubble": zero_bubble}
)
