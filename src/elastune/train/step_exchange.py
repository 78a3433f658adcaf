"""The exchange of a step: what this worker says in it beside its gradients, and what follows from everybody's sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from elastune.core.errors import Diverged, UserError
from elastune.elastic.worker.group import WorkerGroup
from elastune.journal.records import Record
from elastune.monitors.base import WorkerTimes
from elastune.train.adapt.adapter import Adapter
from elastune.train.checkpoints.run_state import RunState
from elastune.train.control import COUNTED, ControlVector
from elastune.train.data.content import PRIME
from elastune.train.data.source import StepPlan, StepSource
from elastune.train.divergence import DivergenceWatch
from elastune.train.progress import Progress
from elastune.train.regrouping import regrouped
from elastune.train.step_check import StepCheck
from elastune.train.step_facts import alike
from elastune.train.training_state import TrainingState
from elastune.train.transaction import Phase, StepTransaction, check_samples

CHECK_LOSS_EVERY = 50  # on a GPU, where looking at the loss waits for the device


class StepExchange:
    """One exchange after another: one for each step that ``transaction`` begins. ``Stepper`` sets ``batch_size``,
    ``gradient_bytes`` and ``times``.

    Attributes:
        batch_size: What the steps of this pass are cut by.
        gradient_bytes: What a worker sends of them, of the model as it stands in this view.
        times: Of the step before, as long as the view is the same.
        alike: Finds out whether all workers take the same step.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        progress: Progress,
        transaction: StepTransaction,
        state: RunState,
        adapter: Adapter,
        watch: DivergenceWatch,
        device: torch.device,
        send: Callable[[Record], None],
        stop_requested: Callable[[], bool],
    ) -> None:
        self._workers = workers
        self._progress = progress
        self._transaction = transaction
        self._state = state
        self._adapter = adapter
        self._watch = watch
        self._device = device
        self._send = send
        self._stop_requested = stop_requested
        self.batch_size = 0
        self.gradient_bytes = 0
        self.times = WorkerTimes()
        self.alike = StepCheck(workers, progress)
        self._tells: Callable[[], ControlVector] = ControlVector  # for the step that was begun last
        self._looks = True  # whether its loss is judged
        self._stop_votes, self._stop_agreed = 0.0, False  # agreed: by policies

    # -- before the sums are there ------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan, source: StepSource, trained: TrainingState) -> None:
        """Begin the step of ``plan``, and settle what this worker will say in its exchange."""
        self._workers.left = ""
        due = self._device.type == "cpu" or self._progress.position.step % CHECK_LOSS_EVERY == 0
        self._looks = due and not self._adapter.survives_divergence
        if monitoring := self._adapter.monitoring:
            monitoring.prepare(trained.sync, self._progress.position.step + 1)
        trained.sync.wants_statistics = bool(monitoring) or self._looks or self._progress.loss_wanted
        if self._transaction.evaluates_again:
            trained.sync.measure(False)
        self._tells = partial(self._told, plan, source, trained)
        self._transaction.begin(plan, trained.sync, self._tells())

    def _told(self, plan: StepPlan, source: StepSource, trained: TrainingState) -> ControlVector:
        """What this worker adds to the exchange of ``plan``, as it stands now."""
        speaks = trained.replica.speaks(self._workers.comms.mesh, self._workers.comms.rank)
        own = [places for part, places in zip(plan.slices, plan.own_parts, strict=True) if part.weight and speaks]
        own_part = ControlVector(
            stop=float(self._stop_requested()),
            heard=self._workers.begin_step(),
            samples=sum(len(places) for places in own) % COUNTED,
            checksum=plan.checksum if [*map(len, own)] == [plan.size] else sum(map(source.checksum, own)) % PRIME,
            sent=self._adapter.exchanged.since(trained.sync.sent_bytes),
            marks=self.alike.marks(plan, trained),
        )
        return self.control(own_part)

    def control(self, own: ControlVector) -> ControlVector:
        """This worker's part of the next step's control vector; always of the same length."""
        extra = self._adapter.contribute(self.times)
        return ControlVector(  # in each step: ``replace`` would take several times as long
            stop=own.stop,
            heard=own.heard,
            samples=own.samples,
            checksum=own.checksum,
            waiting=extra.waiting,
            seconds=extra.seconds,
            sent=own.sent,
            unsure=extra.unsure,
            marks=own.marks,
            votes=extra.votes,
            times=extra.times,
        )

    def backward(self, loss: torch.Tensor, only: list[torch.nn.Parameter] | None = None, more: bool = False) -> None:
        """See ``Session.backward``; ``only`` these parameters."""
        transaction, workers, step = self._transaction, self._workers, self._progress.position.step
        if transaction.phase is Phase.LOST:
            return
        part, sync = transaction.due(), self._state.prepared.sync
        sync.replica.only = only
        if loss.numel() != 1:
            raise UserError("a loss must be one number", f"shape {tuple(loss.shape)}", "take its mean over the batch")
        speaks = self._looks and sync.replica.speaks(workers.comms.mesh, workers.comms.rank)  # others have a stand-in
        if speaks and not math.isfinite(value := loss.item()):
            raise Diverged(f"loss is {value} at step {step + 1}")
        if more:
            self._adapter.monitoring.refuse_more()
            transaction.add(loss)
            return
        if not sync.meets_after_step:
            self._adapter.monitoring.bend(sync, loss, part, step + 1)
        if part.ends_step and not sync.meets_after_step:
            workers.say("reducing", step, self.gradient_bytes, f"the reduction of step {step + 1}")
        found = transaction.reduce(loss, self._adapter.votes)
        if found is not None:
            self._reduced(found)

    def meet(self, *, repeatable: bool = True) -> None:
        """Where workers meet after the optimizer's step, and have not: they do now. See ``StepTransaction.meet``."""
        transaction, workers, step = self._transaction, self._workers, self._progress.position.step
        took_s = self._progress.times.step_s
        while transaction.phase is Phase.APART:  # again, where the round goes on without some who were lost here
            plan, trained = transaction.plan, self._state.prepared
            workers.say("reducing", step, trained.state_bytes, f"the exchange after step {step + plan.steps}")
            if trained.sync.plan.spares:
                transaction.tell(self._tells())
                learners = len({part.learner for part in plan.slices})
                workers.took_round(step, learners, trained.sync.plan, took_s)
            if (found := transaction.meet(self._adapter.votes, repeatable=repeatable)) is not None:
                self._reduced(found)

    # -- after that ---------------------------------------------------------------------------------------------------

    def _reduced(self, found: ControlVector) -> None:
        """The workers' sums are here."""
        transaction, workers, step = self._transaction, self._workers, self._progress.position.step
        trained = self._state.prepared
        workers.say("computing", step + 1)
        if not alike(found.marks):
            if (differs := self.alike.difference(transaction.plan, trained)) is not None:
                transaction.reject()
                raise differs
            check_samples(transaction.plan, found)
        self._stop_votes = found.stop
        self._state.reduced(trained.sync)
        self._adapter.step_reduced(found, found.sent, transaction.plan, trained.sync.statistics)
        if self._looks:
            self._watch.loss(trained.sync.statistics.parts["loss"], step + 1, transaction.plan.turn)
        self._tell_of_regrouping(self._progress.times.now)

    def commit(self) -> None:
        """If the user's lines have just applied a step, it counts; what was agreed on in it is done."""
        self.meet(repeatable=False)
        if self._transaction.phase is Phase.REDUCED:
            self._transaction.commit()
            self._state.prepared.in_use.committed()
            self._stop_agreed = self._adapter.after_step(self._state.prepared, self.batch_size)

    def _tell_of_regrouping(self, now: float) -> None:
        """Report the pause when the first step of a new view completes."""
        workers, interruption = self._workers, self._workers.interruption
        pause_s, discarded = interruption.step_completed(workers.view, now), interruption.discarded
        if pause_s is None:
            return
        self.times, interruption.discarded = WorkerTimes(), 0
        if workers.rank == 0:
            self._send(regrouped(workers, self._progress, pause_s, discarded, self._transaction.plan.steps))

    @property
    def stop_wanted(self) -> str:
        """Why training is to end at this boundary, as all have agreed; "" where it is not."""
        return "policy" if self._stop_agreed else "requested" if self._stop_votes > 0 else ""

    def any_asked_to_stop(self) -> bool:
        """Where no reduction carried the workers' votes: ask for them."""
        votes = self._workers.gather([float(self._stop_requested())], "the end of an epoch")
        return any(vote > 0 for (vote,) in votes)
