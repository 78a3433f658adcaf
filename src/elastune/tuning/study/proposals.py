"""Proposals of a study's search in the background: a proposal may take seconds, in which the study loop must run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from itertools import count

from elastune.core.journal.records import Entry, ProposalAsked, Record, TrialFinished, TrialStarted, WarmStarted
from elastune.tuning.search.suggester import Estimates, SearchReplay, Suggester, Suggestion

WAIT_S = 0.01  # most proposals are ready by then; while one is not, the loop checks again after so long


class Proposals:
    """Requests proposals from ``suggester``, one at a time, in a thread of its own, or (``inline``) at once.

    Only this object may use the suggester. Results that come while a proposal is computed reach the suggester after it.

    Args:
        suggester: The search.
        inline: Compute proposals in the calling thread.
        note: Receives a record of every request, before the request is made.
    """

    def __init__(
        self, suggester: Suggester, *, inline: bool, note: Callable[[ProposalAsked], None] = lambda record: None
    ) -> None:
        self.note = note
        self._suggester = suggester
        self._thread = None if inline else ThreadPoolExecutor(1, "proposals")
        self._request: Future[Suggestion | None] | None = None
        self._spare_proposals: list[Suggestion] = []  # proposals that came when they were not needed
        self._unsent_results: list[tuple[int, TrialFinished]] = []

    @property
    def asking(self) -> bool:
        """Whether a proposal is being computed: call ``ask`` again."""
        return self._request is not None

    def ready(self) -> bool:
        """As ``Suggester.ready``."""
        return self.asking or bool(self._spare_proposals) or self._suggester.ready()

    def ask(self, estimates: Estimates, paused: Collection[int] = ()) -> Suggestion | None:
        """Return the next configuration; None while it is being computed (``asking``), or once a grid is exhausted.

        ``estimates`` are the expected values and violations of open trials, ``paused`` the trials without workers.
        Raises as ``Suggester.ask``.
        """
        if self._spare_proposals:
            return self._spare_proposals.pop(0)
        if self._request is None:
            self.note(ProposalAsked(self._suggester.next_number))
            self._suggester.expect(estimates, paused)
            if self._thread is None:
                return self._suggester.ask()
            self._request = self._thread.submit(self._suggester.ask)
        return self._collect() if wait_for([self._request], WAIT_S).done else None

    def adopt(self, params: Mapping[str, object]) -> Suggestion:
        """As ``Suggester.adopt``."""
        self._wait()
        return self._suggester.adopt(params)

    def reserve(self) -> int:
        """As ``Suggester.reserve``."""
        self._wait()
        return self._suggester.reserve()

    def replay(self, entries: Sequence[Entry], since: int = 0) -> SearchReplay:
        """Return a replay of the journal into the search, before the first proposal; ``finish_replay`` ends it.

        ``since``: the first trial that the search learns of.
        """
        search_replay = SearchReplay(self._suggester, [entry.record for entry in entries], "open")
        self._suggester.next_number = since
        return search_replay

    def finish_replay(self, replay: SearchReplay) -> None:
        """End a replay. Unfinished trials stay open, and requested proposals whose trials never began come next."""
        replay.finish()
        self._spare_proposals.extend(
            suggestion for suggestion in replay.pending if self._suggester.is_open(suggestion.number)
        )

    def learn(self, earlier: WarmStarted) -> None:
        """As ``Suggester.learn``, before the first proposal."""
        self._suggester.learn(earlier)

    def tell(self, number: int, finished: TrialFinished) -> None:
        """As ``Suggester.tell``."""
        self._unsent_results.append((number, finished))
        if self._request is None:
            self._catch_up()

    def close(self) -> None:
        """Wait for a proposal that is being computed, and end the thread. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown()
            self._request = None
            self._catch_up()

    def _wait(self) -> None:
        """Wait for the proposal that is being computed, and keep it for later."""
        if self._request is not None and (suggestion := self._collect()) is not None:
            self._spare_proposals.append(suggestion)

    def _collect(self) -> Suggestion | None:
        assert self._request is not None
        request, error = self._request, self._request.exception()
        self._request = None
        self._catch_up()
        if error is not None:
            raise error
        return request.result()

    def _catch_up(self) -> None:
        while self._unsent_results:
            self._suggester.tell(*self._unsent_results.pop(0))


class NoProposals(Proposals):
    """Proposals of a loop whose trials all have fixed settings: it only gives out trial numbers.

    ``before`` is the journal so far: its trials and requested proposals keep their numbers.
    """

    def __init__(self, before: Iterable[Entry] = ()) -> None:
        records = (entry.record for entry in before)
        numbers = [record.trial for record in records if isinstance(record, TrialStarted | ProposalAsked)]
        self._numbers = count(max(numbers, default=-1) + 1)

    @property
    def asking(self) -> bool:
        return False

    def ready(self) -> bool:
        return False

    def reserve(self) -> int:
        return next(self._numbers)

    def replay(self, entries: Sequence[Entry], since: int = 0) -> SearchReplay:
        return _NoReplay()

    def finish_replay(self, replay: SearchReplay) -> None:
        pass

    def tell(self, number: int, finished: TrialFinished) -> None:
        pass

    def close(self) -> None:
        pass


class _NoReplay(SearchReplay):
    """A replay without a search: it ignores all records."""

    def __init__(self) -> None:
        pass

    def observe(self, record: Record, estimates: Callable[[], Estimates] = dict) -> Suggestion | None:
        return None
