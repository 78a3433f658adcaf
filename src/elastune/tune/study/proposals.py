"""The search of a study, asked in the background: a proposal may take seconds, in which trials want to be heard."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from itertools import count

from elastune.core.journal.records import Entry, ProposalAsked, Record, TrialFinished, TrialStarted, WarmStarted
from elastune.tune.search.suggester import Estimates, SearchReplay, Suggester, Suggestion

WAIT_S = 0.01  # most proposals are there by then; the loop looks again this often while one is not


class Proposals:
    """Asks ``suggester``, one proposal at a time, in a thread of its own, or (``inline``) at once.

    What it is told meanwhile it hears after the proposal: nobody else may use the suggester. ``note`` hears of every
    moment at which a proposal is asked for, before it is.
    """

    def __init__(
        self, suggester: Suggester, *, inline: bool, note: Callable[[ProposalAsked], None] = lambda record: None
    ) -> None:
        self.note = note
        self._suggester = suggester
        self._thread = None if inline else ThreadPoolExecutor(1, "proposals")
        self._request: Future[Suggestion | None] | None = None
        self._spare_proposals: list[Suggestion] = []  # proposals that came when something else was wanted
        self._unsent_results: list[tuple[int, TrialFinished]] = []

    @property
    def asking(self) -> bool:
        """Whether a proposal is on its way: ask again."""
        return self._request is not None

    def ready(self) -> bool:
        """As ``Suggester.ready``."""
        return self.asking or bool(self._spare_proposals) or self._suggester.ready()

    def ask(self, estimates: Estimates, paused: Collection[int] = ()) -> Suggestion | None:
        """The next configuration; None while it is on its way (``asking``), else once a grid is exhausted.

        ``estimates``: what open trials are expected to reach, and by how much they break constraints; ``paused``: which
        of them have no workers. Raises as ``Suggester.ask``.
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
        """To tell the search its journal again, before the first proposal; ``finish_replay`` says when that is done.

        ``since``: the first trial that the search is told of.
        """
        found = SearchReplay(self._suggester, [entry.record for entry in entries], "open")
        self._suggester.next_number = since
        return found

    def finish_replay(self, replay: SearchReplay) -> None:
        """Trials that never finished stay open, and what was asked for and never began is proposed next."""
        replay.finish()
        self._spare_proposals.extend(one for one in replay.pending if self._suggester.is_open(one.number))

    def learn(self, earlier: WarmStarted) -> None:
        """As ``Suggester.learn``, before the first proposal."""
        self._suggester.learn(earlier)

    def tell(self, number: int, finished: TrialFinished) -> None:
        """As ``Suggester.tell``."""
        self._unsent_results.append((number, finished))
        if self._request is None:
            self._catch_up()

    def close(self) -> None:
        """Wait for a proposal that is on its way, and let go of the search's files. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown()
            self._request = None
            self._catch_up()

    def _wait(self) -> None:
        """Keep the proposal that is on its way for later: nobody else may use the suggester."""
        if self._request is not None and (found := self._collect()) is not None:
            self._spare_proposals.append(found)

    def _collect(self) -> Suggestion | None:
        assert self._request is not None
        asked, error = self._request, self._request.exception()
        self._request = None
        self._catch_up()
        if error is not None:
            raise error
        return asked.result()

    def _catch_up(self) -> None:
        while self._unsent_results:
            self._suggester.tell(*self._unsent_results.pop(0))


class NoProposals(Proposals):
    """For loops whose trials are all given: numbers, and nothing to propose.

    ``before``: what the journal tells already, whose trials keep their numbers, and those that were asked for, too.
    """

    def __init__(self, before: Iterable[Entry] = ()) -> None:
        told = (entry.record for entry in before)
        taken = [one.trial for one in told if isinstance(one, TrialStarted | ProposalAsked)]
        self._numbers = count(max(taken, default=-1) + 1)

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
    """There is no search that would have to be told."""

    def __init__(self) -> None:
        pass

    def hear(self, record: Record, estimates: Callable[[], Estimates] = dict) -> Suggestion | None:
        return None
