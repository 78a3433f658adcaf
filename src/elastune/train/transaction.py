"""When a step counts: one global batch is begun, then reduced or lost, then committed.

This file decides whether a step is open, reduced or committed, and nothing else does; ``docs/step.md`` tells the whole
story. What a step computes is the sync's and its replica's, how workers meet again after a loss is the group's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum

import torch

from elastune.comm.group import GroupBroken
from elastune.core.batch_slices import BatchSlice
from elastune.core.errors import UserError
from elastune.core.run import Means, Position
from elastune.elastic.worker.group import WorkerGroup
from elastune.elastic.worker.open_round import NO_ROUND, OpenRound
from elastune.sync.base import Sync
from elastune.train.control import COUNTED, ControlVector
from elastune.train.data.content import PRIME
from elastune.train.data.sample_log import SampleLog, add_left_out, add_steps
from elastune.train.data.source import StepPlan
from elastune.train.progress import Progress
from elastune.train.step_facts import alike


class Phase(Enum):
    """Where a worker is in a step."""

    BETWEEN = "between steps"  # none is begun
    OPEN = "inside of a step"  # its gradients are this worker's alone
    APART = "after a round's last pass"  # the user's lines take the last of its own steps; then workers meet
    REDUCED = "after a step's reduction"  # the sum over workers is here; the user's lines apply it
    LOST = "after a step was lost"  # a worker went before the sum came: the user's lines run on without effect
    LEFT = "after the batch loop was left inside of a step"  # there is no way on


class StepTransaction:
    """The steps of one run, one after another; each belongs to the sync that it was begun with.

    | event | from | to |
    |---|---|---|
    | ``begin`` | BETWEEN, LOST | OPEN |
    | ``begin_slice`` | OPEN | OPEN; LOST as below, where learners met in it |
    | ``reduce`` | OPEN | REDUCED after the last slice; LOST if a worker went and nobody has the sum |
    | ``reduce`` | OPEN | APART after the last slice, where ``Sync.meets_after_step`` |
    | ``meet`` | APART | REDUCED; LOST as above; APART where the round goes on without those that were lost |
    | ``adopt_result`` | OPEN, APART | REDUCED: another worker had completed the sum |
    | ``recover`` | OPEN, APART | as it was, where a round goes on; else REDUCED or LOST |
    | ``abandon`` | OPEN, APART | LOST |
    | ``commit`` | REDUCED | BETWEEN |
    | ``arrive`` | BETWEEN, LOST | BETWEEN |
    | ``leave`` | OPEN, LOST | LEFT |
    | ``reject`` | REDUCED | LEFT |

    Any other call raises ``RuntimeError``.

    Attributes:
        phase: Where this worker is.
        unrepeatable: Since its last step boundary this worker has done what cannot be repeated without the workers it
            was done with: evaluated its part of a data set, or built what training begins with.
        plan: The newest step that was begun.
        attempts: How many steps were begun.
        evaluates_again: The optimizer (LBFGS) may ask for the loss of the same batch again.
    """

    def __init__(self, workers: WorkerGroup, progress: Progress, log: SampleLog) -> None:
        self.phase = Phase.BETWEEN
        self.unrepeatable = True
        self.evaluates_again = False
        self.attempts = 0
        self._workers = workers
        self._progress = progress
        self._log = log
        self.plan: StepPlan
        self._dealt_by = 0  # the view by which the learners of the newest round were dealt out
        self._carriers: Mapping[int, int] = {}  # who had which learner in it
        self._sync: Sync
        self._slice: BatchSlice | None = None  # whose backward pass is due
        self._newest: BatchSlice | None = None  # that the user's lines were given

    # -- questions ----------------------------------------------------------------------------------------------------

    @property
    def completed_steps(self) -> int:
        """Steps whose sum is here: the committed ones, and one that the user's lines are just applying."""
        return self._progress.position.step + (self.plan.steps if self.phase is Phase.REDUCED else 0)

    @property
    def round_steps(self) -> int:
        """How many of these the newest round had."""
        return self.plan.steps if self.phase is Phase.REDUCED else self._progress.newest_steps

    @property
    def open_round(self) -> OpenRound:
        """The round that was begun and is not complete, where it can end without some of its learners."""
        if self.phase not in (Phase.OPEN, Phase.APART) or not self._sync.plan.spares:
            return NO_ROUND
        return OpenRound(self._dealt_by, self._sync.plan.learners, self._sync.plan.quorum)

    @property
    def goes_on(self) -> bool:
        """Whether what was begun is still what all are at, though workers may have been lost in it."""
        return self.open_round.dealt_by == self._workers.dealt_by > 0

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
        """Whether further batches of this worker are needed until a step is completed; so, the user's lines do nothing.

        True for all of a step's batches but the last; and for the rest of a batch whose step was lost, as if there were
        more batches, since the step will be begun again.
        """
        if self.phase is Phase.OPEN:
            return self._slice is None or not self._slice.ends_step
        return self.phase in (Phase.LOST, Phase.LEFT)

    @property
    def ends_local_step(self) -> bool:
        """Whether all that this worker trains has taken a step with the current batch, if only by itself."""
        if self.phase is Phase.OPEN and self._slice is None and self._newest is not None:
            return self._newest.ends_local_step
        return not self.more_to_come

    @property
    def reducing(self) -> bool:
        """Whether this worker has given its part of a step's sum and waits for the others'."""
        return self.phase is Phase.APART or (self.phase is Phase.OPEN and self._slice is None)

    @property
    def owes_backward(self) -> bool:
        """Whether the user's lines still have to call for the backward pass of the batch that they were given."""
        return self._slice is not None

    def check_body(self, *, rates_changed: bool) -> None:
        """The user's loop body must have done its part, and inside of a step no more. Raises ``UserError``."""
        if self.owes_backward:
            told = "none" if not self._sync.replica.has_more else "none without more=True"
            raise UserError("each training batch needs session.backward", told, "replace loss.backward() by it")
        if rates_changed:
            fix = "give the scheduler to session.prepare(model, optimizer, scheduler)"
            raise UserError("learning rates may change between steps only", "a change inside of one", fix)

    def due(self) -> BatchSlice:
        """The slice whose backward pass comes next. Raises ``UserError`` if there is none."""
        if self.phase is Phase.REDUCED and self.evaluates_again:
            return self.plan.slices[-1]
        if self._slice is None:
            rule = "session.backward belongs once into each training batch"
            if self._newest is None or self.phase in (Phase.BETWEEN, Phase.LEFT):
                raise UserError(rule, "outside of one", "move it into the loop over session.batches")
            fix = "session.backward(one, more=True), or one + other; turns=2 for updates in turn: docs/programs.md"
            raise UserError(rule, "a second time in one", fix)
        return self._slice

    # -- one step -----------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan, sync: Sync, control: ControlVector) -> None:
        """Begin the global batch ``plan``; ``control`` is this worker's part of the control vector."""
        self._require(Phase.BETWEEN, Phase.LOST)
        self.phase, self.plan, self._sync = Phase.OPEN, plan, sync
        self.attempts += 1
        self._dealt_by = self._workers.dealt_by
        sync.control, sync.parts = control.to_list(), plan.slices

    def begin_slice(self, part: BatchSlice) -> bool:
        """The user's lines are about to get the samples of ``part``. False if the step was lost: learners that meet
        within a round do so here.
        """
        self._require(Phase.OPEN)
        try:
            self._sync.begin(part, starts_step=part is self.plan.slices[0])
        except GroupBroken as error:
            self.recover(error)
            return False
        self._slice = self._newest = part
        return True

    def add(self, loss: torch.Tensor) -> None:
        """Run a backward pass of the due slice that is not its last one."""
        self._sync.add(loss, self.due())

    def reduce(self, loss: torch.Tensor, votes: int) -> ControlVector | None:
        """Run the due slice's backward pass; after the step's last slice, wait for the sum over workers.

        ``loss`` is the mean over the slice's samples; ``votes`` is how many of the control vector's numbers are votes.
        Returns the sum of all workers' control vectors if this call completed the step's sum; else None.
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
        return self._reduced(votes, served=served)

    def tell(self, control: ControlVector) -> None:
        """This worker's part of the control vector, before an exchange that comes long after ``begin``."""
        self._require(Phase.APART)
        self._sync.control = control.to_list()

    def meet(self, votes: int, *, repeatable: bool) -> ControlVector | None:
        """The user's lines have taken the round's last step: workers meet. What ``reduce`` returns.

        None, too, where those that are left are to ``meet`` again. ``repeatable``: the round can be done again here;
        else its loss sends all workers back (``Rewind``).
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
        return self._reduced(votes, served=served)

    def _reduced(self, votes: int, *, served: bool) -> ControlVector:
        found = ControlVector.of(self._sync.totals, votes)
        if self._sync.plan.spares:
            size = self._workers.size
            self._carriers = self._workers.carriers(self._dealt_by, self._sync.plan.learners)
            self.plan = replace(self.plan.without(self._sync.absent), contributors=size, workers=size)
        if alike(found.marks):  # else it is for the caller to find out what the workers mean
            check_samples(self.plan, found)
        self.phase = Phase.REDUCED
        self._workers.end_step(found.heard, self.plan.contributors, served=served)
        return found

    def recover(self, error: GroupBroken) -> bool:
        """The group broke: meet the survivors. True if one of them had the sum; else an open step is lost, unless it is
        a round that goes on."""
        self._workers.recover(error)
        self.regrouped()
        return self.phase is Phase.REDUCED

    def regrouped(self) -> None:
        """The workers have changed: what was begun is lost, unless it is a round that goes on."""
        if self.phase in (Phase.OPEN, Phase.APART) and not self.goes_on:
            self.abandon()

    def adopt_result(self, result: Sequence[torch.Tensor]) -> None:
        """Complete the step by the sum that another worker has."""
        self._require(Phase.OPEN, Phase.APART)
        self._sync.adopt_result(result)
        self.phase = Phase.REDUCED

    def abandon(self) -> None:
        """Lose the step: no parameter has a gradient, and until the next boundary this worker acts for itself."""
        self._require(Phase.OPEN, Phase.APART)
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
        """This worker is at a step boundary: it acts together with the others, and all before can be repeated."""
        self._require(Phase.BETWEEN, Phase.LOST)
        self.phase, self.unrepeatable = Phase.BETWEEN, False
        self._workers.synchronised = True

    def leave(self) -> None:
        """The user's lines left the batch loop before the step was completed."""
        self._require(Phase.OPEN, Phase.LOST)
        self._sync.abandon()
        self.phase, self._slice = Phase.LEFT, None

    def reject(self) -> None:
        """The workers did not take the step alike, so its sum means nothing: it never counts."""
        self._require(Phase.REDUCED)
        self.phase = Phase.LEFT

    def _require(self, *allowed: Phase) -> None:
        if self.phase not in allowed:
            raise RuntimeError(f"this belongs {' or '.join(phase.value for phase in allowed)}, not {self.phase.value}")


def check_samples(plan: StepPlan, found: ControlVector) -> None:
    """The commit gate: the workers' samples together must be those of ``plan``. Raises ``RuntimeError``."""
    samples, checksum = plan.used
    used = int(found.samples) % COUNTED, int(found.checksum) % PRIME
    if used != (samples % COUNTED, checksum):
        modulo = f" modulo {COUNTED:,}" if samples >= COUNTED else ""
        raise RuntimeError(
            f"a step of {samples} samples (checksum {checksum}) summed up {found.samples:g}{modulo} "
            f"(checksum {used[1]}): workers disagree about the data; does it depend on the rank?"
        )


def evaluates_again(optimizer: torch.optim.Optimizer, means: Means, most: int) -> bool:
    """Whether ``optimizer`` evaluates a step several times. Raises ``UserError`` where ``most`` workers cannot."""
    again = isinstance(optimizer, torch.optim.LBFGS)
    if again and (means.mode, means.micro_batch, most) != ("fast", None, 1):
        rule = "LBFGS evaluates a step several times, which needs the whole batch in one pass"
        raise UserError(rule, f"{means.mode} mode, up to {most} workers", "use --mode fast --workers 1")
    return again
