"""The loop of a study: choose the next trial, start it, listen, judge, tell the search, until a phase is over.

Searches, frontiers, warm starts and simulations run on it. They differ in their arguments: the trials (``Experiment``),
their order (``Schedule``, ``Proposals``), the pool of workers, and the clock.
Every event goes into the journal first. A loop that starts with a journal takes over the state of the earlier
controller: its trials go on with workers that survived, or wait to be resumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastune.core.clock import Clock
from elastune.core.errors import UserError
from elastune.core.journal.folds import TrialSummary, TrialTable
from elastune.core.journal.records import (
    ActAsked,
    ActDone,
    Adopted,
    ChangesAccepted,
    Entry,
    LinkMeasured,
    Proved,
    Record,
    Regrouped,
    Reported,
    RunFinished,
    StartedFrom,
    StudyFinished,
    StudyStarted,
    TrialAdopted,
    TrialFinished,
    TrialPaused,
    TrialProved,
    TrialRegrouped,
    TrialReported,
    TrialResumed,
    TrialStarted,
    TrialStartedFrom,
    WarmStarted,
)
from elastune.core.run import CommandLine
from elastune.runtime.clusters.base import NoRoomError
from elastune.runtime.job.pool import JobEvent, Pool
from elastune.runtime.job.run import machine_context
from elastune.tuning.search.schedule import FixedTrial, ForkTrial, NewTrial, Resume, Schedule
from elastune.tuning.study.budget import Bounds, Budget, FailureLimit, StopRules, program_error, raise_if_disk_full
from elastune.tuning.study.control.acts import Situation, StudyControl, why_refused
from elastune.tuning.study.experiment import Experiment, PreparedTrial, TrialProofs
from elastune.tuning.study.proposals import WAIT_S, Proposals
from elastune.tuning.study.rebalancer import MakeRebalancer, Rebalancer, rungs_passed
from elastune.tuning.study.resume import (
    common_data,
    cut_off,
    first_comparable_trial,
    next_trial_number,
    surviving_jobs,
)
from elastune.tuning.study.retention import Keeper
from elastune.tuning.study.trial_progress import HeldTrials
from elastune.tuning.study.trials import check_params

PAUSE_REASONS = {
    "notice": "its host is being taken away",
    "lost": "it had lost its workers, and there was no room",
    "requested": "there is no room for it now",
}
WORKER_RECORDS = (TrialStartedFrom, TrialReported, TrialRegrouped, TrialPaused, TrialFinished)
GRACE_S = 10.0  # for the checkpoints of trials that run when a study ends
REPEATS = 30  # proposals in a row that were trained already: the space has hardly any others


class StudyLoop:
    """Runs the trials of a study: ``replay`` its journal, ``run`` its phases, ``finish`` and ``close`` it.

    Args:
        experiment: How trials run and are judged.
        schedule: The schedule of the search; ``run`` may take others.
        proposals: The proposals of the search.
        pool: The running trials.
        clock: The clock of the study.
        keep: Writes a record into the journal.
        keeper: Decides which weights and predictions stay after a trial.
        flush: Called after each round of events.
        share: Makes the rebalancer that moves workers between running trials; None: trials have fixed workers.
        holding: The trials that are held back; None: no trial is.
        rules: When the study ends by its results.
        proofs: Which trials prove their first step; None: none does.
        control: What is asked of the study from outside; None: it takes no requests.
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
        proofs: TrialProofs | None = None,
        control: StudyControl | None = None,
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
        self._proofs = proofs or TrialProofs(unchecked=True)
        self._budget = Budget(self.table, pool, clock, self._rules)
        self._control = control or StudyControl()
        self._ready: PreparedTrial | None = None
        proposals.note = self.write_record
        self._next = TrialChooser(
            experiment, self._search_state, proposals, self.table, self._budget, clock, holding, self._control
        )
        self._failure_limit = FailureLimit()
        self._was_listening = False
        self._data_seen: dict[str, Any] | None = None  # the data of the trials of earlier controllers
        self._fatal_error: UserError | None = None
        self._first_new = 0  # trials with lower numbers began under an earlier controller

    # -- from the beginning to the end --

    def replay(
        self,
        entries: Sequence[Entry],
        settings: dict[str, Any],
        command: CommandLine | None = None,
        changed: Sequence[str] = (),
    ) -> None:
        """Take over the state of earlier controllers, and begin to record.

        Trials that ran go on with their own workers where these have survived, else from their last checkpoints. The
        search does not learn from trials before an accepted change.

        Args:
            entries: The journal so far.
            settings: The settings of the study, for the journal.
            command: The command line that starts or resumes the study.
            changed: Accepted changes of the program, its space or the data.
        """
        self._first_new = next_trial_number(entries)
        self.table.since = self._first_new if changed else first_comparable_trial(entries)
        check_params(entry.record for entry in entries if isinstance(entry.record, TrialStarted))
        replay = self._proposals.replay(entries, self.table.since)
        for entry in entries:
            self._observe(entry)
            record = entry.record
            number = getattr(record, "trial", None)
            if number is not None and number < self.table.since:
                continue
            if isinstance(record, TrialFinished) and record.trial in self.table.trials:
                record = self._experiment.for_search(self.table.trials[record.trial])
            suggestion = replay.observe(record, self._search_state.estimates)
            if suggestion is not None and isinstance(result := self._experiment.new(suggestion, None), TrialFinished):
                self._proposals.tell(suggestion.number, result)  # the same was trained already
        self._proposals.finish_replay(replay)
        self._budget.resume()
        self.write_record(StudyStarted(settings, machine_context(), resumed=bool(entries), command=command))
        for number in self._keeper.undecided(self.table):
            self._keep_or_remove(number, self._keeper.folder(number))
        to_pause = self._search_state.verdicts
        survivors = surviving_jobs(self.table, entries, self._experiment.left, self._clock.wall(), to_pause)
        adopted = self._pool.adopt(survivors)
        for paused in cut_off(self.table, entries, adopted):
            self.write_record(paused)
        self._data_seen = common_data(self.table)
        if changed:
            self.write_record(ChangesAccepted(list(changed), first_trial=self._first_new))
        self._was_listening = bool(entries) and isinstance(entries[-1].record, WORKER_RECORDS)
        for number in adopted:
            if number in to_pause:  # the controller had no time left to pause it
                self._pool.pause(number)

    def learn(self, earlier: WarmStarted) -> None:
        """Take over results and proposals of an earlier study, before any new trial."""
        self.write_record(earlier)
        self._proposals.learn(earlier)

    @property
    def elapsed_s(self) -> float:
        """Seconds that controllers have worked on the study."""
        return self._budget.elapsed_s

    def run(self, bounds: Bounds, interrupts: Callable[[], int], schedule: Schedule | None = None) -> str:
        """Run trials until none is left, a budget ends or the user interrupts.

        Args:
            bounds: The budget of this phase.
            interrupts: Returns how many interrupts the user has sent.
            schedule: The schedule of this phase; None: the search's.

        Returns:
            The reason why the phase ended.

        Raises:
            UserError: If no trial has reported an objective, or if the program or the data have changed meanwhile.
                Running trials have paused then.
        """
        self._enter(bounds, schedule)
        if (
            self._was_listening and self._pool.running
        ):  # the earlier controller heard these events before it began another trial
            self._listen(self._pool.pump(0.0))
        self._was_listening = False
        while not (reason := "interrupted" if interrupts() or self._do_asked() else self._budget.over()):
            self._fill()
            ready = self._ready
            if self._pool.running == 0 and ready is not None and self._pool.takes(ready.spec.execution.workers):
                self._begin(ready, ready.spec.execution.workers)  # no measurements exist yet
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
        """Wait for the ends of all running trials, and start none."""
        while self._pool.running and not interrupts():
            self._listen(self._pool.pump(float("inf")))
            self._flush()
        if self._fatal_error is not None:
            raise self._fatal_error

    def finish(self, reason: str) -> None:
        """Record the end of the study."""
        self.write_record(StudyFinished(reason, self.elapsed_s))

    def close(self) -> None:
        """End all running trials and the search. Idempotent."""
        self._pool.abandon()
        self._proposals.close()

    def write_record(self, record: Record) -> None:
        """Write a record into the journal, and then act on it."""
        self._keep(record)
        self._observe(Entry(self._clock.wall(), record))

    def _enter(self, bounds: Bounds, schedule: Schedule | None) -> None:
        self._budget.bounds = self._control.bounds(bounds)
        self._ready, self._next.exhausted, self._rebalancer = None, False, None
        if schedule is not None:
            self._search_state.switch(schedule)
        if self._make_rebalancer is not None and self._search_state.schedule.shares:
            left_s, left_worker_s = max(self._budget.left_s, 0.0), max(self._budget.left_worker_s, 0.0)
            self._rebalancer = self._make_rebalancer(self._pool, self._clock, left_s, left_worker_s)
            for number, job in self._pool.jobs.items():
                self._rebalancer.trial_started(number, job.requested)

    def _patience_s(self) -> float:
        """Seconds that the loop may wait for events."""
        # 0: the rebalancer waits for workers that are leaving
        due_s = self._rebalancer.due_s if self._rebalancer is not None else 0.0
        proposal_s = WAIT_S if self._next.awaits else float("inf")
        return min(self._budget.soonest_s, proposal_s, due_s or float("inf"), self._control.patience_s)

    def _wind_down(self, reason: str, interrupts: Callable[[], int]) -> None:
        """Pause all running trials, so that a resumed study can go on with them."""
        before, deadline = interrupts(), self._clock.now() + GRACE_S
        for number in list(self._pool.jobs):
            self._pool.pause(number)
        while self._pool.running and interrupts() == before and self._clock.now() < deadline:
            self._listen(self._pool.pump(deadline - self._clock.now()), reason)
        self._pool.abandon()

    # -- what is asked from outside --

    def _do_asked(self) -> bool:
        """Journal new requests, and do those that are pending. Returns whether the study is to end."""
        for act in self._control.take():
            self.write_record(replace(act, refused=why_refused(act, self._situation())))
            self._control.acknowledged(act)
        for act in list(self._control.pending.values()):
            if act.trial is not None:
                outcome = self._act_on(self.table.trials[act.trial], act)
            else:
                outcome = "it ends, and its running trials pause" if act.act == "end" else "done"
                self._change_limits()
            if outcome:
                self.write_record(ActDone(act.ask, outcome))
        return self._control.ends

    def _situation(self) -> Situation:
        return Situation(
            self.table.trials,
            self._search_state.schedule.phase,
            self._control.divided,
            self._control.fewest,
            self._pool.room,
            self._budget.tried,
            self._budget.elapsed_s,
            self._budget.used_worker_s,
        )

    def _change_limits(self) -> None:
        """Take over the budget and the workers that were asked for."""
        self._budget.bounds = self._control.bounds(self._budget.bounds)
        self._pool.limit(self._control.changed.get("workers"))
        if self._rebalancer is not None:
            self._rebalancer.limit(max(self._budget.left_s, 0.0), max(self._budget.left_worker_s, 0.0))

    def _act_on(self, life: TrialSummary, act: ActAsked) -> str:
        """Do ``act`` with a trial, as far as it is possible now. Returns what came of it; "": it is not done yet."""
        if life.state == "over":
            by_this = life.finished is not None and life.finished.reason == _stopped_by(act)
            return "stopped" if act.act == "stop" and by_this else "it had ended before"
        if act.act == "go_on":
            return f"it goes on with {life.workers} workers" if life.state == "running" else ""
        if life.number in self._pool.jobs:
            self._pool.pause(life.number)
            return ""
        if act.act == "pause":
            return f"paused after {life.epoch} passes"
        self._stop(life, 0.0, 0.0, life.cost, act)
        return "stopped"

    def _stop(self, life: TrialSummary, seconds: float, worker_s: float, cost: float | None, act: ActAsked) -> None:
        """Record the end of a trial that was stopped on request, and has no result."""
        number = life.number
        if self._ready is not None and self._ready.number == number:
            self._ready = None
            if self._rebalancer is not None:
                self._rebalancer.withdraw_request()
        total_s, total_worker_s = life.seconds + seconds, life.worker_seconds + worker_s
        self.write_record(
            TrialFinished(
                number,
                "infeasible",
                metrics=life.metrics,
                seconds=total_s,
                reason=_stopped_by(act),
                worker_seconds=total_worker_s,
                cost=cost,
            )
        )
        self._search_state.verdicts.pop(number, None)
        self._keep_or_remove(number, self._keeper.folder(number))
        if life.started.phase == "search":
            self._proposals.tell(number, self._experiment.for_search(self.table.trials[number]))

    # -- starting trials --

    def _fill(self) -> None:
        """Start trials while workers are free and a trial is ready."""
        if self._rebalancer is not None:
            self._rebalance(self._rebalancer)
            return
        while self._pool.free > 0 or (self._pool.varies and self._pool.running == 0):
            self._ready = self._ready or self._choose()  # although it may have to wait for a host
            if self._ready is None or self._ready.spec.execution.workers > self._pool.free:
                return  # no other trial passes it: a trial with many workers comes first once they are free
            self._begin(self._ready, self._ready.spec.execution.workers)

    def _choose(self) -> PreparedTrial | None:
        """The next trial. A trial that cannot run is recorded as infeasible with its reason, and passed over."""
        while (ready := self._next.choose()) is not None and ready.refused:
            self.write_record(ready.record)
            self.write_record(TrialFinished(ready.number, "infeasible", reason=f"refused: {ready.refused}"))
            self._proposals.tell(ready.number, self._experiment.for_search(self.table.trials[ready.number]))
        return ready

    def _begin(self, ready: PreparedTrial, workers: int) -> None:
        """Start or resume a trial."""
        self._ready, ready = None, ready.on(workers)
        proves = self._proofs.wanted(ready.number, ready.spec)
        ready = replace(ready, spec=replace(ready.spec, data_seen=self._data_seen, proves=proves))
        self.write_record(ready.record)
        try:
            self._pool.start(ready.number, ready.spec)
        except NoRoomError as error:  # a host has left since its workers were counted
            if not self._pool.varies:
                raise
            self.write_record(
                TrialPaused(ready.number, self.table.trials[ready.number].epoch, 0.0, 0.0, str(error), True)
            )
            return
        if self._rebalancer is not None:
            self._rebalancer.trial_started(ready.number, workers)

    def _rebalance(self, rebalancer: Rebalancer) -> None:
        """Let the rebalancer decide which trial begins, and which trials get fewer or more workers."""
        while True:
            if self._ready is None or self._ready.last:  # later trials go before a held one
                ready = self._choose()
                if ready is not self._ready:
                    self._request_workers(rebalancer, ready)
            if rebalancer.due_s > 0:
                return
            for progress in rebalancer.looks():
                self.write_record(progress)
            running = {number: self.table.trials[number] for number in self._pool.jobs}
            rungs = {number: rungs_passed(trial.epoch, trial.epochs) for number, trial in running.items()}
            supply = self._search_state.schedule.supplies and not self._next.exhausted and not self._budget.spent()
            result = rebalancer.rebalance(self._search_state.expected_values(), rungs, supply)
            for record in result.moved:
                self.write_record(record)
            if self._ready is None or not result.begins:
                return
            self._begin(self._ready, result.begins)
            for _ in range(result.more):
                if (ready := self._choose()) is None:
                    break
                if not ready.is_new:
                    self._request_workers(rebalancer, ready)
                    break
                self._begin(ready, result.begins)

    def _request_workers(self, rebalancer: Rebalancer, ready: PreparedTrial | None) -> None:
        """Request workers for the next trial."""
        self._ready = ready
        if ready is None:
            rebalancer.withdraw_request()
        else:
            rebalancer.request_workers(ready.number, ready.is_new, ready.last, self._next.waited_s(ready.number))

    # -- events of trials --

    def _listen(self, events: Sequence[JobEvent], reason: str = "") -> None:
        for event in events:
            if event.outcome is not None:
                self._ended(event, reason)
                continue
            if isinstance(event.record, Reported):
                workers = self._average(self.table.trials[event.job], event)
                self.write_record(TrialReported(event.job, event.record, workers, event.cost))
                if event.job in self._search_state.verdicts and event.job in self._pool.jobs:
                    self._pool.pause(event.job)
            elif isinstance(event.record, Regrouped):
                self.write_record(TrialRegrouped(event.job, event.record))
            elif isinstance(event.record, Adopted):
                self.write_record(TrialAdopted(event.job, event.record))
            elif isinstance(event.record, StartedFrom):
                self.write_record(TrialStartedFrom(event.job, event.record))
            elif isinstance(event.record, Proved):
                self.write_record(TrialProved(event.job, event.record))
            elif isinstance(event.record, LinkMeasured):
                self.write_record(event.record)
            elif isinstance(event.record, ChangesAccepted) and self.table.since < self._first_new:
                self.write_record(replace(event.record, step=0, epoch=0, first_trial=self._first_new))
            if self._rebalancer is not None:
                self._rebalancer.record_event(event.job, event.record)

    def _average(self, life: TrialSummary, event: JobEvent) -> float:
        """The average number of workers of a trial, over all times that it ran."""
        total_s = life.seconds + event.seconds
        worker_seconds = life.worker_seconds + event.worker_seconds
        return worker_seconds / total_s if total_s > 0 else float(life.first_workers)

    def _ended(self, event: JobEvent, reason: str) -> None:
        life, number = self.table.trials[event.job], event.job
        if self._rebalancer is not None:
            self._rebalancer.gone(number, event.paused_by is not None)
        if event.paused_by is not None:
            self._paused(life, event, reason)
            return
        if (error := program_error(event)) is not None:
            self._fatal_error = error
            return  # it has no result: a resumed study goes on with it
        raise_if_disk_full(event)
        self.write_record(replace(self._experiment.result(life, event), cost=event.cost))
        self._search_state.verdicts.pop(number, None)
        if isinstance(event.outcome, RunFinished):
            self._keep_or_remove(number, event.spec.out)
        if life.started.phase == "search":
            self._proposals.tell(number, self._experiment.for_search(self.table.trials[number]))
        self._failure_limit.ended(event, self.table)

    def _keep_or_remove(self, number: int, folder: Path) -> None:
        """Apply the retention rule after the end of trial ``number`` in ``folder``."""
        decision = self._keeper.ended(number, folder, self.table, self._search_state.standing())
        for record in decision.records:
            self.write_record(record)
        self._keeper.remove(decision.folders)

    def _paused(self, life: TrialSummary, event: JobEvent, end_reason: str) -> None:
        """Record that a trial has paused with a checkpoint."""
        verdicts = self._search_state.verdicts
        act = self._control.of(life.number)
        if act is not None and act.act == "stop":
            self._stop(life, event.seconds, event.worker_seconds, event.cost, act)
            return
        asked = f"paused by {act.by}" if act is not None and act.act == "pause" else ""
        held = life.number in self._search_state.held
        planned = event.paused_by == "until_epoch" or life.number in verdicts
        reason = asked or verdicts.pop(life.number, "") or end_reason or PAUSE_REASONS.get(event.paused_by or "", "")
        reason = reason or f"was to run until epoch {life.until_epoch}"
        if planned:  # sums of a program over an epoch must not begin in its middle
            self._pool.files.back_to_epoch(event.spec.out)
        epoch = max(life.epoch, event.outcome.epoch if isinstance(event.outcome, RunFinished) else 0)
        used = event.seconds, event.worker_seconds
        waits = bool(asked) or held or not planned  # the schedule knows of no pause that it did not decide
        self.write_record(TrialPaused(life.number, epoch, *used, reason, waits, event.cost, held and not asked))

    def _observe(self, entry: Entry) -> None:
        """Act on a new or replayed entry of the journal."""
        self.table.observe(entry)
        self._control.observe(entry.record)
        self._proofs.observe(entry.record)
        number = getattr(entry.record, "trial", None)
        if self._holding is not None and (number is None or number >= self.table.since):
            self._holding.observe(entry)
        if number in self.table.trials and number >= self.table.since:
            self._search_state.observe(entry.record, self.table.trials[number])
            self._rules.observe(entry.record, self.table.trials[number])


# --- the state of the search ---


def _stopped_by(act: ActAsked) -> str:
    """The reason of a trial that ends because of ``act``."""
    return f"stopped by {act.by}"


class SearchState:
    """The decisions of the search: which trials must pause, and the results and expected values of trials.

    It passes every event to the schedule of the trial's phase.

    Attributes:
        schedule: The schedule that decides now.
        verdicts: Trial -> the reason why it must pause.
        held: Trials of ``verdicts`` that ``holding`` holds back; no schedule knows of these pauses.
        results: The values of complete trials of the search, and of members that were trained like them.
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
        """Let ``schedule`` decide from now on, and pass it the events of its phase."""
        self.schedule = self._by_phase[schedule.phase] = schedule

    def observe(self, record: Record, life: TrialSummary) -> None:
        """Record an event of the trial of ``life``, new or replayed."""
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
                result = self._experiment.for_search(life)
                values = self._values(result)
                valid = result.values and all(abs(value) < math.inf for value in values)
                schedule.ended(number, values if valid else None, max(result.violations.values(), default=0.0))

    def _reported(self, schedule: Schedule, life: TrialSummary) -> None:
        intermediate = self._experiment.intermediate(life) if schedule.proposes else None
        if intermediate is not None:
            self._violations[life.number] = intermediate.violation
            if verdict := schedule.reported(intermediate):
                self.verdicts.setdefault(life.number, verdict)

    def _hold(self, number: int, report: Reported, at: float) -> None:
        """Hold a trial back if it should leave its workers to shorter ones, unless it pauses anyway."""
        if self._holding is None or number in self.verdicts:
            return
        if reason := self._holding.why(number, report, at):
            self.verdicts[number] = reason
            self.held.add(number)

    def _values(self, result: TrialFinished) -> tuple[float, ...]:
        return tuple(result.values.get(o.name, math.nan) for o in self._experiment.objectives)

    def estimates(self) -> dict[int, tuple[tuple[float, ...], float]]:
        """Return the expected values of open trials, and their violations of constraints."""
        return {n: (values, self._violations.get(n, 0.0)) for n, values in self._search.estimates().items()}

    def expected_values(self) -> dict[int, tuple[float, ...]]:
        """Return the final or expected values of trials; smaller is better."""
        return {n: self._oriented(values) for n, values in {**self._search.estimates(), **self.results}.items()}

    def standing(self) -> dict[int, tuple[float, ...]]:
        """Return the values of the complete trials of the search; smaller is better."""
        return {n: self._oriented(values) for n, values in self.results.items()}

    def _oriented(self, values: tuple[float, ...]) -> tuple[float, ...]:
        signs = [-1.0 if o.direction == "max" else 1.0 for o in self._experiment.objectives]
        return tuple(s * v for s, v in zip(signs, values, strict=True))


# --- the next trial ---


class TrialChooser:
    """Chooses the next trial: one that was cut off, one of the schedule, or one that was held back.

    ``awaits`` is True while a proposal is being computed, ``exhausted`` once the search has no further proposals.

    Args:
        experiment: Turns proposals into trials.
        decisions: The state of the search.
        proposals: The proposals of the search.
        table: All trials.
        budget: The budget of the study.
        clock: The clock of the study.
        holding: The trials that are held back; None: such trials resume like those that were cut off.
        control: Which trials wait for a request, or go on by one.
    """

    def __init__(
        self,
        experiment: Experiment,
        decisions: SearchState,
        proposals: Proposals,
        table: TrialTable,
        budget: Budget,
        clock: Clock,
        holding: HeldTrials | None = None,
        control: StudyControl | None = None,
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
        self._control = control or StudyControl()
        self._held: PreparedTrial | None = None

    def choose(self) -> PreparedTrial | None:
        """Return the trial that starts or resumes next; None: there is none now."""
        self.awaits = False
        schedule = self._search_state.schedule
        for number, by in self._control.wanted.items():
            life, cut = self._table.trials[number], number in self._table.cut_off
            if life.started.phase == schedule.phase and life.state == "paused":
                until_epoch = life.until_epoch if cut else None
                return self._experiment.again(life, f"asked for by {by}", until_epoch, cut_off=cut)
        for number in self._table.cut_off:
            life = self._table.trials[number]
            if life.started.phase == schedule.phase and number not in self._control.parked and not self._waits(number):
                reason_to_resume = (
                    "it had been cut off" if self._held_since_s(number) is None else "held back for long enough"
                )
                return self._experiment.again(life, reason_to_resume, life.until_epoch, cut_off=True)
        fresh = not self._budget.spent() and (not schedule.proposes or self._may_propose())
        match schedule.next(fresh):
            case Resume(trial=number, reason=reason, epoch=epoch):
                return self._experiment.again(self._table.trials[number], reason, epoch)
            case FixedTrial() as fixed:
                return self._experiment.fixed(self._proposals.reserve(), fixed)
            case ForkTrial(parent=parent, params=params, epoch=epoch):
                prepared = self._experiment.new(self._proposals.adopt(params), epoch, parent)
                return prepared if isinstance(prepared, PreparedTrial) else None
            case NewTrial(epoch=epoch):
                proposed = self._proposed(epoch)
                return self.choose() if proposed is None and self.exhausted else proposed
        return self._held_back()

    def waited_s(self, number: int) -> float:
        """Return for how many seconds a trial has been held back."""
        since_s = self._held_since_s(number)
        return 0.0 if since_s is None else self._clock.wall() - since_s

    def _held_since_s(self, number: int) -> float | None:
        return None if self._holding is None else self._holding.since_s(number)

    def _waits(self, number: int) -> bool:
        return self._holding is not None and self._holding.waits(number, self._clock.wall())

    def _held_back(self) -> PreparedTrial | None:
        """The shortest trial that is held back, since no other trial can go on; the same object on every call."""
        for number in self._holding.waiting if self._holding is not None else ():
            if number in self._table.cut_off and number not in self._control.parked:
                if self._held is None or self._held.number != number:
                    life = self._table.trials[number]
                    reason = "held back until workers were idle"
                    self._held = replace(
                        self._experiment.again(life, reason, life.until_epoch, cut_off=True), last=True
                    )
                return self._held
        self._held = None
        return None

    def _may_propose(self) -> bool:
        return not self.exhausted and self._proposals.ready()

    def _proposed(self, until_epoch: int | None) -> PreparedTrial | None:
        """A trial that the search proposes; None if it has no proposal yet, or none any more."""
        for _ in range(REPEATS):
            suggestion = self._proposals.ask(self._search_state.estimates(), self._table.paused)
            if suggestion is None:
                self.awaits = self._proposals.asking
                self.exhausted = not self.awaits
                return None
            prepared = self._experiment.new(suggestion, until_epoch)
            if isinstance(prepared, PreparedTrial):
                return prepared
            self._proposals.tell(suggestion.number, prepared)  # the same was trained already
        self.exhausted = True
        return None
