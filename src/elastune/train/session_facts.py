"""Who a worker is in a run, and how far the run has come: what a training function may ask of its session."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch

from elastune.core.run import RunSpec
from elastune.core.signals import Signal
from elastune.elastic.worker.group import WorkerGroup
from elastune.journal.records import DataContext, RunContext
from elastune.mechanisms.parked import built_in_parts
from elastune.train.adapt.adapter import Adapter
from elastune.train.checkpoints.run_state import RunState
from elastune.train.data.fingerprint import data_context
from elastune.train.machine import run_context
from elastune.train.progress import Progress
from elastune.train.training_state import TrainingState
from elastune.train.transaction import StepTransaction


class SessionFacts:
    """The part of ``Session`` that does nothing to the run."""

    state: RunState
    _spec: RunSpec
    device: torch.device
    _workers: WorkerGroup
    _progress: Progress
    _transaction: StepTransaction
    _train_set: Any
    _adapter: Adapter

    @property
    def rank(self) -> int:
        """This worker's number, from 0. It may change between steps."""
        return self._workers.rank

    @property
    def size(self) -> int:
        """How many workers there are. It may change between steps."""
        return self._workers.size

    @property
    def epoch(self) -> int:
        """Completed training passes."""
        return self._progress.position.epoch

    @property
    def step(self) -> int:
        """Completed steps (global batches)."""
        return self._progress.position.step

    @property
    def samples(self) -> int:
        """Samples used by the completed steps of all workers."""
        return self._progress.position.samples

    @property
    def ends_step(self) -> bool:
        """Whether the current batch completed a step: with several slots a worker, a step has several batches.

        Inside the batch loop, whatever counts steps, reports or breaks belongs under ``if session.ends_step:``. A step
        during which a worker was lost is done again: none of its batches ended it.
        """
        return not self._transaction.more_to_come

    @property
    def seconds(self) -> float:
        """Training time so far, earlier parts of a resumed run included."""
        return self._progress.times.seconds

    @property
    def progress(self) -> Progress:
        """How far training has come, for who ends the run."""
        return self._progress

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of everything that was reported."""
        return self._progress.metrics

    @property
    def loss(self) -> float:
        """The mean loss over the global batch of the newest step: of all workers, alike on them, whoever was lost.

        To steer by. What a program adds up itself is gone with a worker that dies. NaN before the first step, and on a
        GPU before the step behind the first look, since it costs a wait for the device.
        """
        self._progress.loss_wanted = True
        return math.nan if self._progress.loss is None else self._progress.loss

    @property
    def signals(self) -> dict[str, Signal]:
        """What the run's monitors say by now, by name."""
        return self._adapter.monitoring.signals

    @property
    def context(self) -> RunContext:
        """What the run could not choose: data and model, as far as they were seen, and the device."""
        trained = self.trained
        data = DataContext() if self._train_set is None else data_context(self._train_set)
        return run_context(self.device, data, 0 if trained is None else trained.parameters)

    @property
    def stopped(self) -> str:
        """Why training ended: "complete", "max_steps", "until_epoch", "requested", "policy" or "program"."""
        return self._progress.stopped

    @property
    def trained(self) -> TrainingState | None:
        """What was prepared."""
        return self.state.trained

    def model_context(self) -> AbstractContextManager[None]:
        """Under it the program may build a model that fits into no worker's memory; its optimizer comes after it.

        Initial values are those of a plain construction. Parameters lie in nameless files in the run's folder until
        ``session.prepare`` has given each worker its part. Where all compute with all of them, this does nothing.

        Example:
            >>> with session.model_context():
            ...     model = Transformer(layers=96)
        """
        return built_in_parts(self._spec.means, self._spec.out)
