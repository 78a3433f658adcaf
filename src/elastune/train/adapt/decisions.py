"""What the program and its policies ask for: from the proposal, by the vote on it, to the change or its refusal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from elastune.core.errors import UserError
from elastune.core.signals import Decision, Snapshot
from elastune.elastic.worker.group import WorkerGroup
from elastune.journal.records import Decided, Measured, PolicyFailed, Record
from elastune.policies.runtime.host import PolicyHost, Proposal
from elastune.train.adapt.agreement import PROGRAM, Agreed, Agreement
from elastune.train.adapt.apply import DecisionApplier
from elastune.train.progress import Progress
from elastune.train.training_state import TrainingState

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
        self._agreement = Agreement(policies)
        self._agreed: list[Agreed] = []  # in the newest step, or between epochs
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
                self._journal(Agreed(refused.policy, None, refused), "refused", refused.note)
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

    def _still_new(self, each: Agreed, trained: TrainingState) -> Agreed | None:
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
            "workers": self._asked_workers or self._workers.size,
            "mesh": self._asked_mesh,
            "topology": self._applier.topology,
            "sync": trained.in_use.coming,
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

    def _disagreed(self, each: Agreed) -> None:
        name = each.policy
        if name == PROGRAM:
            here = "" if each.own else f"rank {self._workers.rank} asked for nothing, another did; "
            self._journal(each, "disagreed", f"{here}every worker must ask session.change for the same")
            return
        self.differ = True
        self._disagreements[name] = self._disagreements.get(name, 0) + 1
        self._journal(each, "disagreed", "")
        if each.own is not None:
            self._host.put_back(name, each.own.before)
        if self._disagreements[name] >= MOST_DISAGREEMENTS:
            self._host.switch_off(name)
            detail = f"workers disagreed {MOST_DISAGREEMENTS} times in a row: a policy must not depend on the rank"
            self._journal_failure(name, "vote", self._progress.position.step, detail, off=True)

    def _refused(self, each: Agreed, why: str) -> None:
        if each.own is not None and each.policy != PROGRAM:
            self._host.put_back(each.policy, each.own.before)
        if each.decision is not None and self._last_refused.get(each.policy) != each.decision:
            self._last_refused[each.policy] = each.decision  # it may ask again and again
            self._journal(each, "refused", why)

    # -- journal ------------------------------------------------------------------------------------------------------

    def _journal(self, each: Agreed, outcome: Literal["applied", "disagreed", "refused"], detail: str) -> None:
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
