"""What a training function can read of its session: who this worker is, and how far the run has come."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import torch

from elastune.core.run import RunSpec
from elastune.core.signals import Signal
from elastune.elastic.worker.group import WorkerGroup
from elastune.journal.records import RunContext
from elastune.mechanisms.parked import built_in_parts
from elastune.train.adapt.adapter import Adapter
from elastune.train.checkpoints.run_state import RunState
from elastune.train.machine import run_context
from elastune.train.progress import Progress
from elastune.train.training_state import TrainingState
from elastune.train.transaction import StepTransaction


class SessionFacts:
    """The part of ``Session`` that only reads."""

    state: RunState
    _spec: RunSpec
    device: torch.device
    _workers: WorkerGroup
    _progress: Progress
    _transaction: StepTransaction
    _adapter: Adapter

    @property
    def rank(self) -> int:
        """This worker's rank, from 0. It may change between steps."""
        return self._workers.rank

    @property
    def size(self) -> int:
        """The number of workers. It may change between steps."""
        return self._workers.size

    @property
    def epoch(self) -> int:
        """The number of completed training passes."""
        return self._progress.position.epoch

    @property
    def step(self) -> int:
        """The number of completed steps (global batches)."""
        return self._progress.position.step

    @property
    def samples(self) -> int:
        """The number of samples that the completed steps of all workers used."""
        return self._progress.position.samples

    @property
    def ends_step(self) -> bool:
        """Whether the current batch completed a step: a worker with several slots has several batches in a step.

        Inside the batch loop, put whatever counts steps, reports or breaks under ``if session.ends_step:``. A step in
        which a worker was lost is done again: none of its batches ended it.
        """
        return not self._transaction.more_to_come

    @property
    def seconds(self) -> float:
        """Training time so far, in seconds; it includes earlier parts of a resumed run."""
        return self._progress.times.seconds

    @property
    def progress(self) -> Progress:
        """How far training has come, for the code that ends the run."""
        return self._progress

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of every reported metric, by name."""
        return self._progress.metrics

    @property
    def loss(self) -> float:
        """The mean loss over the global batch of the newest step, equal on all workers.

        Use it to steer the training: it stays right when a worker is lost, while a sum that the program keeps itself is
        lost with its worker. It is NaN before the first step. Reading it costs a wait for the device; so on a GPU it is
        also NaN until the step after the first time it is read.
        """
        self._progress.loss_wanted = True
        return math.nan if self._progress.loss is None else self._progress.loss

    @property
    def signals(self) -> dict[str, Signal]:
        """The newest signals of the run's monitors, by name."""
        return self._adapter.monitoring.signals

    @property
    def context(self) -> RunContext:
        """What the run could not choose: its data and model, as far as they were seen, and its device."""
        trained = self.trained
        return run_context(self.device, self.state.data.context(), 0 if trained is None else trained.parameters)

    @property
    def stopped(self) -> str:
        """Why training ended: "complete", "max_steps", "until_epoch", "requested", "policy" or "program"."""
        return self._progress.stopped

    @property
    def trained(self) -> TrainingState | None:
        """What ``prepare`` was given; None before it."""
        return self.state.trained

    def model_context(self) -> AbstractContextManager[None]:
        """Return a context for building a model that does not fit into any worker's memory.

        Make the optimizer after the block. Initial values are those of a plain construction. Parameters lie in unnamed
        files in the run's folder until ``session.prepare`` has given each worker its part. Where every worker computes
        with all parameters, the context does nothing.

        Example:
            >>> with session.model_context():
            ...     model = Transformer(layers=96)
        """
        return built_in_parts(self._spec.means, self._spec.out)
