"""What the user's training function holds: an ordinary PyTorch loop in, any number of workers out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from elastune.comm.exactly import exact_mean, exact_sum
from elastune.comm.group import Group
from elastune.core.clock import Clock, SystemClock
from elastune.core.errors import Diverged, UserError
from elastune.core.run import Config, Position, RunSpec
from elastune.core.seeds import derive
from elastune.core.shares import Share
from elastune.journal.records import Checkpointed, Record, Reported
from elastune.mechanisms.registry import prepare as prepare_replica
from elastune.train import checkpoint as checkpoints
from elastune.train.data import (
    Loading,
    Step,
    check_dataset,
    evaluation_indices,
    fetch,
    to_device,
    training_indices,
    training_steps,
)
from elastune.train.precision import autocast_forward
from elastune.train.rng import seed_everything
from elastune.train.schedules import gate, learning_rates
from elastune.train.timing import StepTimes
from elastune.train.trained import Trained

Number = float | int | bool | torch.Tensor
CHECK_LOSS_EVERY = 50  # on a GPU, where looking at the loss waits for the device


class StopTraining(BaseException):
    """Training was asked to stop and has been saved; not an ``Exception``, so that user code does not swallow it."""


class Session:
    """A worker's view of a run. Every worker of a run executes the same function with its own session."""

    def __init__(
        self,
        spec: RunSpec,
        group: Group,
        device: torch.device,
        *,
        config: Config,
        send: Callable[[Record], None],
        stop_requested: Callable[[], bool],
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.seed = spec.seed
        self.metrics: dict[str, float] = {}
        self.stopped: str = "complete"
        self.times = StepTimes(clock or SystemClock())
        self._spec = spec
        self._group = group
        self._send = send
        self._stop_requested = stop_requested
        self._position = Position()
        self.trained: Trained | None = None
        self._share: Share | None = None
        self._used = False
        self._closures = False
        self._mid_step = False
        self._left_inside = False
        self._passes_in_epoch = 0
        seed_everything(derive(spec.seed, "init"))

    # -- who and where ------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._group.rank

    @property
    def size(self) -> int:
        """How many workers there are."""
        return self._group.size

    @property
    def epoch(self) -> int:
        """Completed training passes."""
        return self._position.epoch

    @property
    def step(self) -> int:
        """Completed steps (global batches)."""
        return self._position.step

    @property
    def samples(self) -> int:
        """Samples used by the completed steps of all workers."""
        return self._position.samples

    @property
    def ends_step(self) -> bool:
        """Whether the batch at hand is this worker's last of its step: with several slots a worker, a step has several.

        Inside the batch loop, whatever counts steps, reports or breaks belongs behind ``if session.ends_step:``.
        """
        return not self._mid_step

    @property
    def seconds(self) -> float:
        """Training time so far, earlier parts of a resumed run included."""
        return self.times.seconds

    # -- the training loop --------------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, *schedulers: Any) -> tuple[Any, ...]:
        """Attach mechanism, precision and checkpoints; returns (model, optimizer, *schedulers) to be used from here on.

        Moves the model to ``session.device`` and gives every worker rank 0's initial state. Schedulers that step inside
        the batch loop must be given here; ``ReduceLROnPlateau`` is then stepped with the mean over workers.
        """
        if self.trained is not None:
            raise UserError("session.prepare must be called once", "a second call", "prepare one model a run")
        self._closures = isinstance(optimizer, torch.optim.LBFGS)
        means = self._spec.means
        if self._closures and (means.mode, means.micro_batch, self.size) != ("fast", None, 1):
            rule = "LBFGS evaluates a step several times, which needs the whole batch in one pass"
            raise UserError(rule, f"{means.mode} mode, {self.size} workers", "use --mode fast --workers 1")
        model.to(self.device)
        for tensor in [*model.parameters(), *model.buffers()]:
            self._group.broadcast(tensor.data)
        replica = prepare_replica(model, means, self._group)
        self.trained = Trained(replica, optimizer, schedulers)
        if means.precision == "bf16":
            autocast_forward(model, self.device)
        if self._spec.resume:
            self._resume(self.trained)
        for scheduler in schedulers:
            gate(scheduler, lambda: not self._mid_step, self.mean)
        return (replica.model, optimizer, *schedulers)

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs still to run of ``count`` (a run's ``--epochs`` goes over ``count``)."""
        total = count if self._spec.epochs is None else self._spec.epochs
        while self._position.epoch < total and self.stopped == "complete":
            epoch = self._position.epoch
            self._passes_in_epoch = 0
            yield epoch
            self._refuse_half_a_step()
            if self.stopped != "complete":
                return
            if self._position.epoch == epoch:  # an epoch without a whole training pass
                self._position = replace(self._position, epoch=epoch + 1, offset=0)
                self._stop_if_asked()
            self._passes_in_epoch = 0
            if self._spec.checkpoint_every_steps != 0:
                self.save()

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
        if train:
            return self._training_pass(dataset, batch_size, shuffle, drop_last, loading)
        return self._evaluation_pass(dataset, batch_size, loading)

    def backward(self, loss: torch.Tensor) -> None:
        """Backward pass of ``loss``, the MEAN over the batch that ``batches`` just gave.

        After the last call of a step the gradients are those of the mean over the global batch, equal on all workers;
        before it no parameter has one. Raises ``Diverged`` where the loss is not finite.
        """
        if self._share is None or self.trained is None:
            where = "outside of a training batch, or twice in one"
            raise UserError("session.backward belongs once into each training batch", where, "add losses up first")
        if loss.numel() != 1:
            raise UserError("a loss must be one number", f"shape {tuple(loss.shape)}", "take its mean over the batch")
        looks = self.device.type == "cpu" or self._position.step % CHECK_LOSS_EVERY == 0
        if looks and not math.isfinite(value := float(loss.detach())):
            raise Diverged(f"loss is {value} at step {self._position.step + 1}")
        share, self._used = self._share, True
        if not self._closures:
            self._share = None
        self.trained.replica.backward(loss, share)

    def _training_pass(
        self, dataset: Any, batch_size: int, shuffle: bool, drop_last: bool, loading: Loading
    ) -> Iterator[Any]:
        if self.trained is None:
            raise UserError("session.prepare must come before training", "no model yet", "call session.prepare first")
        if self._passes_in_epoch:
            raise UserError("an epoch holds one training pass", "a second one", "use one more session.epochs")
        self._passes_in_epoch += 1
        at, length = self._position, len(dataset)

        def steps() -> Iterator[Step]:
            return training_steps(length, batch_size, at.offset, self._spec.means, self.size, self.rank, drop_last)

        indices = training_indices(steps(), length, self.seed, at.epoch, shuffle)
        data = fetch(dataset, indices, loading, self.seed, at.epoch)
        for step in steps():
            if not self._go_on(self.trained):
                return
            yield from self._one_step(step, data, self.trained)
        self._position = replace(self._position, epoch=at.epoch + 1, offset=0)

    def _one_step(self, step: Step, data: Iterator[Any], trained: Trained) -> Iterator[Any]:
        self.times.begin_step()
        for i, share in enumerate(step.shares):
            batch = to_device(next(data), self.device)
            # Data are fetched before seeding: augmentation in this process must not show in the slot's own stream.
            seed_everything(derive(self.seed, "slot", self._position.step, share.slot, share.samples.start))
            rates = learning_rates(trained.optimizer)
            trained.replica.begin(share, starts_step=i == 0)
            self._share, self._used = share, False
            self._mid_step = not share.ends_step
            try:
                yield batch
            except GeneratorExit:  # the user left the loop
                self._left_inside, self._mid_step = self._mid_step or not self._used, False
                if not self._left_inside:
                    self._count(step)
                raise
            self._check_used(rates if not share.ends_step else None, trained)
        self.times.end_step(trained.replica.wait_s)
        self._count(step)

    def _count(self, step: Step) -> None:
        at = self._position
        self._position = replace(at, offset=step.offset + step.size, step=at.step + 1, samples=at.samples + step.size)

    def _check_used(self, rates: list[float] | None, trained: Trained) -> None:
        """The user's loop body must have done its part, and inside of a step no more than that."""
        self._share = None
        if not self._used:
            raise UserError("each training batch needs session.backward", "none", "replace loss.backward() by it")
        if rates is not None and learning_rates(trained.optimizer) != rates:
            fix = "give the scheduler to session.prepare(model, optimizer, scheduler)"
            raise UserError("learning rates may change between steps only", "a change inside of one", fix)

    def _go_on(self, trained: Trained) -> bool:
        """At a step boundary: save what is due; False once ``max_steps`` are done."""
        done, every = self._position.step, self._spec.checkpoint_every_steps
        if trained.replica.stop_votes > 0:
            self._stop()
        if self._spec.max_steps is not None and done >= self._spec.max_steps:
            self.stopped = "max_steps"
            if every != 0:
                self.save()
            return False
        if every and done and done % every == 0:
            self.save()
        trained.replica.stop = float(self._stop_requested())
        return True

    def _refuse_half_a_step(self) -> None:
        """Workers take different numbers of batches a step: what all must do together has its place between steps."""
        if self._left_inside:
            fix = "put 'if session.ends_step:' before the break, or use --max-steps"
            raise UserError("a batch loop may be left between steps only", "left inside of a step", fix)

    def _refuse_inside(self, what: str) -> None:
        if self._mid_step:
            fix = "put 'if session.ends_step:' before it, or move it behind the loop"
            raise UserError(f"session.{what} belongs between steps", "a call inside of a step", fix)

    def _stop_if_asked(self) -> None:
        """Where no reduction carried the workers' votes, ask for them."""
        votes = self._group.gather_floats([float(self._stop_requested())])
        if any(vote > 0 for (vote,) in votes):
            self._stop()

    def _stop(self) -> NoReturn:
        self.stopped = "requested"
        self.save()
        raise StopTraining

    def _evaluation_pass(self, dataset: Any, batch_size: int, loading: Loading) -> Iterator[Any]:
        if self.trained is not None:
            self.trained.replica.settle()
        indices = evaluation_indices(len(dataset), batch_size, self.size, self.rank)
        for batch in fetch(dataset, indices, loading, self.seed, -1):
            yield to_device(batch, self.device)

    # -- numbers over workers -----------------------------------------------------------------------------------------

    def sum(self, values: Number | Iterable[Number]) -> float:
        """The sum over all workers of a number, a tensor or a list of them, rounded once: workers do not show in it."""
        self._refuse_inside("sum")
        return exact_sum(x for row in self._group.gather_floats(_floats(values)) for x in row)

    def mean(self, values: Number | Iterable[Number]) -> float:
        """The mean over all values of all workers, rounded once."""
        self._refuse_inside("mean")
        return exact_mean(x for row in self._group.gather_floats(_floats(values)) for x in row)

    def report(self, **metrics: Number) -> None:
        """Record metrics, each averaged over workers. A search optimises the last value of each.

        Names that begin with ``test_`` are held-out figures: no search ever reads them. Every worker must call this.
        Raises ``Diverged`` where a metric is not finite.
        """
        self._refuse_inside("report")
        reserved = sorted(set(metrics) & {"seconds", "cost"})
        if reserved or not metrics:
            raise UserError("report needs metrics other than seconds and cost", reserved or "none", "rename them")
        rows = self._group.gather_floats([_floats(value)[0] for value in metrics.values()])
        if any(len(row) != len(metrics) for row in rows):
            raise UserError("all workers must report the same metrics", [len(r) for r in rows], "report on every rank")
        means = {name: exact_mean(row[i] for row in rows) for i, name in enumerate(metrics)}
        at = self._position
        self.metrics = {**self.metrics, **means}
        if self.rank == 0:
            self._send(Reported(at.epoch, at.step, at.samples, self.seconds, means))
        wrong = [f"{name} is {value}" for name, value in means.items() if not math.isfinite(value)]
        if wrong:
            raise Diverged(f"{', '.join(wrong)} after step {at.step}")

    # -- saving -------------------------------------------------------------------------------------------------------

    def _meaning(self) -> dict[str, Any]:
        means = self._spec.means
        slots = {"num_slots": means.num_slots} if means.mode == "exact" else {}
        return {"seed": self.seed, "config": self.config, "mode": means.mode, "precision": means.precision, **slots}

    def save(self) -> None:
        """Write a checkpoint now. Every worker must call this, between steps."""
        if self.trained is None:
            return
        state = self.trained.state()
        if self.rank == 0:
            kept = checkpoints.Checkpoint(self._position, self._meaning(), state, self.seconds, self.metrics)
            path = checkpoints.save(self._spec.out / "checkpoints", kept)
            self._send(Checkpointed(self._position.step, str(path)))

    def _resume(self, trained: Trained) -> None:
        found = checkpoints.complete(self._spec.out / "checkpoints")
        if not found:
            return
        kept = checkpoints.load(found[-1])
        wanted = self._meaning()
        other = [name for name in wanted if kept.meaning.get(name) != wanted[name]]
        if other:
            rule = f"a run resumes with the {', '.join(other)} it was begun with"
            raise UserError(rule, [wanted[name] for name in other], f"use {[kept.meaning.get(n) for n in other]}")
        trained.load(kept.state, found[-1])
        self._position, self.metrics = kept.position, dict(kept.metrics)
        self.times.seconds_before = kept.seconds


def _floats(values: Number | Iterable[Number]) -> list[float]:
    if isinstance(values, torch.Tensor):
        return [float(x) for x in values.detach().double().reshape(-1).tolist()]
    if isinstance(values, Iterable):
        return [x for value in values for x in _floats(value)]
    return [float(values)]
