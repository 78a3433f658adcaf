"""What the user's training function holds: an ordinary PyTorch loop in, any number of workers out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from elastune.comm.exactly import exact_mean, exact_sum
from elastune.comm.group import GroupBroken
from elastune.core.clock import Clock, SystemClock
from elastune.core.cost import MEASURED
from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import Config, RunSpec
from elastune.core.seeds import derive
from elastune.core.signals import Signal
from elastune.elastic.worker.group import Rows, WorkerGroup
from elastune.elastic.worker.state_owner import Packed
from elastune.journal.records import Record, Reported
from elastune.mechanisms.registry import Plans, meshes_of, note_plan
from elastune.policies.base import Policy
from elastune.sync.registry import prepare as prepare_sync
from elastune.train.adapt.adapter import Adapter
from elastune.train.adapt.agreement import wished
from elastune.train.checkpoints.run_state import RunState
from elastune.train.control import ControlVector
from elastune.train.data.loading import Loading, batches_less, check_dataset, evaluation_indices, fetch, to_device
from elastune.train.data.sample_log import SampleLog
from elastune.train.data.source import MapStyleSource
from elastune.train.divergence import DivergenceWatch
from elastune.train.memory import StepMemory
from elastune.train.metrics import Number, floats_of, sample_counts
from elastune.train.precision import autocast_forward
from elastune.train.progress import Progress
from elastune.train.rng import seed_everything
from elastune.train.schedules import gate, learning_rates
from elastune.train.session_facts import SessionFacts
from elastune.train.stepper import Stepper
from elastune.train.timing import StepTimes
from elastune.train.training_state import TrainingState
from elastune.train.transaction import Phase, StepTransaction, evaluates_again


class Session(SessionFacts):
    """A worker's view of a run. Every worker of a run executes the same function with its own session.

    ``snapshot``: what this worker was rewound to, and goes on from. ``warm_up``: a joiner's first time through the
    training function, which ends after a few passes that do not count. ``policies``: classes of policies of the user's
    own, by name.
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
        self.state = RunState(
            spec, config, workers, self._progress, self._transaction, self._adapter, send, parts=(self._log,)
        )
        self._watch = DivergenceWatch(spec.divergence, self._progress)
        self._stepper = Stepper(
            spec,
            workers,
            self._progress,
            self._transaction,
            self._log,
            self.state,
            self._adapter,
            self._watch,
            device,
            send,
            stop_requested,
            warm_up,
        )
        self._passes_in_epoch = 0
        self._evaluated = ""  # since the last call in which all ranks meet
        self._planned = spec.epochs or 0
        self._train_set: Any = None
        if snapshot is not None:
            self.state.rewind(snapshot)
        seed_everything(derive(spec.seed, "init"))

    # -- the training loop --------------------------------------------------------------------------------------------

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *schedulers: Any, plan: Plans | None = None
    ) -> tuple[Any, ...]:
        """Attach mechanism, precision and checkpoints; returns (model, optimizer, *schedulers) to be used from here on.

        Moves the model to ``session.device`` and gives every worker rank 0's initial state. Schedulers that step inside
        the batch loop must be given here; ``ReduceLROnPlateau`` is then stepped with the mean over workers.
        ``plan``: which layers the mechanism ``tensor`` divides, or a ``Pipeline`` that says where ``pipeline`` cuts the
        model (``docs/meshes.md``); found by itself where left out.
        """
        if self.trained is not None:
            raise UserError("session.prepare must be called once", "a second call", "prepare one model a run")
        means, workers = self._spec.means, self._workers
        most = max(self._spec.most_workers, workers.group.size)
        self._transaction.evaluates_again = evaluates_again(optimizer, means, most)
        note_plan(model, plan)
        model.to(self.device)
        self.state.spread(model, optimizer)
        control = len(self._stepper.control(ControlVector()).to_list())
        with self.model_context():  # a division makes parameters of its own
            sync = prepare_sync(model, optimizer, means, workers.comms, control=control, elastic=workers.elastic)
        self.state.watch(sync.replica)
        self.state.trained = TrainingState(sync, schedulers, tuple(learning_rates(optimizer)))
        if means.precision == "bf16":
            autocast_forward(model, self.device)
        if self._snapshot is not None:
            self.state.rewind(self._snapshot)
        elif workers.synchronised:
            self.state.begin()
        for scheduler in schedulers:
            gate(scheduler, lambda: self.ends_step, self.mean)
        return (sync.replica.model, sync.replica.optimizer, *schedulers)

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs still to run of ``count`` (a run's ``--epochs`` goes over ``count``)."""
        progress, until = self._progress, self._spec.until_epoch
        if until is not None and until < 1:
            raise UserError("a run pauses after a whole number of epochs, at least 1", until, "until_epoch=1")
        self._stepper.join()
        total = self._planned = count if self._spec.epochs is None else self._spec.epochs
        while progress.position.epoch < total and self.stopped == "complete":
            epoch = progress.position.epoch
            if until is not None and epoch >= until:
                self._stepper.stop("until_epoch")
            self._passes_in_epoch = 0
            with self._workers.told_if_left("session.epochs"):
                yield epoch
            self._refuse_half_a_step()
            if self.stopped != "complete":
                return
            if progress.position.epoch == epoch:  # an epoch without a whole training pass
                progress.position = replace(progress.position, epoch=epoch + 1, offset=0)
                self._stepper.stop_if_asked()
            self._passes_in_epoch = 0
            pauses = until is not None and until <= progress.position.epoch < total
            if self._spec.checkpoint_every_steps != 0 and not pauses:  # a pause writes one
                self._stepper.commit()
                self._stepper.save()

    def batches(
        self,
        dataset: Any,
        batch_size: int,
        *,
        train: bool = True,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        loader_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
    ) -> Iterator[Any]:
        """This worker's part of one pass over ``dataset``, collated and on ``session.device``.

        ``batch_size`` is global: all workers together use that many samples a step. A training pass goes on where a
        resumed run left it; each batch it yields needs one ``session.backward``. With ``train=False`` the pass is for
        evaluation: in order, each batch of ``batch_size`` goes to one worker, and sums over workers see every sample
        once. The other options are those of torch's ``DataLoader``.
        """
        self._refuse_half_a_step()
        check_dataset(dataset, batch_size)
        loading = Loading(collate_fn, loader_workers, pin_memory, prefetch_factor)
        if not train:
            return self._evaluation_pass(dataset, batch_size, loading)
        if self.trained is None:
            raise UserError("session.prepare must come before training", "no model yet", "call session.prepare first")
        if self._passes_in_epoch:
            raise UserError("an epoch holds one training pass", "a second one", "use one more session.epochs")
        self._passes_in_epoch += 1
        self._train_set = dataset

        def source(epoch: int) -> MapStyleSource:
            return MapStyleSource(dataset, self.seed, epoch, shuffle=shuffle, drop_last=drop_last, loading=loading)

        return self._stepper.training_pass(source, batch_size)

    def backward(self, loss: torch.Tensor) -> None:
        """Backward pass of ``loss``, the MEAN over the batch that ``batches`` just gave.

        After the last call of a step the gradients are those of the mean over the global batch, equal on all workers;
        before it no parameter has one. Raises ``Diverged`` where the loss is not finite, or has exploded.
        """
        self._stepper.backward(loss)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale the step's gradient so that its norm, over all parameters of the model, is at most ``max_norm``.

        As torch's ``clip_grad_norm_`` (norm 2), and for every mechanism: where gradients lie in pieces on several
        workers torch's finds none. The norm is added up in a way that shows neither workers nor mesh.

        Args:
            max_norm: The largest norm that is left as it is.

        Returns:
            The norm before; 0 where this batch did not complete a step (``ends_step``), and nothing was done.

        Raises:
            UserError: For a bound that is not positive.

        Example:
            >>> session.backward(loss)
            >>> session.clip_grad_norm_(1.0)
            >>> optimizer.step()
        """
        if not max_norm > 0:
            raise UserError("the norm of a gradient is bounded by a positive number", max_norm, "such as 1.0")
        if self.trained is None:
            raise UserError("session.prepare must come before training", "no model yet", "call session.prepare first")
        return self.trained.replica.clip(float(max_norm))

    def _refuse_half_a_step(self) -> None:
        """Workers take different numbers of batches a step: what all must do together has its place between steps."""
        if self._transaction.phase is Phase.LEFT:
            fix = "put 'if session.ends_step:' before the break, or use --max-steps"
            raise UserError("a batch loop may be left between steps only", "left inside of a step", fix)

    def _refuse_inside(self, what: str) -> None:
        self._refuse_half_a_step()
        if self._transaction.more_to_come and self._workers.synchronised:
            fix = "put 'if session.ends_step:' before it, or move it after the loop"
            raise UserError(f"session.{what} belongs between steps", "a call inside of a step", fix)
        trained = self.trained
        if trained is not None and trained.sync.awaits_step and self._transaction.phase is Phase.REDUCED:
            rule = f"where workers hold a part of the state each, session.{what} comes after optimizer.step()"
            raise UserError(rule, "a call between session.backward and optimizer.step()", "move it behind that")

    def _evaluation_pass(self, dataset: Any, batch_size: int, loading: Loading) -> Iterator[Any]:
        workers = self._workers
        self.state.evaluate()
        self._transaction.unrepeatable |= workers.synchronised
        if workers.synchronised:
            self._evaluated += f" after the evaluation of {len(dataset)} samples in batches of {batch_size}"
        mesh = workers.comms.mesh
        place = (mesh.batch, mesh.batch_rank(workers.comms.rank)) if workers.synchronised else (1, 0)
        indices = evaluation_indices(len(dataset), batch_size, *place)
        for batch in fetch(dataset, indices, loading, self.seed, -1):
            if workers.broken:
                workers.recover(GroupBroken("the view is over"))
            yield to_device(batch, self.device)
        if self.trained is not None:
            self.trained.replica.stand_in(batches_less(len(dataset), batch_size, *place))

    # -- numbers over workers -----------------------------------------------------------------------------------------

    def _meet(self, values: list[float], what: str) -> Rows:
        """Every part of the samples' ``values``, by rank. All must have evaluated the same since they met last."""
        what, self._evaluated = what + self._evaluated, ""
        rows = self._workers.gather(values, what)
        mesh = self._workers.gathered_on
        if len(rows) < mesh.workers:  # this worker's alone
            return rows
        return [row for rank, row in enumerate(rows) if mesh.speaks(rank)]

    def sum(self, values: Number | Iterable[Number]) -> float:
        """The sum over all workers of a number, a tensor or a list of them, rounded once: workers do not show in it."""
        self._refuse_inside("sum")
        return exact_sum(x for row in self._meet(floats_of(values), "session.sum") for x in row)

    def mean(self, values: Number | Iterable[Number]) -> float:
        """The mean over all values of all workers, rounded once."""
        self._refuse_inside("mean")
        return exact_mean(x for row in self._meet(floats_of(values), "session.mean") for x in row)

    def report(self, *, evaluated_on: int | Mapping[str, int] | None = None, **metrics: Number) -> None:
        """Record metrics, each averaged over workers. A search optimises the last value of each.

        Names that begin with ``test_`` are held-out figures: no search ever reads them. Every worker must call this.
        ``evaluated_on``: how many samples, of all workers, they (or those that it names) were measured on; without it
        confidence intervals cannot count the error of the test set.
        Raises ``Diverged`` where a metric is not finite, or one that a study minimises has exploded.
        """
        self._refuse_inside("report")
        reserved = sorted(set(metrics) & set(MEASURED))
        if reserved or not metrics:
            raise UserError("report needs metrics other than seconds and cost", reserved or "none", "rename them")
        counts = sample_counts(evaluated_on, metrics)
        names = sorted(metrics)  # whatever their order was here
        rows = self._meet([floats_of(metrics[name])[0] for name in names], f"session.report({', '.join(names)})")
        means = {name: exact_mean(row[names.index(name)] for row in rows) for name in metrics}
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

    # -- change -------------------------------------------------------------------------------------------------------

    def resize(self, workers: int) -> None:
        """Ask for another number of workers, at a later step boundary: new ones first get warm while training goes on.

        One worker may ask, or all; what goes beyond ``--workers LOW:HIGH`` is cut to it. Raises ``UserError`` where
        another launcher started the workers.
        """
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise UserError("a run needs a whole number of workers, at least 1", workers, "session.resize(2)")
        self._workers.resize(workers, "session.resize")

    def reshape(self, mesh: str | Mesh) -> None:
        """Ask for workers that stand as ``mesh`` says ("data=1,tensor=2"), and are as many, at a later step boundary.

        What they hold of the model then moves from one to another; in ``exact`` mode no result changes by it. One
        worker may ask, or all.

        Args:
            mesh: Workers along each axis; axes that are left out have one.

        Raises:
            UserError: For what the run's mechanism does not divide along, or its ``--workers LOW:HIGH`` do not allow;
                and where another launcher started the workers.

        Example:
            >>> if session.ends_step and session.step == 100:
            ...     session.reshape("data=2,shard=2")
        """
        wanted, spec = Mesh.parse(mesh) if isinstance(mesh, str) else mesh, self._spec
        meshes_of(spec.means).widened(self.state.layers).refuse(wanted)
        low, high = min(spec.elastic.low, spec.means.workers), spec.most_workers
        if not low <= wanted.workers <= high:
            fix = "ask for a mesh of as many, or begin the run with --workers LOW:HIGH"
            raise UserError(f"this run has from {low} to {high} workers", f"{wanted}: {wanted.workers}", fix)
        self._workers.reshape(wanted, "session.reshape")

    def change(self, *, batch_size: int | None = None, lr: float | None = None) -> None:
        """Ask for another global batch size, or learning rate, on every worker.

        Every worker must ask for the same between the same two steps. They vote on it in the next step's reduction and
        change together after that step; schedulers go on from the new rate. What came of it is journaled, as a policy's
        decision is: applied; refused, where it cannot be (a batch longer than an epoch); or disagreed, where workers
        asked for different things and nothing changed.

        Args:
            batch_size: Samples in the global batch; None leaves it as it is.
            lr: The learning rate of every parameter group; None leaves it as it is.

        Raises:
            UserError: For a batch size or a learning rate that cannot be.

        Example:
            >>> if session.ends_step and session.step == 1000:
            ...     session.change(batch_size=512, lr=0.4)
        """
        self._adapter.wish(wished(batch_size, lr))

    def save(self) -> None:
        """Write a checkpoint now. Every worker must call this, between steps; a reduced step counts as completed."""
        self._refuse_inside("save")
        self._meet([], "session.save")
        self._stepper.commit()
        self._stepper.save()

    @property
    def signals(self) -> dict[str, Signal]:
        """What the run's monitors say by now, by name."""
        return self._adapter.monitoring.signals

    def finish(self) -> None:
        """The training function has ended."""
        self._adapter.after_train(self.trained)

    def flush(self) -> None:
        """Send what was not sent yet of the record of samples."""
        self._log.flush()
