"""The training pass: one mini-batch after another, and what happens between steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from itertools import chain, tee
from typing import Any, Literal, NoReturn

import torch

from elastune.comm.group import GroupBroken
from elastune.core.errors import Diverged, UserError
from elastune.core.run import Means, RunSpec
from elastune.core.seeds import derive
from elastune.elastic.worker.group import WorkerGroup
from elastune.journal.records import Record, Regrouped
from elastune.monitors.base import WorkerTimes
from elastune.train.adapt.adapter import Adapter
from elastune.train.checkpoints.run_state import RunState
from elastune.train.control import PRIME, ControlVector
from elastune.train.data.content import CHANGES, MORE_READS, READS, content
from elastune.train.data.loading import to_device
from elastune.train.data.sample_log import SampleLog, shorten_epoch
from elastune.train.data.source import StepPlan, StepSource, plan_steps
from elastune.train.divergence import DivergenceWatch
from elastune.train.progress import Progress
from elastune.train.rng import seed_everything
from elastune.train.schedules import learning_rates
from elastune.train.step_facts import NO_MARKS, Settings, StepFacts, alike, differences, marks, steps_differ
from elastune.train.training_state import TrainingState
from elastune.train.transaction import Phase, StepTransaction, check_samples
from elastune.train.warm_up import warm_up

CHECK_LOSS_EVERY = 50  # on a GPU, where looking at the loss waits for the device
Outcome = Literal["over", "stopped", "again"]


class StopTraining(BaseException):
    """Training was asked to stop and has been saved; not an ``Exception``, so that user code does not swallow it."""


class Stepper:
    """Runs this worker's slices, step by step, whatever the membership view is."""

    def __init__(
        self,
        spec: RunSpec,
        workers: WorkerGroup,
        progress: Progress,
        transaction: StepTransaction,
        log: SampleLog,
        state: RunState,
        adapter: Adapter,
        watch: DivergenceWatch,
        device: torch.device,
        send: Callable[[Record], None],
        stop_requested: Callable[[], bool],
        warming_up: bool,
    ) -> None:
        self._spec = spec
        self._workers = workers
        self._progress = progress
        self._transaction = transaction
        self._log = log
        self._state = state
        self._adapter = adapter
        self._watch = watch
        self._device = device
        self._send = send
        self._stop_requested = stop_requested
        self._warming_up = warming_up
        self._size = 0
        self._stop_votes = 0.0
        self._stop_agreed = False  # by policies
        self._times = WorkerTimes()  # of the step before, as long as the view is the same
        self._saved = 0  # the step of the newest checkpoint that was due by its number
        self._settings = Settings()
        self._content: int | None = None  # of the data of this pass
        self._reread: Callable[[], list[Any]] = list

    # -- a pass -------------------------------------------------------------------------------------------------------

    def training_pass(self, open_source: Callable[[int], StepSource], batch_size: int) -> Iterator[Any]:
        """The batches of the rest of an epoch; ``open_source(epoch)`` is what the epoch goes through."""
        progress, trained = self._progress, self._trained()
        self.join()
        source, self._content = open_source(progress.position.epoch), None
        self._reread = lambda: list(source.fetch(iter([source.probe()] * MORE_READS)))
        self._adapter.begin_pass(trained, source.length(0, 1), batch_size)
        outcome: Outcome = "again"
        while outcome == "again":
            self._size = batch_size if progress.batch_size is None else progress.batch_size
            outcome = yield from self._under_one_view(source, trained)
        if outcome == "over":
            progress.position = replace(progress.position, epoch=progress.position.epoch + 1, offset=0)
            self._log.flush()
            self._state.average_buffers()
            self._adapter.after_epoch(trained, progress.batch_size or self._size)

    def _under_one_view(self, source: StepSource, trained: TrainingState) -> Generator[Any, None, Outcome]:
        """Steps for as long as all stays as it is that they are planned by: view, batch size and micro-batch."""
        workers, progress, means, size = self._workers, self._progress, self._means(), self._size
        mesh, everyone = workers.comms.mesh, workers.size if trained.sync.all_contribute else None
        place = mesh.batch, mesh.batch_rank(workers.comms.rank)
        if self._warming_up:
            place, everyone = (min(means.num_slots, means.first_mesh.batch), 0), None
        view, start = workers.view, progress.position
        progress.memory.begin_view(view)
        replica = trained.replica
        how = {"even": replica.equal_passes, "in_turn": replica.in_turn}
        steps = plan_steps(source, size, start, means, *place, replica.least_samples, everyone, **how)
        plans, ahead = tee(steps)
        parts = (part for plan in ahead for part in plan.own_parts)
        probe = source.probe()
        probes = workers.size > 1 and self._content is None and not self._warming_up and len(probe) > 0
        data = source.fetch(chain([probe] * READS, parts) if probes else parts)
        if self._warming_up:
            yield from warm_up(
                next(plans, None), data, self._transaction, trained.sync, self.control(ControlVector()), self._device
            )
        for plan in plans:
            if not self._go_on(trained):
                return "stopped"
            if workers.view != view or progress.batch_size not in (None, size) or self._means() != means:
                return "again"
            if self._may_be_last(plan):
                self._state.remember()
            if probes:
                self._content, probes = content([next(data) for _ in range(READS)]), False
            completed = yield from self._one_step(plan, source, data, trained)
            if not completed:
                workers.interruption.discarded += 1
                self._adapter.step_lost()
                return "again"
            self._adapter.exchange()
            self.commit()
        if progress.position == start:  # a batch that has grown is more than what is left of the epoch
            length = source.length(start.offset, size)
            self._log.shorten_epoch(length)
            shorten_epoch(progress.spans, length)
        return "over"

    def _means(self) -> Means:
        micro_batch = self._progress.micro_batch
        return self._spec.means if micro_batch is None else replace(self._spec.means, micro_batch=micro_batch)

    def _may_be_last(self, plan: StepPlan) -> bool:
        """Whether the pass ends with this step: what follows may have to be repeated, and begins with this step then.

        A pass that is entered again has a batch at least, so that the user's lines after the loop find what they use.
        """
        ends_pass = 0 < plan.length <= plan.offset + plan.size
        return ends_pass or self._progress.position.step + 1 == self._spec.max_steps

    # -- a step -------------------------------------------------------------------------------------------------------

    def _one_step(
        self, plan: StepPlan, source: StepSource, data: Iterator[Any], trained: TrainingState
    ) -> Generator[Any, None, bool]:
        """Yields the step's batches. True if the step is completed, False if it is to be done again."""
        transaction, workers, times = self._transaction, self._workers, self._progress.times
        number = self._progress.position.step
        times.begin_step()
        self._progress.memory.begin_step()
        workers.say("computing", number)
        data_s = 0.0
        for part in plan.slices:
            if workers.broken:
                transaction.recover(GroupBroken("the view is over"))
                return False
            if transaction.phase is Phase.LOST:  # the user's lines met a loss elsewhere, such as in an evaluation
                return False
            fetching = times.now
            batch = to_device(next(data), self._device)
            data_s += times.now - fetching
            if part is plan.slices[0]:
                self._begin(plan, source, trained)
            # Data are fetched before seeding: augmentation in this process must not show in the slot's own stream.
            seed_everything(derive(self._spec.seed, "slot", number, part.slot, part.samples.start))
            rates = learning_rates(trained.optimizer)
            transaction.begin_slice(part)
            try:
                yield batch
            except GeneratorExit:  # the user left the loop
                workers.leaves("the batch loop")
                if transaction.phase in (Phase.OPEN, Phase.LOST):
                    transaction.leave()
                self.commit()
                raise
            self._check_body(None if part.ends_step else rates, trained)
        if transaction.phase is Phase.LOST:
            return False
        wait_s = trained.sync.wait_s
        step_s = times.end_step(wait_s)
        self._progress.memory.end_step()
        self._times = WorkerTimes(data_s, max(0.0, step_s - data_s - wait_s), wait_s)
        return True

    def _begin(self, plan: StepPlan, source: StepSource, trained: TrainingState) -> None:
        self._workers.left = ""
        monitoring = self._adapter.monitoring
        monitoring.prepare(trained.sync, self._progress.position.step + 1)
        trained.sync.wants_statistics = bool(monitoring) or self._looks
        if self._transaction.evaluates_again:
            trained.sync.measure(False)
        speaks = self._workers.comms.mesh.speaks(self._workers.comms.rank)
        own = [places for part, places in zip(plan.slices, plan.own_parts, strict=True) if part.weight and speaks]
        control = ControlVector(
            stop=float(self._stop_requested()),
            heard=self._workers.begin_step(),
            samples=sum(len(places) for places in own),
            checksum=sum(source.checksum(places) for places in own) % PRIME,
            marks=self._marks(plan, trained) if self._workers.size > 1 else NO_MARKS,
        )
        self._transaction.begin(plan, trained.sync, self.control(control))

    def _marks(self, plan: StepPlan, trained: TrainingState) -> list[float]:
        at, settings = self._progress.position, self._settings.checksum(trained.optimizer)
        return marks(hash((at.epoch, at.step, *plan.taken, self._content or CHANGES, settings)))

    def backward(self, loss: torch.Tensor) -> None:
        """See ``Session.backward``."""
        transaction, workers, step = self._transaction, self._workers, self._progress.position.step
        if transaction.phase is Phase.LOST:
            return
        part, sync = transaction.due(), self._trained().sync
        if loss.numel() != 1:
            raise UserError("a loss must be one number", f"shape {tuple(loss.shape)}", "take its mean over the batch")
        speaks = workers.comms.mesh.speaks(workers.comms.rank)  # others may have a stand-in for the loss
        if self._looks and speaks and not math.isfinite(value := float(loss.detach())):
            raise Diverged(f"loss is {value} at step {step + 1}")
        self._adapter.monitoring.bend(sync, loss, part, step + 1)
        if part.ends_step:
            workers.say("reducing", step, self._trained().gradient_bytes, f"the reduction of step {step + 1}")
        found = transaction.reduce(loss, self._adapter.votes)
        if found is None:
            return
        workers.say("computing", step + 1)
        if not alike(found.marks):
            self._find_difference(transaction.plan)
            check_samples(transaction.plan, found)
        self._stop_votes = found.stop
        if self._progress.memory.due:
            self._progress.memory.reduced(self._trained().replica.memory())
        self._adapter.step_reduced(found, transaction.plan, sync.statistics)
        if self._looks:
            self._watch.loss(sync.statistics.parts["loss"], step + 1)
        self._tell_of_regrouping(self._progress.times.now)

    @property
    def _looks(self) -> bool:
        """Whether this step's loss is judged."""
        due = self._device.type == "cpu" or self._progress.position.step % CHECK_LOSS_EVERY == 0
        return due and not self._adapter.survives_divergence

    def _find_difference(self, plan: StepPlan) -> None:
        """Workers did not take the step alike. Raises ``UserError`` unless data change by themselves."""
        workers, at, step = self._workers, self._progress.position, self._progress.position.step + 1
        settings, line = Settings.told(self._trained().optimizer), workers.where()
        own = StepFacts(at.epoch, *plan.taken, self._content or CHANGES, settings, line)
        rows = workers.gather_bytes(own.encode(), "what the step is made of")
        found = differences(rows)
        if list(found) == ["content"]:
            again = {content([batch]) for batch in self._reread()}
            same = float(again == {self._content})  # so it was read ten times alike, here
            if not all(told for (told,) in workers.gather([same], "data that are read again")):
                self._content = CHANGES
                return
        self._transaction.reject()
        raise steps_differ(step, found, rows)

    def _check_body(self, rates: list[float] | None, trained: TrainingState) -> None:
        """The user's loop body must have done its part, and inside of a step no more than that."""
        if self._transaction.owes_backward:
            raise UserError("each training batch needs session.backward", "none", "replace loss.backward() by it")
        if rates is not None and learning_rates(trained.optimizer) != rates:
            fix = "give the scheduler to session.prepare(model, optimizer, scheduler)"
            raise UserError("learning rates may change between steps only", "a change inside of one", fix)

    def commit(self) -> None:
        """If the user's lines have just applied a step, it counts; what was agreed on in it is done."""
        if self._transaction.phase is Phase.REDUCED:
            self._transaction.commit()
            self._stop_agreed = self._adapter.after_step(self._trained(), self._size)

    def control(self, own: ControlVector) -> ControlVector:
        """This worker's part of the next step's control vector; always of the same length."""
        return self._adapter.contribute(own, self._times)

    def _tell_of_regrouping(self, now: float) -> None:
        """Report the pause when the first step of a new view completes."""
        workers, interruption = self._workers, self._workers.interruption
        pause_s, discarded = interruption.step_completed(workers.view, now), interruption.discarded
        if pause_s is None:
            return
        self._times, interruption.discarded = WorkerTimes(), 0
        if workers.rank == 0:
            median_s, _ = self._progress.times.medians()
            self._send(
                Regrouped(
                    version=workers.view,
                    members=list(workers.members),
                    planned=workers.planned,
                    step=self._progress.position.step + 1,
                    pause_s=max(0.0, pause_s - (median_s or 0.0)),
                    discarded=discarded,
                    mesh="" if workers.comms.mesh.replica == 1 else str(workers.comms.mesh),
                )
            )

    # -- between steps ------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """From here on this worker trains with the others, if it does not yet."""
        if not self._warming_up:
            self._workers.join()

    def _go_on(self, trained: TrainingState) -> bool:
        """At a step boundary: stop, save or change what is due; False once ``max_steps`` are done."""
        workers, progress = self._workers, self._progress
        self._transaction.arrive()
        done, every = progress.position.step, self._spec.checkpoint_every_steps
        if self._stop_agreed or self._stop_votes > 0:
            self.stop("policy" if self._stop_agreed else "requested")
        if self._spec.max_steps is not None and done >= self._spec.max_steps:
            progress.stopped = "max_steps"
            if every != 0:
                self.save()
            return False
        view = workers.view
        workers.boundary()
        if workers.view != view:
            return True  # come here once more, as a member of the new view
        if self._adapter.before_step(trained, self._size):
            self.stop("policy")
        if workers.view == view and every and done and done % every == 0 and self._saved != done:
            self._saved = done
            self.save()
        return True

    def stop_if_asked(self) -> None:
        """Where no reduction carried the workers' votes, ask for them."""
        if any(vote > 0 for (vote,) in self._workers.gather([float(self._stop_requested())], "the end of an epoch")):
            self.stop()

    def stop(self, why: str = "requested") -> NoReturn:
        """Save and end."""
        self._progress.stopped = why
        self.save()
        raise StopTraining

    def save(self) -> None:
        """Write a checkpoint; its steps are told before it."""
        self._log.flush()
        self._state.save()

    def _trained(self) -> TrainingState:
        if self._state.trained is None:
            raise UserError("session.prepare must come before training", "no model yet", "call session.prepare first")
        return self._state.trained
