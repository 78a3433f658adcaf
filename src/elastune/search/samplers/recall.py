"""A search taken up from its journal: told again what it was told, in the same order, so that it goes on alike.

A proposal rests on what had been told when it was asked for, not on what was told until its trial began: others may
have ended meanwhile, or the controller may have died. So the journal holds that moment (``ProposalAsked``), and here
each trial is opened at it, with the estimates of then and what was dismissed on the way. Samplers are asked only for
what had been asked for and never came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from elastune.journal.entry import Entry
from elastune.journal.records import (
    ProposalAsked,
    Record,
    TrialFinished,
    TrialPaused,
    TrialResumed,
    TrialStarted,
    WarmStarted,
)
from elastune.search.samplers.suggest import Estimates, Suggester, Suggestion


class Recall:
    """Tells ``suggester``, which was not asked yet, the ``records`` of its journal, one by one.

    ``unfinished``: whether trials that never ended stay open, or nothing is learnt of them. ``pending``: proposals that
    were asked for and whose trials never began; they are open. Raises ``ValueError`` where the suggester was asked
    already.
    """

    def __init__(self, suggester: Suggester, records: Iterable[Record], unfinished: Literal["open", "drop"]) -> None:
        if suggester.next_number:
            raise ValueError("replay comes before the first ask")
        records = list(records)
        self.pending: list[Suggestion] = []
        self._suggester = suggester
        self._ended = {record.trial for record in records if isinstance(record, TrialFinished)}
        self._starts: dict[int, TrialStarted] = {}
        self._drops = unfinished == "drop"
        for record in records:
            if isinstance(record, TrialStarted) and record.phase == "search" and record.parent is None:
                self._starts.setdefault(record.trial, record)
        self._paused: set[int] = set()
        self._opened: set[int] = set()  # by the moment they were asked for; their starts say nothing new

    def hear(self, record: Record, estimates: Callable[[], Estimates] = dict) -> Suggestion | None:
        """The next record. ``estimates``: those of this moment. Returns a proposal that has to be made now."""
        suggester = self._suggester
        match record:
            case ProposalAsked(trial=number):
                suggester.expect(estimates(), self._paused)
                suggester.next_number = max(suggester.next_number, number)
                if number in self._starts:
                    self._opened.add(number)
                    self._reopen(self._starts[number])
                elif (found := suggester.ask()) is not None:
                    self.pending.append(found)
                    return found
            case TrialPaused(trial=number, cut_off=False):
                self._paused.add(number)
            case TrialResumed(trial=number):
                self._paused.discard(number)
            case TrialStarted(trial=number, phase=phase):
                self._paused.discard(number)
                suggester.next_number = max(suggester.next_number, number + 1)
                if number in self._opened:
                    self._opened.discard(number)
                elif phase == "search":
                    self._reopen(record)
            case WarmStarted():
                suggester.learn(record)
            case TrialFinished(trial=number) if suggester.is_open(number):
                suggester.tell(number, record)
        return None

    def finish(self) -> None:
        """There are no more."""
        for number in self._suggester.open_trials:
            if number in self._ended:  # it was started again after its end
                self._suggester.drop(number)

    def _reopen(self, record: TrialStarted) -> None:
        self._suggester.next_number = max(self._suggester.next_number, record.trial + 1)
        if record.trial in self._ended or not self._drops:
            self._suggester.reopen(record)


def replay(suggester: Suggester, entries: Iterable[Entry], *, unfinished: Literal["open", "drop"] = "drop") -> None:
    """Take up a study from its journal, before the first ``ask``: see ``Recall``.

    The numbers of trials that were lost, and of those that were not suggested, are not given out again.
    """
    records = [entry.record for entry in entries]
    recall = Recall(suggester, records, unfinished)
    for record in records:
        recall.hear(record)
    recall.finish()
