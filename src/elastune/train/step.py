"""One training step: begin, slices, reduce, apply, commit, boundary, in the order in which they happen.

``StepTransaction`` decides whether a step is open, reduced, committed or lost; nothing else does. ``StepExchange``
says what a worker adds to the step's reduction and what follows from the sums. ``Stepper`` is the loop over a pass.
What a step computes belongs to the sync strategy and its replica (``parallel``). How workers meet again after a
loss belongs to the group (``elastic``). ``docs/step.md`` tells the whole story.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from itertools import chain, tee
from typing import Any, Literal, NoReturn

import torch

from elastune.adapt.monitors.base import WorkerTimes
from elastune.core.batch_slices import BatchSlice
from elastune.core.errors import Diverged, UserError
from elastune.core.journal.records import Compiled, Record, Regrouped, SyncChanged
from elastune.core.run import ExecutionSettings, Position, RunSpec, derive
from elastune.elastic.stragglers import lines_by_rank
from elastune.elastic.worker.group import WorkerGroup
from elastune.elastic.worker.reconcile import NO_ROUND, OpenRound
from elastune.parallel.comm.group import GroupBroken
from elastune.parallel.sync.base import Sync
from elastune.train.adaptation.adapter import Adapter, StepContribution
from elastune.train.checkpoints.run_state import RunState
from elastune.train.compiling import COMPILED
from elastune.train.data.fingerprint import CHANGES, MORE_READS, PRIME, READS, content
from elastune.train.data.loading import to_device
from elastune.train.data.sample_log import SampleLog, add_left_out, add_steps, shorten_epoch
from elastune.train.data.source import StepPlan, StepSource, plan_rounds, plan_steps
from elastune.train.progress import BY_PROGRAM, DivergenceWatch, PlannedSteps, Progress, ignore
from elastune.train.rng import seed_everything
from elastune.train.schedules import learning_rates
from elastune.train.training_state import TrainingState

# [step facts] What all workers must have alike when they begin a step, and how they notice where it differs.
#
# Each adds a few small numbers to the step's reduction that depend on all of it. From their sums every worker learns
# whether all had the same; only where they had not, they tell each other what they had.

_QUICK = {float, int, bool, str, tuple, type(None)}
_MODULI = (61, 59, 53)  # sums of 4096 workers' squares of smaller numbers are exact in single precision
NO_MARKS = (0.0,) * (1 + 2 * len(_MODULI))
_WORDS = {
    "epoch": "epoch {}",
    "offset": "place {} of the epoch",
    "size": "a batch of {} samples",
    "length": "a pass of {} samples",
    "order": "samples whose numbers add up to {}",
    "content": "data with checksum {}",
}


def marks(facts: int) -> list[float]:
    """One worker's part of the sums: 1, and remainders of ``facts`` with their squares."""
    small = [facts % modulus for modulus in _MODULI]
    return [1.0, *map(float, small), *(float(x * x) for x in small)]


def alike(sums: Sequence[float]) -> bool:
    """Whether all had the same, from the sums of their ``marks``.

    By Cauchy and Schwarz n times the sum of squares is the square of the sum only where all are equal. What differs is
    missed in one step of 190,000.
    """
    if not any(sums):  # a lone worker's: of several, the first is their number
        return True
    count, own = sums[0], len(_MODULI)
    return all(count * square == mark * mark for mark, square in zip(sums[1 : 1 + own], sums[1 + own :], strict=True))


class Settings:
    """The numbers beside tensors that an optimizer steps by: learning rates, momenta, weight decay."""

    def __init__(self) -> None:
        self._known: list[Any] = []
        self._checksum = 0

    def checksum(self, optimizer: torch.optim.Optimizer) -> int:
        """A number that tells them apart."""
        found = [
            value if type(value) in _QUICK else _plain(value)
            for group in optimizer.param_groups
            for name, value in group.items()
            if name != "params"
        ]
        if found != self._known:  # hardly ever: what costs time is done once
            self._known, self._checksum = found, zlib.crc32(repr([_plain(value) for value in found]).encode())
        return self._checksum

    @staticmethod
    def told(optimizer: torch.optim.Optimizer) -> dict[str, str]:
        """The same to be read, by name."""
        return {
            f"{name} of group {at}": repr(_plain(value))
            for at, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if name != "params"
        }


def _plain(value: Any) -> Any:
    """``value`` as it is after a checkpoint too, which knows neither tuples nor numpy's numbers."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else tuple(value.shape)
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    return float(value) if isinstance(value, float) else type(value).__name__


@dataclass(frozen=True)
class StepSettings:
    """One worker's, to be told. ``content``: see ``data.content``; ``line``: where its program is."""

    epoch: int
    offset: int
    size: int
    length: int
    order: int
    content: int
    settings: dict[str, str]
    line: str

    def encode(self) -> bytes:
        """For ``differences``."""
        return json.dumps(asdict(self)).encode()


def differences(rows: Sequence[bytes]) -> dict[str, list[str]]:
    """What differs between the workers whose ``StepSettings`` are ``rows``: by name, what each has of it."""
    told = [json.loads(row) for row in rows]
    tables = [{**{name: words.format(of[name]) for name, words in _WORDS.items()}, **_named(of)} for of in told]
    names = dict.fromkeys(name for table in tables for name in table)
    columns = {name: [table.get(name, f"no {name}") for table in tables] for name in names}
    return {name: column for name, column in columns.items() if len(set(column)) > 1}


def _named(of: dict[str, Any]) -> dict[str, str]:
    return {name: f"{name} {value}" for name, value in of["settings"].items()}


def steps_differ(step: int, found: dict[str, list[str]], rows: Sequence[bytes]) -> UserError:
    """What to raise where workers had what is ``found`` to differ when they took step ``step``."""
    lines = [json.loads(row)["line"] for row in rows]
    told = {
        rank: f"has {', '.join(column[rank] for column in found.values())}" + (f" ({line})" if line else "")
        for rank, line in enumerate(lines)
    }
    rule = "all ranks must take a step with the same data and settings"
    fix = "let them follow from config, seed and session.step; a variable of your own is lost with its worker"
    return UserError(rule, f"in step {step}, {lines_by_rank(told)}", fix)


# [control] The control vector: the few numbers that workers add to a step's reduction beside gradients.

COUNTED = 1 << 12  # of samples, modulo this: sums of up to 4096 workers are exact, however long a round is


@dataclass(frozen=True)
class ControlVector(StepContribution):
    """What each worker adds to a step's reduction beside gradients; read back as sums over workers.

    Attributes:
        stop: 1 where this worker was asked to stop.
        heard: 1 where this worker has heard of the next membership view.
        samples: How many samples this worker used in the step, modulo ``COUNTED``.
        checksum: Their ``checksum``.
        sent: Bytes that this worker's collectives have sent since they were told last.
        marks: What tells whether all take the step alike (``train.step_facts``); zeros where there is one worker.
    """

    stop: float = 0.0
    heard: float = 0.0
    samples: float = 0.0
    checksum: float = 0.0
    sent: float = 0.0
    marks: Sequence[float] = NO_MARKS

    def to_list(self) -> list[float]:
        """In the order of the fields."""
        single = [
            self.stop,
            self.heard,
            self.samples,
            self.checksum,
            self.waiting,
            self.seconds,
            self.sent,
            self.unsure,
        ]
        return [*single, *self.marks, *self.votes, *self.times]

    @staticmethod
    def of(sums: Sequence[float], votes: int) -> ControlVector:
        """The sum of all workers' ``to_list``; ``votes`` numbers of it are votes."""
        stop, heard, samples, checksum, waiting, seconds, sent, unsure, *rest = sums
        ends = len(NO_MARKS), len(NO_MARKS) + votes
        marks, topology_for_vote, times = rest[: ends[0]], rest[ends[0] : ends[1]], rest[ends[1] :]
        adapted = waiting, seconds, unsure, topology_for_vote, times
        return ControlVector(*adapted, stop, heard, samples, checksum, sent, marks)


# [step check] Whether workers take a step alike: marks that ride in its reduction, and who differs where these do.


class StepCheck:
    """What this worker knows of that. ``content``: of the data of this pass; None before they were looked at."""

    def __init__(self, workers: WorkerGroup, progress: Progress) -> None:
        self._workers = workers
        self._progress = progress
        self._settings = Settings()
        self.content: int | None = None
        self._reread: Callable[[], list[Any]] = list

    def begin_pass(self, source: StepSource) -> None:
        """Through ``source``."""
        self.content = None
        self._reread = lambda: list(source.fetch(iter([source.probe()] * MORE_READS)))

    @property
    def probes(self) -> bool:
        """Whether the data are still to be looked at."""
        return self._workers.size > 1 and self.content is None

    def marks(self, plan: StepPlan, trained: TrainingState) -> Sequence[float]:
        """This worker's, of the step that it is about to take."""
        if self._workers.size == 1:
            return NO_MARKS
        at, settings = self._progress.position, self._settings.checksum(trained.optimizer)
        return marks(
            hash((at.epoch, at.step, *plan.taken, self.content or CHANGES, settings, trained.flags.checksum()))
        )

    def difference(self, plan: StepPlan, trained: TrainingState) -> UserError | None:
        """In what workers took the step differently, as an error; None where only data change by themselves.

        All workers call it alike, where marks were not.
        """
        workers, at, step = self._workers, self._progress.position, self._progress.position.step + 1
        settings, line = Settings.told(trained.optimizer), workers.where()
        settings["frozen parameters"] = ", ".join(trained.flags.frozen) or "none"
        own = StepSettings(at.epoch, *plan.taken, self.content or CHANGES, settings, line)
        rows = workers.gather_bytes(own.encode(), "what the step is made of")
        found = differences(rows)
        if list(found) == ["content"]:
            again = {content([batch]) for batch in self._reread()}
            same = float(again == {self.content})  # so it was read ten times alike, here
            if not all(told for (told,) in workers.gather([same], "data that are read again")):
                self.content = CHANGES
                return None
        return steps_differ(step, found, rows)


# [regrouping] What a change of workers has cost, to be told once the first step among the new ones is complete.


def regrouped(workers: WorkerGroup, progress: Progress, pause_s: float, discarded: int, steps: int) -> Regrouped:
    """The record of it.

    Args:
        workers: As they are now.
        progress: At the step whose sum has just come.
        pause_s: From the step before that to this one, in seconds.
        discarded: Steps that were begun in between and are done again.
        steps: How many steps that is which has just come: a round has several.
    """
    median_s, _ = progress.times.medians()
    return Regrouped(
        version=workers.view,
        members=list(workers.members),
        planned=workers.planned,
        step=progress.position.step + 1,
        pause_s=max(0.0, pause_s - (median_s or 0.0) * steps),
        discarded=discarded,
        mesh="" if workers.comms.mesh.replica == 1 else str(workers.comms.mesh),
    )


# [transaction] When a step counts: one global batch is begun, then reduced or lost, then committed.
#
# This file decides whether a step is open, reduced or committed, and nothing else does; ``docs/step.md`` tells the whole
# story. What a step computes is the sync's and its replica's, how workers meet again after a loss is the group's.


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
        reevaluates_loss: The optimizer (LBFGS) may ask for the loss of the same batch again.
    """

    def __init__(self, workers: WorkerGroup, progress: Progress, log: SampleLog) -> None:
        self.phase = Phase.BETWEEN
        self.unrepeatable = True
        self.reevaluates_loss = False
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
        if self.phase not in (Phase.OPEN, Phase.APART) or not self._sync.plan.has_quorum:
            return NO_ROUND
        return OpenRound(self._dealt_by, self._sync.plan.learners, self._sync.plan.quorum)

    @property
    def goes_on(self) -> bool:
        """Whether what was begun is still what all are at, though workers may have been lost in it."""
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

    def begin(self, plan: StepPlan, sync: Sync, control: ControlVector) -> None:
        """Begin the global batch ``plan``; ``control`` is this worker's part of the control vector."""
        self._require(Phase.BETWEEN, Phase.LOST)
        self.phase, self.plan, self._sync = Phase.OPEN, plan, sync
        self.attempts += 1
        self._dealt_by = self._workers.assignment_view
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
        if self._sync.plan.has_quorum:
            size = self._workers.size
            self._carriers = self._workers.learner_workers(self._dealt_by, self._sync.plan.learners)
            self.plan = replace(self.plan.without(self._sync.absent), contributors=size, workers=size)
        if alike(found.marks):  # else it is for the caller to find out what the workers mean
            check_committed_samples(self.plan, found)
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


def check_committed_samples(plan: StepPlan, found: ControlVector) -> None:
    """The commit gate: the workers' samples together must be those of ``plan``. Raises ``RuntimeError``."""
    samples, checksum = plan.used
    used = int(found.samples) % COUNTED, int(found.checksum) % PRIME
    if used != (samples % COUNTED, checksum):
        modulo = f" modulo {COUNTED:,}" if samples >= COUNTED else ""
        raise RuntimeError(
            f"a step of {samples} samples (checksum {checksum}) summed up {found.samples:g}{modulo} "
            f"(checksum {used[1]}): workers disagree about the data; does it depend on the rank?"
        )


def reevaluates_loss(optimizer: torch.optim.Optimizer, execution: ExecutionSettings, most: int) -> bool:
    """Whether ``optimizer`` evaluates a step several times. Raises ``UserError`` where ``most`` workers cannot."""
    again = isinstance(optimizer, torch.optim.LBFGS)
    if again and (execution.mode, execution.micro_batch, most) != ("fast", None, 1):
        rule = "LBFGS evaluates a step several times, which needs the whole batch in one pass"
        raise UserError(rule, f"{execution.mode} mode, up to {most} workers", "use --mode fast --workers 1")
    return again


# [step exchange] The exchange of a step: what this worker says in it beside its gradients, and what follows from everybody's sums.

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
        if self._transaction.reevaluates_loss:
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
            if trained.sync.plan.has_quorum:
                transaction.tell(self._tells())
                learners = len({part.learner for part in plan.slices})
                workers.report_round(step, learners, trained.sync.plan, took_s)
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
            check_committed_samples(transaction.plan, found)
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
            self._state.prepared.active_sync.committed()
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


# [warm up] A joiner's first passes, before it is a member: everything gets warm, and nothing counts.

SLICES = 2


class WarmedUp(BaseException):
    """A joiner has done a few passes that do not count: everything is warm, and training can begin."""


def warm_up(
    plan: StepPlan | None,
    data: Iterator[Any],
    transaction: StepTransaction,
    sync: Sync,
    control: ControlVector,
    device: torch.device,
) -> Generator[Any, None, NoReturn]:
    """Yields the first batches of ``plan`` and throws their gradients away. Raises ``WarmedUp``."""
    COMPILED.listen()
    for part in plan.slices[:SLICES] if plan is not None else ():
        assert plan is not None
        batch = to_device(next(data), device)
        alone = replace(part, ends_step=False, weight=max(part.weight, 1e-9))
        transaction.begin(replace(plan, slices=[alone]), sync, control)
        transaction.begin_slice(alone)
        yield batch
        transaction.abandon()
    raise WarmedUp


# [stepper] The training pass: one mini-batch after another, and what happens between steps.

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
        workers, progress, execution, exchange = self._workers, self._progress, self._means(), self._exchange
        agreed, size = trained.sync, exchange.batch_size
        mesh, everyone = workers.comms.mesh, workers.size if trained.sync.all_contribute else None
        place = mesh.batch, mesh.batch_rank(workers.comms.rank)
        if self._warming_up:
            place, everyone = (min(execution.num_slots, execution.first_mesh.batch), 0), None
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
            changed = (
                progress.batch_size not in (None, size) or self._means() != execution or trained.sync is not agreed
            )
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
        execution, start, least = self._means(), self._progress.position, replica.least_samples
        if plan.in_rounds:
            ends = [step for step in (self._spec.max_steps, self._spec.sync_schedule.next_after(start.step)) if step]
            most = min(ends) - start.step if ends else None
            seat = self._workers.seat if plan.has_quorum and not self._warming_up else None
            return plan_rounds(source, size, start, execution, plan, *place, least, most, seat)
        among = (1, 0) if self._warming_up else replica.among(self._workers.comms.mesh, self._workers.comms.rank)
        how = {"even": replica.equal_passes, "in_turn": replica.in_turn}
        return plan_steps(source, size, start, execution, *place, least, everyone, **how, among=among)

    def _means(self) -> ExecutionSettings:
        micro_batch = self._progress.micro_batch
        return self._spec.execution if micro_batch is None else replace(self._spec.execution, micro_batch=micro_batch)

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
        active_sync, step = trained.active_sync, self._progress.position.step
        active_sync.follow(self._spec.sync_schedule, step)
        if active_sync.wanted is not None:
            self._state.average_buffers()
            plan, why = active_sync.switch(step)
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
