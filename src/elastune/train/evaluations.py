"""Passes over data that train nothing: who evaluates which samples, and what workers then add up together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset

from elastune.core.mesh import Mesh
from elastune.elastic.worker.group import Rows, WorkerGroup
from elastune.parallel.comm.group import GroupBroken
from elastune.train.checkpoints.run_state import RunState
from elastune.train.data.loading import LoaderOptions, evaluation_indices, fetch, to_device
from elastune.train.data.stream import evaluated
from elastune.train.predictions import EvaluatedSamples
from elastune.train.step import StepTransaction

T = TypeVar("T")


class Evaluations:
    """This worker's evaluation passes, and what workers gather behind them.

    ``seen``: the samples that the newest pass has given to the program.
    """

    def __init__(
        self, workers: WorkerGroup, state: RunState, transaction: StepTransaction, device: torch.device, seed: int
    ) -> None:
        self._workers, self._state, self._transaction = workers, state, transaction
        self._device, self._seed = device, seed
        self._since_met = ""  # what was evaluated since the last call in which all ranks meet
        self.seen = EvaluatedSamples()

    def batches(self, dataset: Any, batch_size: int, loading: LoaderOptions) -> Iterator[Any]:
        """This worker's batches of one pass: each of ``batch_size`` samples goes to one worker, in order."""
        workers = self._workers
        self._state.evaluate()
        self._transaction.unrepeatable |= workers.synchronised
        mesh, tells = workers.comms.mesh, workers.synchronised
        place = self._place(mesh, workers.comms.rank) if tells else (1, 0)
        streams = isinstance(dataset, IterableDataset)
        self.seen.begin(0 if streams else len(dataset))
        what = " after the evaluation of {} samples in batches of " + str(batch_size)
        if tells and not streams:
            self._since_met += what.format(len(dataset))
        replica = None if self._state.trained is None or not tells else self._state.trained.replica
        if replica is not None:
            replica.begin_evaluation()
        for samples, batch in self._numbered(dataset, batch_size, loading, place):
            if workers.broken:
                workers.recover(GroupBroken("the view is over"))
            if replica is not None:  # others may have met in the program's lines
                replica.begin_evaluation()
            self.seen.batches.append(samples)
            on_device = to_device(batch, self._device)
            self._state.seed_batch(samples[0] if samples else -1)
            yield on_device
        self._state.seed_between("evaluation")
        if tells and streams:  # how many there are is known by now
            self._since_met += what.format(self.seen.length)
        if replica is not None:
            replica.stand_in(ends=True)

    def _numbered(
        self, dataset: Any, batch_size: int, loading: LoaderOptions, place: tuple[int, int]
    ) -> Iterator[tuple[list[int], Any]]:
        """This worker's batches, each with the places of its samples."""
        if isinstance(dataset, IterableDataset):
            yield from evaluated(dataset, batch_size, loading, self._seed, *place, self.seen.came_to)
            return
        indices, given = (evaluation_indices(len(dataset), batch_size, *place) for _ in range(2))
        yield from zip(given, fetch(dataset, indices, loading, self._seed, -1), strict=True)

    def meet(self, values: list[float], what: str) -> Rows:
        """Every part of the samples' ``values``, by rank. All must have evaluated the same since they met last."""
        return self._spoken(self._workers.gather(values, self._told(what)))

    def meet_bytes(self, data: bytes, what: str) -> list[bytes]:
        """The same of ``data``."""
        return self._spoken(self._workers.gather_bytes(data, self._told(what)))

    def _told(self, what: str) -> str:
        told, self._since_met = what + self._since_met, ""
        return told

    def _spoken(self, rows: list[T]) -> list[T]:
        """One of each part: workers of one replica have evaluated the same samples."""
        mesh = self._workers.gathered_on
        if len(rows) < mesh.workers:  # this worker's alone
            return rows
        return [row for rank, row in enumerate(rows) if self._speaks(mesh, rank)]

    def _place(self, mesh: Mesh, rank: int) -> tuple[int, int]:
        """Which part of what is evaluated a worker has, of how many."""
        trained = self._state.trained
        return (mesh.batch, mesh.batch_rank(rank)) if trained is None else trained.replica.place(mesh, rank)

    def _speaks(self, mesh: Mesh, rank: int) -> bool:
        trained = self._state.trained
        return mesh.speaks(rank) if trained is None else trained.replica.speaks(mesh, rank)
