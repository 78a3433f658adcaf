"""The loop of a study: choose the next trial, start it, listen, judge, tell the search, until a phase is over.

Searches, frontiers, warm starts and simulations run on it. Its arguments differ: what is tried (``Experiment``), which
trials come next (``Schedule``, ``Proposals``), the pool of workers, and the clock.
Every event goes into the journal first. A loop that starts with a journal takes over the state of the earlier
controller: its trials go on with workers that survived, or wait to be resumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from elastune.core.clock import Clock
from elastune.core.errors import UserError
from elastune.core.journal.records import (
    AFTERWARDS,
    Adopted,
    ChangesAccepted,
    DataContext,
    Entry,
    LinkMeasured,
    ProposalAsked,
    Record,
    Regrouped,
    Reported,
    RunFailed,
    RunFinished,
    StartedFrom,
    StudyFinished,
    StudyStarted,
    TrialAdopted,
    TrialFinished,
    TrialPaused,
    TrialRegrouped,
    TrialReported,
    TrialResumed,
    TrialStarted,
    TrialStartedFrom,
    WarmStarted,
)
from elastune.core.journal.trials import TrialSummary, TrialTable
from elastune.core.run import CommandLine
from elastune.runtime.clusters.base import NoRoomError, SurvivingRun
from elastune.runtime.job.pool import JobEvent, Pool, SurvivingJob
from elastune.runtime.job.run import machine_context
from elastune.train.checkpoints.checkpoint import UNWRITABLE
from elastune.train.data.fingerprint import OTHER_DATA
from elastune.train.program.source import EDITED
from elastune.tune.search.schedule import FixedTrial, ForkTrial, NewTrial, Resume, Schedule
from elastune.tune.study.budget import Bounds, Budget, StopRules
from elastune.tune.study.experiment import Experiment, PreparedTrial
from elastune.tune.study.proposals import WAIT_S, Proposals
from elastune.tune.study.rebalancer import MakeRebalancer, Rebalancer, rungs_passed
from elastune.tune.study.retention import Keeper
from elastune.tune.study.trial_progress import HeldTrials
from elastune.tune.study.trial_results import UNREPORTED
from elastune.tune.study.trials import check_params

# [decisions] What the search makes of what happens: which trials are to pause and why, and what they promise.


class SearchState:
    """Tells ``schedule``, and others that take its place for a while, what happens to the trials of their phases.

    ``verdicts``: trial -> why it is to pause. ``held``: those of them that ``holding`` holds back, of which no schedule
    is told. ``results``: the values of the complete trials of the search, and of members that were trained like them.
    """

    def __init__(self, experiment: Experiment, schedule: Schedule, holding: HeldTrials | None = None) -> None:
        self.schedule = schedule
        self.verdicts: dict[int, str] = {}
        self.held: set[int] = set()
        self.results: dict[int, tuple[float, ...]] = {}
        self._holding = holding
        self._experiment = experiment
        self._search = schedule
        self._by_phase = {schedule.phase: schedule}
        self._judged = {schedule.phase, "member"}
        self._violations: dict[int, float] = {}

    def switch(self, schedule: Schedule) -> None:
        """Ask ``schedule`` from now on, and tell it of the trials of its phase."""
        self.schedule = self._by_phase[schedule.phase] = schedule

    def hear(self, record: Record, life: TrialSummary) -> None:
        """Take in what happened to the trial of ``life``, now or before."""
        number, phase = life.number, life.started.phase
        if isinstance(record, TrialFinished) and phase in self._judged and record.state == "complete":
            self.results[number] = self._values(self._experiment.for_search(life))
        if isinstance(record, TrialFinished):
            self.held.discard(number)
        if isinstance(record, TrialPaused) and (record.held or not record.cut_off):
            self.verdicts.pop(number, None)
            self.held.discard(number)
        schedule = self._by_phase.get(phase)
        if schedule is None:
            return
        match record:
            case TrialStarted():
                schedule.started(number, record.params, record.parent)
            case TrialReported(report=report):
                self._reported(schedule, life)
                self._hold(number, report, life.last_at)
            case TrialPaused(cut_off=False, epoch=epoch):
                schedule.paused(number, epoch)
            case TrialResumed(cut_off=False):
                schedule.resumed(number)
            case TrialFinished():
                found = self._experiment.for_search(life)
                values = self._values(found)
                valid = found.values and all(abs(value) < math.inf for value in values)
                schedule.ended(number, values if valid else None, max(found.violations.values(), default=0.0))

    def _reported(self, schedule: Schedule, life: TrialSummary) -> None:
        shown = self._experiment.intermediate(life) if schedule.proposes else None
        if shown is not None:
            self._violations[life.number] = shown.violation
            if verdict := schedule.reported(shown):
                self.verdicts.setdefault(life.number, verdict)

    def _hold(self, number: int, report: Reported, at: float) -> None:
        """See whether a trial that nobody stops is to leave its workers to shorter ones."""
        if self._holding is None or number in self.verdicts:
            return
        if why := self._holding.why(number, report, at):
            self.verdicts[number] = why
            self.held.add(number)

    def _values(self, found: TrialFinished) -> tuple[float, ...]:
        return tuple(found.values.get(o.name, math.nan) for o in self._experiment.objectives)

    def estimates(self) -> dict[int, tuple[tuple[float, ...], float]]:
        """What open trials are expected to end with, and by how much they break constraints."""
        return {n: (values, self._violations.get(n, 0.0)) for n, values in self._search.estimates().items()}

    def expected_values(self) -> dict[int, tuple[float, ...]]:
        """What trials ended with, or are expected to; smaller is better."""
        return {n: self._oriented(values) for n, values in {**self._search.estimates(), **self.results}.items()}

    def standing(self) -> dict[int, tuple[float, ...]]:
        """What the complete trials of the search ended with; smaller is better."""
        return {n: self._oriented(values) for n, values in self.results.items()}

    def _oriented(self, values: tuple[float, ...]) -> tuple[float, ...]:
        signs = [-1.0 if o.direction == "max" else 1.0 for o in self._experiment.objectives]
        return tuple(s * v for s, v in zip(signs, values, strict=True))


# [next trial] Which trial comes next: what was cut off, what the schedule says, what the search proposes.

REPEATS = 30  # suggestions in a row that were trained already: the space holds hardly more


class TrialChooser:
    """Chooses. ``awaits``: a proposal is on its way. ``exhausted``: the search has none any more. ``holding``: who is
    held back, by ``clock``; None: whoever was goes on like others that were cut off."""

    def __init__(
        self,
        experiment: Experiment,
        decisions: SearchState,
        proposals: Proposals,
        table: TrialTable,
        budget: Budget,
        clock: Clock,
        holding: HeldTrials | None = None,
    ) -> None:
        self.awaits = False
        self.exhausted = False
        self._experiment = experiment
        self._search_state = decisions
        self._proposals = proposals
        self._table = table
        self._budget = budget
        self._clock = clock
        self._holding = holding
        self._held: PreparedTrial | None = None

    def choose(self) -> PreparedTrial | None:
        """The trial that is to start, or to go on, next; None: there is none now."""
        self.awaits = False
        schedule = self._search_state.schedule
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
            suggestion = self._proposals.ask(self._search_state.estimates(), self._table.paused)
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


# [left trials] Trials that ran when their controller died: they go on with workers that have outlived it, or wait to be resumed.


def surviving_jobs(
    table: TrialTable, entries: Sequence[Entry], experiment: Experiment, now: float, to_pause: Collection[int]
) -> dict[int, SurvivingJob]:
    """Of the trials that ran at the end of ``entries``, those whose workers may train on at ``now``, since the epoch.

    That time counts as theirs: their workers were busy. In the order in which they began. ``to_pause``: those that were
    to pause by what they reported last.
    """
    found = {}
    for number in _by_beginning(entries, table.of("running")):
        life = table.trials[number]
        if (spec := experiment.left(life)) is not None:
            kept = _kept(entries, number)
            changed = any(isinstance(record, Regrouped | Adopted) for record in kept)
            stop_at = life.last_at if number in to_pause else None
            run = SurvivingRun(spec, kept, life.begun_at, stop_at)
            found[number] = SurvivingJob(run, _used(life, now)[1] if changed else None)
    return found


def _by_beginning(entries: Iterable[Entry], numbers: Collection[int]) -> list[int]:
    """``numbers`` in the order in which they were started or resumed last."""
    begun: dict[int, None] = {}
    for record in (entry.record for entry in entries):
        if isinstance(record, TrialStarted | TrialResumed) and record.trial in numbers:
            begun.pop(record.trial, None)
            begun[record.trial] = None
    return list(begun)


def cut_off(table: TrialTable, entries: Sequence[Entry], adopted: Collection[int]) -> list[TrialPaused]:
    """The ends, that nobody recorded, of the trials that ran at the end of ``entries`` and were not ``adopted``."""
    found = []
    last_at = max((entry.at for entry in entries if not isinstance(entry.record, AFTERWARDS)), default=0.0)
    for number in table.of("running"):
        if number not in adopted:
            life = table.trials[number]
            seconds, worker_seconds = _used(life, last_at)
            found.append(TrialPaused(number, life.epoch, seconds, worker_seconds, "its controller ended", cut_off=True))
    return found


def _used(life: TrialSummary, at: float) -> tuple[float, float]:
    """How long a trial had run ``at`` this time, since it was started or resumed last, and with how many workers."""
    seconds = max(at - life.begun_at, 0.0)
    whole = (life.average or life.first_workers) * (life.seconds + seconds)
    return seconds, max(whole - life.worker_seconds, 0.0)


def _kept(entries: Iterable[Entry], trial: int) -> list[Record]:
    """What its run has told since it was started or resumed last, as far as a study's journal has it."""
    found: list[Record] = []
    for record in (entry.record for entry in entries):
        match record:
            case TrialStarted(trial=number) | TrialResumed(trial=number) if number == trial:
                found = []
            case TrialReported(trial=number, report=told) if number == trial:
                found.append(told)
            case TrialRegrouped(trial=number, change=change) if number == trial:
                found.append(change)
            case TrialAdopted(trial=number, found=adopted) if number == trial:
                found.append(adopted)
    return found


# [earlier] Trials of earlier controllers, by their numbers in a study's journal.


def next_trial_number(entries: Iterable[Entry]) -> int:
    """Return the number of the first trial that is not in the journal."""
    told = (entry.record for entry in entries)
    return max((each.trial for each in told if isinstance(each, TrialStarted | ProposalAsked)), default=-1) + 1


def first_comparable_trial(entries: Iterable[Entry]) -> int:
    """Return the number of the first trial since the last change that was accepted; 0 where there was none."""
    told = (entry.record for entry in entries)
    return max((each.first_trial for each in told if isinstance(each, ChangesAccepted)), default=0)


def common_data(table: TrialTable) -> dict[str, Any] | None:
    """Return the training set that all trials since the last change had, as a run's specification has it.

    None where there are fewer than two, or their settings decide what data they have.
    """
    told = (life.finished.run for life in table.trials.values() if life.number >= table.since and life.finished)
    found = [run.context.data for run in told if run is not None and run.context is not None]
    known: list[DataContext] = [data for data in found if data.samples]
    return asdict(known[0]) if len(known) > 1 and all(data == known[0] for data in known) else None


# [troubles] What may go wrong in a study besides a single trial: a program without hope, or that was edited; a full disk.

MAX_FAILED_TRIALS = 5  # so many trials that raise, and none that does not, are a bug in the program


class FailureLimit:
    """Gives up on a program whose first trials all raise, or all lack an objective."""

    def __init__(self) -> None:
        self._crashed_in_a_row = self._lacking_in_a_row = 0

    def ended(self, event: JobEvent, table: TrialTable) -> None:
        """A trial is over. Raises ``UserError`` where no trial is likely to succeed."""
        outcome = event.outcome
        crashed = isinstance(outcome, RunFailed) and outcome.reason in ("exception", "user_error")
        self._crashed_in_a_row = self._crashed_in_a_row + 1 if crashed else 0
        if self._crashed_in_a_row >= MAX_FAILED_TRIALS and isinstance(outcome, RunFailed) and not _works(table):
            rule = f"of the first {MAX_FAILED_TRIALS} trials one must not raise"
            raise UserError(rule, outcome.detail, f"fix the program; a log is {event.spec.out / 'logs'}")
        self._lacking_in_a_row = self._lacking_in_a_row + 1 if _lacks(table.trials[event.job]) else 0
        if self._lacking_in_a_row >= MAX_FAILED_TRIALS:
            self.over(table)

    def over(self, table: TrialTable) -> None:
        """There is nothing more to be tried. Raises ``UserError`` where trials have ended well, none with an
        objective."""
        if _works(table):
            return
        for life in table.trials.values():
            if life.finished is not None and _lacks(life):
                fix = "report it by session.report, or name another --objective"
                got = f"trial {life.number} {life.finished.reason}"
                raise UserError("an objective must be a metric that the program reports", got, fix)


def _lacks(life: TrialSummary) -> bool:
    return life.finished is not None and life.finished.reason.startswith(UNREPORTED)


def _works(table: TrialTable) -> bool:
    """Whether some trial has shown that the program can be trained."""
    lives = table.trials.values()
    return any(life.state == "paused" or (life.finished and life.finished.state == "complete") for life in lives)


def change_error(event: JobEvent) -> UserError | None:
    """Why a trial could not be what the study's others are, which is no result of its settings; None where it could."""
    outcome = event.outcome
    for rule in (EDITED, OTHER_DATA):
        if isinstance(outcome, RunFailed) and rule in outcome.detail:
            got = outcome.detail.partition("(got ")[2].rpartition("): ")[0]  # by its worker's own error
            fix = "undo that, then --resume; or go on with it by --resume --accept-changes"
            return UserError(rule, f"trial {event.job}: {got or outcome.detail}", fix)
    return None


def raise_if_disk_full(event: JobEvent) -> None:
    """Raise ``UserError`` where a trial failed because its machine's disk is full: no fault of its own."""
    outcome = event.outcome
    if isinstance(outcome, RunFailed) and UNWRITABLE in outcome.detail:
        got = outcome.detail.partition("(got ")[2].rpartition("): ")[0]  # by its worker's own error
        raise UserError(UNWRITABLE, f"trial {event.job}: {got or outcome.detail}", "free space, then --resume")


# [study loop] The loop of a study: start what deserves workers, hear, judge, tell; until a phase is over.
#
# Searches, frontiers, warm starts and simulations run on it. What is swapped are its arguments: what is tried
# (``Experiment``), which trials come next (``Schedule``, ``Proposals``), the pool of workers, and the clock.

PAUSE_REASONS = {
    "notice": "its host is being taken away",
    "lost": "it had lost its workers, and there was no room",
    "requested": "there is no room for it now",
}
WORKER_RECORDS = (TrialStartedFrom, TrialReported, TrialRegrouped, TrialPaused, TrialFinished)
GRACE_S = 10.0  # for the checkpoints of trials that run when a study ends


class StudyLoop:
    """What a study knows while it runs.

    ``keep`` writes into its journal, ``flush`` is called every now and then. ``schedule``: that of the search; ``run``
    may be given others. ``keeper``: decides what stays of a trial that is over. ``share``: moves workers among the
    trials of a search while they run; ``holding``: which of them wait for idle ones. ``rules``: by what is found, when
    the study ends.
    """

    def __init__(
        self,
        experiment: Experiment,
        schedule: Schedule,
        proposals: Proposals,
        pool: Pool,
        clock: Clock,
        keep: Callable[[Record], None],
        keeper: Keeper,
        *,
        flush: Callable[[], None] = lambda: None,
        share: MakeRebalancer | None = None,
        holding: HeldTrials | None = None,
        rules: StopRules | None = None,
    ) -> None:
        self.table = TrialTable()
        self._experiment = experiment
        self._holding = holding
        self._search_state = SearchState(experiment, schedule, holding)
        self._proposals = proposals
        self._pool = pool
        self._clock = clock
        self._keep = keep
        self._flush = flush
        self._make_rebalancer = share
        self._rebalancer: Rebalancer | None = None
        self._keeper = keeper
        self._rules = rules or StopRules()
        self._budget = Budget(self.table, pool, clock, self._rules)
        self._ready: PreparedTrial | None = None
        proposals.note = self.tell
        self._next = TrialChooser(experiment, self._search_state, proposals, self.table, self._budget, clock, holding)
        self._failure_limit = FailureLimit()
        self._was_listening = False
        self._data_seen: dict[str, Any] | None = None  # by the trials of earlier controllers
        self._fatal_error: UserError | None = None
        self._first_new = 0  # trials with lower numbers began under an earlier controller

    # -- a study from its beginning to its end ------------------------------------------------------------------------

    def replay(
        self,
        entries: Sequence[Entry],
        settings: dict[str, Any],
        command: CommandLine | None = None,
        changed: Sequence[str] = (),
    ) -> None:
        """Take over what an earlier controller has done; ``command`` asks for the study now.

        What ran when it ended goes on with its own workers where they have outlived it, else from its last checkpoint.
        ``changed``: what is another now, as was accepted. The search learns nothing of trials of before a change.
        """
        self._first_new = next_trial_number(entries)
        self.table.since = self._first_new if changed else first_comparable_trial(entries)
        check_params(entry.record for entry in entries if isinstance(entry.record, TrialStarted))
        replay = self._proposals.replay(entries, self.table.since)
        for entry in entries:
            self._hear(entry)
            record = entry.record
            if getattr(record, "trial", self.table.since) < self.table.since:
                continue
            if isinstance(record, TrialFinished) and record.trial in self.table.trials:
                record = self._experiment.for_search(self.table.trials[record.trial])
            suggestion = replay.hear(record, self._search_state.estimates)
            if suggestion is not None and isinstance(known := self._experiment.new(suggestion, None), TrialFinished):
                self._proposals.tell(suggestion.number, known)  # the same was trained already
        self._proposals.finish_replay(replay)
        self._budget.resume()
        self.tell(StudyStarted(settings, machine_context(), resumed=bool(entries), command=command))
        for number in self._keeper.undecided(self.table):
            self._keep_or_remove(number, self._keeper.folder(number))
        to_pause = self._search_state.verdicts
        left = surviving_jobs(self.table, entries, self._experiment, self._clock.wall(), to_pause)
        adopted = self._pool.adopt(left)
        for paused in cut_off(self.table, entries, adopted):
            self.tell(paused)
        self._data_seen = common_data(self.table)
        if changed:
            self.tell(ChangesAccepted(list(changed), first_trial=self._first_new))
        self._was_listening = bool(entries) and isinstance(entries[-1].record, WORKER_RECORDS)
        for number in adopted:
            if number in to_pause:  # the controller had no time left to pause it
                self._pool.pause(number)

    def learn(self, earlier: WarmStarted) -> None:
        """Take over what an earlier study found, before anything new is tried."""
        self.tell(earlier)
        self._proposals.learn(earlier)

    @property
    def elapsed_s(self) -> float:
        """Seconds that controllers have worked on the study."""
        return self._budget.elapsed_s

    def run(self, bounds: Bounds, interrupts: Callable[[], int], schedule: Schedule | None = None) -> str:
        """Until there is nothing more to start and nothing runs, or somebody ends it. Returns why it ended.

        Raises ``UserError`` where no trial has reported what is to be optimised, and where the program or the data
        have changed meanwhile: what runs has been paused then.
        """
        self._enter(bounds, schedule)
        if self._was_listening and self._pool.running:  # nothing was begun before all that had come was heard
            self._listen(self._pool.pump(0.0))
        self._was_listening = False
        while not (reason := "interrupted" if interrupts() else self._budget.over()):
            self._fill()
            ready = self._ready
            if self._pool.running == 0 and ready is not None and self._pool.takes(ready.spec.execution.workers):
                self._begin(ready, ready.spec.execution.workers)  # nobody knows yet what it takes
            if self._pool.running == 0 and self._ready is None and not self._next.awaits:
                reason = self._budget.spent() or "the space is exhausted"
                break
            self._listen(self._pool.pump(self._patience_s()))
            self._flush()
            if self._fatal_error is not None:
                reason = self._fatal_error.rule
                break
        self._wind_down(reason, interrupts)
        if self._fatal_error is not None:
            raise self._fatal_error
        if reason != "interrupted":
            self._failure_limit.over(self.table)
        return reason

    def await_running(self, interrupts: Callable[[], int]) -> None:
        """Hear what runs to its end, and start nothing."""
        while self._pool.running and not interrupts():
            self._listen(self._pool.pump(float("inf")))
            self._flush()
        if self._fatal_error is not None:
            raise self._fatal_error

    def finish(self, reason: str) -> None:
        """The study has ended."""
        self.tell(StudyFinished(reason, self.elapsed_s))

    def close(self) -> None:
        """End what runs and let go of the search's files. Idempotent."""
        self._pool.abandon()
        self._proposals.close()

    def tell(self, record: Record) -> None:
        """Something has happened: first of all into the journal."""
        self._keep(record)
        self._hear(Entry(self._clock.wall(), record))

    def _enter(self, bounds: Bounds, schedule: Schedule | None) -> None:
        self._budget.bounds = bounds
        self._ready, self._next.exhausted, self._rebalancer = None, False, None
        if schedule is not None:
            self._search_state.switch(schedule)
        if self._make_rebalancer is not None and self._search_state.schedule.shares:
            left_s, left_worker_s = max(self._budget.left_s, 0.0), max(self._budget.left_worker_s, 0.0)
            self._rebalancer = self._make_rebalancer(self._pool, self._clock, left_s, left_worker_s)
            for number, job in self._pool.jobs.items():
                self._rebalancer.begun(number, job.wished)

    def _patience_s(self) -> float:
        """How long nothing need be done if nothing is heard."""
        due_s = (
            self._rebalancer.due_s if self._rebalancer is not None else 0.0
        )  # 0: it waits for workers that are leaving
        proposal_s = WAIT_S if self._next.awaits else float("inf")
        return min(self._budget.soonest_s, proposal_s, due_s or float("inf"))

    def _wind_down(self, reason: str, interrupts: Callable[[], int]) -> None:
        """Have what still runs write a checkpoint and end: a study that is resumed goes on with it."""
        before, deadline = interrupts(), self._clock.now() + GRACE_S
        for number in list(self._pool.jobs):
            self._pool.pause(number)
        while self._pool.running and interrupts() == before and self._clock.now() < deadline:
            self._listen(self._pool.pump(deadline - self._clock.now()), why=reason)
        self._pool.abandon()

    # -- starting -----------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Start trials while there is room and something to start."""
        if self._rebalancer is not None:
            self._share(self._rebalancer)
            return
        while self._pool.free > 0 or (self._pool.varies and self._pool.running == 0):
            self._ready = self._ready or self._choose()  # though it may have to wait for a host
            if self._ready is None or self._ready.spec.execution.workers > self._pool.free:
                return  # what is wide comes first once workers are free: no trial is passed over for being wide
            self._begin(self._ready, self._ready.spec.execution.workers)

    def _choose(self) -> PreparedTrial | None:
        """What comes next. One that cannot run is told, infeasible with its reason, and passed over."""
        while (ready := self._next.choose()) is not None and ready.refused:
            self.tell(ready.record)
            self.tell(TrialFinished(ready.number, "infeasible", reason=f"refused: {ready.refused}"))
            self._proposals.tell(ready.number, self._experiment.for_search(self.table.trials[ready.number]))
        return ready

    def _begin(self, ready: PreparedTrial, workers: int) -> None:
        """Start a trial, or let it go on."""
        self._ready, ready = None, ready.on(workers)
        ready = replace(ready, spec=replace(ready.spec, data_seen=self._data_seen))
        self.tell(ready.record)
        try:
            self._pool.start(ready.number, ready.spec)
        except NoRoomError as error:  # a host has gone since it was counted
            if not self._pool.varies:
                raise
            self.tell(TrialPaused(ready.number, self.table.trials[ready.number].epoch, 0.0, 0.0, str(error), True))
            return
        if self._rebalancer is not None:
            self._rebalancer.begun(ready.number, workers)

    def _share(self, sharing: Rebalancer) -> None:
        """Let the allocation say which trial begins, which goes on with fewer workers, and which with more."""
        while True:
            if self._ready is None or self._ready.last:  # who is held back gives its place to whoever has come since
                ready = self._choose()
                if ready is not self._ready:
                    self._ask(sharing, ready)
            if sharing.due_s > 0:
                return
            for seen in sharing.looks():
                self.tell(seen)
            known = {number: self.table.trials[number] for number in self._pool.jobs}
            rungs = {number: rungs_passed(trial.epoch, trial.epochs) for number, trial in known.items()}
            supply = self._search_state.schedule.supplies and not self._next.exhausted and not self._budget.spent()
            settled = sharing.rebalance(self._search_state.expected_values(), rungs, supply)
            for record in settled.moved:
                self.tell(record)
            if self._ready is None or not settled.begins:
                return
            self._begin(self._ready, settled.begins)
            for _ in range(settled.more):
                if (ready := self._choose()) is None:
                    break
                if not ready.is_new:
                    self._ask(sharing, ready)
                    break
                self._begin(ready, settled.begins)

    def _ask(self, sharing: Rebalancer, ready: PreparedTrial | None) -> None:
        """Whoever comes next asks for workers."""
        self._ready = ready
        if ready is None:
            sharing.withdraw_request()
        else:
            sharing.request_workers(ready.number, ready.is_new, ready.last, self._next.waited_s(ready.number))

    # -- hearing ------------------------------------------------------------------------------------------------------

    def _listen(self, events: Sequence[JobEvent], why: str = "") -> None:
        for event in events:
            if event.outcome is not None:
                self._ended(event, why)
                continue
            if isinstance(event.record, Reported):
                workers = self._average(self.table.trials[event.job], event)
                self.tell(TrialReported(event.job, event.record, workers, event.cost))
                if event.job in self._search_state.verdicts and event.job in self._pool.jobs:
                    self._pool.pause(event.job)
            elif isinstance(event.record, Regrouped):
                self.tell(TrialRegrouped(event.job, event.record))
            elif isinstance(event.record, Adopted):
                self.tell(TrialAdopted(event.job, event.record))
            elif isinstance(event.record, StartedFrom):
                self.tell(TrialStartedFrom(event.job, event.record))
            elif isinstance(event.record, LinkMeasured):
                self.tell(event.record)
            elif isinstance(event.record, ChangesAccepted) and self.table.since < self._first_new:
                self.tell(replace(event.record, step=0, epoch=0, first_trial=self._first_new))
            if self._rebalancer is not None:
                self._rebalancer.heard(event.job, event.record)

    def _average(self, life: TrialSummary, event: JobEvent) -> float:
        """The workers that a trial has had on average, in all the times that it ran."""
        whole_s = life.seconds + event.seconds
        worker_seconds = life.worker_seconds + event.worker_seconds
        return worker_seconds / whole_s if whole_s > 0 else float(life.first_workers)

    def _ended(self, event: JobEvent, why: str) -> None:
        life, number = self.table.trials[event.job], event.job
        if self._rebalancer is not None:
            self._rebalancer.gone(number, event.paused_by is not None)
        if event.paused_by is not None:
            self._paused(life, event, why)
            return
        if (changed := change_error(event)) is not None:
            self._fatal_error = changed
            return  # it has no result: the study goes on with it once that is settled
        raise_if_disk_full(event)
        self.tell(replace(self._experiment.result(life, event), cost=event.cost))
        self._search_state.verdicts.pop(number, None)
        if isinstance(event.outcome, RunFinished):
            self._keep_or_remove(number, event.spec.out)
        if life.started.phase == "search":
            self._proposals.tell(number, self._experiment.for_search(self.table.trials[number]))
        self._failure_limit.ended(event, self.table)

    def _keep_or_remove(self, number: int, folder: Path) -> None:
        """Trial ``number`` ended well in ``folder``."""
        kept = self._keeper.ended(number, folder, self.table, self._search_state.standing())
        for record in kept.told:
            self.tell(record)
        self._keeper.remove(kept.gone)

    def _paused(self, life: TrialSummary, event: JobEvent, why: str) -> None:
        """A trial has ended with a checkpoint to go on from."""
        verdicts = self._search_state.verdicts
        held = life.number in self._search_state.held
        wanted = event.paused_by == "until_epoch" or life.number in verdicts
        reason = verdicts.pop(life.number, "") or why or PAUSE_REASONS.get(event.paused_by or "", "")
        reason = reason or f"was to run until epoch {life.until_epoch}"
        if wanted:  # what a program adds up over an epoch must not begin in its middle
            self._pool.files.back_to_epoch(event.spec.out)
        epoch = max(life.epoch, event.outcome.epoch if isinstance(event.outcome, RunFinished) else 0)
        used = event.seconds, event.worker_seconds
        self.tell(TrialPaused(life.number, epoch, *used, reason, held or not wanted, event.cost, held))

    def _hear(self, entry: Entry) -> None:
        """Take in what happened, now or before."""
        self.table.hear(entry)
        number = getattr(entry.record, "trial", None)
        if self._holding is not None and (number is None or number >= self.table.since):
            self._holding.hear(entry)
        if number in self.table.trials and number >= self.table.since:
            self._search_state.hear(entry.record, self.table.trials[number])
            self._rules.hear(entry.record, self.table.trials[number])
