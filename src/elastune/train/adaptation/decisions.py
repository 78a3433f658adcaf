"""From a proposal of the program or a policy, by the vote on it, to the change of the run or its refusal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from elastune.adapt.policies.host import PolicyHost, Proposal
from elastune.adapt.policies.run import MOST
from elastune.core.communication import Topology
from elastune.core.decisions import VOTE_LENGTH, Decision, Snapshot, outcome, vote
from elastune.core.errors import UserError
from elastune.core.journal.records import Decided, Measured, PolicyFailed, Record
from elastune.core.mesh import Mesh
from elastune.core.mesh_choice import MeshChoice
from elastune.core.sync_plan import SyncPlan
from elastune.elastic.worker.group import WorkerGroup
from elastune.train.adaptation.monitoring import Monitoring
from elastune.train.adaptation.routing import Routing
from elastune.train.checkpoints.tree import Tensors, from_tree, to_tree
from elastune.train.progress import Progress
from elastune.train.schedules import Ramp, scale_rates, set_rates
from elastune.train.training_state import TrainingState

# [agreement] What this worker's program and policies propose, until it is voted on; each has a vote of its own.

_ABSTENTION = [0.0] * VOTE_LENGTH
PROGRAM = "program"  # proposes what the training function asks of ``session.change``


@dataclass(frozen=True)
class VoteResult:
    """What came of a vote.

    Attributes:
        policy: What was voted on is its proposal, or the program's.
        decision: What all workers decided; None where they decided differently.
        own: What this worker proposed, if anything.
    """

    policy: str
    decision: Decision | None
    own: Proposal | None


class OpenProposals:
    """Open proposals of the program and of each policy; of each one rides in a vote, the others in later ones.

    The program always has a vote: whether it will ever use it is not known when the length of a step's control vector
    must be.
    """

    def __init__(self, policies: Sequence[str]) -> None:
        self._open: dict[str, list[Proposal]] = {name: [] for name in (PROGRAM, *policies)}
        self.abstention = _ABSTENTION * len(self._open)

    def add(self, proposal: Proposal) -> None:
        """To be voted on."""
        self._open[proposal.policy].append(proposal)

    def vote(self) -> list[float]:
        """This worker's votes in the next step: the program's, then policy by policy."""
        if not any(self._open.values()):
            return self.abstention
        return [x for own in self._open.values() for x in (vote(own[0].decision) if own else _ABSTENTION)]

    def count_votes(self, sums: Sequence[float], voters: int) -> list[VoteResult]:
        """What came of the votes of ``voters`` workers, from their sums; nothing of a policy that nobody spoke for."""
        found = []
        for place, (name, own) in enumerate(self._open.items()):
            part = sums[place * VOTE_LENGTH : (place + 1) * VOTE_LENGTH]
            if own or any(part):
                found.append(VoteResult(name, outcome(part, voters), own.pop(0) if own else None))
        return found

    def to_json(self) -> list[dict[str, Any]]:
        """The open proposals."""
        return [
            {**asdict(replace(p, decision=Decision())), "decision": p.decision.to_json()}
            for own in self._open.values()
            for p in own
        ]

    def load(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Go on from ``to_json``, without what policies propose that there are no more."""
        for own in self._open.values():
            own.clear()
        for p in told:
            if p["policy"] in self._open:
                cause = Snapshot.from_json(p["cause"])
                self.add(Proposal(**{**p, "decision": Decision(**p["decision"]), "cause": cause}))


def wished(batch_size: int | None, lr: float | None) -> Decision:
    """The decision that ``session.change`` asks for. Raises ``UserError`` for what cannot be."""
    whole = isinstance(batch_size, int) and not isinstance(batch_size, bool)
    if batch_size is not None and not (whole and 1 <= batch_size <= MOST):
        raise UserError("a batch holds a whole number of samples, at least 1", batch_size, "session.change(...)")
    number = isinstance(lr, int | float) and not isinstance(lr, bool)
    if lr is not None and not (number and math.isfinite(lr) and lr >= 0):
        raise UserError("a learning rate must be finite and not negative", lr, "session.change(lr=0.1)")
    return Decision(batch_size=batch_size, lr=None if lr is None else float(lr))


# [apply] What a decision does to a worker's run: batch, learning rates, momentum, a state to go back to.


class DecisionApplier:
    """Applies decisions, the same ones at the same step boundary on every worker.

    Attributes:
        remembered: A state to go back to; joiners and checkpoints take it over.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        progress: Progress,
        monitoring: Monitoring,
        routing: Routing,
        meshes: MeshChoice | None = None,
    ) -> None:
        self._workers = workers
        self._routing = routing
        self._meshes = meshes or MeshChoice()
        self._monitoring = monitoring
        self._progress = progress
        self._ramps: list[Ramp] = []
        self.remembered: dict[str, Any] | None = None

    @property
    def topology(self) -> str:
        """What the run asks for now, as decisions have it."""
        return str(self._routing.asked)

    def apply(self, decision: Decision, trained: TrainingState, policy: str = "") -> None:
        """Do all of it, as ``policy`` has decided. Raises ``UserError`` with nothing done where a part cannot be."""
        progress, workers = self._progress, self._workers
        if decision.restore and self.remembered is None:
            raise UserError("a run goes back to what it remembers", "nothing yet", "let the policy remember first")
        if decision.micro_batch is not None and isinstance(trained.optimizer, torch.optim.LBFGS):
            raise UserError("LBFGS needs the whole batch in one pass", decision.micro_batch, "leave micro_batch alone")
        topology = None if decision.topology is None else Topology.parse(decision.topology)
        if topology is not None:
            self._routing.check(topology)
        if decision.sync is not None:
            why = "session.set_sync" if policy == PROGRAM else f"policy {policy}"
            trained.active_sync.want(SyncPlan.parse(decision.sync), why)
        if decision.workers is not None:
            workers.resize(decision.workers, f"policy {policy}")
        if decision.mesh is not None:
            self._meshes.refuse(mesh := Mesh.parse(decision.mesh))
            workers.reshape(mesh, f"policy {policy}")
        if decision.replace_rank is not None:
            workers.replace(decision.replace_rank)
        if decision.restore:
            self._restore(trained)
        if decision.batch_size is not None:
            progress.batch_size = decision.batch_size
        if decision.micro_batch is not None:
            progress.micro_batch = decision.micro_batch
        if decision.lr is not None:
            self._ramps = []
            set_rates(trained.optimizer, trained.schedulers, decision.lr)
        if decision.lr_factor is not None:
            ramp = Ramp(decision.lr_factor, max(1, decision.ramp_steps), 0, decision.correct_momentum)
            if decision.ramp_steps:
                self._ramps.append(ramp)
            else:
                self._scale(ramp, trained)
        if decision.remember:
            self._remember(trained)
        if topology is not None:
            self._routing.change(topology, trained, policy)

    def ramp(self, trained: TrainingState) -> None:
        """After a step: the next part of each ramp."""
        self._ramps = [left for ramp in self._ramps if (left := self._scale(ramp, trained)) is not None]

    def _scale(self, ramp: Ramp, trained: TrainingState) -> Ramp | None:
        factor, left = ramp.next()
        factors = [factor] * len(trained.optimizer.param_groups)
        scale_rates(trained.optimizer, trained.schedulers, factors, correct_momentum=ramp.correct_momentum)
        return left

    def _remember(self, trained: TrainingState) -> None:
        tensors: Tensors = {}
        tree = to_tree(trained.whole(), tensors)
        copies = from_tree(tree, {name: t.detach().clone() for name, t in tensors.items()})
        self.remembered = {"trained": copies, "monitors": json.dumps(self._monitoring.to_json())}

    def _restore(self, trained: TrainingState) -> None:
        """Weights, optimizer and monitors as remembered; learning rates stay, and so does the place in the data."""
        assert self.remembered is not None
        tensors: Tensors = {}
        tree = to_tree(self.remembered["trained"], tensors)
        good = from_tree(tree, {name: t.clone() for name, t in tensors.items()})
        now = trained.state()
        optimizer = {**good["optimizer"], "param_groups": now["optimizer"]["param_groups"]}
        trained.load_whole({**now, "model": good["model"], "optimizer": optimizer}, "what the run remembered")
        self._monitoring.load(json.loads(self.remembered["monitors"]))

    def to_json(self) -> list[dict[str, Any]]:
        """The ramps under way, for a joiner or a checkpoint; beside ``remembered``."""
        return [asdict(ramp) for ramp in self._ramps]

    def load(self, told: list[dict[str, Any]]) -> None:
        """Go on from ``to_json``."""
        self._ramps = [Ramp(**ramp) for ramp in told]


# [decisions] What the program and its policies ask for: from the proposal, by the vote on it, to the change or its refusal.

MOST_DISAGREEMENTS = 3  # in a row: policies that go on like this only cost time


class Decisions:
    """The decisions of one worker's run, on their way.

    Attributes:
        longest_batch: Samples of an epoch, once that is known.
        differ: Workers have just decided differently: they have not seen the same.
    """

    def __init__(
        self,
        host: PolicyHost,
        policies: Sequence[str],
        applier: DecisionApplier,
        workers: WorkerGroup,
        progress: Progress,
        send: Callable[[Record], None],
    ) -> None:
        self.longest_batch: int | None = None
        self.differ = False
        self._host = host
        self._applier = applier
        self._workers = workers
        self._progress = progress
        self._send = send
        self._agreement = OpenProposals(policies)
        self._agreed: list[VoteResult] = []  # in the newest step, or between epochs
        self._stood: Snapshot | None = None  # before they are applied, where another worker alone may have asked
        self._disagreements: dict[str, int] = {}  # in a row, by policy
        self._asked_workers: int | None = None  # they are on their way
        self._asked_mesh: str | None = None  # likewise
        self._last_refused: dict[str, Decision] = {}
        self._bounds_told: list[str] = []  # the policies that were told what workers there may be

    # -- proposals and votes ------------------------------------------------------------------------------------------

    def propose(self, proposal: Proposal) -> None:
        """Have a proposal voted on, without what is under way already."""
        decision = proposal.decision
        if decision.workers == self._asked_workers:
            decision = replace(decision, workers=None)
        if not decision.empty:
            self._agreement.add(replace(proposal, decision=decision))

    def collect(self) -> None:
        """Take over what the policies' hooks have come to."""
        for proposal in self._host.drain_proposals():
            self.propose(proposal)
        for refused in self._host.drain_refusals():
            if refused.policy not in self._bounds_told:
                self._bounds_told.append(refused.policy)
                self._journal(VoteResult(refused.policy, None, refused), "refused", refused.note)
        for failed in self._host.drain_failures():
            self._journal_failure(failed.policy, failed.hook, failed.step, failed.detail, failed.off)

    def vote(self) -> Sequence[float]:
        """This worker's votes; always of the same length."""
        return self._agreement.vote()

    def count_votes(self, sums: Sequence[float], voters: int) -> None:
        """The ``sums`` of the votes of ``voters`` workers are here; ``apply`` does what was agreed on."""
        self._agreed = self._agreement.count_votes(sums, voters)

    def workers_changed(self) -> None:
        """Those that were asked for have come, or others have gone."""
        self._asked_workers = self._asked_mesh = None

    # -- what comes of them -------------------------------------------------------------------------------------------

    def apply(self, trained: TrainingState, stand: Callable[[], Snapshot]) -> list[Decision]:
        """Do what was agreed on, policy by policy, and journal what came of it. Returns what was done.

        ``stand``: where the run stands, for a record of what this worker did not ask for itself.
        """
        if not self._agreed:  # as in most steps
            return []
        agreed, self._agreed = [new for each in self._agreed if (new := self._still_new(each, trained))], []
        done: list[Decision] = []
        self._stood = stand() if any(each.own is None for each in agreed) else None
        for each in agreed:
            if each.decision is None:
                self._disagreed(each)
                continue
            self._disagreements.pop(each.policy, None)
            try:
                self._check(each.decision, done)
                self._applier.apply(each.decision, trained, each.policy)
            except UserError as error:
                self._refused(each, str(error))
                continue
            done.append(each.decision)
            self._asked_workers = each.decision.workers or self._asked_workers
            self._asked_mesh = each.decision.mesh or self._asked_mesh
            self._journal(each, "applied", "" if each.own is None else each.own.note)
        return done

    def _still_new(self, each: VoteResult, trained: TrainingState) -> VoteResult | None:
        """``each`` without what is so already, or on its way; None where nothing else is in it.

        A vote takes a step, and an exchange of policies another. A policy that asked again meanwhile, since it still
        saw the old state, has asked once.
        """
        decision = each.decision
        if decision is None:
            return each
        of_policy = each.policy != PROGRAM
        if of_policy and decision.batch_size is not None and decision.batch_size == self._progress.batch_size:
            return None  # nor does the learning rate follow the batch twice
        holds = {
            "workers": self._asked_workers,  # not how many there are: after a loss some may not know that yet
            "mesh": self._asked_mesh,
            "topology": self._applier.topology,
            "sync": trained.active_sync.coming,
        }
        same = [name for name, value in holds.items() if value is not None and getattr(decision, name) == value]
        old: dict[str, Any] = dict.fromkeys(same)
        if not old:
            return each
        rest = replace(decision, **old)
        own = each.own and replace(each.own, decision=replace(each.own.decision, **old))
        return None if rest.empty else replace(each, decision=rest, own=own)

    def _check(self, decision: Decision, done: Sequence[Decision]) -> None:
        if any(other.contradicts(decision) for other in done):
            raise UserError("a thing changes once at a step", "another policy was first", "give it a cooldown")
        batch, longest = decision.batch_size, self.longest_batch
        if batch is not None and longest is not None and batch > longest:
            raise UserError(f"a batch must not be longer than an epoch of {longest} samples", batch, "ask for less")

    def _disagreed(self, each: VoteResult) -> None:
        name = each.policy
        if name == PROGRAM:
            here = "" if each.own else f"rank {self._workers.rank} asked for nothing, another did; "
            self._journal(each, "disagreed", f"{here}every worker must ask session.change for the same")
            return
        self.differ = True
        self._disagreements[name] = self._disagreements.get(name, 0) + 1
        self._journal(each, "disagreed", "")
        if each.own is not None:
            self._host.revert_proposal(name, each.own.before)
        if self._disagreements[name] >= MOST_DISAGREEMENTS:
            self._host.switch_off(name)
            detail = f"workers disagreed {MOST_DISAGREEMENTS} times in a row: a policy must not depend on the rank"
            self._journal_failure(name, "vote", self._progress.position.step, detail, off=True)

    def _refused(self, each: VoteResult, why: str) -> None:
        if each.own is not None and each.policy != PROGRAM:
            self._host.revert_proposal(each.policy, each.own.before)
        if each.decision is not None and self._last_refused.get(each.policy) != each.decision:
            self._last_refused[each.policy] = each.decision  # it may ask again and again
            self._journal(each, "refused", why)

    # -- journal ------------------------------------------------------------------------------------------------------

    def _journal(self, each: VoteResult, outcome: Literal["applied", "disagreed", "refused"], detail: str) -> None:
        """Of an elastic run every member that asked sends it: whoever dies, it is known, and one record is kept.

        Of any other run only rank 0's records are kept, so it tells what others asked for, too.
        """
        own, step = each.own, self._progress.position.step
        if own is not None and (self._workers.elastic or self._workers.rank == 0):
            self._send(Decided(own.policy, step, own.decision.to_json(), measured(own.cause), outcome, detail))
        elif own is None and not self._workers.elastic and self._workers.rank == 0:
            assert self._stood is not None
            asked = (each.decision or Decision()).to_json()
            self._send(Decided(each.policy, step, asked, measured(self._stood), outcome, detail))

    def _journal_failure(self, policy: str, hook: str, step: int, detail: str, off: bool) -> None:
        self._send(PolicyFailed(policy, hook, step, self._workers.worker, detail, off))

    # -- for joiners and checkpoints ----------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """What is equal on workers that have seen the same."""
        return {
            "proposals": self._agreement.to_json(),
            "disagreements": self._disagreements,
            "asked_workers": self._asked_workers,
            "asked_mesh": self._asked_mesh,
            "bounds_told": self._bounds_told,
        }

    def load(self, told: Mapping[str, Any], *, resumed: bool) -> None:
        """Go on from ``to_json``; ``resumed``: in another run, whose policies may have been fixed."""
        self._agreement.load(told["proposals"])
        self._disagreements = {} if resumed else dict(told["disagreements"])
        self._asked_workers = None if resumed else told["asked_workers"]
        self._asked_mesh = None if resumed else told.get("asked_mesh")
        self._bounds_told = [] if resumed else list(told["bounds_told"])
        self._agreed = []


def measured(at: Snapshot) -> Measured:
    """The record of a snapshot."""
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
