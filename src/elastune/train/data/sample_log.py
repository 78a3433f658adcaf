"""What this worker says of the samples that were used: the ledger's raw material."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from elastune.core.run import Position
from elastune.journal.records import Record, StepsCompleted

PRIME = 4093  # sums of up to 4096 workers' checksums are exact in single precision


SampleSpans = list[list[int]]
"""What all steps so far have used, in pieces as long as can be (about one an epoch): the epoch, its first and last
place, its length, the first and last step. It is part of a checkpoint: claims may be lost with the controller."""


def follow(trail: SampleSpans, at: Position, size: int, length: int) -> None:
    """Add the step from ``at`` on, which used ``size`` samples of an epoch that will use ``length``."""
    if trail:
        epoch, _, stop, known, _, last = trail[-1]
        if (epoch, stop, known, last) == (at.epoch, at.offset, length, at.step):
            trail[-1][2], trail[-1][5] = stop + size, last + 1
            return
    trail.append([at.epoch, at.offset, at.offset + size, length, at.step + 1, at.step + 1])


def cut(trail: SampleSpans, length: int) -> None:
    """The epoch at hand ends sooner than was thought, at ``length``."""
    if trail:
        trail[-1][3] = length


def claims_of(trail: SampleSpans) -> list[StepsCompleted]:
    """The claims that ``trail`` stands for, whoever made them."""
    return [
        StepsCompleted(-1, 0, 0, epoch, start, stop, length, first_step, last_step)
        for epoch, start, stop, length, first_step, last_step in trail
    ]


def checksum(indices: torch.Tensor) -> int:
    """A small number that tells apart what samples were meant."""
    return int(indices.sum()) % PRIME


@dataclass(frozen=True)
class ControlVector:
    """What each worker adds to a step's reduction beside gradients; read back as sums over workers.

    ``waiting``: policies of this worker wait for what other workers' policies give. ``seconds``: of training, by rank
    0's clock. ``unsure``: a worker was lost, and not all may have seen the same. ``votes``: what is to change, policy
    by policy (``core.votes``). ``times``: three numbers for each rank, of which a worker gives its own
    (``monitors.base.WorkerTimes``); as many ranks as there can ever be.
    """

    stop: float = 0.0
    heard: float = 0.0
    samples: float = 0.0
    checksum: float = 0.0
    waiting: float = 0.0
    seconds: float = 0.0
    unsure: float = 0.0
    votes: Sequence[float] = ()
    times: Sequence[float] = ()

    def to_list(self) -> list[float]:
        """In the order of the fields."""
        single = [self.stop, self.heard, self.samples, self.checksum, self.waiting, self.seconds, self.unsure]
        return [*single, *self.votes, *self.times]

    @staticmethod
    def of(sums: Sequence[float], votes: int) -> ControlVector:
        """What ``to_list`` of all workers add up to; ``votes`` numbers of it are votes."""
        stop, heard, samples, checksum, waiting, seconds, unsure, *rest = sums
        return ControlVector(stop, heard, samples, checksum, waiting, seconds, unsure, rest[:votes], rest[votes:])


class SampleLog:
    """Joins the steps taken under one version to records."""

    def __init__(self, worker: int, send: Callable[[Record], None]) -> None:
        self._worker = worker
        self._send = send
        self._open: StepsCompleted | None = None

    def step(self, at: Position, size: int, length: int, version: int, workers: int) -> None:
        """The step from ``at`` on used ``size`` samples of an epoch that will use ``length``."""
        known, number = self._open, at.step + 1
        if (
            known is not None
            and (known.version, known.epoch, known.length) == (version, at.epoch, length)
            and (known.stop, known.last_step) == (at.offset, at.step)
        ):
            self._open = replace(known, stop=at.offset + size, last_step=number)
            return
        self.flush()
        self._open = StepsCompleted(
            worker=self._worker,
            version=version,
            workers=workers,
            epoch=at.epoch,
            start=at.offset,
            stop=at.offset + size,
            length=length,
            first_step=number,
            last_step=number,
        )

    def cut(self, length: int) -> None:
        """The epoch at hand ends sooner than was thought, at ``length``."""
        if self._open is not None:
            self._open = replace(self._open, length=length)

    def flush(self) -> None:
        """Send what was not sent yet."""
        known, self._open = self._open, None
        if known is not None:
            self._send(known)
