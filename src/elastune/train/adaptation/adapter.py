"""A run's monitors and policies, as the training loop calls them: around steps and around epochs.

Each worker runs the same policies on the same signals. Their proposals travel as votes in the next step's
reduction. Its sums show all workers whether all have asked for the same. Nothing waits, and nothing is lost or
done twice when workers die: a vote counts with the step that carried it, and joining workers receive states and
open proposals.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from elastune.adapt.monitors.base import UNKNOWN_TIMES, WorkerTimes
from elastune.adapt.policies.base import Hook, Limits, Policy, bounds_text
from elastune.adapt.policies.host import PolicyHost, Proposal
from elastune.adapt.policies.library.registry import build_all, monitors_for
from elastune.core.decisions import MOST_VOTERS, Decision, Snapshot
from elastune.core.errors import UserError
from elastune.core.journal.records import NotMeasured, Record
from elastune.core.run import RunSpec
from elastune.elastic.worker.group import WorkerGroup
from elastune.parallel.mechanisms.capabilities import meshes_of
from elastune.parallel.sync.base import StepStatistics
from elastune.train.adaptation.decisions import PROGRAM, DecisionApplier, Decisions, measured
from elastune.train.adaptation.monitoring import Monitoring
from elastune.train.adaptation.routing import Routing
from elastune.train.data.sample_log import newest_left_out
from elastune.train.data.source import StepPlan
from elastune.train.progress import Progress
from elastune.train.training_state import TrainingState

LEARNERS_DISTANCE, MIX_STALENESS, SENT_BYTES = "learners_distance", "mix_staleness", "sent_bytes"

MEASURED_EVERY_S = 0.5  # seconds of training between two records of the signals
LOSS_EVERY_S = 0.1  # the same where the loss alone is recorded
LOSS_SHARE = 0.005  # of the training so far: a run without monitors records its loss ever more rarely
WORKER_TIMES = 3  # numbers of one worker's times in the control vector
_PARTS = {"monitors", "policies", "decisions", "at", "ramps"}  # of the state that joiners and checkpoints receive


@dataclass
class _Position:
    """What was done and seen so far, equal on all workers. Joiners and checkpoints take it over."""

    began: bool = False
    epoch: int = -1  # the newest epoch whose before_epoch was called
    step: int = -1  # the newest step whose before_step was called
    lr: float = 0.0  # the learning rate that the program began with
    batch_size: int = 0
    seconds: float = 0.0  # rank 0's clock, as the newest step brought it to all
    loss: float | None = None  # of the newest step
    wished: dict[str, Any] = field(default_factory=dict)  # the program's decision since the last boundary, as JSON
    exchange_due: bool = False
    resync_due: bool = False


@dataclass(frozen=True)
class StepContribution:
    """What monitors and policies add to a step's control vector. The reduction returns the sums over all workers.

    Attributes:
        waiting: 1 if policies of this worker wait for the values of other workers' policies.
        seconds: Seconds of training by rank 0's clock; 0 on other ranks.
        unsure: 1 if a worker was lost since the last step, so that not all workers may have seen the same.
        votes: The changes that policies propose, policy by policy (``core.votes``).
        times: Three numbers for each possible rank; a worker sets its own (``adapt.monitors.base.WorkerTimes``).
    """

    waiting: float = 0.0
    seconds: float = 0.0
    unsure: float = 0.0
    votes: Sequence[float] = ()
    times: Sequence[float] = ()


class Adapter:
    """Runs a worker's monitors and policies, and applies what the policies of all workers have decided.

    The training loop calls it around steps and epochs.

    Attributes:
        monitoring: The monitors and their states.
        survives_divergence: Whether a policy handles a loss that diverges.
        exchanged: Counts what exchanges cost.
        mean_loss: The training loss since the newest record of it.
        routing: Chooses how sums travel.
        votes: How many numbers of a control vector are votes.
    """

    def __init__(
        self,
        spec: RunSpec,
        workers: WorkerGroup,
        progress: Progress,
        send: Callable[[Record], None],
        kinds: Mapping[str, type[Policy]],
    ) -> None:
        policies = build_all(spec.adapt.policies, kinds)
        if policies and spec.most_workers > MOST_VOTERS:
            rule = f"policies agree among at most {MOST_VOTERS} workers"
            raise UserError(rule, spec.most_workers, "use fewer workers, or no policy")
        names = [named.name for named in policies]
        if PROGRAM in names:
            raise UserError("a policy needs a name of its own", PROGRAM, "rename its class")
        wanted = (*monitors_for(policies), *spec.adapt.monitors)
        self.monitoring = Monitoring((*wanted, *(("loss",) if wanted or policies else ())), spec.seed)
        self.survives_divergence = any(named.policy.survives_divergence for named in policies)
        self._spec = spec
        self._workers = workers
        self._progress = progress
        self._send = send
        self._adapts = bool(policies)
        self._at = _Position()
        self._host = PolicyHost(policies, self.monitoring.gives)
        self.exchanged = ExchangeStatistics()
        self.routing = Routing(spec, workers, progress, send)
        self._applier = DecisionApplier(workers, progress, self.monitoring, self.routing, meshes_of(spec.execution))
        self._decisions = Decisions(self._host, names, self._applier, workers, progress, send)
        self._regrouped = False
        self._others = False  # waiting hooks have begun among other workers
        self._unsure = False  # another worker may have seen other values
        self._measured_s = -math.inf
        self.mean_loss = MeanLoss()
        self._reported_unmeasured = False
        self.votes = len(self._decisions.vote())

    # -- a step -------------------------------------------------------------------------------------------------------

    def before_step(self, trained: TrainingState, batch_size: int) -> bool:
        """Do what all workers have to do together before a step. Returns whether training is to end."""
        if self._regrouped:
            self._regrouped = False
            self._decisions.workers_changed()
        if self._others:
            self._begin_again()
        self._propose_wished(trained, batch_size)
        if self._at.resync_due:
            self._resync()
        self.routing.settle(trained)
        self.exchange()
        at, position = self._at, self._progress.position
        if not self._adapts:
            return False
        ends = False
        if not at.began:
            at.began = True
            self._call("before_train", trained, batch_size)
        if at.epoch < position.epoch:
            self._call("before_epoch", trained, batch_size)
            at.epoch = position.epoch
            ends = self._agree_now(trained, batch_size)
        if at.step < position.step:  # a repeated step was announced before
            at.step = position.step
            self._call("before_step", trained, self._progress.batch_size or batch_size)
        return ends

    def contribute(self, times_here: WorkerTimes) -> StepContribution:
        """The contribution of this worker's monitors and policies to the next step; it always has the same length.

        ``times_here``: how long this worker's newest step took.
        """
        workers = self._workers
        # Unused times are sent, too: in fast mode the order of additions depends on the length.
        times = [0.0] * (WORKER_TIMES * (self._spec.most_workers if workers.elastic else workers.size))
        if (self.monitoring.times or self.routing.watches or times_here is UNKNOWN_TIMES) and workers.synchronised:
            place = WORKER_TIMES * workers.rank
            times[place : place + WORKER_TIMES] = [times_here.data_s, times_here.compute_s, times_here.wait_s]
        return StepContribution(
            waiting=float(self._adapts and self._host.waiting),
            seconds=self._progress.times.seconds if workers.rank == 0 else 0.0,
            unsure=float(self._unsure),
            votes=self._decisions.vote(),
            times=times,
        )

    def step_reduced(self, total: StepContribution, sent: float, plan: StepPlan, statistics: StepStatistics) -> None:
        """Take in the sums of a step.

        Args:
            total: The sum of the contributions.
            sent: The bytes that all workers have reported.
            plan: The step.
            statistics: What was measured in the step.
        """
        at = self._at
        at.seconds = total.seconds or at.seconds  # rank 0 may have had no samples
        at.loss = statistics.parts.get("loss", math.nan)
        at.exchange_due = total.waiting > 0
        if any(each < 0 for each in total.times):  # a worker compiled in the step before this one
            self._progress.times.leave_out_newest()
            total = replace(total, times=[0.0] * len(total.times))
        self.routing.observe(total.times)
        if total.unsure > 0:
            at.resync_due, self._unsure = True, False
        self._decisions.count_votes(total.votes, plan.contributors)
        contributed = plan.contributors == plan.workers or any(part.weight for part in plan.slices)
        apart, old = statistics.distance, statistics.staleness
        self.exchanged.reduced(sent, plan.steps, apart, old, contributed=contributed)
        if self.monitoring.monitors:
            number = self._progress.position.step + plan.steps
            self.monitoring.read(number, plan.used[0], plan.workers, statistics, total.times)
            self._report_unmeasured(number, plan, statistics)

    def _report_unmeasured(self, number: int, plan: StepPlan, statistics: StepStatistics) -> None:
        """Report once, at a batch of full size, which signals cannot be measured here."""
        short = plan.size < 2 or plan.steps > 1 or 0 < plan.offset == plan.length - plan.size
        if self._reported_unmeasured or short or self._workers.rank != 0:
            return
        names, why = self.monitoring.unmeasured(number, statistics, self._spec.execution.mode)
        self._reported_unmeasured = bool(names)
        for name in names:
            self._send(NotMeasured(name, number, why))

    def step_lost(self) -> None:
        """Forget the program's wishes of this step: it will be repeated, and with it the lines that wished."""
        self._at.wished = {}

    def exchange(self) -> None:
        """If a hook of any worker waits for the others' values, exchange the values of all workers."""
        if not self._at.exchange_due:
            return
        self._at.exchange_due = False
        rows = self._workers.gather_bytes(self._host.offer(), "the exchange of policies")
        if self._others and len(rows) == self._workers.size:  # else a worker that completed it before a loss sent them
            self._begin_again()
        if self._host.waits_among(len(rows)):
            self._host.deliver(rows, self._workers.rank)
            self._decisions.collect()

    def _begin_again(self) -> None:
        self._others = False
        self._host.restart_waiting_hooks(self._workers.size, self._limits(), self._workers.rank)
        self._decisions.collect()

    def after_step(self, trained: TrainingState, batch_size: int) -> bool:
        """Apply what was agreed on in the step, after the user's lines of it. Returns whether training is to end."""
        self._applier.ramp(trained)
        ends = self._apply(trained, batch_size)
        batch_size = self._progress.batch_size or batch_size
        if self._adapts:
            self._call("after_step", trained, batch_size)
        seconds = self._progress.times.seconds
        every = MEASURED_EVERY_S if self._records_signals(trained) else max(LOSS_EVERY_S, LOSS_SHARE * seconds)
        if seconds - self._measured_s >= every:
            self._report_measured(trained, batch_size)
        return ends

    def _records_signals(self, trained: TrainingState) -> bool:
        """Whether the run has monitors, or learners, whose distance matters; other runs record their loss alone."""
        return bool(self.monitoring.monitors) or trained.sync.plan.in_rounds

    def _report_measured(self, trained: TrainingState, batch_size: int) -> None:
        """Record the signals, or the mean loss since the last record where a run measures nothing else."""
        self._measured_s = self._progress.times.seconds
        exchanged, loss = self.exchanged.signals(), self.mean_loss.take()  # on every worker: any may become rank 0
        signals = {**(exchanged if self._records_signals(trained) else {}), **loss}
        if self._workers.rank == 0 and (signals or self._records_signals(trained)):
            record = measured(self.snapshot(trained, batch_size))
            self._send(replace(record, signals={**signals, **record.signals}))

    def _apply(self, trained: TrainingState, batch_size: int) -> bool:
        done = self._decisions.apply(trained, lambda: self.snapshot(trained, self._progress.batch_size or batch_size))
        if done:
            self._measured_s = -math.inf  # so that the effect is recorded soon
        if self._decisions.differ:
            self._decisions.differ, self._at.resync_due = False, True
        return any(decision.stop for decision in done)

    # -- epochs, and the run ------------------------------------------------------------------------------------------

    def begin_pass(self, trained: TrainingState, length: int, batch_size: int) -> None:
        """Begin or continue a training pass over ``length`` samples (0: unknown), with the requested ``batch_size``."""
        self._decisions.longest_batch = length or None
        if not self._at.batch_size:
            self._at.batch_size, self._at.lr = batch_size, _rate(trained)

    def after_epoch(self, trained: TrainingState, batch_size: int) -> None:
        """Call the hooks at the end of a training pass."""
        if self._adapts:
            self._call("after_epoch", trained, batch_size)

    def after_train(self, trained: TrainingState | None) -> None:
        """Call the hooks at the end of the run, and record the last signals."""
        if trained is None:
            return
        batch_size = self._progress.batch_size or self._at.batch_size
        if self._adapts and self._at.began:
            self._call("after_train", trained, batch_size, ended=True)
            what = "the end of policies"
            while any(waiting for (waiting,) in self._workers.gather([float(self._host.waiting)], what)):
                self._at.exchange_due = True
                self.exchange()
        self._report_measured(trained, batch_size)

    def _agree_now(self, trained: TrainingState, batch_size: int) -> bool:
        """Vote on decisions between epochs, so that they count from the first step of the next epoch on."""
        rows = self._workers.gather(self._decisions.vote(), "a vote of policies")
        self._decisions.count_votes([sum(column) for column in zip(*rows, strict=True)], len(rows))
        return self._apply(trained, batch_size)

    # -- the program's wishes -----------------------------------------------------------------------------------------

    def wish(self, decision: Decision) -> None:
        """Propose ``decision`` for the program. All its wishes between two steps are one proposal."""
        if self._spec.most_workers > MOST_VOTERS:
            rule = f"parameters can change for at most {MOST_VOTERS} workers"
            raise UserError(rule, self._spec.most_workers, "use fewer workers, or no session.change")
        if self._workers.synchronised:
            self._at.wished = {**self._at.wished, **decision.to_json()}

    def note_resize(self, workers: int, trained: TrainingState | None) -> None:
        """Record that the program asked for ``workers`` workers, if the run's bounds leave nothing of its request."""
        limits, size = self._limits(), self._workers.size
        if trained is None or workers == size or min(max(workers, limits.low), limits.high) != size:
            return
        cause = self.snapshot(trained, self._progress.batch_size or self._at.batch_size)
        note = f"asked for {workers} workers; {bounds_text(limits)}"
        self._decisions.refuse(Proposal(PROGRAM, cause.step, Decision(workers=workers), cause), note)

    def _propose_wished(self, trained: TrainingState, batch_size: int) -> None:
        wished, self._at.wished = self._at.wished, {}
        if wished:
            cause = self.snapshot(trained, self._progress.batch_size or batch_size)
            self._decisions.propose(Proposal(PROGRAM, cause.step, Decision(**wished), cause))

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _call(self, hook: Hook, trained: TrainingState, batch_size: int, ended: bool = False) -> None:
        if self._workers.synchronised:
            snapshot = self.snapshot(trained, batch_size)
            self._host.call(hook, snapshot, self._limits(ended), self._workers.rank)
            self._decisions.collect()

    def _limits(self, ended: bool = False) -> Limits:
        elastic, size = self._spec.elastic, self._workers.size
        low, high = (elastic.low, self._spec.most_workers) if self._workers.elastic else (size, size)
        slots = self._spec.execution.num_slots
        return Limits(min(low, size), max(high, size), self._decisions.longest_batch, ended, slots)

    def snapshot(self, trained: TrainingState, batch_size: int) -> Snapshot:
        """The state of the run as policies see it."""
        at, position = self._at, self._progress.position
        return Snapshot(
            step=position.step,
            epoch=position.epoch,
            samples=position.samples,
            seconds=at.seconds,
            loss=at.loss,
            workers=self._workers.size,
            batch_size=batch_size,
            lr=_rate(trained),
            micro_batch=self._progress.micro_batch or self._spec.execution.micro_batch,
            signals=self.monitoring.signals,
            lr_at_start=at.lr,
            batch_at_start=at.batch_size,
            sync=str(trained.sync.plan),
            left_out=newest_left_out(self._progress.spans, position.step),
        )

    # -- when workers come and go -------------------------------------------------------------------------------------

    def regrouped(self) -> None:
        """Note that the workers have changed. The consequences follow at the next boundary, the same place for all."""
        self._regrouped = self._others = True
        # Some workers may have gone on in the old view, so what they have seen may differ. They report it in the next
        # step, and all resynchronise after it: at this place no worker knows how far the others are.
        if not self._workers.planned and (self._adapts or self.monitoring.monitors):
            self._unsure = True

    def _resync(self) -> None:
        """Have all workers go on from what rank 0 has measured, decided and proposed."""
        self._at.resync_due = False
        payload = json.dumps(self._shared_state()).encode() if self._workers.rank == 0 else b""
        rows = self._workers.gather_bytes(payload, "what monitors and policies have seen")
        payload_of_leader = next((each for each in rows if each), None)
        if payload_of_leader is not None:  # else rank 0 was lost meanwhile, and the next step repeats this
            self._load(json.loads(payload_of_leader), resumed=False)
            self._begin_again()

    @property
    def remembered(self) -> dict[str, Any] | None:
        """The state that policies may go back to, with its tensors; it travels beside ``to_json``."""
        return self._applier.remembered

    @remembered.setter
    def remembered(self, state: dict[str, Any] | None) -> None:
        self._applier.remembered = state

    def to_json(self) -> dict[str, Any]:
        """The state that a joiner or a checkpoint needs to go on from here."""
        return {**self._shared_state(), "ramps": self._applier.to_json()}

    def load(self, state: Mapping[str, Any], *, resumed: bool = False) -> None:
        """Go on from ``to_json`` of another worker, of this one earlier, or (``resumed``) of a checkpoint.

        Raises ``UserError`` if the checkpoint is of another version.
        """
        if resumed and not (self._adapts or self.monitoring.monitors):  # this run uses nothing of it
            return
        if state.keys() != _PARTS:
            fix = "begin it again, or resume it with the version that wrote it"
            raise UserError("a run resumes from a checkpoint of its own version", f"one with {sorted(state)}", fix)
        self._load(state, resumed=resumed)
        self._others = True
        self._applier.load(state["ramps"])

    def _shared_state(self) -> dict[str, Any]:
        """The state that is equal on workers that have seen the same."""
        return {
            "monitors": self.monitoring.to_json(),
            "policies": self._host.to_json(),
            "decisions": self._decisions.to_json(),
            "at": asdict(self._at),
        }

    def _load(self, state: Mapping[str, Any], *, resumed: bool) -> None:
        self.monitoring.load(state["monitors"])
        self._host.load(state["policies"], pardon=resumed)
        self._decisions.load(state["decisions"], resumed=resumed)
        self._at = _Position(**state["at"])
        if resumed:
            self._at.began = self._at.resync_due = False


class MeanLoss:
    """The mean loss of the samples since it was last taken. Reading it changes nothing of the training."""

    def __init__(self) -> None:
        self._sum, self._samples = 0.0, 0

    def add(self, loss: float, samples: int) -> None:
        """Count a step's loss, the mean over its ``samples``."""
        self._sum, self._samples = self._sum + loss * samples, self._samples + samples

    def take(self) -> dict[str, tuple[float, float | None]]:
        """Return the signal "loss" as a record has it, and begin anew; {} if no step was counted."""
        mean, counted = self._sum / max(1, self._samples), self._samples > 0
        self._sum, self._samples = 0.0, 0
        return {"loss": (mean, None)} if counted else {}


class ExchangeStatistics:
    """Counts what a run's exchanges cost, for the journal: bytes per step, and the distance of learners.

    Every worker counts alike. The bytes that a worker has sent for one exchange travel in the next one.
    """

    def __init__(self) -> None:
        self._distance: float | None = None
        self._staleness: float | None = None
        self._reported_bytes = self._reporting_bytes = 0  # sent by this worker
        self._bytes, self._steps = 0.0, 0  # of all workers, since the last signals
        self._newest_steps = 0  # steps whose bytes were not reported yet

    def since(self, sent_bytes: int) -> float:
        """The bytes that this worker reports in the next exchange: the unreported part of ``sent_bytes``."""
        self._reporting_bytes = sent_bytes
        return float(max(0, sent_bytes - self._reported_bytes))

    def reduced(
        self,
        sent_bytes: float,
        steps: int,
        distance: float | None,
        staleness: float | None = None,
        *,
        contributed: bool,
    ) -> None:
        """Note that an exchange is complete.

        Args:
            sent_bytes: The bytes that all workers have reported in it.
            steps: How many steps the exchange was for.
            distance: The distance of learners, if the exchange has ended a round of learners.
            staleness: How many global batches old the values were that learners took from others without waiting.
            contributed: Whether this worker was part of the exchange.
        """
        if contributed:
            self._reported_bytes = self._reporting_bytes
        if self._newest_steps:  # otherwise the bytes were sent before the first step
            self._bytes, self._steps = self._bytes + sent_bytes, self._steps + self._newest_steps
        self._newest_steps, self._distance, self._staleness = steps, distance, staleness

    def signals(self) -> dict[str, tuple[float, float | None]]:
        """The signals as a record has them, without errors: bytes per step, and the newest distance and staleness.

        Bytes are counted since the last call.
        """
        signals: dict[str, tuple[float, float | None]] = {}
        if self._steps:
            signals[SENT_BYTES] = (self._bytes / self._steps, None)
        if self._distance is not None:
            signals[LEARNERS_DISTANCE] = (self._distance, None)
        if self._staleness is not None:
            signals[MIX_STALENESS] = (self._staleness, None)
        self._bytes, self._steps = 0.0, 0
        return signals


def _rate(trained: TrainingState) -> float:
    return float(trained.optimizer.param_groups[0].get("lr", 0.0))
