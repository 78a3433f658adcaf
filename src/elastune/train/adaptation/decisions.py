"""From a proposal of the program or a policy, by the vote on it, to the change of the run or its refusal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from elastune.adapt.policies.base import MOST
from elastune.adapt.policies.host import PolicyHost, Proposal
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

_ABSTENTION = [0.0] * VOTE_LENGTH
PROGRAM = "program"  # the name under which the requests of ``session.change`` are proposed

MOST_DISAGREEMENTS = 3  # in a row: afterwards the policy is switched off


class Decisions:
    """Takes each proposal from its author over the vote to its application or refusal, and records it in the journal.

    Attributes:
        longest_batch: The number of samples of an epoch, once it is known.
        differ: Workers have just decided differently, so they have not seen the same.
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
        self._proposals = OpenProposals(policies)
        self._agreed: list[VoteResult] = []  # in the newest step, or between epochs
        self._snapshot: Snapshot | None = None  # before the decisions, if a decision is not this worker's proposal
        self._disagreements: dict[str, int] = {}  # in a row, by policy
        self._requested_workers: int | None = None  # requested, not there yet
        self._requested_mesh: str | None = None  # requested, not there yet
        self._last_refused: dict[str, Decision] = {}
        self._bounds_reported: list[str] = []  # policies whose requests beyond the bounds were recorded

    # -- proposals and votes ------------------------------------------------------------------------------------------

    def propose(self, proposal: Proposal) -> None:
        """Have a proposal voted on, without the parts that were requested already."""
        decision = proposal.decision
        if decision.workers == self._requested_workers:
            decision = replace(decision, workers=None)
        if not decision.empty:
            self._proposals.add(replace(proposal, decision=decision))

    def collect(self) -> None:
        """Take over the proposals, refusals and failures of the policies' hooks."""
        for proposal in self._host.drain_proposals():
            self.propose(proposal)
        for refused in self._host.drain_refusals():
            if refused.policy not in self._bounds_reported:
                self._bounds_reported.append(refused.policy)
                self._journal(VoteResult(refused.policy, None, refused), "refused", refused.note)
        for failed in self._host.drain_failures():
            self._journal_failure(failed.policy, failed.hook, failed.step, failed.detail, failed.off)

    def refuse(self, proposal: Proposal, why: str) -> None:
        """Record that nothing comes of ``proposal``, once where it is repeated."""
        self._refused(VoteResult(proposal.policy, proposal.decision, proposal), why)

    def vote(self) -> Sequence[float]:
        """This worker's votes; always of the same length."""
        return self._proposals.vote()

    def count_votes(self, sums: Sequence[float], voters: int) -> None:
        """Take in the ``sums`` of the votes of ``voters`` workers; ``apply`` does what was agreed on."""
        self._agreed = self._proposals.count_votes(sums, voters)

    def workers_changed(self) -> None:
        """Note that the requested workers have come, or others have gone."""
        self._requested_workers = self._requested_mesh = None

    # -- results of votes ---------------------------------------------------------------------------------------------

    def apply(self, trained: TrainingState, stand: Callable[[], Snapshot]) -> list[Decision]:
        """Apply what was agreed on, policy by policy, and record the outcome in the journal.

        Args:
            trained: What the run trains.
            stand: Returns the state of the run, for the record of a decision that this worker did not propose.

        Returns:
            The decisions that were applied.
        """
        if not self._agreed:  # the usual case
            return []
        agreed, self._agreed = [new for result in self._agreed if (new := self._still_new(result, trained))], []
        done: list[Decision] = []
        self._snapshot = stand() if any(result.own_proposal is None for result in agreed) else None
        for result in agreed:
            if result.decision is None:
                self._disagreed(result)
                continue
            self._disagreements.pop(result.policy, None)
            try:
                self._check(result.decision, done)
                self._applier.apply(result.decision, trained, result.policy)
            except UserError as error:
                self._refused(result, str(error))
                continue
            done.append(result.decision)
            self._requested_workers = result.decision.workers or self._requested_workers
            self._requested_mesh = result.decision.mesh or self._requested_mesh
            self._journal(result, "applied", "" if result.own_proposal is None else result.own_proposal.note)
        return done

    def _still_new(self, result: VoteResult, trained: TrainingState) -> VoteResult | None:
        """``result`` without the parts that hold already or were requested; None if nothing else is in it.

        A vote takes a step, and an exchange of policies another one. A policy that asked again meanwhile, because it
        still saw the old state, has asked once.
        """
        decision = result.decision
        if decision is None:
            return result
        of_policy = result.policy != PROGRAM
        if of_policy and decision.batch_size is not None and decision.batch_size == self._progress.batch_size:
            return None  # otherwise the learning rate would follow the batch twice
        holds = {
            "workers": self._requested_workers,  # not the present number: after a loss some workers may not know it yet
            "mesh": self._requested_mesh,
            "topology": self._applier.topology,
            "sync": trained.active_sync.coming,
        }
        same = [name for name, value in holds.items() if value is not None and getattr(decision, name) == value]
        old: dict[str, Any] = dict.fromkeys(same)
        if not old:
            return result
        rest = replace(decision, **old)
        proposal = result.own_proposal and replace(
            result.own_proposal, decision=replace(result.own_proposal.decision, **old)
        )
        return None if rest.empty else replace(result, decision=rest, own_proposal=proposal)

    def _check(self, decision: Decision, done: Sequence[Decision]) -> None:
        if any(other.contradicts(decision) for other in done):
            raise UserError("a thing changes once at a step", "another policy was first", "give it a cooldown")
        batch, longest = decision.batch_size, self.longest_batch
        if batch is not None and longest is not None and batch > longest:
            raise UserError(f"a batch must not be longer than an epoch of {longest} samples", batch, "ask for less")

    def _disagreed(self, result: VoteResult) -> None:
        name = result.policy
        if name == PROGRAM:
            prefix = "" if result.own_proposal else f"rank {self._workers.rank} asked for nothing, another did; "
            self._journal(result, "disagreed", f"{prefix}every worker must ask session.change for the same")
            return
        self.differ = True
        self._disagreements[name] = self._disagreements.get(name, 0) + 1
        self._journal(result, "disagreed", "")
        if result.own_proposal is not None:
            self._host.revert_proposal(name, result.own_proposal.before)
        if self._disagreements[name] >= MOST_DISAGREEMENTS:
            self._host.switch_off(name)
            detail = f"workers disagreed {MOST_DISAGREEMENTS} times in a row: a policy must not depend on the rank"
            self._journal_failure(name, "vote", self._progress.position.step, detail, off=True)

    def _refused(self, result: VoteResult, why: str) -> None:
        if result.own_proposal is not None and result.policy != PROGRAM:
            self._host.revert_proposal(result.policy, result.own_proposal.before)
        if result.decision is not None and self._last_refused.get(result.policy) != result.decision:
            self._last_refused[result.policy] = result.decision  # a policy may repeat its request
            self._journal(result, "refused", why)

    # -- journal ------------------------------------------------------------------------------------------------------

    def _journal(self, result: VoteResult, outcome: Literal["applied", "disagreed", "refused"], detail: str) -> None:
        """Record the outcome of a vote.

        In an elastic run every member that proposed it sends it, and one record is kept.

        In any other run only rank 0's records are kept, so rank 0 records the proposals of others, too.
        """
        proposal, step = result.own_proposal, self._progress.position.step
        if proposal is not None and (self._workers.elastic or self._workers.rank == 0):
            self._send(
                Decided(proposal.policy, step, proposal.decision.to_json(), measured(proposal.cause), outcome, detail)
            )
        elif proposal is None and not self._workers.elastic and self._workers.rank == 0:
            assert self._snapshot is not None
            decision = (result.decision or Decision()).to_json()
            self._send(Decided(result.policy, step, decision, measured(self._snapshot), outcome, detail))

    def _journal_failure(self, policy: str, hook: str, step: int, detail: str, off: bool) -> None:
        self._send(PolicyFailed(policy, hook, step, self._workers.worker, detail, off))

    # -- for joiners and checkpoints ----------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The state that is equal on workers that have seen the same."""
        return {
            "proposals": self._proposals.to_json(),
            "disagreements": self._disagreements,
            "asked_workers": self._requested_workers,
            "asked_mesh": self._requested_mesh,
            "reported_bounds": self._bounds_reported,
        }

    def load(self, state: Mapping[str, Any], *, resumed: bool) -> None:
        """Go on from ``to_json``. ``resumed``: in another run, whose policies may have been fixed."""
        self._proposals.load(state["proposals"])
        self._disagreements = {} if resumed else dict(state["disagreements"])
        self._requested_workers = None if resumed else state["asked_workers"]
        self._requested_mesh = None if resumed else state.get("asked_mesh")
        self._bounds_reported = [] if resumed else list(state["reported_bounds"])
        self._agreed = []


class DecisionApplier:
    """Applies decisions to a worker's run; every worker applies the same ones at the same step boundary.

    Attributes:
        remembered: A state to go back to. Joiners and checkpoints take it over.
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
        """The topology that the run asks for now, as decisions name it."""
        return str(self._routing.requested_topology)

    def apply(self, decision: Decision, trained: TrainingState, policy: str = "") -> None:
        """Apply all of ``decision``, which ``policy`` has made.

        Raises:
            UserError: A part of it is impossible; then nothing of it was applied.
        """
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
        """Apply the next part of each ramp, after a step."""
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
        """Restore weights, optimizer and monitors as remembered; learning rates and the place in the data stay."""
        assert self.remembered is not None
        tensors: Tensors = {}
        tree = to_tree(self.remembered["trained"], tensors)
        good = from_tree(tree, {name: t.clone() for name, t in tensors.items()})
        now = trained.state()
        optimizer = {**good["optimizer"], "param_groups": now["optimizer"]["param_groups"]}
        trained.load_whole({**now, "model": good["model"], "optimizer": optimizer}, "what the run remembered")
        self._monitoring.load(json.loads(self.remembered["monitors"]))

    def to_json(self) -> list[dict[str, Any]]:
        """The running ramps, for a joiner or a checkpoint; ``remembered`` travels beside it."""
        return [asdict(ramp) for ramp in self._ramps]

    def load(self, ramps: list[dict[str, Any]]) -> None:
        """Go on from ``to_json``."""
        self._ramps = [Ramp(**ramp) for ramp in ramps]


def wished(batch_size: int | None, lr: float | None) -> Decision:
    """The decision that ``session.change`` asks for. Raises ``UserError`` for an invalid value."""
    whole = isinstance(batch_size, int) and not isinstance(batch_size, bool)
    if batch_size is not None and not (whole and 1 <= batch_size <= MOST):
        raise UserError("a batch holds a whole number of samples, at least 1", batch_size, "session.change(...)")
    number = isinstance(lr, int | float) and not isinstance(lr, bool)
    if lr is not None and not (number and math.isfinite(lr) and lr >= 0):
        raise UserError("a learning rate must be finite and not negative", lr, "session.change(lr=0.1)")
    return Decision(batch_size=batch_size, lr=None if lr is None else float(lr))


class OpenProposals:
    """The proposals of the program and of each policy that were not voted on yet.

    In each step one proposal of the program and one of each policy travel as votes. The program always has a vote: the
    length of the control vector is fixed before it is known whether the program will use its vote.
    """

    def __init__(self, policies: Sequence[str]) -> None:
        self._open: dict[str, list[Proposal]] = {name: [] for name in (PROGRAM, *policies)}
        self.abstention = _ABSTENTION * len(self._open)

    def add(self, proposal: Proposal) -> None:
        """Add a proposal to be voted on."""
        self._open[proposal.policy].append(proposal)

    def vote(self) -> list[float]:
        """This worker's votes in the next step: the program's, then policy by policy."""
        if not any(self._open.values()):
            return self.abstention
        return [value for queue in self._open.values() for value in (vote(queue[0].decision) if queue else _ABSTENTION)]

    def count_votes(self, sums: Sequence[float], voters: int) -> list[VoteResult]:
        """The results of a vote of ``voters`` workers, from the sums of their votes.

        Without any vote there is no result.
        """
        results = []
        for place, (name, proposals) in enumerate(self._open.items()):
            part = sums[place * VOTE_LENGTH : (place + 1) * VOTE_LENGTH]
            if proposals or any(part):
                results.append(VoteResult(name, outcome(part, voters), proposals.pop(0) if proposals else None))
        return results

    def to_json(self) -> list[dict[str, Any]]:
        """The open proposals."""
        return [
            {**asdict(replace(p, decision=Decision())), "decision": p.decision.to_json()}
            for proposals in self._open.values()
            for p in proposals
        ]

    def load(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Go on from ``to_json``, without proposals of policies that no longer exist."""
        for proposals in self._open.values():
            proposals.clear()
        for p in entries:
            if p["policy"] in self._open:
                cause = Snapshot.from_json(p["cause"])
                self.add(Proposal(**{**p, "decision": Decision(**p["decision"]), "cause": cause}))


@dataclass(frozen=True)
class VoteResult:
    """The result of a vote.

    Attributes:
        policy: The policy that proposed the change; or the program.
        decision: The decision of all workers; None if they decided differently.
        own_proposal: The proposal of this worker, if it had one.
    """

    policy: str
    decision: Decision | None
    own_proposal: Proposal | None


def measured(at: Snapshot) -> Measured:
    """The record of the snapshot ``at``."""
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
