"""Policies at work: hooks are called, what they decide is agreed on in a step's reduction, and applied behind it.

Each worker runs the same policies on the same signals. What they ask for rides as a vote in the next reduction, whose
sums tell all workers alike whether all have decided the same, and what. Nothing waits, nothing of it is lost or done
twice when workers die: a vote counts with the step that carried it, and joiners take over states and open proposals.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from elastune.core.errors import UserError
from elastune.core.run import RunSpec
from elastune.core.signals import Decision, Snapshot
from elastune.core.votes import MOST_VOTERS
from elastune.elastic.worker.group import WorkerGroup
from elastune.journal.records import Decided, Measured, PolicyFailed, Record
from elastune.policies.base import Hook, Policy
from elastune.policies.library.registry import build_all, monitors_for
from elastune.policies.run import Limits
from elastune.policies.runtime.host import PolicyHost, Proposal
from elastune.train.adapt.agreement import PROGRAM, Agreed, Agreement
from elastune.train.adapt.apply import DecisionApplier
from elastune.train.adapt.monitoring import Monitoring
from elastune.train.control import ControlVector
from elastune.train.progress import Progress
from elastune.train.training_state import TrainingState

MEASURED_EVERY_S = 0.5
MOST_DISAGREEMENTS = 3  # in a row: policies that go on like this only cost time


@dataclass
class _AdapterState:
    """What of a run's adaptation is to be known to joiners and checkpoints, beside monitors and policies."""

    began: bool = False
    epoch: int = -1  # the last whose before_epoch was called
    step: int = -1  # the last whose before_step was called
    lr: float = 0.0  # the program's own
    batch_size: int = 0
    disagreements: dict[str, int] = field(default_factory=dict)  # in a row, by policy
    asked: int | None = None  # so many workers were asked for, and are not there yet
    seconds: float = 0.0  # rank 0's clock, as the newest step brought it to all
    loss: float | None = None  # of the newest step
    wished: dict[str, Any] = field(default_factory=dict)  # by the program since the last boundary, a decision as JSON
    exchange_due: bool = False
    resync_due: bool = False


class Adapter:
    """What one worker's run measures, and what its policies make of it."""

    def __init__(
        self,
        spec: RunSpec,
        crew: WorkerGroup,
        progress: Progress,
        send: Callable[[Record], None],
        kinds: Mapping[str, type[Policy]],
    ) -> None:
        policies = build_all(spec.adapt.policies, kinds)
        if policies and spec.most_workers > MOST_VOTERS:
            rule = f"policies agree among at most {MOST_VOTERS} workers"
            raise UserError(rule, spec.most_workers, "use fewer workers, or no policy")
        if any(named.name == PROGRAM for named in policies):
            raise UserError("a policy needs a name of its own", PROGRAM, "rename its class")
        wanted = (*monitors_for(policies), *spec.adapt.monitors)
        self.monitoring = Monitoring((*wanted, *(("loss",) if wanted or policies else ())), spec.seed)
        self.survives_divergence = any(named.policy.survives_divergence for named in policies)
        self._spec = spec
        self._crew = crew
        self._progress = progress
        self._send = send
        self._host = PolicyHost(policies, self.monitoring.gives)
        self._adapts = bool(policies)
        self._standing = _AdapterState()
        self._ballot = Agreement([named.name for named in policies])
        self._verdicts: list[Agreed] = []  # of the step at hand
        self._last_refused: dict[str, Decision] = {}
        self._regrouped = False
        self.unsure = 0.0  # 1.0: another worker may have seen something else
        self._changer = DecisionApplier(crew, progress, self.monitoring)
        self._longest: int | None = None
        self._measured_s = -math.inf

    # -- hooks --------------------------------------------------------------------------------------------------------

    def begin_pass(self, trained: TrainingState, length: int, batch_size: int) -> None:
        """A training pass over ``length`` samples goes on, or begins; the program asks for ``batch_size``."""
        self._longest = length
        standing = self._standing
        if not standing.batch_size:
            standing.batch_size, standing.lr = batch_size, _rate(trained)

    def boundary(self, trained: TrainingState, batch_size: int) -> bool:
        """Between steps, before another: what has to be done by all workers together. True where training is to end."""
        self._meet()
        self._propose_wished(trained, batch_size)
        if self._standing.resync_due:
            self._resync()
        self.exchange()
        standing, at = self._standing, self._progress.position
        if not self._adapts:
            return False
        ends = False
        if not standing.began:
            standing.began = True
            self._call("before_train", trained, batch_size)
        if standing.epoch < at.epoch:
            self._call("before_epoch", trained, batch_size)
            standing.epoch = at.epoch
            ends = self._agree_now(trained)
        if standing.step < at.step:  # a step that is done again was announced
            standing.step = at.step
            self._call("before_step", trained, self._progress.batch_size or batch_size)
        return ends

    def wish(self, decision: Decision) -> None:
        """The program asks for ``decision``; what it asks for between two steps is one decision."""
        if self._spec.most_workers > MOST_VOTERS:
            rule = f"parameters can change for at most {MOST_VOTERS} workers"
            raise UserError(rule, self._spec.most_workers, "use fewer workers, or no session.change")
        if self._crew.synchronised:
            self._standing.wished = {**self._standing.wished, **decision.to_json()}

    def step_discarded(self) -> None:
        """The step under way will be done again, and with it the user's lines that may have wished for something."""
        self._standing.wished = {}

    def _propose_wished(self, trained: TrainingState, batch_size: int) -> None:
        wished, self._standing.wished = self._standing.wished, {}
        if wished:
            cause = self.snapshot(trained, self._progress.batch_size or batch_size)
            self._ballot.add(Proposal(PROGRAM, cause.step, Decision(**wished), cause))

    def exchange(self) -> None:
        """Where a hook of some worker waits for the others': all tell each other what they have."""
        if not self._standing.exchange_due:
            return
        self._standing.exchange_due = False
        rows = self._crew.gather(self._host.offer())
        if self._regrouped:  # some may have been told of the others before, some not
            self._host.cancel()
        elif self._host.waiting:
            self._host.deliver(rows, self._crew.rank)
            self._collect()

    def after_epoch(self, trained: TrainingState, batch_size: int) -> None:
        """A training pass is over."""
        if self._adapts:
            self._call("after_epoch", trained, batch_size)

    def after_train(self, trained: TrainingState | None) -> None:
        """The run is over."""
        if self._adapts and trained is not None and self._standing.began:
            batch_size = self._progress.batch_size or self._standing.batch_size
            self._call("after_train", trained, batch_size, ended=True)
            while any(waiting for (waiting,) in self._crew.gather([self.waiting])):
                self._standing.exchange_due = True
                self.exchange()
        if trained is not None and self.monitoring and self._crew.rank == 0:
            batch_size = self._progress.batch_size or self._standing.batch_size
            self._send(_measured(self.snapshot(trained, batch_size)))

    def _agree_now(self, trained: TrainingState) -> bool:
        """What was decided between epochs is to count from the next one's first step on."""
        rows = self._crew.gather(self._ballot.vote())
        self._verdicts = self._ballot.settle([sum(column) for column in zip(*rows, strict=True)], len(rows))
        return self._apply(trained)

    def _call(self, hook: Hook, trained: TrainingState, batch_size: int, ended: bool = False) -> None:
        if not self._crew.synchronised:
            return
        snapshot = self.snapshot(trained, batch_size)
        self._host.call(hook, snapshot, self._limits(ended), self._crew.rank)
        self._collect()

    def _collect(self) -> None:
        for proposal in self._host.drain_proposals():
            decision = proposal.decision
            if decision.workers == self._standing.asked:  # they are on their way
                decision = replace(decision, workers=None)
            if not decision.empty:
                self._ballot.add(replace(proposal, decision=decision))
        for failure in self._host.drain_failures():
            self._send(
                PolicyFailed(
                    policy=failure.policy,
                    hook=failure.hook,
                    step=failure.step,
                    worker=self._crew.worker,
                    detail=failure.detail,
                    off=failure.off,
                )
            )

    def _limits(self, ended: bool) -> Limits:
        elastic, size = self._spec.elastic, self._crew.size
        low, high = (elastic.low, self._spec.most_workers) if self._crew.elastic else (size, size)
        return Limits(min(low, size), max(high, size), self._longest, ended)

    def snapshot(self, trained: TrainingState, batch_size: int) -> Snapshot:
        """Where the run stands."""
        at, standing = self._progress.position, self._standing
        return Snapshot(
            step=at.step,
            epoch=at.epoch,
            samples=at.samples,
            seconds=standing.seconds,
            loss=standing.loss,
            workers=self._crew.size,
            batch_size=batch_size,
            lr=_rate(trained),
            micro_batch=self._progress.micro_batch or self._spec.means.micro_batch,
            signals=self.monitoring.signals,
            lr_at_start=standing.lr,
            batch_at_start=standing.batch_size,
        )

    # -- agreement ----------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> float:
        """1.0 where a hook of this worker waits for the others'."""
        return float(self._adapts and self._host.waiting)

    def votes(self) -> Sequence[float]:
        """This worker's part of a step's control vector, always of the same length."""
        return self._ballot.vote()

    def completed(self, control: ControlVector, voters: int, loss: float) -> None:
        """A step's reduction is in: ``voters`` workers had a vote."""
        standing = self._standing
        standing.seconds, standing.loss = control.seconds or standing.seconds, loss  # rank 0 may have had no samples
        standing.exchange_due = control.waiting > 0
        if control.unsure > 0:
            standing.resync_due, self.unsure = True, 0.0
        self._verdicts = self._ballot.settle(control.votes, voters)

    def behind_step(self, trained: TrainingState) -> bool:
        """Behind the user's lines of a step: do what was agreed on in it, and what comes about step by step.

        True where training is to end.
        """
        self._changer.ramp(trained)
        return self._apply(trained)

    def _apply(self, trained: TrainingState) -> bool:
        """Do what was agreed on, policy by policy. True where training is to end."""
        verdicts, self._verdicts = self._verdicts, []
        done: list[Decision] = []
        for verdict in verdicts:
            decision = verdict.agreed
            if decision is None:
                self._disagreed(verdict)
                continue
            self._standing.disagreements.pop(verdict.policy, None)
            try:
                if any(other.contradicts(decision) for other in done):
                    raise UserError("a thing changes once at a step", "another policy was first", "give it a cooldown")
                self._check_batch(decision)
                self._changer.make(decision, trained)
            except UserError as error:
                self._refused(verdict, str(error))
                continue
            done.append(decision)
            self._standing.asked = decision.workers or self._standing.asked
            self._tell(verdict, "applied", "" if verdict.own is None else verdict.own.note)
        if done:
            self._measured_s = -math.inf  # what comes of it is to be seen
        return any(decision.stop for decision in done)

    def _check_batch(self, decision: Decision) -> None:
        batch, longest = decision.batch_size, self._longest
        if batch is not None and longest is not None and batch > longest:
            raise UserError(f"a batch must not be longer than an epoch of {longest} samples", batch, "ask for less")

    def _disagreed(self, verdict: Agreed) -> None:
        standing, name = self._standing, verdict.policy
        if name == PROGRAM:
            self._tell(verdict, "disagreed", "every worker must ask session.change for the same")
            return
        standing.resync_due = True
        standing.disagreements[name] = standing.disagreements.get(name, 0) + 1
        self._tell(verdict, "disagreed", "")
        if verdict.own is not None:
            self._host.put_back(name, verdict.own.before)
        if standing.disagreements[name] >= MOST_DISAGREEMENTS:
            self._host.switch_off(name)
            detail = f"workers disagreed {MOST_DISAGREEMENTS} times in a row: a policy must not depend on the rank"
            step = self._progress.position.step
            self._send(PolicyFailed(name, "vote", step, self._crew.worker, detail, off=True))

    def _refused(self, verdict: Agreed, why: str) -> None:
        if verdict.own is None:
            return
        if verdict.policy != PROGRAM:
            self._host.put_back(verdict.policy, verdict.own.before)
        if self._last_refused.get(verdict.policy) != verdict.own.decision:  # it may ask again and again
            self._last_refused[verdict.policy] = verdict.own.decision
            self._tell(verdict, "refused", why)

    def after_step(self, trained: TrainingState, batch_size: int) -> None:
        """Behind a step and what it changed."""
        if self._adapts:
            self._call("after_step", trained, batch_size)
        now = self._progress.times.seconds
        if self.monitoring and self._crew.rank == 0 and now - self._measured_s >= MEASURED_EVERY_S:
            self._measured_s = now
            self._send(_measured(self.snapshot(trained, batch_size)))

    def _tell(self, verdict: Agreed, what: Literal["applied", "disagreed", "refused"], detail: str) -> None:
        """Of an elastic run every member tells it: whoever dies, it is known. Of several equal records one is kept."""
        own, step = verdict.own, self._progress.position.step
        if own is not None and (self._crew.elastic or self._crew.rank == 0):
            self._send(Decided(own.policy, step, own.decision.to_json(), _measured(own.cause), what, detail))

    # -- when workers come and go -------------------------------------------------------------------------------------

    def regrouped(self) -> None:
        """The workers are others now. What follows is done at the next boundary, where all are at the same place."""
        self._regrouped = True
        # Some may have gone on in the old version, some not: what they saw may differ. They say so in the next step, so
        # that all do the same behind it: who is where now, nobody knows.
        if not self._crew.planned and (self._adapts or self.monitoring):
            self.unsure = 1.0

    def _meet(self) -> None:
        """What hooks waited for is over: it was said among others."""
        if self._regrouped:
            self._regrouped = False
            self._host.cancel()
            self._standing.asked = None

    def _resync(self) -> None:
        """All go on from what rank 0 has measured, decided and proposed."""
        self._standing.resync_due = False
        own = json.dumps(self._told()).encode() if self._crew.rank == 0 else b""
        rows = self._crew.gather([float(byte) for byte in own])
        found = next((row for row in rows if row), None)
        if found is not None:  # else rank 0 was lost meanwhile, and the next step brings all here again
            self._take(json.loads(bytes(int(byte) for byte in found)), resumed=False)

    def _told(self) -> dict[str, Any]:
        """What is equal on workers that have seen the same."""
        return {
            "monitors": self.monitoring.to_json(),
            "policies": self._host.to_json(),
            "proposals": self._ballot.to_json(),
            "standing": asdict(self._standing),
        }

    def _take(self, told: Mapping[str, Any], *, resumed: bool) -> None:
        self.monitoring.take(told["monitors"])
        self._host.load(told["policies"], pardon=resumed)
        self._ballot.take(told["proposals"])
        self._standing = _AdapterState(**told["standing"])
        self._verdicts = []

    @property
    def remembered(self) -> dict[str, Any] | None:
        """The state that policies may go back to, with its tensors; it travels with ``to_json``."""
        return self._changer.remembered

    @remembered.setter
    def remembered(self, state: dict[str, Any] | None) -> None:
        self._changer.remembered = state

    def to_json(self) -> dict[str, Any]:
        """What a joiner or a checkpoint needs to go on from here."""
        return {**self._told(), "changes": self._changer.to_json()}

    def take(self, told: Mapping[str, Any], *, resumed: bool = False) -> None:
        """Go on from ``to_json`` of another worker, of this one earlier, or (``resumed``) of a checkpoint."""
        if resumed:
            standing = {**told["standing"], "began": False, "disagreements": {}, "asked": None, "resync_due": False}
            told = {**told, "standing": standing}
        self._take(told, resumed=resumed)
        self._changer.take(told["changes"])


def _rate(trained: TrainingState) -> float:
    return float(trained.optimizer.param_groups[0].get("lr", 0.0))


def _measured(at: Snapshot) -> Measured:
    return Measured(
        step=at.step,
        epoch=at.epoch,
        samples=at.samples,
        seconds=at.seconds,
        workers=at.workers,
        batch_size=at.batch_size,
        lr=at.lr,
        signals={name: (signal.value, signal.error) for name, signal in at.signals.items()},
    )
