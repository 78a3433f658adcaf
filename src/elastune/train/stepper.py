"""The training pass: one mini-batch after another, and what happens between steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from itertools import chain, tee
from typing import Any, Literal, NoReturn

import torch

from elastune.comm.group import GroupBroken
from elastune.core.run import Means, RunSpec
from elastune.core.seeds import derive
from elastune.elastic.worker.group import WorkerGroup
from elastune.journal.records import Compiled, Record, SyncChanged
from elastune.train.adapt.adapter import Adapter
from elastune.train.checkpoints.run_state import RunState
from elastune.train.compiling import COMPILED
from elastune.train.control import ControlVector
from elastune.train.data.content import READS, content
from elastune.train.data.loading import to_device
from elastune.train.data.planned import PlannedSteps, ignore
from elastune.train.data.sample_log import SampleLog, shorten_epoch
from elastune.train.data.source import StepPlan, StepSource, plan_rounds, plan_steps
from elastune.train.progress import BY_PROGRAM, Progress
from elastune.train.rng import seed_everything
from elastune.train.schedules import learning_rates
from elastune.train.step_exchange import StepExchange
from elastune.train.training_state import TrainingState
from elastune.train.transaction import Phase, StepTransaction
from elastune.train.warm_up import warm_up

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
        exchange: StepExchange,
        device: torch.device,
        send: Callable[[Record], None],
        warming_up: bool,
    ) -> None:
        self._spec = spec
        self._workers = workers
        self._progress = progress
        self._transaction = transaction
        self._log = log
        self._state = state
        self._adapter = adapter
        self._exchange = exchange
        self._device = device
        self._send = send
        self._planned = PlannedSteps(ignore if warming_up else send, spec.sync_schedule)
        self._warming_up = warming_up
        self._saved = 0  # the step of the newest checkpoint that was due by its number
        self.in_pass = False  # the program is in the loop over a pass's batches

    # -- a pass -------------------------------------------------------------------------------------------------------

    def training_pass(self, open_source: Callable[[int], StepSource], batch_size: int, epochs: int) -> Iterator[Any]:
        """The batches of the rest of an epoch, of ``epochs``; ``open_source(epoch)`` is what the epoch goes through."""
        progress, trained, exchange = self._progress, self._state.prepared, self._exchange
        self.join()
        source = open_source(progress.position.epoch)
        exchange.alike.begin_pass(source)
        self._adapter.begin_pass(trained, source.length(0, 1), batch_size)
        outcome: Outcome = "again"
        self.in_pass = True
        try:
            while outcome == "again":
                exchange.batch_size = batch_size if progress.batch_size is None else progress.batch_size
                self._planned.tell(source, progress.position, exchange.batch_size, epochs, trained.sync.plan)
                outcome = yield from self._under_one_view(source, trained)
        finally:
            self.in_pass = False
        if outcome == "over":
            progress.position = replace(progress.position, epoch=progress.position.epoch + 1, offset=0)
            self._log.flush()
            self._state.average_buffers()
            self._state.seed_between("pass")
            self._adapter.after_epoch(trained, progress.batch_size or exchange.batch_size)

    def _under_one_view(self, source: StepSource, trained: TrainingState) -> Generator[Any, None, Outcome]:
        """Steps for as long as all stays as it is that they are planned by: view, batch size and micro-batch."""
        workers, progress, means, exchange = self._workers, self._progress, self._means(), self._exchange
        agreed, size = trained.sync, exchange.batch_size
        mesh, everyone = workers.comms.mesh, workers.size if trained.sync.all_contribute else None
        place = mesh.batch, mesh.batch_rank(workers.comms.rank)
        if self._warming_up:
            place, everyone = (min(means.num_slots, means.first_mesh.batch), 0), None
        view, start = workers.view, progress.position
        progress.memory.begin_view(view)
        exchange.gradient_bytes = trained.gradient_bytes
        plans, ahead = tee(self._plans(source, size, place, everyone, trained))
        parts = (part for plan in ahead for part in plan.own_parts)
        probe = source.probe()
        probes = exchange.alike.probes and not self._warming_up and len(probe) > 0
        data = source.fetch(chain([probe] * READS, parts) if probes else parts)
        if self._warming_up:
            control = exchange.control(ControlVector())
            yield from warm_up(next(plans, None), data, self._transaction, trained.sync, control, self._device)
        for plan in plans:
            if not self._go_on(trained):
                return "stopped"
            changed = progress.batch_size not in (None, size) or self._means() != means or trained.sync is not agreed
            if workers.view != view or changed:
                return "again"
            if self._may_be_last(plan, source):
                self._state.remember()
            if probes:
                exchange.alike.content, probes = content([next(data) for _ in range(READS)]), False
            schedulers = trained.remember_schedulers() if plan.steps > 1 else None
            completed = yield from self._one_step(plan, source, data, trained)
            if not completed:
                trained.restore_schedulers(schedulers)
                workers.interruption.discarded += self._transaction.phase is Phase.LOST  # else nothing was begun
                self._adapter.step_lost()
                return "again"
            self._adapter.exchange()
            exchange.commit()
        if progress.position == start:  # a batch that has grown is more than what is left of the epoch
            length = source.length(start.offset, size)
            self._log.shorten_epoch(length)
            shorten_epoch(progress.spans, length)
        return "over"

    def _plans(
        self, source: StepSource, size: int, place: tuple[int, int], everyone: int | None, trained: TrainingState
    ) -> Iterator[StepPlan]:
        """What this worker does in the rest of the pass."""
        replica, plan = trained.replica, trained.sync.plan
        means, start, least = self._means(), self._progress.position, replica.least_samples
        if plan.in_rounds:
            ends = [step for step in (self._spec.max_steps, self._spec.sync_schedule.next_after(start.step)) if step]
            most = min(ends) - start.step if ends else None
            seat = self._workers.seat if plan.spares and not self._warming_up else None
            return plan_rounds(source, size, start, means, plan, *place, least, most, seat)
        among = (1, 0) if self._warming_up else replica.among(self._workers.comms.mesh, self._workers.comms.rank)
        how = {"even": replica.equal_passes, "in_turn": replica.in_turn}
        return plan_steps(source, size, start, means, *place, least, everyone, **how, among=among)

    def _means(self) -> Means:
        micro_batch = self._progress.micro_batch
        return self._spec.means if micro_batch is None else replace(self._spec.means, micro_batch=micro_batch)

    def _may_be_last(self, plan: StepPlan, source: StepSource) -> bool:
        """Whether the pass ends with this step: what follows may have to be repeated, and begins with this step then:
        so the user's lines after the loop find what they use of a batch.
        """
        stop, known = plan.offset + plan.moves, plan.length
        ends_pass = known <= stop if known else source.ends(stop)
        return ends_pass or self._progress.position.step + plan.steps == self._spec.max_steps

    # -- a step -------------------------------------------------------------------------------------------------------

    def _one_step(
        self, plan: StepPlan, source: StepSource, data: Iterator[Any], trained: TrainingState
    ) -> Generator[Any, None, bool]:
        """Yields the step's batches. True if the step is completed, False if it is to be done again."""
        transaction, workers, times = self._transaction, self._workers, self._progress.times
        number, data_s = self._progress.position.step, 0.0
        times.begin_step()
        self._progress.memory.begin_step()
        workers.say("computing", number)
        for part in plan.slices:
            if workers.broken:
                transaction.recover(GroupBroken("the view is over"))
                if not transaction.goes_on:
                    return False
                workers.say("computing", number)
            if transaction.phase is Phase.LOST:  # the user's lines met a loss elsewhere, such as in an evaluation
                return False
            fetching = times.now
            batch = to_device(next(data), self._device)
            data_s += times.now - fetching
            if part is plan.slices[0]:
                self._exchange.begin(plan, source, trained)
            # Data are fetched before seeding: augmentation in this process must not show in the slot's own stream.
            seed_everything(derive(self._spec.seed, "slot", number, part.slot, part.samples.start))
            last = part.ends_step or part.ends_local_step
            rates = () if last else learning_rates(trained.optimizer)
            if not transaction.begin_slice(part):
                return False
            try:
                yield batch
            except GeneratorExit:  # the user left the loop
                workers.leaves("the batch loop")
                if transaction.phase in (Phase.OPEN, Phase.LOST):
                    transaction.leave()
                if transaction.phase is not Phase.APART:  # nothing may be raised here: workers meet in the next call
                    self._exchange.commit()
                raise
            transaction.check_body(rates_changed=not last and learning_rates(trained.optimizer) != rates)
        trained.replica.stand_in()  # the program may have left an evaluation early
        self._exchange.meet()
        if transaction.phase is Phase.LOST:
            return False
        self._exchange.times = times.end_step(data_s, trained.sync.wait_s, plan.steps)
        self._progress.memory.end_step()
        if (compiled_s := COMPILED.untold()) and (workers.elastic or workers.rank == 0):
            self._send(Compiled(number + plan.steps, workers.worker, compiled_s))
        return True

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
        if why := self._exchange.stop_wanted:
            self.stop(why)
        self._stop_at_limit()
        if progress.stopped != "complete":  # or by the program
            if every != 0:
                self.save()
            return False
        view = workers.view
        self._agree_as_due(trained)
        workers.boundary()
        if workers.view != view:
            return True  # come here once more, as a member of the new view
        if self._adapter.before_step(trained, self._exchange.batch_size):
            self.stop("policy")
        due = every and done // every > (done - progress.newest_steps) // every  # joiners find the same
        if workers.view == view and due and self._saved != done:
            self._saved = done
            self.save()
        return True

    def _stop_at_limit(self) -> None:
        """Let the run stop where ``max_steps`` are done, unless the program has stopped it."""
        progress, most = self._progress, self._spec.max_steps
        if most is not None and progress.position.step >= most and not progress.stop_why:
            progress.stopped = "max_steps"

    def begins_epoch(self) -> bool:
        """Whether another epoch is to begin: none where ``max_steps`` were done as the one before it ended."""
        if self._progress.position.offset == 0:  # else evaluation and report of a cut epoch may still be missing
            self._stop_at_limit()
        return self._progress.stopped == "complete"

    def _agree_as_due(self, trained: TrainingState) -> None:
        """Where another strategy is due by the schedule, or was decided on, it takes over here."""
        in_use, step = trained.in_use, self._progress.position.step
        in_use.follow(self._spec.sync_schedule, step)
        if in_use.wanted is not None:
            self._state.average_buffers()
            plan, why = in_use.switch(step)
            if self._workers.rank == 0 or self._workers.elastic:  # of several equal records one is kept
                self._send(SyncChanged(step, str(plan), why, self._progress.times.seconds))

    def stop_if_asked(self) -> None:
        """Where no reduction carried the workers' votes, ask for them."""
        if self._exchange.any_asked_to_stop():
            self.stop()

    def stop(self, why: str = "requested") -> NoReturn:
        """Save and end."""
        self._progress.stopped = why
        self.save()
        raise StopTraining

    def finish(self) -> None:
        """The training function has returned. One that goes on later, as it is asked to, is not at the run's end."""
        if self._progress.stopped in ("complete", "policy", BY_PROGRAM):
            self._planned.over(self._progress.position.step)

    def save(self) -> None:
        """Write a checkpoint; its steps are told before it."""
        self._log.flush()
        self._state.save()
