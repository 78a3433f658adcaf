"""A run's monitors and policies, as the training loop calls them: around steps and around epochs.

Each worker runs the same policies on the same signals. Their proposals travel as votes in the next step's
reduction, whose sums tell all workers whether all have asked for the same. Nothing waits, and nothing is lost or
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
from elastune.adapt.policies.base import Hook, Policy
from elastune.adapt.policies.host import PolicyHost, Proposal
from elastune.adapt.policies.library.registry import build_all, monitors_for
from elastune.adapt.policies.run import Limits
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

# [exchanged] What a run's exchanges tell of themselves, to be journaled: bytes a step, and how far apart learners were.

LEARNERS_DISTANCE, MIX_STALENESS, SENT_BYTES = "learners_distance", "mix_staleness", "sent_bytes"


class ExchangeStatistics:
    """Counts on each worker alike; what a worker has sent for one exchange is told in the next one."""

    def __init__(self) -> None:
        self._distance: float | None = None
        self._staleness: float | None = None
        self._told_bytes = self._telling_bytes = 0  # of this worker's own
        self._bytes, self._steps = 0.0, 0  # of all workers', since the last signals
        self._newest_steps = 0  # whose bytes are not told yet

    def since(self, sent_bytes: int) -> float:
        """What this worker adds to the next exchange: of ``sent_bytes`` so far, those that were not told yet."""
        self._telling_bytes = sent_bytes
        return float(max(0, sent_bytes - self._told_bytes))

    def reduced(
        self,
        sent_bytes: float,
        steps: int,
        distance: float | None,
        staleness: float | None = None,
        *,
        contributed: bool,
    ) -> None:
        """An exchange for ``steps`` steps is complete: ``sent_bytes`` is what all workers told in it.

        ``contributed``: this worker was one of them. ``distance``: that of learners, where it ended a round of them.
        ``staleness``: how many global batches old in it what learners took of others without waiting was.
        """
        if contributed:
            self._told_bytes = self._telling_bytes
        if self._newest_steps:  # else they are of what came before the first step
            self._bytes, self._steps = self._bytes + sent_bytes, self._steps + self._newest_steps
        self._newest_steps, self._distance, self._staleness = steps, distance, staleness

    def signals(self) -> dict[str, tuple[float, float | None]]:
        """As a record has them, without errors: bytes a step since this was asked last, the newest round's
        distance and staleness."""
        told: dict[str, tuple[float, float | None]] = {}
        if self._steps:
            told[SENT_BYTES] = (self._bytes / self._steps, None)
        if self._distance is not None:
            told[LEARNERS_DISTANCE] = (self._distance, None)
        if self._staleness is not None:
            told[MIX_STALENESS] = (self._staleness, None)
        self._bytes, self._steps = 0.0, 0
        return told


# [adapter] A run's monitors and policies, as the training loop meets them: before, in and after a step, around epochs.
#
# Each worker runs the same policies on the same signals. What they ask for rides as votes in the next step's reduction,
# whose sums tell all workers alike whether all have asked for the same, and what (``decisions``). Nothing waits, and
# nothing is lost or done twice when workers die: a vote counts with the step that carried it, and joiners take over
# states and open proposals.

MEASURED_EVERY_S = 0.5
_PARTS = {"monitors", "policies", "decisions", "at", "ramps"}  # of what travels to joiners and checkpoints
WORKER_TIMES = 3  # numbers of one worker's times in the control vector


@dataclass
class _Position:
    """What has been done and seen, equal on all workers; joiners and checkpoints take it over."""

    began: bool = False
    epoch: int = -1  # the last whose before_epoch was called
    step: int = -1  # the last whose before_step was called
    lr: float = 0.0  # the program's own
    batch_size: int = 0
    seconds: float = 0.0  # rank 0's clock, as the newest step brought it to all
    loss: float | None = None  # of the newest step
    wished: dict[str, Any] = field(default_factory=dict)  # by the program since the last boundary, a decision as JSON
    exchange_due: bool = False
    resync_due: bool = False


@dataclass(frozen=True)
class StepContribution:
    """What monitors and policies add to a step's control vector; read back as sums over workers.

    Attributes:
        waiting: 1 where policies of this worker wait for what other workers' policies give.
        seconds: Seconds of training by rank 0's clock; 0 on other ranks.
        unsure: 1 where a worker was lost since the last step, and not all may have seen the same.
        votes: What policies want to change, policy by policy (``core.votes``).
        times: Three numbers for each rank there can ever be, of which a worker gives its own
            (``monitors.base.WorkerTimes``).
    """

    waiting: float = 0.0
    seconds: float = 0.0
    unsure: float = 0.0
    votes: Sequence[float] = ()
    times: Sequence[float] = ()


class Adapter:
    """What one worker's run measures, and what its policies make of it. ``votes``: how many numbers of a control vector
    are votes.
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
        self._others = False  # hooks that wait have begun among other workers
        self._unsure = False  # another worker may have seen something else
        self._measured_s = -math.inf
        self._told_unmeasured = False
        self.votes = len(self._decisions.vote())

    # -- a step -------------------------------------------------------------------------------------------------------

    def before_step(self, trained: TrainingState, batch_size: int) -> bool:
        """Between steps, before another: what all workers have to do together. True where training is to end."""
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
        if at.step < position.step:  # a step that is done again was announced
            at.step = position.step
            self._call("before_step", trained, self._progress.batch_size or batch_size)
        return ends

    def contribute(self, own: WorkerTimes) -> StepContribution:
        """What monitors and policies of this worker add to the next step; always of the same length.

        ``own``: how long this worker's newest step took.
        """
        workers = self._workers
        # There whether they are asked for or not: in fast mode the order of additions depends on the length.
        times = [0.0] * (WORKER_TIMES * (self._spec.most_workers if workers.elastic else workers.size))
        if (self.monitoring.times or self.routing.watches or own is UNKNOWN_TIMES) and workers.synchronised:
            place = WORKER_TIMES * workers.rank
            times[place : place + WORKER_TIMES] = [own.data_s, own.compute_s, own.wait_s]
        return StepContribution(
            waiting=float(self._host.waiting),
            seconds=self._progress.times.seconds if workers.rank == 0 else 0.0,
            unsure=float(self._unsure),
            votes=self._decisions.vote(),
            times=times,
        )

    def step_reduced(self, found: StepContribution, sent: float, plan: StepPlan, statistics: StepStatistics) -> None:
        """The sums of a step are here: of contributions, of bytes ``sent``, and of what was measured."""
        at = self._at
        at.seconds = found.seconds or at.seconds  # rank 0 may have had no samples
        at.loss = statistics.parts.get("loss", math.nan)
        at.exchange_due = found.waiting > 0
        if any(each < 0 for each in found.times):  # of the step before this one: somebody compiled in it
            self._progress.times.leave_out_newest()
            found = replace(found, times=[0.0] * len(found.times))
        self.routing.hear(found.times)
        if found.unsure > 0:
            at.resync_due, self._unsure = True, False
        self._decisions.count_votes(found.votes, plan.contributors)
        contributed = plan.contributors == plan.workers or any(part.weight for part in plan.slices)
        apart, old = statistics.distance, statistics.staleness
        self.exchanged.reduced(sent, plan.steps, apart, old, contributed=contributed)
        if self.monitoring:
            number = self._progress.position.step + plan.steps
            self.monitoring.read(number, plan.used[0], plan.workers, statistics, found.times)
            self._tell_unmeasured(number, plan, statistics)

    def _tell_unmeasured(self, number: int, plan: StepPlan, statistics: StepStatistics) -> None:
        """Say once what cannot be measured here, by a batch of full size."""
        short = plan.size < 2 or plan.steps > 1 or 0 < plan.offset == plan.length - plan.size
        if self._told_unmeasured or short or self._workers.rank != 0:
            return
        names, why = self.monitoring.unmeasured(number, statistics, self._spec.execution.mode)
        self._told_unmeasured = bool(names)
        for name in names:
            self._send(NotMeasured(name, number, why))

    def step_lost(self) -> None:
        """The step under way will be done again, and with it the user's lines that may have wished for something."""
        self._at.wished = {}

    def exchange(self) -> None:
        """Where a hook of some worker waits for the others': all tell each other what they have."""
        if not self._at.exchange_due:
            return
        self._at.exchange_due = False
        rows = self._workers.gather_bytes(self._host.offer(), "the exchange of policies")
        if self._others and len(rows) == self._workers.size:  # else they are from a worker that had all before a loss
            self._begin_again()
        if self._host.waits_among(len(rows)):
            self._host.deliver(rows, self._workers.rank)
            self._decisions.collect()

    def _begin_again(self) -> None:
        self._others = False
        self._host.restart_waiting_hooks(self._workers.size, self._limits(), self._workers.rank)
        self._decisions.collect()

    def after_step(self, trained: TrainingState, batch_size: int) -> bool:
        """After the user's lines of a step: do what was agreed on in it. True where training is to end."""
        self._applier.ramp(trained)
        ends = self._apply(trained, batch_size)
        batch_size = self._progress.batch_size or batch_size
        if self._adapts:
            self._call("after_step", trained, batch_size)
        if self._progress.times.seconds - self._measured_s >= MEASURED_EVERY_S:
            self._tell_measured(trained, batch_size)
        return ends

    def _tell_measured(self, trained: TrainingState, batch_size: int) -> None:
        """Of a run with monitors; of any while it has learners, who are apart and may stay so."""
        self._measured_s = self._progress.times.seconds
        exchanged = self.exchanged.signals()  # on every worker: who becomes rank 0 goes on from here
        if self._workers.rank == 0 and (self.monitoring or trained.sync.plan.in_rounds):
            told = measured(self.snapshot(trained, batch_size))
            self._send(replace(told, signals={**exchanged, **told.signals}))

    def _apply(self, trained: TrainingState, batch_size: int) -> bool:
        done = self._decisions.apply(trained, lambda: self.snapshot(trained, self._progress.batch_size or batch_size))
        if done:
            self._measured_s = -math.inf  # what comes of it is to be seen
        if self._decisions.differ:
            self._decisions.differ, self._at.resync_due = False, True
        return any(decision.stop for decision in done)

    # -- epochs, and the run ------------------------------------------------------------------------------------------

    def begin_pass(self, trained: TrainingState, length: int, batch_size: int) -> None:
        """A training pass over ``length`` samples (0: nobody knows) goes on, or begins; asked for: ``batch_size``."""
        self._decisions.longest_batch = length or None
        if not self._at.batch_size:
            self._at.batch_size, self._at.lr = batch_size, _rate(trained)

    def after_epoch(self, trained: TrainingState, batch_size: int) -> None:
        """A training pass is over."""
        if self._adapts:
            self._call("after_epoch", trained, batch_size)

    def after_train(self, trained: TrainingState | None) -> None:
        """The run is over."""
        if trained is None:
            return
        batch_size = self._progress.batch_size or self._at.batch_size
        if self._adapts and self._at.began:
            self._call("after_train", trained, batch_size, ended=True)
            what = "the end of policies"
            while any(waiting for (waiting,) in self._workers.gather([float(self._host.waiting)], what)):
                self._at.exchange_due = True
                self.exchange()
        self._tell_measured(trained, batch_size)

    def _agree_now(self, trained: TrainingState, batch_size: int) -> bool:
        """What was decided between epochs is to count from the next one's first step on."""
        rows = self._workers.gather(self._decisions.vote(), "a vote of policies")
        self._decisions.count_votes([sum(column) for column in zip(*rows, strict=True)], len(rows))
        return self._apply(trained, batch_size)

    # -- what the program asks for ------------------------------------------------------------------------------------

    def wish(self, decision: Decision) -> None:
        """The program asks for ``decision``; what it asks for between two steps is one proposal."""
        if self._spec.most_workers > MOST_VOTERS:
            rule = f"parameters can change for at most {MOST_VOTERS} workers"
            raise UserError(rule, self._spec.most_workers, "use fewer workers, or no session.change")
        if self._workers.synchronised:
            self._at.wished = {**self._at.wished, **decision.to_json()}

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
        """Where the run stands."""
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
        """The workers are others now. What follows is done at the next boundary, where all are at the same place."""
        self._regrouped = self._others = True
        # Some may have gone on in the old view, some not: what they saw may differ. They say so in the next step, so
        # that all do the same after it: here nobody knows how far the others are.
        if not self._workers.planned and (self._adapts or self.monitoring):
            self._unsure = True

    def _resync(self) -> None:
        """All go on from what rank 0 has measured, decided and proposed."""
        self._at.resync_due = False
        own = json.dumps(self._told()).encode() if self._workers.rank == 0 else b""
        rows = self._workers.gather_bytes(own, "what monitors and policies have seen")
        found = next((each for each in rows if each), None)
        if found is not None:  # else rank 0 was lost meanwhile, and the next step brings all here again
            self._load(json.loads(found), resumed=False)
            self._begin_again()

    @property
    def remembered(self) -> dict[str, Any] | None:
        """The state that policies may go back to, with its tensors; it travels with ``to_json``."""
        return self._applier.remembered

    @remembered.setter
    def remembered(self, state: dict[str, Any] | None) -> None:
        self._applier.remembered = state

    def to_json(self) -> dict[str, Any]:
        """What a joiner or a checkpoint needs to go on from here."""
        return {**self._told(), "ramps": self._applier.to_json()}

    def load(self, told: Mapping[str, Any], *, resumed: bool = False) -> None:
        """Go on from ``to_json`` of another worker, of this one earlier, or (``resumed``) of a checkpoint."""
        if resumed and not (self._adapts or self.monitoring):  # whatever another run or version has kept
            return
        if told.keys() != _PARTS:
            fix = "begin it again, or resume it with the version that wrote it"
            raise UserError("a run resumes from a checkpoint of its own version", f"one with {sorted(told)}", fix)
        self._load(told, resumed=resumed)
        self._others = True
        self._applier.load(told["ramps"])

    def _told(self) -> dict[str, Any]:
        """What is equal on workers that have seen the same."""
        return {
            "monitors": self.monitoring.to_json(),
            "policies": self._host.to_json(),
            "decisions": self._decisions.to_json(),
            "at": asdict(self._at),
        }

    def _load(self, told: Mapping[str, Any], *, resumed: bool) -> None:
        self.monitoring.load(told["monitors"])
        self._host.load(told["policies"], pardon=resumed)
        self._decisions.load(told["decisions"], resumed=resumed)
        self._at = _Position(**told["at"])
        if resumed:
            self._at.began = self._at.resync_due = False


def _rate(trained: TrainingState) -> float:
    return float(trained.optimizer.param_groups[0].get("lr", 0.0))
