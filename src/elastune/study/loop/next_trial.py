"""Which trial comes next: what was cut off, what the schedule says, what the search proposes."""

from __future__ import annotations

from dataclasses import replace

from elastune.core.clock import Clock
from elastune.journal.trials import TrialTable
from elastune.search.stopping.schedule import FixedTrial, ForkTrial, NewTrial, Resume
from elastune.study.allocation.holding import Holding
from elastune.study.loop.async_suggester import Proposals
from elastune.study.loop.budget import Budget
from elastune.study.loop.decisions import Decisions
from elastune.study.loop.experiment import Experiment, PreparedTrial

REPEATS = 30  # suggestions in a row that were trained already: the space holds hardly more


class NextTrial:
    """Chooses. ``awaits``: a proposal is on its way. ``exhausted``: the search has none any more. ``holding``: who is
    held back, by ``clock``; None: whoever was goes on like others that were cut off."""

    def __init__(
        self,
        experiment: Experiment,
        decisions: Decisions,
        proposals: Proposals,
        table: TrialTable,
        budget: Budget,
        clock: Clock,
        holding: Holding | None = None,
    ) -> None:
        self.awaits = False
        self.exhausted = False
        self._experiment = experiment
        self._decisions = decisions
        self._proposals = proposals
        self._table = table
        self._budget = budget
        self._clock = clock
        self._holding = holding
        self._held: PreparedTrial | None = None

    def choose(self) -> PreparedTrial | None:
        """The trial that is to start, or to go on, next; None: there is none now."""
        self.awaits = False
        schedule = self._decisions.schedule
        for number in self._table.cut_off:
            life = self._table.trials[number]
            if life.started.phase == schedule.phase and not self._waits(number):
                why = "it had been cut off" if self._held_since_s(number) is None else "held back for long enough"
                return self._experiment.again(life, why, life.until_epoch, cut_off=True)
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
        return self._held_back()

    def waited_s(self, number: int) -> float:
        """How long a trial has been held back."""
        since_s = self._held_since_s(number)
        return 0.0 if since_s is None else self._clock.wall() - since_s

    def _held_since_s(self, number: int) -> float | None:
        return None if self._holding is None else self._holding.since_s(number)

    def _waits(self, number: int) -> bool:
        return self._holding is not None and self._holding.waits(number, self._clock.wall())

    def _held_back(self) -> PreparedTrial | None:
        """The shortest of those that are held back: nobody else wants to go on. The same, while it is the same."""
        for number in self._holding.waiting if self._holding is not None else ():
            if number in self._table.cut_off:
                if self._held is None or self._held.number != number:
                    life = self._table.trials[number]
                    why = "held back until workers were idle"
                    self._held = replace(self._experiment.again(life, why, life.until_epoch, cut_off=True), last=True)
                return self._held
        self._held = None
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
