"""The training pass: steps, their shares, and what happens at the boundaries between steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any, Literal, NoReturn

import torch

from elastune.comm.group import GroupBroken
from elastune.core.batch_slices import BatchSlice, contributors
from elastune.core.errors import Diverged, UserError
from elastune.core.run import Means, RunSpec
from elastune.core.seeds import derive
from elastune.elastic.worker.group import WorkerGroup
from elastune.journal.records import Record, Regrouped
from elastune.mechanisms.base import Replica
from elastune.monitors.base import WorkerTimes
from elastune.train.adapt.adapter import Adapter
from elastune.train.checkpoints.run_state import RunState
from elastune.train.data.loading import (
    Loading,
    Step,
    fetch,
    pass_order,
    to_device,
    training_indices,
    training_steps,
    usable,
)
from elastune.train.data.sample_log import PRIME, ControlVector, SampleLog, checksum, cut, follow
from elastune.train.progress import Progress
from elastune.train.rng import seed_everything
from elastune.train.schedules import learning_rates
from elastune.train.training_state import TrainingState

CHECK_LOSS_EVERY = 50  # on a GPU, where looking at the loss waits for the device
REHEARSED = 2
WORKER_TIMES = 3  # numbers of one worker's times in the control vector
Outcome = Literal["over", "stopped", "again"]


class StopTraining(BaseException):
    """Training was asked to stop and has been saved; not an ``Exception``, so that user code does not swallow it."""


class Rehearsed(BaseException):
    """A joiner has done a few passes that do not count: everything is warm, and the real beginning can come."""


class Stepper:
    """Runs the shares of this worker, step by step, under whatever version of the crew there is."""

    def __init__(
        self,
        spec: RunSpec,
        crew: WorkerGroup,
        progress: Progress,
        keeper: RunState,
        adapter: Adapter,
        device: torch.device,
        send: Callable[[Record], None],
        stop_requested: Callable[[], bool],
        rehearsal: bool,
    ) -> None:
        self._spec = spec
        self._crew = crew
        self._progress = progress
        self._keeper = keeper
        self._adapter = adapter
        self._device = device
        self._send = send
        self._stop_requested = stop_requested
        self._rehearsal = rehearsal
        self.claims = SampleLog(crew.worker, send if crew.elastic or crew.rank == 0 else lambda record: None)
        self.mid_step = False  # this worker has more batches to run before the step is completed
        self.left_inside = False
        self.several_closures = False
        self._share: BatchSlice | None = None
        self._used = False
        self._step: Step | None = None
        self._expected = ControlVector()
        self._length = 0
        self._completed_step = 0
        self._among = 0, 0  # of the step at hand: workers, and those of them that have samples
        self._size = 0
        self._stop_votes = 0.0
        self._enough = False  # so a policy has decided
        self._times = WorkerTimes()  # of the step before, while the version stays
        self._saved = 0  # the step of the newest checkpoint that was due by its number

    # -- the loop -----------------------------------------------------------------------------------------------------

    def training_pass(
        self, dataset: Any, batch_size: int, shuffle: bool, drop_last: bool, loading: Loading
    ) -> Iterator[Any]:
        """The batches of what is left of the epoch."""
        progress, trained = self._progress, self._trained()
        self.admit()
        self._adapter.begin_pass(trained, len(dataset), batch_size)
        order = pass_order(len(dataset), self._spec.seed, progress.position.epoch, shuffle)
        outcome: Outcome = "again"
        while outcome == "again":
            size = batch_size if progress.batch_size is None else progress.batch_size
            self._size = size
            outcome = yield from self._under_one_version(dataset, order, size, drop_last, loading, trained)
        if outcome == "over":
            progress.position = replace(progress.position, epoch=progress.position.epoch + 1, offset=0)
            self.claims.flush()
            self._keeper.settle()
            self._adapter.after_epoch(trained, progress.batch_size or self._size)

    def _under_one_version(
        self, dataset: Any, order: torch.Tensor, size: int, drop_last: bool, loading: Loading, trained: TrainingState
    ) -> Generator[Any, None, Outcome]:
        crew, progress, means = self._crew, self._progress, self._means()
        at = progress.position
        place = (min(means.num_slots, means.workers), 0) if self._rehearsal else (crew.size, crew.rank)
        plan = list(training_steps(len(order), size, at, means, *place, drop_last, self._compares))
        data = fetch(dataset, training_indices(plan, order), loading, self._spec.seed, at.epoch)
        if self._rehearsal:
            yield from self._rehearse(plan, data, trained)
        self._length = usable(len(order), size, at.offset, drop_last)
        if not plan:  # a batch that has grown is more than what is left of the epoch
            self.claims.cut(self._length)
            cut(progress.trail, self._length)
        version = crew.version
        for step in plan:
            if not self._go_on(trained):
                return "stopped"
            if crew.version != version or progress.batch_size not in (None, size) or self._means() != means:
                return "again"
            self._expected = ControlVector(
                samples=step.size, checksum=checksum(order[step.offset : step.offset + step.size]) % PRIME
            )
            self._step = step
            if self._is_last(step):
                self._keeper.remember()
            completed = yield from self._one_step(step, data, order, trained)
            if not completed:
                crew.discarded += 1
                self.mid_step = False
                self._adapter.step_discarded()
                return "again"
            self._adapter.exchange()
            self.count()
        return "over"

    def _means(self) -> Means:
        micro_batch = self._progress.micro_batch
        return self._spec.means if micro_batch is None else replace(self._spec.means, micro_batch=micro_batch)

    def _compares(self, step: int) -> bool:
        return not self.several_closures and self._adapter.monitoring.compares(step)

    def _is_last(self, step: Step) -> bool:
        """Whether the pass ends with ``step``: what follows may have to be repeated, and begins with this step then.

        A pass that is entered anew has a batch at least, so that the user's lines behind the loop find what they use.
        """
        return step.offset + step.size >= self._length or self._progress.position.step + 1 == self._spec.max_steps

    def _one_step(
        self, step: Step, data: Iterator[Any], order: torch.Tensor, trained: TrainingState
    ) -> Generator[Any, None, bool]:
        """Yields the step's batches. True if the step is completed, False if it is to be done again."""
        crew, progress = self._crew, self._progress
        progress.times.begin_step()
        self._set_control(step, order, trained)
        data_s = 0.0
        crew.say("computing", progress.position.step)
        for i, share in enumerate(step.shares):
            if crew.broken:
                crew.recover(GroupBroken("the version is over"))
                return False
            fetching = progress.times.now
            batch = to_device(next(data), self._device)
            data_s += progress.times.now - fetching
            # Data are fetched before seeding: augmentation in this process must not show in the slot's own stream.
            seed_everything(derive(self._spec.seed, "slot", progress.position.step, share.slot, share.samples.start))
            rates = learning_rates(trained.optimizer)
            self._keeper.mid_step = True
            trained.replica.begin(share, starts_step=i == 0)
            self._share, self._used = share, False
            self.mid_step = not share.ends_step
            try:
                yield batch
            except GeneratorExit:  # the user left the loop
                self.left_inside, self.mid_step = self.mid_step or not self._used, False
                if not self.left_inside:
                    self.count()
                raise
            self._check_used(rates if not share.ends_step else None, trained)
        if self.mid_step:  # the reduction was given up
            return False
        wait_s = trained.replica.wait_s
        step_s = progress.times.end_step(wait_s)
        self._times = WorkerTimes(data_s, max(0.0, step_s - data_s - wait_s), wait_s)
        return True

    def _rehearse(
        self, plan: list[Step], data: Iterator[Any], trained: TrainingState
    ) -> Generator[Any, None, NoReturn]:
        """Passes whose gradients are thrown away."""
        for _, share in zip(range(REHEARSED), plan[0].shares if plan else (), strict=False):
            batch = to_device(next(data), self._device)
            share = replace(share, ends_step=False, weight=max(share.weight, 1e-9))
            trained.replica.begin(share, starts_step=True)
            self._share, self._used, self.mid_step = share, False, True
            yield batch
            trained.replica.abandon()
        raise Rehearsed

    def admit(self) -> None:
        """From here on this worker trains with the others, if it does not yet."""
        if not self._rehearsal:
            self._crew.admit()

    def backward(self, loss: torch.Tensor) -> None:
        """See ``Session.backward``."""
        if self._share is None:
            where = "outside of a training batch, or twice in one"
            raise UserError("session.backward belongs once into each training batch", where, "add losses up first")
        if loss.numel() != 1:
            raise UserError("a loss must be one number", f"shape {tuple(loss.shape)}", "take its mean over the batch")
        step = self._progress.position.step
        looks = self._device.type == "cpu" or step % CHECK_LOSS_EVERY == 0
        if looks and not self._adapter.survives_divergence and not math.isfinite(value := float(loss.detach())):
            raise Diverged(f"loss is {value} at step {step + 1}")
        share, self._used = self._share, True
        if not self.several_closures:
            self._share = None
        replica = self._trained().replica
        self._adapter.monitoring.bend(replica, loss, share, step + 1)
        if share.ends_step:
            self._crew.say("reducing", step, self._trained().gradient_bytes)
        served = False
        try:
            replica.backward(loss, share)
        except GroupBroken as error:
            served = self._crew.recover_step(error)
            if not served:
                # Others may have noticed elsewhere: until the next boundary the user's lines are this worker's alone.
                self.mid_step, self._crew.live = True, False
                return
        if share.ends_step and not self._rehearsal:
            self._completed(replica, served)

    def _completed(self, replica: Replica, served: bool) -> None:
        """The step's reduction is here in full, or another worker's of the same step."""
        assert self._step is not None
        if self._completed_step == self._progress.position.step + 1:  # an optimizer may evaluate it again
            return
        self._completed_step = self._progress.position.step + 1
        self._keeper.mid_step, self._keeper.uncounted = False, 1
        found = ControlVector.of(replica.totals, len(self._adapter.votes()))
        expected = self._expected
        if (found.samples, int(found.checksum) % PRIME) != (expected.samples, expected.checksum):
            raise RuntimeError(f"a step of {expected.samples:g} samples summed up {found.samples:g}, or other ones")
        crew, progress = self._crew, self._progress
        workers, voters = self._among
        crew.end_step(found.heard, voters, served=served)
        crew.say("computing", progress.position.step + 1)
        self._stop_votes = found.stop
        self._adapter.completed(found, voters, replica.found.parts.get("loss", math.nan))
        if self._adapter.monitoring:
            at = self._progress.position.step + 1
            self._adapter.monitoring.read(at, self._step.size, workers, replica.found, found.times)
        self._tell_of_regrouping(progress.times.now)

    def _tell_of_regrouping(self, now: float) -> None:
        """The first step under a version ends its coming about."""
        crew, before = self._crew, self._crew.last_step
        crew.last_step = crew.version, now
        if before is None or before[0] == crew.version:
            return
        self._times = WorkerTimes()
        if crew.rank == 0:
            median_s, _ = self._progress.times.medians()
            self._send(
                Regrouped(
                    version=crew.version,
                    members=list(crew.members),
                    planned=crew.planned,
                    step=self._progress.position.step + 1,
                    pause_s=max(0.0, now - before[1] - (median_s or 0.0)),
                    discarded=crew.discarded,
                )
            )
        crew.discarded = 0

    # -- between steps ------------------------------------------------------------------------------------------------

    def _go_on(self, trained: TrainingState) -> bool:
        """At a step boundary: stop, save or change what is due; False once ``max_steps`` are done."""
        crew, progress = self._crew, self._progress
        crew.live, progress.dirty = True, False
        done, every = progress.position.step, self._spec.checkpoint_every_steps
        if self._enough or self._stop_votes > 0:
            self.stop("policy" if self._enough else "requested")
        if self._spec.max_steps is not None and done >= self._spec.max_steps:
            progress.stopped = "max_steps"
            self.claims.flush()
            if every != 0:
                self._keeper.save()
            return False
        version = crew.version
        crew.boundary()
        if crew.version != version:
            return True  # come here once more, as a member of the new version
        if self._adapter.boundary(trained, self._size):
            self.stop("policy")
        if crew.version != version:
            return True
        if every and done and done % every == 0 and self._saved != done:
            self._saved = done
            self.claims.flush()
            self._keeper.save()
        return True

    def _set_control(self, step: Step, order: torch.Tensor, trained: TrainingState) -> None:
        size = self._crew.size
        self._among = size, contributors(step.size, self._spec.means.num_slots, size)
        own = [share for share in step.shares if share.weight]
        indices = [order[step.offset + s.samples.start : step.offset + s.samples.stop] for s in own]
        self._adapter.monitoring.prepare(trained.replica, trained.optimizer, self._progress.position.step + 1)
        if self.several_closures:
            trained.replica.measure(False)
        trained.replica.control = self.control(
            stop=float(self._stop_requested()),
            heard=self._crew.begin_step(),
            samples=sum(len(part) for part in indices),
            checksum=sum(checksum(part) for part in indices) % PRIME,
        ).to_list()

    def control(
        self, stop: float = 0.0, heard: float = 0.0, samples: float = 0.0, checksum: float = 0.0
    ) -> ControlVector:
        """This worker's part of the next step's control vector; always of the same length."""
        adapter = self._adapter
        times: list[float] = []
        if adapter.monitoring.times:
            crew, own = self._crew, self._times
            times = [0.0] * (WORKER_TIMES * (self._spec.most_workers if crew.elastic else crew.size))
            if crew.live:
                at = WORKER_TIMES * crew.rank
                times[at : at + WORKER_TIMES] = [own.data_s, own.compute_s, own.wait_s]
        seconds = self._progress.times.seconds if self._crew.rank == 0 else 0.0
        adapting = adapter.waiting, seconds, adapter.unsure, adapter.votes()
        return ControlVector(stop, heard, samples, checksum, *adapting, times)

    def count(self) -> None:
        """The user's lines about a completed step have run, if there is one that was not counted yet."""
        if not self._keeper.uncounted:
            return
        assert self._step is not None
        step, at = self._step, self._progress.position
        self.claims.step(at, step.size, self._length, self._crew.version, self._crew.size)
        follow(self._progress.trail, at, step.size, self._length)
        self._progress.position = replace(
            at, offset=step.offset + step.size, step=at.step + 1, samples=at.samples + step.size
        )
        self._progress.reports = 0
        self._keeper.uncounted = 0
        trained = self._trained()
        self._enough = self._adapter.behind_step(trained)
        self._adapter.after_step(trained, self._progress.batch_size or self._size)

    def _check_used(self, rates: list[float] | None, trained: TrainingState) -> None:
        """The user's loop body must have done its part, and inside of a step no more than that."""
        self._share = None
        if not self._used:
            raise UserError("each training batch needs session.backward", "none", "replace loss.backward() by it")
        if rates is not None and learning_rates(trained.optimizer) != rates:
            fix = "give the scheduler to session.prepare(model, optimizer, scheduler)"
            raise UserError("learning rates may change between steps only", "a change inside of one", fix)

    def stop_if_asked(self) -> None:
        """Where no reduction carried the workers' votes, ask for them."""
        votes = self._crew.gather([float(self._stop_requested())])
        if any(vote > 0 for (vote,) in votes):
            self.stop()

    def stop(self, why: str = "requested") -> NoReturn:
        """Save and end."""
        self._progress.stopped = why
        self.claims.flush()
        self._keeper.save()
        raise StopTraining

    def _trained(self) -> TrainingState:
        if self._keeper.trained is None:
            raise UserError("session.prepare must come before training", "no model yet", "call session.prepare first")
        return self._keeper.trained
