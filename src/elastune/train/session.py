"""The session that a training function is given: an ordinary PyTorch loop, on any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from elastune.comm.exactly import exact_mean, exact_sum
from elastune.comm.post import Post
from elastune.comm.tags import CALLS_TAG
from elastune.core.clock import Clock, SystemClock
from elastune.core.cost import MEASURED
from elastune.core.errors import UserError
from elastune.core.run import Config, RunSpec
from elastune.core.seeds import derive
from elastune.core.sync_check import refuse_turns
from elastune.elastic.worker.group import WorkerGroup
from elastune.elastic.worker.state_owner import Packed
from elastune.journal.records import Record, Reported
from elastune.policies.base import Policy
from elastune.train.adapt.adapter import Adapter
from elastune.train.checkpoints.home import OutFolder
from elastune.train.checkpoints.run_state import RunState
from elastune.train.collectives import NamedCollectives
from elastune.train.data.asked import asked_of
from elastune.train.data.loading import Loading
from elastune.train.data.sample_log import SampleLog
from elastune.train.divergence import DivergenceWatch
from elastune.train.evaluations import Evaluations
from elastune.train.memory import StepMemory
from elastune.train.metrics import Number, floats_of, sample_counts
from elastune.train.progress import BY_PROGRAM, Progress
from elastune.train.rng import seed_everything
from elastune.train.scaling import is_scaled
from elastune.train.session_models import SessionModels
from elastune.train.step_exchange import StepExchange
from elastune.train.stepper import Stepper
from elastune.train.timing import StepTimes
from elastune.train.tracked import Tracked
from elastune.train.transaction import Phase, StepTransaction


class Session(SessionModels):
    """One worker's view of a run: the argument of ``train(session)``. Every worker has a session of its own.

    Attributes ``config``, ``device`` and ``seed``: the run's settings, this worker's device, the run's seed. elastune
    makes sessions: ``snapshot`` is what this worker was rewound to, and goes on from; ``warm_up``, a joiner's first
    time through the training function, ends after a few passes that do not count; ``policies``: the program's policy
    classes, by name.
    """

    def __init__(
        self,
        spec: RunSpec,
        workers: WorkerGroup,
        device: torch.device,
        *,
        config: Config,
        send: Callable[[Record], None],
        stop_requested: Callable[[], bool],
        clock: Clock | None = None,
        snapshot: Packed | None = None,
        warm_up: bool = False,
        policies: Mapping[str, type[Policy]] = MappingProxyType({}),
    ) -> None:
        self.config = config
        self.device = device
        self.seed = spec.seed
        self._spec = spec
        self._workers = workers
        self._send = send
        self._clock = clock or SystemClock()
        self._snapshot = snapshot
        self._progress = Progress(StepTimes(self._clock), StepMemory(device))
        self._adapter = Adapter(spec, workers, self._progress, send, policies)
        self._log = SampleLog(workers.worker, send if workers.elastic or workers.rank == 0 else lambda record: None)
        self._transaction = StepTransaction(workers, self._progress, self._log)
        progress, transaction = self._progress, self._transaction
        self._collectives = NamedCollectives(
            workers, lambda: transaction.attempts, transaction.recover, partial(Post, tag=CALLS_TAG), self._stand_in
        )
        self._tracked = Tracked()
        parts = self._log, self._collectives, self._tracked
        self.state = RunState(spec, config, workers, progress, transaction, self._adapter, send, parts=parts)
        self.state.collectives = self._collectives
        self._watch = DivergenceWatch(spec.divergence, progress)
        self._exchange = StepExchange(
            workers, progress, transaction, self.state, self._adapter, self._watch, device, send, stop_requested
        )
        self._stepper = Stepper(
            spec,
            workers,
            progress,
            transaction,
            self._log,
            self.state,
            self._adapter,
            self._exchange,
            device,
            send,
            warm_up,
        )
        self._models: list[nn.Module] = []
        self._passes_in_epoch = 0
        self._evaluations = Evaluations(workers, self.state, transaction, device, spec.seed)
        self._home = OutFolder.found(spec.out)
        self._planned = spec.epochs or 0
        if snapshot is not None:
            self.state.rewind(snapshot)
        seed_everything(derive(spec.seed, "init"))

    # -- the training loop --------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are still to run, of ``count`` in all.

        ``--epochs`` of the run replaces ``count``. A resumed run leaves out the epochs that it has completed.
        """
        progress, until = self._progress, self._spec.until_epoch
        if until is not None and until < 1:
            raise UserError("a run pauses after a whole number of epochs, at least 1", until, "until_epoch=1")
        self._stepper.join()
        if self._held is not None:
            self._held.restore()
            self._held = None
        total = self._planned = count if self._spec.epochs is None else self._spec.epochs
        while progress.position.epoch < total and self._stepper.begins_epoch():
            epoch = progress.position.epoch
            if until is not None and epoch >= until:
                self._stepper.stop("until_epoch")
            self._passes_in_epoch = 0
            self.state.seed_epoch()
            with self._workers.told_if_left("session.epochs"):
                yield epoch
            self._refuse_half_a_step()
            self._exchange.commit()  # where workers meet after a step, and the program has left the loop at once
            if self.stopped != "complete":
                if self.stopped == BY_PROGRAM and self._spec.checkpoint_every_steps != 0:
                    self._stepper.save()  # a resumed run is to know
                return
            if progress.position.epoch == epoch:  # an epoch without a whole training pass
                progress.position = replace(progress.position, epoch=epoch + 1, offset=0)
                self._stepper.stop_if_asked()
            self._passes_in_epoch = 0
            pauses = until is not None and until <= progress.position.epoch < total
            if self._spec.checkpoint_every_steps != 0 and not pauses:  # a pause writes one
                self._exchange.commit()
                self._stepper.save()

    def batches(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        train: bool = True,
        shuffle: bool | None = None,
        sampler: Iterable[int] | None = None,
        drop_last: bool | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        loader_workers: int | None = None,
        pin_memory: bool | None = None,
        prefetch_factor: int | None = None,
        turns: int = 1,
    ) -> Iterator[Any]:
        """Yield this worker's batches of one pass over ``data``, collated and on ``session.device``.

        A training pass continues where a resumed run stopped. Each batch of it needs one ``session.backward``. With
        ``train=False`` the pass is an evaluation: in order, each batch of ``batch_size`` samples goes to one worker,
        and sums over workers count every sample once.

        Args:
            data: A map-style data set, a stream (``IterableDataset``), or a ``DataLoader`` of either. A loader's data
                set, batches, order and other options are taken over.
            batch_size: The global batch size: samples that all workers together use in one step.
            train: Whether this is a training pass.
            shuffle: Whether each epoch visits samples in a new order, which the run's seed decides (default).
            sampler: Replaces that order, such as a ``WeightedRandomSampler``. It draws once an epoch, from the run's
                seed, and the same on all workers.
            drop_last, collate_fn, pin_memory, prefetch_factor: As for torch's ``DataLoader``.
            loader_workers: As ``num_workers`` of torch's ``DataLoader``.
            turns: Steps with each batch, one after another; ``session.turn`` is 0 in the first. A GAN's two networks
                have one turn each.

        Raises:
            UserError: For data that cannot be divided among workers, and for options that contradict each other.

        Example:
            >>> for x, y in session.batches(DataLoader(train_set, batch_size=256, shuffle=True)):
            ...     session.backward(F.cross_entropy(model(x), y))
            ...     optimizer.step()
            ...     optimizer.zero_grad()
        """
        self._refuse_half_a_step()
        self._settle_compiler()
        asked = asked_of(
            data,
            batch_size,
            shuffle=shuffle,
            sampler=sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
            loader_workers=loader_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            seed=self.seed,
        )
        if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
            raise UserError("a batch has a whole number of turns, at least 1", turns, "such as turns=2")
        if not train:
            return self._evaluation_pass(asked.to_evaluate(self.seed), asked.batch_size, asked.loading)
        _ = self.state.prepared  # raises where there is no model yet
        if self._passes_in_epoch:
            raise UserError("an epoch holds one training pass", "a second one", "use one more session.epochs")
        self._passes_in_epoch += 1
        if turns > 1:
            self._forbid(refuse_turns)
        self.state.data.begin_pass(asked.dataset, self.epoch)
        asked = replace(asked, turns=turns)
        return self._stepper.training_pass(asked.source(self.seed), asked.batch_size, self._planned)

    def backward(self, loss: torch.Tensor, model: nn.Module | None = None, *, more: bool = False) -> None:
        """Run the backward pass of ``loss``, the MEAN over the batch that ``batches`` just gave.

        After the last call of a step, the gradients are those of the mean over the global batch, equal on all workers.
        Before that call no parameter has a gradient.

        Args:
            loss: The mean loss over the batch; a scalar.
            model: Of several prepared models, the only one that gets gradients; others may be a part of the loss.
            more: Another loss of the same batch follows, in a call of its own; their gradients add up.

        Raises:
            Diverged: Where the loss is not finite, or has exploded.
        """
        scaler = self._tracked.scaler
        self.state.scale = None if scaler is None or not is_scaled(loss) else scaler.get_scale
        self._exchange.backward(loss, self._trainable_of(model), more)
        for each in self._unfreezing:
            each.hide(self.epoch)

    def _refuse_half_a_step(self) -> None:
        """Workers take different numbers of batches a step: what all must do together has its place between steps.

        An evaluation that the program has left early, here or on another worker, ends here on all of them.
        """
        if self._transaction.phase is Phase.LEFT:
            fix = "put 'if session.ends_step:' before the break, or use --max-steps"
            raise UserError("a batch loop may be left between steps only", "left inside of a step", fix)
        if self.trained is not None:
            self.trained.replica.stand_in()

    def _refuse_inside(self, what: str) -> None:
        self._refuse_half_a_step()
        if self._transaction.more_to_come and self._workers.synchronised:
            fix = "put 'if session.ends_step:' before it, or move it after the loop"
            raise UserError(f"session.{what} belongs between steps", "a call inside of a step", fix)
        trained = self.trained
        ready = self._transaction.phase in (Phase.REDUCED, Phase.APART)
        if trained is not None and trained.sync.awaits_step and ready:
            why = "learners meet" if trained.sync.meets_after_step else "workers hold a part of the state each"
            rule = f"where {why}, session.{what} comes after optimizer.step()"
            raise UserError(rule, "a call between session.backward and optimizer.step()", "move it behind that")
        self._exchange.meet(repeatable=self._stepper.in_pass)

    def _evaluation_pass(self, dataset: Any, batch_size: int, loading: Loading) -> Iterator[Any]:
        if self.trained is not None and self.trained.sync.meets_after_step:
            self._refuse_inside("batches(train=False)")
        yield from self._evaluations.batches(dataset, batch_size, loading)

    # -- numbers over workers -----------------------------------------------------------------------------------------

    def sum(self, values: Number | Iterable[Number]) -> float:
        """Return the sum, over all workers, of a number, a tensor or a list of them.

        It is rounded once, so the number of workers does not show in it. Every worker must call this, between steps.
        """
        self._refuse_inside("sum")
        return exact_sum(x for row in self._evaluations.meet(floats_of(values), "session.sum") for x in row)

    def mean(self, values: Number | Iterable[Number]) -> float:
        """Return the mean over all values of all workers, rounded once. Every worker must call this, between steps."""
        self._refuse_inside("mean")
        return exact_mean(x for row in self._evaluations.meet(floats_of(values), "session.mean") for x in row)

    def report(self, *, evaluated_on: int | Mapping[str, int] | None = None, **metrics: Number) -> None:
        """Record metrics, each averaged over workers. A search optimises the last value of each.

        Every worker must call this, between steps. No search reads a name that begins with ``test_``: a held-out
        figure.

        Args:
            evaluated_on: Number of samples, of all workers, that the metrics were measured on; or one number for each
                metric name. Without it, confidence intervals cannot count the error of the test set.

        Raises:
            Diverged: Where a metric is not finite, or one that a study minimises has exploded.
        """
        self._refuse_inside("report")
        reserved = sorted(set(metrics) & set(MEASURED))
        if reserved or not metrics:
            raise UserError("report needs metrics other than seconds and cost", reserved or "none", "rename them")
        counts = sample_counts(evaluated_on, metrics)
        names = sorted(metrics)  # whatever their order was here
        values = [floats_of(metrics[name])[0] for name in names]
        rows = self._evaluations.meet(values, f"session.report({', '.join(names)})")
        columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        means = {name: exact_mean(columns[name]) for name in metrics}
        progress, at = self._progress, self._progress.position
        progress.evaluated_on |= counts
        if self._workers.synchronised:
            progress.metrics = {**progress.metrics, **means}
            if self.rank == 0 or self._workers.elastic:  # of several equal records one is kept
                so_far = at.epoch, at.step, at.samples, self.seconds
                self._send(Reported(*so_far, means, nth=progress.reports, epochs=self._planned))
            progress.reports += 1
        else:  # on the way back to where the run is: what was reported there stands
            progress.metrics = {**means, **progress.metrics}
        if not self._adapter.survives_divergence:
            self._watch.metrics(means, at.step, again=not self._workers.synchronised)

    def save(self) -> None:
        """Write a checkpoint now. Every worker must call this, between steps; a reduced step counts as completed."""
        self._refuse_inside("save")
        self._evaluations.meet([], "session.save")
        self._exchange.commit()
        self._stepper.save()

    def finish(self) -> None:
        """End the session: the training function has returned."""
        if self.trained is not None:  # it may have left an evaluation early
            self.trained.replica.stand_in()
        self._exchange.commit()
        self._stepper.finish()
        self._adapter.after_train(self.trained)

    def flush(self) -> None:
        """Send the part of the sample record that was not sent yet."""
        self._log.flush()
