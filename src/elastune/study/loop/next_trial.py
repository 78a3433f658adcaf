"""Which trial comes next: what was cut off, what the schedule says, what the search proposes."""

from __future__ import annotations

from elastune.journal.trials import TrialTable
from elastune.search.stopping.schedule import FixedTrial, ForkTrial, NewTrial, Resume
from elastune.study.loop.async_suggester import Proposals
from elastune.study.loop.budget import Budget
from elastune.study.loop.decisions import Decisions
from elastune.study.loop.experiment import Experiment, PreparedTrial

REPEATS = 30  # suggestions in a row that were trained already: the space holds hardly more


class NextTrial:
    """Chooses. ``awaits``: a proposal is on its way. ``exhausted``: the search has none any more."""

    def __init__(
        self, experiment: Experiment, decisions: Decisions, proposals: Proposals, table: TrialTable, budget: Budget
    ) -> None:
        self.awaits = False
        self.exhausted = False
        self._experiment = experiment
        self._decisions = decisions
        self._proposals = proposals
        self._table = table
        self._budget = budget

    def choose(self) -> PreparedTrial | None:
        """The trial that is to start, or to go on, next; None: there is none now."""
        self.awaits = False
        schedule = self._decisions.schedule
        for number in self._table.cut_off:
            life = self._table.trials[number]
            if life.started.phase == schedule.phase:
                return self._experiment.again(life, "it had been cut off", life.until_epoch, cut_off=True)
        fresh = not self._budget.spent() and (not schedule.proposes or self._may_propose())
        match schedule.next(fresh):
            case Resume(trial=number, reason=reason, epoch=epoch):
                return self._experiment.again(self._table.trials[number], reason, epoch)
            case FixedTrial() as fixed:
                return self._experiment.fixed(self._proposals.reserve(), fixed)
            case ForkTrial(parent=parent, params=params, epoch=epoch):
                found = self._experiment.new(self._proposals.adopt(params), epoch, parent)
                return found if isinstance(found, PreparedTrial) else None
            case NewTrial(epoch=epoch):
                proposed = self._proposed(epoch)
                return self.choose() if proposed is None and self.exhausted else proposed
        return None

    def _may_propose(self) -> bool:
        return not self.exhausted and self._proposals.ready()

    def _proposed(self, until_epoch: int | None) -> PreparedTrial | None:
        """A trial that the search proposes; None where it has no proposal yet, or none any more."""
        for _ in range(REPEATS):
            suggestion = self._proposals.ask(self._decisions.estimates(), self._table.paused)
            if suggestion is None:
                self.awaits = self._proposals.asking
                self.exhausted = not self.awaits
                return None
            found = self._experiment.new(suggestion, until_epoch)
            if isinstance(found, PreparedTrial):
                return found
            self._proposals.tell(suggestion.number, found)  # the same was trained already
        self.exhausted = True
        return None
