"""The loop of a study: start what deserves workers, hear, judge, tell; until a phase is over.

Searches, frontiers, warm starts and simulations run on it. What is swapped are its arguments: what is tried
(``Experiment``), which trials come next (``Schedule``, ``Proposals``), the pool of workers, and the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastune.cluster.base import NoRoomError
from elastune.core.clock import Clock
from elastune.core.command import CommandGiven
from elastune.core.errors import UserError
from elastune.job.machine import machine_context
from elastune.job.pool import JobEvent, Pool
from elastune.journal.entry import Entry
from elastune.journal.records import (
    Adopted,
    ChangesAccepted,
    LinkMeasured,
    Record,
    Regrouped,
    Reported,
    RunFinished,
    StartedFrom,
    StudyFinished,
    StudyStarted,
    TrialAdopted,
    TrialBegan,
    TrialFinished,
    TrialPaused,
    TrialRegrouped,
    TrialReported,
    TrialStarted,
    WarmStarted,
)
from elastune.journal.trials import TrialLife, TrialTable
from elastune.search.stopping.schedule import Schedule
from elastune.study.allocation.holding import Holding
from elastune.study.allocation.priority import rungs_passed
from elastune.study.allocation.rebalancer import MakeSharing, Sharing
from elastune.study.loop.async_suggester import WAIT_S, Proposals
from elastune.study.loop.budget import Bounds, Budget
from elastune.study.loop.decisions import Decisions
from elastune.study.loop.earlier import data_of_all, first_comparable, first_new
from elastune.study.loop.experiment import Experiment, PreparedTrial
from elastune.study.loop.keeper import Keeper
from elastune.study.loop.left_trials import cut_off, left_jobs
from elastune.study.loop.next_trial import NextTrial
from elastune.study.loop.stop_rules import StopRules
from elastune.study.loop.troubles import Hope, changed_meanwhile, refuse_full_disk
from elastune.study.results.trials import check_params

PAUSES = {
    "notice": "its host is being taken away",
    "lost": "it had lost its workers, and there was no room",
    "requested": "there is no room for it now",
}
HEARD = (TrialBegan, TrialReported, TrialRegrouped, TrialPaused, TrialFinished)
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
        share: MakeSharing | None = None,
        holding: Holding | None = None,
        rules: StopRules | None = None,
    ) -> None:
        self.table = TrialTable()
        self._experiment = experiment
        self._holding = holding
        self._decisions = Decisions(experiment, schedule, holding)
        self._proposals = proposals
        self._pool = pool
        self._clock = clock
        self._keep = keep
        self._flush = flush
        self._make_sharing = share
        self._sharing: Sharing | None = None
        self._keeper = keeper
        self._rules = rules or StopRules()
        self._budget = Budget(self.table, pool, clock, self._rules)
        self._ready: PreparedTrial | None = None
        proposals.note = self.tell
        self._next = NextTrial(experiment, self._decisions, proposals, self.table, self._budget, clock, holding)
        self._hope = Hope()
        self._was_listening = False
        self._data_seen: dict[str, Any] | None = None  # by the trials of earlier controllers
        self._trouble: UserError | None = None
        self._first_new = 0  # trials with lower numbers began under an earlier controller

    # -- a study from its beginning to its end ------------------------------------------------------------------------

    def replay(
        self,
        entries: Sequence[Entry],
        settings: dict[str, Any],
        command: CommandGiven | None = None,
        changed: Sequence[str] = (),
    ) -> None:
        """Take over what an earlier controller has done; ``command`` asks for the study now.

        What ran when it ended goes on with its own workers where they have outlived it, else from its last checkpoint.
        ``changed``: what is another now, as was accepted. The search learns nothing of trials of before a change.
        """
        self._first_new = first_new(entries)
        self.table.since = self._first_new if changed else first_comparable(entries)
        check_params(entry.record for entry in entries if isinstance(entry.record, TrialStarted))
        recall = self._proposals.recall(entries, self.table.since)
        for entry in entries:
            self._hear(entry)
            record = entry.record
            if getattr(record, "trial", self.table.since) < self.table.since:
                continue
            if isinstance(record, TrialFinished) and record.trial in self.table.trials:
                record = self._experiment.for_search(self.table.trials[record.trial])
            suggestion = recall.hear(record, self._decisions.estimates)
            if suggestion is not None and isinstance(known := self._experiment.new(suggestion, None), TrialFinished):
                self._proposals.tell(suggestion.number, known)  # the same was trained already
        self._proposals.recalled(recall)
        self._budget.resume()
        self.tell(StudyStarted(settings, machine_context(), resumed=bool(entries), command=command))
        for number in self._keeper.undecided(self.table):
            self._keep_or_remove(number, self._keeper.folder(number))
        to_pause = self._decisions.verdicts
        left = left_jobs(self.table, entries, self._experiment, self._clock.wall(), to_pause)
        adopted = self._pool.adopt(left)
        for paused in cut_off(self.table, entries, adopted):
            self.tell(paused)
        self._data_seen = data_of_all(self.table)
        if changed:
            self.tell(ChangesAccepted(list(changed), first_trial=self._first_new))
        self._was_listening = bool(entries) and isinstance(entries[-1].record, HEARD)
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
            if self._pool.running == 0 and ready is not None and self._pool.takes(ready.spec.means.workers):
                self._begin(ready, ready.spec.means.workers)  # nobody knows yet what it takes
            if self._pool.running == 0 and self._ready is None and not self._next.awaits:
                reason = self._budget.spent() or "the space is exhausted"
                break
            self._listen(self._pool.pump(self._patience_s()))
            self._flush()
            if self._trouble is not None:
                reason = self._trouble.rule
                break
        self._wind_down(reason, interrupts)
        if self._trouble is not None:
            raise self._trouble
        if reason != "interrupted":
            self._hope.over(self.table)
        return reason

    def await_running(self, interrupts: Callable[[], int]) -> None:
        """Hear what runs to its end, and start nothing."""
        while self._pool.running and not interrupts():
            self._listen(self._pool.pump(float("inf")))
            self._flush()
        if self._trouble is not None:
            raise self._trouble

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
        self._ready, self._next.exhausted, self._sharing = None, False, None
        if schedule is not None:
            self._decisions.switch(schedule)
        if self._make_sharing is not None and self._decisions.schedule.shares:
            left_s, left_worker_s = max(self._budget.left_s, 0.0), max(self._budget.left_worker_s, 0.0)
            self._sharing = self._make_sharing(self._pool, self._clock, left_s, left_worker_s)
            for number, job in self._pool.jobs.items():
                self._sharing.begun(number, job.wished)

    def _patience_s(self) -> float:
        """How long nothing need be done if nothing is heard."""
        due_s = self._sharing.due_s if self._sharing is not None else 0.0  # 0: it waits for workers that are leaving
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
        if self._sharing is not None:
            self._share(self._sharing)
            return
        while self._pool.free > 0 or (self._pool.varies and self._pool.running == 0):
            self._ready = self._ready or self._choose()  # though it may have to wait for a host
            if self._ready is None or self._ready.spec.means.workers > self._pool.free:
                return  # what is wide comes first once workers are free: no trial is passed over for being wide
            self._begin(self._ready, self._ready.spec.means.workers)

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
        if self._sharing is not None:
            self._sharing.begun(ready.number, workers)

    def _share(self, sharing: Sharing) -> None:
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
            supply = self._decisions.schedule.supplies and not self._next.exhausted and not self._budget.spent()
            settled = sharing.settle(self._decisions.promises(), rungs, supply)
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

    def _ask(self, sharing: Sharing, ready: PreparedTrial | None) -> None:
        """Whoever comes next asks for workers."""
        self._ready = ready
        if ready is None:
            sharing.asks_no_more()
        else:
            sharing.asks(ready.number, ready.is_new, ready.last, self._next.waited_s(ready.number))

    # -- hearing ------------------------------------------------------------------------------------------------------

    def _listen(self, events: Sequence[JobEvent], why: str = "") -> None:
        for event in events:
            if event.outcome is not None:
                self._ended(event, why)
                continue
            if isinstance(event.record, Reported):
                workers = self._average(self.table.trials[event.job], event)
                self.tell(TrialReported(event.job, event.record, workers, event.cost))
                if event.job in self._decisions.verdicts and event.job in self._pool.jobs:
                    self._pool.pause(event.job)
            elif isinstance(event.record, Regrouped):
                self.tell(TrialRegrouped(event.job, event.record))
            elif isinstance(event.record, Adopted):
                self.tell(TrialAdopted(event.job, event.record))
            elif isinstance(event.record, StartedFrom):
                self.tell(TrialBegan(event.job, event.record))
            elif isinstance(event.record, LinkMeasured):
                self.tell(event.record)
            elif isinstance(event.record, ChangesAccepted) and self.table.since < self._first_new:
                self.tell(replace(event.record, step=0, epoch=0, first_trial=self._first_new))
            if self._sharing is not None:
                self._sharing.heard(event.job, event.record)

    def _average(self, life: TrialLife, event: JobEvent) -> float:
        """The workers that a trial has had on average, in all the times that it ran."""
        whole_s = life.seconds + event.seconds
        worker_seconds = life.worker_seconds + event.worker_seconds
        return worker_seconds / whole_s if whole_s > 0 else float(life.first_workers)

    def _ended(self, event: JobEvent, why: str) -> None:
        life, number = self.table.trials[event.job], event.job
        if self._sharing is not None:
            self._sharing.gone(number, event.paused_by is not None)
        if event.paused_by is not None:
            self._paused(life, event, why)
            return
        if (changed := changed_meanwhile(event)) is not None:
            self._trouble = changed
            return  # it has no result: the study goes on with it once that is settled
        refuse_full_disk(event)
        self.tell(replace(self._experiment.result(life, event), cost=event.cost))
        self._decisions.verdicts.pop(number, None)
        if isinstance(event.outcome, RunFinished):
            self._keep_or_remove(number, event.spec.out)
        if life.started.phase == "search":
            self._proposals.tell(number, self._experiment.for_search(self.table.trials[number]))
        self._hope.ended(event, self.table)

    def _keep_or_remove(self, number: int, folder: Path) -> None:
        """Trial ``number`` ended well in ``folder``."""
        kept = self._keeper.ended(number, folder, self.table, self._decisions.standing())
        for record in kept.told:
            self.tell(record)
        self._keeper.remove(kept.gone)

    def _paused(self, life: TrialLife, event: JobEvent, why: str) -> None:
        """A trial has ended with a checkpoint to go on from."""
        verdicts = self._decisions.verdicts
        held = life.number in self._decisions.held
        wanted = event.paused_by == "until_epoch" or life.number in verdicts
        reason = verdicts.pop(life.number, "") or why or PAUSES.get(event.paused_by or "", "")
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
            self._decisions.hear(entry.record, self.table.trials[number])
            self._rules.hear(entry.record, self.table.trials[number])
