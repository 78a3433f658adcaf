"""Evaluation passes: which worker evaluates which samples, and the values that workers gather after a pass."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.elastic.worker.group import Rows, WorkerGroup
from elastune.parallel.comm.group import GroupBroken
from elastune.train.checkpoints.run_state import RunState
from elastune.train.data.loading import LoaderOptions, evaluation_indices, fetch, to_device
from elastune.train.data.stream import evaluated
from elastune.train.predictions import EvaluatedSamples
from elastune.train.step import StepTransaction

T = TypeVar("T")
Number = float | int | bool | torch.Tensor


class Evaluations:
    """This worker's evaluation passes, and the values that workers gather after them.

    A pass hands out whole batches: each batch goes to one worker. ``meet`` then gathers values of all workers, and
    checks that they have evaluated the same since they met last.

    Attributes:
        seen: The samples that the newest pass has given to the program.
    """

    def __init__(
        self, workers: WorkerGroup, state: RunState, transaction: StepTransaction, device: torch.device, seed: int
    ) -> None:
        self._workers, self._state, self._transaction = workers, state, transaction
        self._device, self._seed = device, seed
        self._since_met = ""  # the evaluations since the last call in which all workers met, in words
        self.seen = EvaluatedSamples()

    def batches(self, dataset: Any, batch_size: int, loading: LoaderOptions) -> Iterator[Any]:
        """Yield this worker's batches of one pass: each of ``batch_size`` samples goes to one worker, in order."""
        workers = self._workers
        self._state.evaluate()
        self._transaction.unrepeatable |= workers.synchronised
        mesh, together = workers.comms.mesh, workers.synchronised
        place = self._place(mesh, workers.comms.rank) if together else (1, 0)
        streams = isinstance(dataset, IterableDataset)
        self.seen.begin(0 if streams else len(dataset))
        sentence = " after the evaluation of {} samples in batches of " + str(batch_size)
        if together and not streams:
            self._since_met += sentence.format(len(dataset))
        replica = None if self._state.trained is None or not together else self._state.trained.replica
        if replica is not None:
            replica.begin_evaluation()
        for samples, batch in self._numbered(dataset, batch_size, loading, place):
            if workers.broken:
                workers.recover(GroupBroken("the view is over"))
            if replica is not None:  # workers may have met in the program's lines
                replica.begin_evaluation()
            self.seen.batches.append(samples)
            on_device = to_device(batch, self._device)
            self._state.seed_batch(samples[0] if samples else -1)
            yield on_device
        self._state.seed_between("evaluation")
        if together and streams:  # the length of a stream is known at its end
            self._since_met += sentence.format(self.seen.length)
        if replica is not None:
            replica.stand_in(ends=True)

    def meet(self, values: list[float], what: str) -> Rows:
        """Gather the ``values`` of each part of the samples, by rank; ``what`` names the call that all workers make."""
        return self._speakers_rows(self._workers.gather(values, self._named(what)))

    def meet_bytes(self, data: bytes, what: str) -> list[bytes]:
        """As ``meet``, for bytes."""
        return self._speakers_rows(self._workers.gather_bytes(data, self._named(what)))

    def _numbered(
        self, dataset: Any, batch_size: int, loading: LoaderOptions, place: tuple[int, int]
    ) -> Iterator[tuple[list[int], Any]]:
        """This worker's batches, each with the places of its samples."""
        if isinstance(dataset, IterableDataset):
            yield from evaluated(dataset, batch_size, loading, self._seed, *place, self.seen.came_to)
            return
        to_fetch, places = (evaluation_indices(len(dataset), batch_size, *place) for _ in range(2))
        yield from zip(places, fetch(dataset, to_fetch, loading, self._seed, -1), strict=True)

    def _named(self, what: str) -> str:
        """The name of a gather, with the evaluations before it: workers that name it differently end with an error."""
        name, self._since_met = what + self._since_met, ""
        return name

    def _speakers_rows(self, rows: list[T]) -> list[T]:
        """One row of each part: the workers of one replica have evaluated the same samples."""
        mesh = self._workers.gathered_on
        if len(rows) < mesh.workers:  # of this worker alone
            return rows
        return [row for rank, row in enumerate(rows) if self._speaks(mesh, rank)]

    def _place(self, mesh: Mesh, rank: int) -> tuple[int, int]:
        """Into how many parts the samples of an evaluation are cut, and which part a worker has."""
        trained = self._state.trained
        return (mesh.batch, mesh.batch_rank(rank)) if trained is None else trained.replica.place(mesh, rank)

    def _speaks(self, mesh: Mesh, rank: int) -> bool:
        trained = self._state.trained
        return mesh.speaks(rank) if trained is None else trained.replica.speaks(mesh, rank)


def floats_of(values: Number | Iterable[Number]) -> list[float]:
    """All numbers in a number, a tensor, or an iterable of them. Raises ``UserError`` for text."""
    if isinstance(values, torch.Tensor):
        return [float(x) for x in values.detach().double().reshape(-1).tolist()]
    untyped: object = values
    if isinstance(untyped, str):
        raise UserError("a metric must be a number, or numbers", repr(values), "for example session.report(loss=0.5)")
    if isinstance(values, Iterable):
        return [x for value in values for x in floats_of(value)]
    return [float(values)]


def sample_counts(evaluated_on: int | Mapping[str, int] | None, names: Collection[str]) -> dict[str, int]:
    """How many samples each of the metrics ``names`` was measured on, from the argument of ``session.report``.

    Raises ``UserError`` for a count below 1, and for a metric that is not among ``names``.
    """
    if evaluated_on is None:
        return {}
    counts = dict(evaluated_on) if isinstance(evaluated_on, Mapping) else dict.fromkeys(names, evaluated_on)
    for name, n in counts.items():
        if name not in names or isinstance(n, bool) or not isinstance(n, int) or n < 1:
            rule = "evaluated_on must be a number of samples, or one for metrics of the same report"
            raise UserError(rule, f"{name!r}: {n!r}", "for example evaluated_on=len(data.test)")
    return counts
