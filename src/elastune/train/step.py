"""One training step: begin, slices, reduce, apply, commit, boundary, in the order in which they happen.

``TrainingLoop`` takes a worker through its steps; it stands first and reads from top to bottom. ``StepTransaction``
alone decides whether a step is open, reduced, committed or lost. ``ControlVector`` holds the few numbers that travel
beside the gradients. The sync strategy and its replica (``parallel``) compute the step. The worker group (``elastic``)
brings workers together again after a loss. ``docs/step.md`` describes the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import chain, tee
from typing import Any, Literal, NoReturn, TypeVar

import torch

from elastune.adapt.monitors.base import WorkerTimes
from elastune.core.errors import Diverged, UserError
from elastune.core.journal.records import ChangeTimed, Compiled, Proved, Record, Regrouped, SyncChanged
from elastune.core.run import ExecutionSettings, Position, RunSpec, derive
from elastune.core.slots import BatchSlice
from elastune.elastic.worker.group import WorkerGroup
from elastune.elastic.worker.recovery import NO_ROUND, OpenRound
from elastune.parallel.comm.group import GroupBroken
from elastune.parallel.sync.base import Sync
from elastune.train import losses
from elastune.train.adaptation.adapter import Adapter, StepContribution
from elastune.train.agreement import NO_MARKS, OptimizerSettings, StepSettings, alike, differences, marks, steps_differ
from elastune.train.checkpoints.run_state import RunState
from elastune.train.data.fingerprint import CHANGES, MORE_READS, PRIME, READS, content
from elastune.train.data.loading import to_device
from elastune.train.data.sample_log import SampleLog, add_left_out, add_steps, shorten_epoch
from elastune.train.data.source import StepPlan, StepSource, plan_rounds, plan_steps
from elastune.train.losses import MEAN, Loss, LossKind, as_mean, without_gradient
from elastune.train.progress import BY_PROGRAM, COMPILED, DivergenceWatch, PlannedSteps, Progress, ignore
from elastune.train.proof.first_step import FirstPasses, FirstStep
from elastune.train.proof.verification import STATE, Verification
from elastune.train.rng import seed_everything, streams_kept
from elastune.train.schedules import learning_rates
from elastune.train.training_state import TrainingState

CHECK_LOSS_EVERY = 50  # steps, on a GPU: reading the loss waits for the device
WARM_UP_SLICES = 2  # of a joiner
DIGESTS_FROM = 8 + len(NO_MARKS)  # the place of the digests in a control vector
COUNTED = 1 << 12  # samples are counted modulo this: sums over 4096 workers are exact, however long a round is

T = TypeVar("T")
Outcome = Literal["over", "stopped", "again"]
"""How the steps of one view ended: the pass is over, training stops, or the rest of the pass needs new plans."""


class Phase(Enum):
    """The place of a worker in a step."""

    BETWEEN = "between steps"  # no step is begun
    OPEN = "inside of a step"  # the gradients are this worker's alone
    APART = "after a round's last pass"  # the user's lines take the last of the worker's own steps; then workers meet
    REDUCED = "after a step's reduction"  # the sum over workers is here; the user's lines apply it
    LOST = "after a step was lost"  # a worker went before the sum came: the user's lines run on without effect
    LEFT = "after the batch loop was left inside of a step"  # training cannot go on


class StopTraining(BaseException):
    """Training was asked to stop and has been saved; not an ``Exception``, so that user code does not swallow it."""


class WarmedUp(BaseException):
    """A joiner has done a few passes that do not count: everything is warm, and training can begin."""


class TrainingLoop:
    """Takes one worker through training, step by step, whatever the membership view is.

    ``training_pass`` is the loop over a pass: the program draws batches from it. The program's lines between two
    batches call ``backward``, which reduces the step, and apply it. ``commit`` and the boundary follow when the program
    asks for the next batch. The methods below stand in this order.

    Attributes:
        in_pass: The program is in the loop over a pass's batches.
    """

    def __init__(
        self,
        spec: RunSpec,
        workers: WorkerGroup,
        progress: Progress,
        transaction: StepTransaction,
        log: SampleLog,
        state: RunState,
        adapter: Adapter,
        divergence: DivergenceWatch,
        device: torch.device,
        verification: Verification,
        *,
        send: Callable[[Record], None],
        stop_requested: Callable[[], bool],
        warming_up: bool = False,
    ) -> None:
        self._spec = spec
        self._workers = workers
        self._progress = progress
        self._transaction = transaction
        self._log = log
        self._state = state
        self._adapter = adapter
        self._divergence = divergence
        self._device = device
        self._verification = verification
        self._send = send
        self._stop_requested = stop_requested
        self._warming_up = warming_up
        self._planned = PlannedSteps(ignore if warming_up else send, spec.sync_schedule)
        self.in_pass = False
        # Of the pass:
        self._batch_size = 0  # by which its steps are cut
        self._gradient_bytes = 0  # that a worker sends, of the model as it stands in this view
        self._content: int | None = None  # checksum of a few samples; None: not read yet
        self._reread: Callable[[], list[Any]] = list  # reads these samples again
        self._settings = OptimizerSettings()
        # Of the step:
        self._control_now: Callable[[], ControlVector] = ControlVector  # this worker's part, as it stands when called
        self._checks_loss = True
        self._encoders: list[losses.SliceEncoder] = []  # of slices whose pass waits for the others
        self._state_digest = ""  # where workers compare their state
        self._times = WorkerTimes()  # of the step before, as long as the view is the same
        self._stop_votes, self._stop_agreed = 0.0, False  # of workers that were asked to stop; by policies
        self._saved = 0  # the step of the newest checkpoint that was due by its number

    # -- pass ---------------------------------------------------------------------------------------------------------

    def training_pass(
        self, open_source: Callable[[int], StepSource], batch_size: int, epochs: int
    ) -> Generator[Any, None, None]:
        """Yield the batches of the rest of an epoch, one of ``epochs``; ``open_source(epoch)`` plans its data."""
        progress, trained = self._progress, self._state.prepared
        self.join()
        source = open_source(progress.position.epoch)
        if (recorder := self._state.recorder) is not None:
            recorder.begins(trained.optimizer, trained.replica.module, self._workers.rank)
            source = recorder.shortened(source, batch_size)
        self._content, self._reread = None, lambda: list(source.fetch(iter([source.probe()] * MORE_READS)))
        self._adapter.begin_pass(trained, source.length(0, 1), batch_size)
        outcome: Outcome = "again"
        self.in_pass = True
        try:
            while outcome == "again":
                self._batch_size = batch_size if progress.batch_size is None else progress.batch_size
                self._planned.report(source, progress.position, self._batch_size, epochs, trained.sync.plan)
                outcome = yield from self._steps_of_view(source, trained)
        finally:
            self.in_pass = False
        if outcome == "over":
            progress.position = replace(progress.position, epoch=progress.position.epoch + 1, offset=0)
            self._log.flush()
            self._state.average_buffers()
            self._state.seed_between("pass")
            self._adapter.after_epoch(trained, progress.batch_size or self._batch_size)

    def _steps_of_view(self, source: StepSource, trained: TrainingState) -> Generator[Any, None, Outcome]:
        """Take steps for as long as their plans hold: the same view, batch size, micro-batch and strategy."""
        workers, progress, execution = self._workers, self._progress, self._execution()
        sync, size = trained.sync, self._batch_size
        mesh, everyone = workers.comms.mesh, workers.size if trained.sync.all_contribute else None
        place = mesh.batch, mesh.batch_rank(workers.comms.rank)
        if self._warming_up:
            place, everyone = (min(execution.num_slots, execution.first_mesh.batch), 0), None
        view, start = workers.view, progress.position
        progress.memory.begin_view(view)
        self._gradient_bytes = trained.gradient_bytes
        plans, ahead = tee(self._plans(source, size, place, everyone, trained))
        parts = (part for n, plan in enumerate(ahead, start.step + 1) for part in self._parts_of(plan, n, trained))
        probe = source.probe()
        probes = workers.size > 1 and self._content is None and not self._warming_up and len(probe) > 0
        proof = self._state.first_step
        first, plans = _first_of(plans) if self._proves(sync) else (None, plans)
        proof_places = FirstStep.places(first) if proof is not None and first is not None else []
        data = source.fetch(chain(proof_places, [probe] * READS, parts) if probes else chain(proof_places, parts))
        if proof is not None and first is not None:
            yield from self._prove(proof, first, proof_places, data, trained)
        if self._warming_up:
            control = self._empty_control()
            yield from warm_up(next(plans, None), data, self._transaction, trained.sync, control, self._device)
        for plan in plans:
            if not self._boundary(trained):
                return "stopped"
            changed = (
                progress.batch_size not in (None, size) or self._execution() != execution or trained.sync is not sync
            )
            if workers.view != view or changed or self._verification.enter():
                return "again"
            if self._may_be_last(plan, source):
                self._state.remember()
            if probes:
                self._content, probes = content([next(data) for _ in range(READS)]), False
            schedulers = trained.remember_schedulers() if plan.steps > 1 else None
            completed = yield from self._run_slices(plan, source, data, trained)
            if not completed:
                trained.restore_schedulers(schedulers)
                workers.interruption.discarded += self._transaction.phase is Phase.LOST  # else no step was begun
                self._adapter.step_lost()
                return "again"
            self._adapter.exchange()
            self.commit()
        if progress.position == start:  # a batch that has grown is more than the rest of the epoch
            length = source.length(start.offset, size)
            self._log.shorten_epoch(length)
            shorten_epoch(progress.spans, length)
        return "over"

    def _parts_of(self, plan: StepPlan, step: int, trained: TrainingState) -> list[range]:
        """The places of this worker's passes in ``step``: first of those that only verify another worker."""
        if self._warming_up:
            return plan.own_parts
        passes = self._verification.passes_of(plan, step, self._execution(), trained.replica.least_samples)
        return [*replace(plan, slices=passes).own_parts, *plan.own_parts]

    # -- proof --------------------------------------------------------------------------------------------------------

    def _proves(self, sync: Sync) -> bool:
        """Whether the next step is the run's first, and its loss is to be proved a mean that slots may share."""
        if self._state.first_step is None or self._warming_up or self._progress.position.step or self._workers.view > 1:
            return False
        whole = sync.replica.has_all and not sync.plan.in_rounds
        return whole and self._device.type == "cpu" and torch.get_num_threads() == 1

    def _prove(
        self, proof: FirstStep, plan: StepPlan, places: list[range], data: Iterator[Any], trained: TrainingState
    ) -> Generator[Any, None, None]:
        """Take a few passes in a fork of this process: nothing of them shows in the run.

        Raises:
            UserError: The program makes a mistake for certain.
        """
        self._state.first_step = None
        batches = [to_device(next(data), self._device) for _ in places]
        if batches and proof.fork():
            try:
                self._state.first_step = proof
                alone = replace(plan.slices[0], ends_step=False, weight=1.0)
                self._transaction.begin(replace(plan, slices=[alone]), trained.sync, self._empty_control())
                for batch, each in zip(batches, places, strict=True):
                    seed_everything(derive(self._spec.seed, "first step"))
                    self._transaction.begin_slice(alone)
                    with proof.passing(batch, each):
                        yield batch
                proof.answer()
            finally:
                proof.leave()  # no error may reach the program in the fork, whose files are this run's
        mine = proof.wait() if batches else FirstPasses()
        seen = self._workers.gather_bytes(mine.encode(), "the proof of the first step")
        loss = proof.judge([FirstPasses.decode(each) for each in seen])
        if self._workers.rank == 0:
            self._send(Proved("first_step", loss, mine.seconds))

    def _plans(
        self, source: StepSource, size: int, place: tuple[int, int], everyone: int | None, trained: TrainingState
    ) -> Iterator[StepPlan]:
        """This worker's part of each step in the rest of the pass."""
        replica, plan = trained.replica, trained.sync.plan
        execution, start, least = self._execution(), self._progress.position, replica.least_samples
        if plan.in_rounds:
            ends = [step for step in (self._spec.max_steps, self._spec.sync_schedule.next_after(start.step)) if step]
            most = min(ends) - start.step if ends else None
            seat = self._workers.seat if plan.has_quorum and not self._warming_up else None
            return plan_rounds(source, size, start, execution, plan, *place, least, most, seat)
        among = (1, 0) if self._warming_up else replica.among(self._workers.comms.mesh, self._workers.comms.rank)
        dealing = {"even": replica.equal_passes, "in_turn": replica.in_turn}
        return plan_steps(source, size, start, execution, *place, least, everyone, **dealing, among=among)

    def _execution(self) -> ExecutionSettings:
        """The run's execution settings, with the micro-batch that the run was changed to use."""
        micro_batch = self._progress.micro_batch
        return self._spec.execution if micro_batch is None else replace(self._spec.execution, micro_batch=micro_batch)

    def _may_be_last(self, plan: StepPlan, source: StepSource) -> bool:
        """Whether the pass ends with this step.

        The program's lines after the loop may have to be repeated. They then begin with this step again, and so find
        the variables that they use of a batch.
        """
        stop, length = plan.offset + plan.moves, plan.length
        ends_pass = length <= stop if length else source.ends(stop)
        return ends_pass or self._progress.position.step + plan.steps == self._spec.max_steps

    # -- begin --------------------------------------------------------------------------------------------------------

    def _begin(self, plan: StepPlan, source: StepSource, trained: TrainingState, first: BatchSlice) -> None:
        """Begin the step of ``plan`` with the pass ``first``, and this worker's part of the control vector."""
        self._workers.left, self._encoders = "", []
        due = self._device.type == "cpu" or self._progress.position.step % CHECK_LOSS_EVERY == 0
        self._checks_loss = due and not self._adapter.survives_divergence
        if monitors := self._adapter.monitoring.monitors:
            self._adapter.monitoring.prepare(trained.sync, self._progress.position.step + 1)
        trained.sync.wants_statistics = bool(monitors) or self._checks_loss or self._progress.loss_wanted
        if self._transaction.reevaluates_loss:
            trained.sync.measure(False)
        self._control_now = partial(self._control, plan, source, trained)
        self._transaction.begin(plan, trained.sync, self._control_now(), first)
        least, step = trained.replica.least_samples, self._progress.position.step + plan.steps
        self._verification.begin(plan, step, trained.sync, self._execution(), least)

    def _control(self, plan: StepPlan, source: StepSource, trained: TrainingState) -> ControlVector:
        """This worker's part of the control vector of the step of ``plan``, as it stands now."""
        workers, position, verification = self._workers, self._progress.position, self._verification
        speaks = trained.replica.apart or workers.comms.speaks
        step_marks = [
            places for part, places in zip(plan.slices, plan.own_parts, strict=True) if part.weight and speaks
        ]
        stop, view_known = float(self._stop_requested()), workers.begin_step()
        samples = sum(len(places) for places in step_marks) % COUNTED
        checksum = (
            plan.checksum if [*map(len, step_marks)] == [plan.size] else sum(map(source.checksum, step_marks)) % PRIME
        )
        sent = self._adapter.exchanged.since(trained.sync.sent_bytes)
        own_marks: Sequence[float] = NO_MARKS
        if workers.size > 1:
            settings, data = self._settings.checksum(trained.optimizer), self._content or CHANGES
            frozen, self._state_digest = trained.flags.checksum(), verification.state_digest(position.step + 1, trained)
            equal = position.epoch, position.step, *plan.taken, data, settings, frozen
            own_marks = marks(hash((*equal, self._state_digest) if self._state_digest else equal))
        digests = (0.0,) * verification.numbers
        extra = self._contribution()
        return ControlVector(*extra, stop, view_known, samples, checksum, sent, own_marks, digests)

    def _contribution(self) -> tuple[float, float, float, Sequence[float], Sequence[float]]:
        """The part of the control vector that monitors and policies add, in the order of its fields."""
        extra = self._adapter.contribute(self._times)
        return extra.waiting, extra.seconds, extra.unsure, extra.votes, extra.times

    def _empty_control(self) -> ControlVector:
        """A control vector of the right length, before there is a step."""
        return ControlVector(*self._contribution(), digests=(0.0,) * self._verification.numbers)

    @property
    def control_length(self) -> int:
        """How many numbers a control vector of this run has; always the same."""
        return len(self._empty_control().to_list())

    # -- slices -------------------------------------------------------------------------------------------------------

    def _run_slices(
        self, plan: StepPlan, source: StepSource, data: Iterator[Any], trained: TrainingState
    ) -> Generator[Any, None, bool]:
        """Yield the step's batches, one a slice. Return True if the step is completed, False if it is done again."""
        transaction, workers, times = self._transaction, self._workers, self._progress.times
        number, data_s = self._progress.position.step, 0.0
        times.begin_step()
        self._progress.memory.begin_step()
        workers.set_activity("computing", number)
        verification, least = self._verification, trained.replica.least_samples
        redone = verification.passes_of(plan, number + 1, self._execution(), least)
        for nth, part in enumerate([*redone, *plan.slices]):
            again = nth < len(redone)
            if workers.broken:
                transaction.recover(GroupBroken("the view is over"))
                if not transaction.goes_on:
                    return False
                workers.set_activity("computing", number)
            if transaction.phase is Phase.LOST:  # the user's lines met a loss elsewhere, such as in an evaluation
                return False
            fetching = times.now
            batch = to_device(next(data), self._device)
            data_s += times.now - fetching
            if nth == 0:
                self._begin(plan, source, trained, part)
            verification.redoing = part if again else None
            # Data are fetched before seeding: augmentation in this process must not show in the slot's own stream.
            seed_everything(derive(self._spec.seed, "slot", number, part.slot, part.samples.start))
            last = part.ends_step or part.ends_local_step
            rates = () if last else learning_rates(trained.optimizer)
            if not transaction.begin_slice(part):
                return False
            recorder = self._state.recorder
            recorded = nullcontext() if recorder is None or again else recorder.around(plan, part, batch, source)
            try:
                with recorded:
                    yield batch
            except GeneratorExit:
                self._left_loop()
                raise
            transaction.check_body(rates_changed=not last and learning_rates(trained.optimizer) != rates)
        trained.replica.stand_in()  # the program may have left an evaluation early
        self.meet()
        if transaction.phase is Phase.LOST:
            return False
        self._times = times.end_step(data_s, trained.sync.wait_s, plan.steps)
        self._progress.memory.end_step()
        if (compiled_s := COMPILED.unreported()) and (workers.elastic or workers.rank == 0):
            self._send(Compiled(number + plan.steps, workers.worker, compiled_s))
        return True

    def _left_loop(self) -> None:
        """The program left the batch loop: the step counts if its sum is here, and cannot go on if it is open."""
        transaction = self._transaction
        self._workers.leaves("the batch loop")
        if transaction.phase in (Phase.OPEN, Phase.LOST):
            transaction.leave(self._workers.where())
        if transaction.phase is not Phase.APART:  # else workers meet in the next call: nothing may be raised here
            self.commit()

    # -- reduce -------------------------------------------------------------------------------------------------------

    def backward(
        self,
        loss: torch.Tensor,
        only: list[torch.nn.Parameter] | None = None,
        more: bool = False,
        kind: LossKind = MEAN,
    ) -> None:
        """Run one backward pass; after the step's last one, reduce the step. See ``Session.backward``.

        Args:
            loss: The loss over the batch.
            only: The parameters that get gradients; None: all.
            more: Another loss of the same batch follows.
            kind: What the loss is over.
        """
        transaction, workers, step = self._transaction, self._workers, self._progress.position.step
        if transaction.phase is Phase.LOST:
            return
        part, sync = transaction.due(), self._state.prepared.sync
        verification = self._verification
        sync.replica.only = only
        if loss.numel() != 1:
            raise UserError("a loss must be one number", f"shape {tuple(loss.shape)}", "take its mean over the batch")
        if self._state.first_step is not None and self._state.first_step.in_fork:
            self._state.first_step.loss(loss, sync.replica.module, known=kind != MEAN or more or only is not None)
            transaction.defer()
            return
        user_loss, loss = loss, as_mean(loss, part, kind, sync, more=more)
        if verification.redoing is not None and not more:
            with without_gradient(sync, kind):
                transaction.redo(loss, verification.redone)
            return
        # With verification the sum of losses is the same on all workers: the cause may be a worker that computes wrong.
        speaks = self._checks_loss and not verification.on and (sync.replica.apart or workers.comms.speaks)
        if speaks and not math.isfinite(value := loss.item()):  # a worker that does not speak has a stand-in
            raise Diverged(f"loss is {value} at step {step + 1}")
        if self._state.recorder is not None:
            self._state.recorder.loss(user_loss, loss, sync.replica.module, only)
        if more:
            self._adapter.monitoring.refuse_cut_losses("more=True")
            transaction.add(loss)
            return
        if self._adapter.monitoring.curved and not sync.meets_after_step:
            self._adapter.monitoring.bend(sync, loss, part, step + 1)
        if part.ends_step and not sync.meets_after_step:
            workers.set_activity("reducing", step, self._gradient_bytes, f"the reduction of step {step + 1}")
        with without_gradient(sync, kind):
            sums = transaction.reduce(loss, self._adapter.votes)
        if sums is not None:
            self._reduced(sums)

    def backward_global(self, loss: Loss, encode: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        """Keep a slice's call; with the last one, pass all slices. See ``Session.backward_global``."""
        transaction, step = self._transaction, self._progress.position.step
        if transaction.phase is Phase.LOST:
            return
        part, sync = transaction.due(), self._state.prepared.sync
        losses.refuse_gathering(sync)
        if self._verification.on:
            rule = "a slot that a second worker computes, too, needs no other slot"
            raise UserError(rule, "session.backward_global with --verify", "leave --verify out")
        if self._state.first_step is not None and self._state.first_step.in_fork:
            self._state.first_step.leave()
        encoder = losses.SliceEncoder.of(part, encode, inputs)
        if len(part.samples) == part.batch:
            self.backward(loss(*encoder.features()))
            return
        self._adapter.monitoring.refuse_cut_losses("session.backward_global")
        self._encoders.append(encoder)
        if not part.ends_step:
            transaction.defer()
            return
        encoders, self._encoders = self._encoders, []
        # As the step's one operation: a worker may still be here while another is in the reduction.
        self._workers.set_activity("reducing", step, self._gradient_bytes, f"the reduction of step {step + 1}")
        features = transaction.exchanged(lambda: losses.gathered(encoders, sync))
        if features is None:
            return
        self._workers.set_activity("computing", step)
        with streams_kept():  # a loss may draw, alike on all workers
            seed_everything(derive(self._spec.seed, "global loss", step))
            gradients = losses.FeatureGradients.of(loss, features, sync.replica.params)
        for encoder in encoders:
            transaction.take_up(encoder.part)
            self.backward(gradients.loss_of(encoder))

    def meet(self, *, repeatable: bool = True) -> None:
        """Meet, if workers meet after the optimizer's step and have not met yet. See ``StepTransaction.meet``."""
        transaction, workers, step = self._transaction, self._workers, self._progress.position.step
        took_s = self._progress.times.step_s
        while transaction.phase is Phase.APART:  # again, where the round goes on without workers that were lost here
            plan, trained = transaction.plan, self._state.prepared
            workers.set_activity("reducing", step, trained.state_bytes, f"the exchange after step {step + plan.steps}")
            if trained.sync.plan.has_quorum:
                transaction.replace_control(self._control_now())
                learners = len({part.learner for part in plan.slices})
                workers.report_round(step, learners, trained.sync.plan, took_s)
            if (sums := transaction.meet(self._adapter.votes, repeatable=repeatable)) is not None:
                self._reduced(sums)

    # -- apply --------------------------------------------------------------------------------------------------------

    def _reduced(self, sums: ControlVector) -> None:
        """The workers' sums are here: check them, then let the user's lines apply them."""
        transaction, workers, step = self._transaction, self._workers, self._progress.position.step
        trained = self._state.prepared
        workers.set_activity("computing", step + 1)
        if not alike(sums.marks):
            self._require_alike(transaction.plan, trained)
            check_committed_samples(transaction.plan, sums)
        if sums.digests and not self._verification.accepts(sums.digests, step + 1, trained):
            transaction.abandon()  # done again, with one more worker to decide
            return
        self._stop_votes = sums.stop
        trained.sync.divide_by_counts()
        self._state.reduced(trained.sync)
        if self._state.recorder is not None:
            settings = OptimizerSettings.by_name(trained.optimizer)
            self._state.recorder.reduced(step + 1, self._progress.position.epoch, trained.replica.module, settings)
        self._adapter.step_reduced(sums, sums.sent, transaction.plan, trained.sync.statistics)
        if trained.sync.wants_statistics:
            self._adapter.mean_loss.add(trained.sync.statistics.parts["loss"], transaction.plan.size)
        if self._checks_loss:
            try:
                self._divergence.loss(trained.sync.statistics.parts["loss"], step + 1, transaction.plan.turn)
            except Diverged:
                self._verification.doubt_divergence(step + 1)
                raise
        self._report_regrouping()

    def _require_alike(self, plan: StepPlan, trained: TrainingState) -> None:
        """Workers' marks differ: find out how. All workers call this together.

        Raises:
            UserError: Where workers took the step with other data or settings; not where only the data change by
                themselves, so that a worker that reads them again gets others.
        """
        workers, position = self._workers, self._progress.position
        settings, line = OptimizerSettings.by_name(trained.optimizer), workers.where()
        settings["frozen parameters"] = ", ".join(trained.flags.frozen) or "none"
        settings |= {STATE: self._state_digest} if self._state_digest else {}
        settings_here = StepSettings(position.epoch, *plan.taken, self._content or CHANGES, settings, line)
        rows = workers.gather_bytes(settings_here.encode(), "what the step is made of")
        columns = differences(rows)
        if list(columns) == ["content"]:
            checksums = {content([batch]) for batch in self._reread()}
            same = float(checksums == {self._content})  # so this worker has read the same ten times
            if not all(flag for (flag,) in workers.gather([same], "data that are read again")):
                self._content = CHANGES
                return
        if list(columns) == [STATE]:
            digests = [text.removeprefix(f"{STATE} ") for text in columns[STATE]]
            if self._verification.state_differs(digests, position.step + 1):
                return
        self._transaction.reject()
        raise steps_differ(position.step + 1, columns, rows)

    def _report_regrouping(self) -> None:
        """Report what a change of workers has cost, when the first step of the new view is reduced."""
        workers, progress, interruption = self._workers, self._progress, self._workers.interruption
        pause_s, discarded = interruption.step_completed(workers.view, progress.times.now), interruption.discarded
        if pause_s is None:
            return
        self._times, interruption.discarded, first = WorkerTimes(), 0, progress.position.step + 1
        if workers.elastic:
            self._send(ChangeTimed(workers.view, workers.worker, first, interruption.parts_ms))
        if workers.rank == 0:
            step_s = (progress.times.medians()[0] or 0.0) * self._transaction.plan.steps
            mesh = "" if workers.comms.mesh.replica == 1 else str(workers.comms.mesh)
            members, without_step_s = list(workers.members), max(0.0, pause_s - step_s)
            self._send(Regrouped(workers.view, members, workers.planned, first, without_step_s, discarded, mesh))

    # -- commit -------------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """If the user's lines have just applied a step, count it and carry out the decisions agreed on in it."""
        self.meet(repeatable=False)
        if self._transaction.phase is Phase.REDUCED:
            if self._state.recorder is not None:
                self._state.recorder.committed(self._state.prepared.replica.module)
            self._transaction.commit()
            self._state.prepared.active_sync.committed()
            self._stop_agreed = self._adapter.after_step(self._state.prepared, self._batch_size)

    # -- boundary -----------------------------------------------------------------------------------------------------

    def _boundary(self, trained: TrainingState) -> bool:
        """Between two steps: stop, change or save what is due. Return False where training has come to its end.

        All workers do the same in the same order, since most of it are collectives.
        """
        workers, progress = self._workers, self._progress
        self._transaction.arrive()
        self._state.look()
        done, every = progress.position.step, self._spec.checkpoint_every_steps
        if self._stop_agreed or self._stop_votes > 0:
            self.stop("policy" if self._stop_agreed else "requested")
        self._stop_at_limit()
        if progress.stopped != "complete":  # or by the program
            if every != 0:
                self.save()
            return False
        view = workers.view
        self._follow_sync_schedule(trained)
        workers.boundary()
        if workers.view != view:
            return True  # the caller comes back, as a member of the new view
        if self._adapter.before_step(trained, self._batch_size):
            self.stop("policy")
        due = every and done // every > (done - progress.newest_steps) // every  # joiners find the same
        if workers.view == view and due and self._saved != done:
            self._saved = done
            self.save(wait=False)
        return True

    def _stop_at_limit(self) -> None:
        """Let the run stop where ``max_steps`` are done, unless the program has stopped it."""
        progress, most = self._progress, self._spec.max_steps
        if most is not None and progress.position.step >= most and not progress.stop_why:
            progress.stopped = "max_steps"

    def _follow_sync_schedule(self, trained: TrainingState) -> None:
        """Change to another sync strategy where one is due by the schedule or was decided on."""
        active_sync, step = trained.active_sync, self._progress.position.step
        if self._spec.sync_schedule.changes:
            active_sync.follow(self._spec.sync_schedule, step)
        if active_sync.wanted is not None:
            self._state.average_buffers()
            plan, why = active_sync.switch(step)
            if self._workers.rank == 0 or self._workers.elastic:  # of several equal records one is kept
                self._send(SyncChanged(step, str(plan), why, self._progress.times.seconds))

    # -- run ----------------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """From here on this worker trains with the others, if it does not yet."""
        if not self._warming_up:
            self._workers.join()

    def begins_epoch(self) -> bool:
        """Whether another epoch is to begin: not where ``max_steps`` were done as the epoch before it ended."""
        if self._progress.position.offset == 0:  # else evaluation and report of a cut epoch may still be missing
            self._stop_at_limit()
        return self._progress.stopped == "complete"

    def stop_if_requested(self) -> None:
        """Stop where a worker was asked to; workers gather it here, where no reduction has carried it."""
        votes = self._workers.gather([float(self._stop_requested())], "the end of an epoch")
        if any(vote > 0 for (vote,) in votes):
            self.stop()

    def stop(self, why: str = "requested") -> NoReturn:
        """Save, and raise ``StopTraining``."""
        self._progress.stopped = why
        self.save()
        raise StopTraining

    def save(self, *, wait: bool = True) -> None:
        """Write a checkpoint. The sample log is sent before it. ``wait``: until it is complete."""
        self._log.flush()
        self._state.save(wait=wait)

    def finish(self) -> None:
        """The training function has returned. A run that was paused is not at its end: it goes on later."""
        self._state.settle()
        self._verification.report(self._progress.position.step)
        if self._progress.stopped in ("complete", "policy", BY_PROGRAM):
            self._planned.over(self._progress.position.step)


def _first_of(plans: Iterator[StepPlan]) -> tuple[StepPlan | None, Iterator[StepPlan]]:
    """The first of ``plans``, and all of them."""
    first = next(plans, None)
    return first, plans if first is None else chain([first], plans)


class StepTransaction:
    """Decides when a step counts: a global batch is begun, then reduced or lost, then committed.

    A run has one transaction, which takes one step after another. Each step belongs to the sync strategy that it was
    begun with.

    | event | from | to |
    |---|---|---|
    | ``begin`` | BETWEEN, LOST | OPEN |
    | ``begin_slice`` | OPEN | OPEN; LOST as below, where learners met in it |
    | ``reduce`` | OPEN | REDUCED after the last slice; LOST if a worker went and nobody has the sum |
    | ``reduce`` | OPEN | APART after the last slice, where ``Sync.meets_after_step`` |
    | ``meet`` | APART | REDUCED; LOST as above; APART where the round goes on without those that were lost |
    | ``adopt_result`` | OPEN, APART | REDUCED: another worker had completed the sum |
    | ``recover`` | OPEN, APART | as it was, where a round goes on; else REDUCED or LOST |
    | ``abandon`` | OPEN, APART, REDUCED | LOST |
    | ``commit`` | REDUCED | BETWEEN |
    | ``arrive`` | BETWEEN, LOST | BETWEEN |
    | ``leave`` | OPEN, LOST | LEFT |
    | ``reject`` | REDUCED | LEFT |

    Any other call raises ``RuntimeError``.

    Attributes:
        phase: The place of this worker in the step.
        unrepeatable: Since its last step boundary this worker has done something that it cannot repeat without the
            same workers: it evaluated its part of a data set, or built the model that training begins with.
        plan: The newest step that was begun.
        attempts: How many steps were begun.
        reevaluates_loss: The optimizer (LBFGS) may ask for the loss of the same batch again.
        left_at: The line at which the batch loop was left inside of a step.
    """

    def __init__(self, workers: WorkerGroup, progress: Progress, log: SampleLog) -> None:
        self.phase = Phase.BETWEEN
        self.unrepeatable = True
        self.reevaluates_loss = False
        self.attempts = 0
        self.left_at = ""
        self._workers = workers
        self._progress = progress
        self._log = log
        self.plan: StepPlan
        self._dealt_by = 0  # the view by which the learners of the newest round were dealt out
        self._carriers: Mapping[int, int] = {}  # the worker of each learner in it
        self._digests = 0  # numbers of the control vector that hold digests
        self._first: BatchSlice  # of the step's passes
        self._sync: Sync
        self._slice: BatchSlice | None = None  # its backward pass is due
        self._newest: BatchSlice | None = None  # the newest that the user's lines have received

    # -- questions ----------------------------------------------------------------------------------------------------

    @property
    def completed_steps(self) -> int:
        """Steps whose sum is here: the committed steps, and one that the user's lines are just applying."""
        return self._progress.position.step + (self.plan.steps if self.phase is Phase.REDUCED else 0)

    @property
    def round_steps(self) -> int:
        """How many of the completed steps the newest round had."""
        return self.plan.steps if self.phase is Phase.REDUCED else self._progress.newest_steps

    @property
    def open_round(self) -> OpenRound:
        """The round that is begun and not complete, where it can end without some of its learners."""
        if self.phase not in (Phase.OPEN, Phase.APART) or not self._sync.plan.has_quorum:
            return NO_ROUND
        return OpenRound(self._dealt_by, self._sync.plan.learners, self._sync.plan.quorum)

    @property
    def goes_on(self) -> bool:
        """Whether all workers are still in the round that was begun, though some may have been lost in it."""
        return self.open_round.assignment_view == self._workers.assignment_view > 0

    @property
    def is_open(self) -> bool:
        """Whether a step was begun whose gradients are this worker's alone."""
        return self.phase is Phase.OPEN

    @property
    def is_lost(self) -> bool:
        """Whether the user's lines run on without effect, since a worker went before the sum came."""
        return self.phase is Phase.LOST

    @property
    def more_to_come(self) -> bool:
        """Whether a step needs further batches of this worker; as long as it does, the user's lines do nothing.

        True for all of a step's batches but the last. True also for the rest of a batch whose step was lost: the step
        will begin again, as if it had more batches.
        """
        if self.phase is Phase.OPEN:
            return self._slice is None or not self._slice.ends_step
        return self.phase in (Phase.LOST, Phase.LEFT)

    @property
    def left_between_slots(self) -> bool:
        """Whether the batch loop was left inside of a step of several batches."""
        return self.phase is Phase.LEFT and len(self.plan.slices) > 1

    @property
    def ends_local_step(self) -> bool:
        """Whether each learner of this worker has taken a step with the current batch, if only by itself."""
        if self.phase is Phase.OPEN and self._slice is None and self._newest is not None:
            return self._newest.ends_local_step
        return not self.more_to_come

    @property
    def reducing(self) -> bool:
        """Whether this worker has given its part of a step's sum and waits for the other parts."""
        return self.phase is Phase.APART or (self.phase is Phase.OPEN and self._slice is None)

    @property
    def owes_backward(self) -> bool:
        """Whether the user's lines still have to call ``session.backward`` for the batch that they received."""
        return self._slice is not None

    def check_body(self, *, rates_changed: bool) -> None:
        """Check that the user's loop body did its part, and inside of a step no more. Raises ``UserError``."""
        if self.owes_backward:
            calls = "none" if not self._sync.replica.has_more else "none without more=True"
            raise UserError("each training batch needs session.backward", calls, "replace loss.backward() by it")
        if rates_changed:
            fix = "make schedulers before session.epochs, and set rates under 'if session.ends_step:'"
            raise UserError("learning rates may change between steps only", "a change inside of one", fix)

    def due(self) -> BatchSlice:
        """The slice whose backward pass comes next. Raises ``UserError`` if there is none."""
        if self.phase is Phase.REDUCED and self.reevaluates_loss:
            return self.plan.slices[-1]
        if self._slice is None:
            rule = "session.backward belongs once into each training batch"
            if self._newest is None or self.phase in (Phase.BETWEEN, Phase.LEFT):
                raise UserError(rule, "outside of one", "move it into the loop over session.batches")
            fix = "session.backward(one, more=True), or one + other; turns=2 for updates in turn: docs/programs.md"
            raise UserError(rule, "a second time in one", fix)
        return self._slice

    # -- one step -----------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan, sync: Sync, control: ControlVector, first: BatchSlice | None = None) -> None:
        """Begin the global batch ``plan``; ``control`` is this worker's part of the control vector.

        ``first``: the first pass, where it is of another worker's slot.
        """
        self._require(Phase.BETWEEN, Phase.LOST)
        self.phase, self.plan, self._sync = Phase.OPEN, plan, sync
        self.attempts += 1
        self._dealt_by = self._workers.assignment_view
        sync.control, sync.parts = control.to_list(), plan.slices
        self._digests, self._first = len(control.digests), first or plan.slices[0]

    def begin_slice(self, part: BatchSlice) -> bool:
        """The user's lines are about to get the samples of ``part``. Return False if the step was lost.

        Learners that meet within a round meet here.
        """
        self._require(Phase.OPEN)
        try:
            self._sync.begin(part, starts_step=part is self._first)
        except GroupBroken as error:
            self.recover(error)
            return False
        self._slice = self._newest = part
        return True

    def defer(self) -> None:
        """The due slice is passed later, before the step's last one; see ``take_up``."""
        self.due()
        self._slice = None

    def take_up(self, part: BatchSlice) -> None:
        """Begin a deferred slice, or the last one, once more: its passes follow at once."""
        self._require(Phase.OPEN)
        self._sync.begin(part, starts_step=part is self.plan.slices[0])
        self._slice = part

    def exchanged(self, act: Callable[[], T]) -> T | None:
        """The result of ``act``, which all workers do within the step; None if the step is lost in it."""
        self._require(Phase.OPEN)
        try:
            return act()
        except GroupBroken as error:
            self._slice = None
            self.recover(error)
            return None

    def redo(self, loss: torch.Tensor, done: Callable[[int, Sequence[torch.Tensor | None]], None]) -> None:
        """Run the due pass of another worker's slot; ``done`` takes the slot and its gradients after the last one."""
        part = self.due()
        self._slice = None
        if (gradients := self._sync.redo(loss, part)) is not None:
            done(part.slot, gradients)

    def add(self, loss: torch.Tensor) -> None:
        """Run a backward pass of the due slice that is not its last one."""
        self._sync.add(loss, self.due())

    def reduce(self, loss: torch.Tensor, votes: int) -> ControlVector | None:
        """Run the due slice's backward pass; after the step's last slice, wait for the sum over workers.

        Args:
            loss: The mean over the slice's samples.
            votes: How many numbers of the control vector are votes.

        Returns:
            The sum of all workers' control vectors if this call completed the step's sum; else None.
        """
        part, again = self.due(), self.phase is Phase.REDUCED
        self._slice, served = None, False
        try:
            self._sync.backward(loss, part)
        except GroupBroken as error:
            served = self.recover(error)
            if not served:
                return None
        if again or not part.ends_step:
            return None
        if self._sync.meets_after_step:
            self.phase = Phase.APART
            return None
        return self._complete(votes, served=served)

    def replace_control(self, control: ControlVector) -> None:
        """Replace this worker's part of the control vector, for an exchange that comes long after ``begin``."""
        self._require(Phase.APART)
        self._sync.control = control.to_list()

    def meet(self, votes: int, *, repeatable: bool) -> ControlVector | None:
        """The user's lines have taken the round's last step: workers meet.

        Args:
            votes: As for ``reduce``.
            repeatable: The round can be done again here; else its loss sends all workers back (``Rewind``).

        Returns:
            As ``reduce``. None, too, where the workers that are left must ``meet`` again.
        """
        self._require(Phase.APART)
        served = False
        try:
            self._sync.after_step()
        except GroupBroken as error:
            if not repeatable:
                before, self.unrepeatable = self.unrepeatable, True
                self._workers.restart(error)
                if self.goes_on:
                    self.unrepeatable = before
                    return None
                self._require(Phase.REDUCED)
            elif not self.recover(error):
                return None
            served = True
        return self._complete(votes, served=served)

    def _complete(self, votes: int, *, served: bool) -> ControlVector:
        """The sum is here: check that it is of the planned samples. ``served``: another worker has sent it."""
        sums = ControlVector.of(self._sync.totals, votes, self._digests)
        if self._sync.plan.has_quorum:
            size = self._workers.size
            self._carriers = self._workers.learner_workers(self._dealt_by, self._sync.plan.learners)
            self.plan = replace(self.plan.without(self._sync.absent), contributors=size, workers=size)
        if alike(sums.marks):  # else the caller finds out how the workers differ
            check_committed_samples(self.plan, sums)
        self.phase = Phase.REDUCED
        self._workers.end_step(sums.view_known, self.plan.contributors, served=served)
        return sums

    def recover(self, error: GroupBroken) -> bool:
        """The group broke: meet the survivors. Return True if one of them had the sum.

        Else an open step is lost, unless it is a round that goes on.
        """
        self._workers.recover(error)
        self.regrouped()
        return self.phase is Phase.REDUCED

    def regrouped(self) -> None:
        """The workers have changed: a step that was begun is lost, unless it is a round that goes on."""
        if self.phase in (Phase.OPEN, Phase.APART) and not self.goes_on:
            self.abandon()

    def adopt_result(self, result: Sequence[torch.Tensor]) -> None:
        """Complete the step by the sum that another worker has."""
        self._require(Phase.OPEN, Phase.APART)
        self._sync.adopt_result(result)
        self.phase = Phase.REDUCED

    def abandon(self) -> None:
        """Lose the step: no parameter has a gradient, and until the next boundary this worker acts for itself.

        A step whose sum is here is lost on all workers alike.
        """
        self._require(Phase.OPEN, Phase.APART, Phase.REDUCED)
        self._sync.abandon()
        self.phase, self._slice = Phase.LOST, None
        self._workers.synchronised = False

    def commit(self) -> None:
        """The user's lines have applied the step: from here on it counts."""
        self._require(Phase.REDUCED)
        plan, progress, at = self.plan, self._progress, self._progress.position
        moves = plan.moves
        self._log.add(at, plan.steps, moves, plan.length, self._workers.view, self._workers.size)
        add_steps(progress.spans, at, plan.steps, moves, plan.length)
        if plan.left_out:
            for left in self._log.leave_out(at, plan.steps, plan.left_out, self._carriers, self._workers.view):
                add_left_out(progress.spans, left, plan.length)
        used = plan.used[0] if moves else 0
        offset, samples, turn = plan.offset + moves, at.samples + used, (plan.turn + 1) % plan.turns
        progress.position = Position(at.epoch, offset, at.step + plan.steps, samples, turn)
        progress.reports, progress.newest_steps = 0, plan.steps
        self.phase = Phase.BETWEEN

    def arrive(self) -> None:
        """This worker is at a step boundary: it acts with the others, and can repeat all that came before."""
        self._require(Phase.BETWEEN, Phase.LOST)
        self.phase, self.unrepeatable = Phase.BETWEEN, False
        self._workers.synchronised = True

    def leave(self, line: str = "") -> None:
        """The user's lines, at ``line``, left the batch loop before the step was completed."""
        self._require(Phase.OPEN, Phase.LOST)
        self.left_at = line
        self._sync.abandon()
        self.phase, self._slice = Phase.LEFT, None

    def reject(self) -> None:
        """The workers did not take the step alike, so its sum means nothing: it never counts."""
        self._require(Phase.REDUCED)
        self.phase = Phase.LEFT

    def _require(self, *allowed: Phase) -> None:
        if self.phase not in allowed:
            raise RuntimeError(f"this belongs {' or '.join(phase.value for phase in allowed)}, not {self.phase.value}")


def check_committed_samples(plan: StepPlan, sums: ControlVector) -> None:
    """The commit check: the workers' samples together must be those of ``plan``. Raises ``RuntimeError``."""
    samples, checksum = plan.used
    used = int(sums.samples) % COUNTED, int(sums.checksum) % PRIME
    if used != (samples % COUNTED, checksum):
        modulo = f" modulo {COUNTED:,}" if samples >= COUNTED else ""
        raise RuntimeError(
            f"a step of {samples} samples (checksum {checksum}) summed up {sums.samples:g}{modulo} "
            f"(checksum {used[1]}): workers disagree about the data; does it depend on the rank?"
        )


def reevaluates_loss(optimizer: torch.optim.Optimizer, execution: ExecutionSettings, most: int) -> bool:
    """Whether ``optimizer`` evaluates a step several times. Raises ``UserError`` where ``most`` workers cannot."""
    again = isinstance(optimizer, torch.optim.LBFGS)
    if again and (execution.mode, execution.micro_batch, most) != ("fast", None, 1):
        rule = "LBFGS evaluates a step several times, which needs the whole batch in one pass"
        raise UserError(rule, f"{execution.mode} mode, up to {most} workers", "use --mode fast --workers 1")
    return again


# --- what travels beside the gradients ---


@dataclass(frozen=True)
class ControlVector(StepContribution):
    """The few numbers that each worker adds to a step's reduction beside gradients; read back as sums over workers.

    Attributes:
        stop: 1 where this worker was asked to stop.
        heard: 1 where this worker has heard of the next membership view.
        samples: How many samples this worker used in the step, modulo ``COUNTED``.
        checksum: Their ``checksum``.
        sent: Bytes that this worker's collectives have sent since the last control vector.
        marks: The ``marks`` by which workers notice that they take different steps; zeros where there is one worker.
        digests: Places for the digests of slots that several workers compute (``train.proof.verification``).
    """

    stop: float = 0.0
    view_known: float = 0.0
    samples: float = 0.0
    checksum: float = 0.0
    sent: float = 0.0
    marks: Sequence[float] = NO_MARKS
    digests: Sequence[float] = ()

    def to_list(self) -> list[float]:
        """The numbers in the order in which they travel; ``of`` reads their sums."""
        single = [
            self.stop,
            self.view_known,
            self.samples,
            self.checksum,
            self.waiting,
            self.seconds,
            self.sent,
            self.unsure,
        ]
        return [*single, *self.marks, *self.digests, *self.votes, *self.times]

    @staticmethod
    def of(sums: Sequence[float], votes: int, digests: int = 0) -> ControlVector:
        """The sum of all workers' ``to_list``; so many numbers of it are ``votes``, and ``digests``."""
        stop, view_known, samples, checksum, waiting, seconds, sent, unsure, *rest = sums
        step_marks, rest = rest[: len(NO_MARKS)], rest[len(NO_MARKS) :]
        all_digests, all_votes, times = rest[:digests], rest[digests : digests + votes], rest[digests + votes :]
        contribution = waiting, seconds, unsure, all_votes, times
        return ControlVector(*contribution, stop, view_known, samples, checksum, sent, step_marks, tuple(all_digests))


# --- a joiner's first passes ---


def warm_up(
    plan: StepPlan | None,
    data: Iterator[Any],
    transaction: StepTransaction,
    sync: Sync,
    control: ControlVector,
    device: torch.device,
) -> Generator[Any, None, NoReturn]:
    """Yield the first batches of ``plan`` before this worker is a member: everything gets warm, and nothing counts.

    Raises:
        WarmedUp: When these passes are done; their gradients are thrown away.
    """
    COMPILED.listen()
    for part in plan.slices[:WARM_UP_SLICES] if plan is not None else ():
        assert plan is not None
        batch = to_device(next(data), device)
        alone = replace(part, ends_step=False, weight=max(part.weight, 1e-9))
        transaction.begin(replace(plan, slices=[alone]), sync, control)
        transaction.begin_slice(alone)
        yield batch
        transaction.abandon()
    raise WarmedUp
