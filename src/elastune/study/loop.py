"""The loop of a study: start what deserves workers, hear, judge, tell; until its budget is spent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from elastune.cluster.base import Cluster
from elastune.core.clock import Clock
from elastune.core.errors import UserError
from elastune.job.machine import machine_context
from elastune.job.pool import Ended, Heard, Pool
from elastune.journal.entry import Entry
from elastune.journal.records import (
    Record,
    Regrouped,
    Reported,
    RunFailed,
    RunFinished,
    StudyFinished,
    StudyStarted,
    TrialFinished,
    TrialPaused,
    TrialRegrouped,
    TrialReported,
    TrialResumed,
    TrialStarted,
    WarmStarted,
)
from elastune.journal.trials import TrialLife, TrialTable
from elastune.search.samplers.suggest import Suggester
from elastune.search.stopping.registry import make_schedule
from elastune.search.stopping.schedule import ForkTrial, NewTrial, Resume
from elastune.study.allocation.allocate import Rules
from elastune.study.allocation.priority import rungs_passed
from elastune.study.allocation.rebalancer import Sharing
from elastune.study.async_suggester import WAIT_S, Proposals
from elastune.study.budget import Budget
from elastune.study.launches import PreparedTrial, TrialLaunches
from elastune.study.trial_results import glimpse, judge, known
from elastune.study.validate import Plan
from elastune.train.checkpoints.checkpoint import UNWRITABLE

HOPELESS_TRIALS = 5  # so many trials that raise, and none that does not, are a bug in the program
STAY_S = 2.0  # a trial keeps its workers so long: several times a pause, so that what is measured is no transient
LEAST_GAIN = 0.5  # of a first worker's: what a further one must bring, or a study would waste them
PATIENCE_S = 300.0  # who waited longer is let in before those that run
GRACE_S = 10.0  # for the checkpoints of trials that run when a study ends


class Driver:
    """What a study knows while it runs. ``keep`` writes into its journal, ``settle`` is called every now and then."""

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        keep: Callable[[Record], None],
        clock: Clock,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        request, objectives = plan.request, plan.pricing.objectives
        self._plan = plan
        self._request = request
        self._keep = keep
        self._settle = settle
        self._clock = clock
        self._table = TrialTable()
        self._schedule = make_schedule(
            request.stopping, objectives, request.seed, space=plan.space, constraints=plan.pricing.constraints
        )
        self._pool = Pool(
            cluster,
            capacity=request.workers,
            timeout_s=request.trial_timeout_s,
            clock=clock,
        )
        self._suggester = Suggester(
            plan.space,
            objectives,
            plan.pricing.constraints,
            sampler=request.sampler,
            seed=request.seed,
        )
        self._proposals = Proposals(self._suggester, inline=request.simulated)
        self._starts = TrialLaunches(plan, self._pool.files, pauses=self._schedule.pauses)
        self._ready: PreparedTrial | None = None
        self._awaits = False  # a proposal that is on its way
        self._results: dict[int, tuple[float, ...]] = {}
        self._exhausted = False
        self._cut_off: deque[int] = deque()  # trials that lost their workers by no decision of the search
        self._verdicts: dict[int, str] = {}  # why those that are asked to pause are
        self._violations: dict[int, float] = {}
        self._crashed_in_a_row = 0
        self._budget = Budget(request, self._table, self._pool, clock)
        self._sharing: Sharing | None = None

    def _new_sharing(self) -> Sharing | None:
        request = self._request
        if request.trial_workers is None:
            return None
        slots = max(request.means.num_slots, request.trial_workers[1]) if request.means.mode == "exact" else None
        return Sharing(self._pool, self._clock, request.trial_workers, slots, self._rules())

    def _rules(self) -> Rules:
        left_s, left_worker_s = max(self._budget.left_s, 0.0), max(self._budget.left_worker_s, 0.0)
        return Rules(
            stay_s=STAY_S, patience_s=PATIENCE_S, least_gain=LEAST_GAIN, deadline_s=left_s, budget_s=left_worker_s
        )

    # -- a study from its beginning to its end ------------------------------------------------------------------------

    def replay(self, entries: list[Entry]) -> None:
        """Take over what an earlier controller has done. What ran when it ended goes on from its last checkpoint."""
        self._suggester.replay(entries, unfinished="open")
        for entry in entries:
            self._hear(entry)
        self._budget.resume()
        self._sharing = self._new_sharing()
        self._tell(StudyStarted(self._plan.settings, machine_context(), resumed=bool(entries)))
        for paused in interrupted(self._table, entries):
            self._tell(paused)

    def learn(self, earlier: WarmStarted) -> None:
        """Take over what an earlier study found, before anything new is tried."""
        self._tell(earlier)
        self._suggester.learn(earlier)

    def run(self, interrupts: Callable[[], int]) -> None:
        """Until there is nothing more to start and nothing runs, or somebody ends it."""
        while not (reason := "interrupted" if interrupts() else self._budget.over()):
            self._fill()
            if self._pool.running == 0 and self._ready is not None:  # nobody knows yet what it takes: let it begin
                self._begin(self._ready, self._ready.spec.means.workers)
            if self._pool.running == 0 and not self._awaits:
                reason = self._budget.spent() or "the space is exhausted"
                break
            self._listen(*self._pool.pump(self._patience_s()))
            self._settle()
        self._wind_down(reason, interrupts)
        self._tell(StudyFinished(reason, self._budget.elapsed_s))

    def _patience_s(self) -> float:
        """How long nothing need be done if nothing is heard."""
        due_s = self._sharing.due_s if self._sharing is not None else 0.0  # 0: it waits for workers that are leaving
        proposal_s = WAIT_S if self._awaits else float("inf")
        return min(self._budget.soonest_s, proposal_s, due_s or float("inf"))

    def abandon(self) -> None:
        """End what runs and let go of the search's files. Idempotent."""
        self._pool.abandon()
        self._proposals.close()

    def _wind_down(self, reason: str, interrupts: Callable[[], int]) -> None:
        """Have what still runs write a checkpoint and end: a study that is resumed goes on with it."""
        before, deadline = interrupts(), self._clock.now() + GRACE_S
        for number in list(self._pool.jobs):
            self._pool.pause(number)
        while self._pool.running and interrupts() == before and self._clock.now() < deadline:
            self._listen(*self._pool.pump(deadline - self._clock.now()), why=reason)
        self.abandon()

    # -- starting -----------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Start trials while there is room and something to start."""
        if self._sharing is not None:
            self._share(self._sharing)
            return
        while self._pool.free > 0:
            self._ready = self._ready or self._next()
            if self._ready is None or self._ready.spec.means.workers > self._pool.free:
                return  # what is wide comes first once workers are free: no trial is passed over for being wide
            self._begin(self._ready, self._ready.spec.means.workers)

    def _begin(self, ready: PreparedTrial, workers: int) -> None:
        """Start a trial, or let it go on."""
        self._ready, ready = None, ready.on(workers)
        self._tell(ready.record)
        self._pool.start(ready.number, ready.spec)
        if self._sharing is not None:
            self._sharing.begun(ready.number, workers)

    def _share(self, sharing: Sharing) -> None:
        """Let the broker say who begins, who goes on with fewer workers, and who with more."""
        while True:
            if self._ready is None and (ready := self._next()) is not None:
                self._ready = ready
                sharing.asks(ready.number, isinstance(ready.record, TrialStarted))
            if sharing.due_s > 0:
                return
            known = {number: self._table.trials[number] for number in self._pool.jobs}
            rungs = {number: rungs_passed(trial.epoch, trial.epochs) for number, trial in known.items()}
            supply = not self._exhausted and not self._budget.spent()
            settled = sharing.settle(self._promises(), rungs, supply)
            for record in settled.moved:
                self._tell(record)
            if self._ready is None or not settled.begins:
                return
            self._begin(self._ready, settled.begins)
            for _ in range(settled.more):
                if (ready := self._next()) is None:
                    break
                if not isinstance(ready.record, TrialStarted):
                    self._ready = ready
                    sharing.asks(ready.number, fresh=False)
                    break
                self._begin(ready, settled.begins)

    def _promises(self) -> dict[int, tuple[float, ...]]:
        """What trials ended with, or are expected to; smaller is better."""
        found = {**self._schedule.estimates(), **self._results}
        signs = [-1.0 if o.direction == "max" else 1.0 for o in self._plan.pricing.objectives]
        return {n: tuple(s * v for s, v in zip(signs, values, strict=True)) for n, values in found.items()}

    def _next(self) -> PreparedTrial | None:
        self._awaits = False
        if self._cut_off:
            number = self._cut_off[0]
            entrant = self._table.trials[number]
            return self._starts.again(number, entrant, "it had been cut off", entrant.until_epoch, cut_off=True)
        fresh = not self._exhausted and not self._budget.spent() and self._proposals.ready()
        match self._schedule.next(fresh):
            case Resume(trial=number, reason=reason, epoch=epoch):
                return self._starts.again(number, self._table.trials[number], reason, epoch)
            case ForkTrial(parent=parent, params=params, epoch=epoch):
                return self._starts.new(self._proposals.adopt(params), epoch, parent)
            case NewTrial(epoch=epoch):
                estimates = self._schedule.estimates()
                suggestion = self._proposals.ask({n: (v, self._violations.get(n, 0.0)) for n, v in estimates.items()})
                if suggestion is not None:
                    return self._starts.new(suggestion, epoch)
                self._awaits = self._proposals.asking
                if self._awaits:
                    return None
                self._exhausted = True
                return self._next()
        return None

    # -- hearing ------------------------------------------------------------------------------------------------------

    def _listen(self, heard: list[Heard], ended: list[Ended], why: str = "") -> None:
        for news in heard:
            if isinstance(news.record, Reported):
                workers = self._average(self._table.trials[news.key], news.seconds, news.worker_seconds)
                self._tell(TrialReported(news.key, news.record, workers))
                if news.key in self._verdicts and news.key in self._pool.jobs:
                    self._pool.pause(news.key)
            elif isinstance(news.record, Regrouped):
                self._tell(TrialRegrouped(news.key, news.record))
            if self._sharing is not None:
                self._sharing.heard(news.key, news.record)
        for job in ended:
            self._ended(job, why)

    def _average(self, entrant: TrialLife, seconds: float, worker_seconds: float) -> float:
        """The workers that a trial has had on average, in all the times that it ran."""
        whole_s = entrant.seconds + seconds
        return (entrant.worker_seconds + worker_seconds) / whole_s if whole_s > 0 else float(entrant.first_workers)

    def _ended(self, job: Ended, why: str) -> None:
        entrant = self._table.trials[job.key]
        if self._sharing is not None:
            self._sharing.gone(job.key, job.paused_by is not None)
        if job.paused_by is not None:
            wanted = job.paused_by == "until_epoch" or job.key in self._verdicts
            reason = self._verdicts.pop(job.key, "") or why or f"was to run until epoch {entrant.until_epoch}"
            if wanted:  # what a program adds up over an epoch must not begin in its middle
                self._pool.files.back_to_epoch(job.spec.out)
            epoch = max(entrant.epoch, job.outcome.epoch if isinstance(job.outcome, RunFinished) else 0)
            self._tell(TrialPaused(job.key, epoch, job.seconds, job.worker_seconds, reason, not wanted))
            return
        whole = replace(
            job, seconds=entrant.seconds + job.seconds, worker_seconds=entrant.worker_seconds + job.worker_seconds
        )
        if isinstance(job.outcome, RunFailed) and UNWRITABLE in job.outcome.detail:  # the machine's fault, not its own
            told = job.outcome.detail.partition("(got ")[2].rpartition("): ")[0]  # by its worker's own error
            raise UserError(UNWRITABLE, f"trial {job.key}: {told or job.outcome.detail}", "free space, then --resume")
        result = judge(job.key, whole, known(entrant.started), self._plan.pricing)
        self._verdicts.pop(job.key, None)
        self._tell(result)
        if isinstance(job.outcome, RunFinished) and not self._schedule.parents:
            self._pool.files.remove(job.spec.out)
        self._proposals.tell(job.key, result)
        self._refuse_hopeless(job)

    def _tell(self, record: Record) -> None:
        """Something has happened: first of all into the journal."""
        self._keep(record)
        self._hear(Entry(self._clock.wall(), record))

    def _hear(self, entry: Entry) -> None:
        """Take in what happened, now or before."""
        self._table.hear(entry)
        match record := entry.record:
            case TrialStarted(trial=number, phase="search"):
                self._schedule.started(number, record.params, record.parent)
            case TrialReported(trial=number, report=report, workers=workers) if number in self._table.trials:
                entrant = self._table.trials[number]
                told = replace(report, metrics=entrant.metrics)
                shown = glimpse(
                    number, told, workers or entrant.first_workers, known(entrant.started), self._plan.pricing
                )
                if shown is not None:
                    self._violations[number] = shown.violation
                    if verdict := self._schedule.reported(shown):
                        self._verdicts.setdefault(number, verdict)
            case TrialPaused(trial=number, cut_off=True):
                self._cut_off.append(number)
            case TrialPaused(trial=number, epoch=epoch):
                self._verdicts.pop(number, None)
                self._schedule.paused(number, epoch)
            case TrialResumed(trial=number, cut_off=True):
                if number in self._cut_off:
                    self._cut_off.remove(number)
            case TrialResumed(trial=number):
                self._schedule.resumed(number)
            case TrialFinished(trial=number) if number in self._table.trials:
                values = tuple(record.values.get(o.name, float("nan")) for o in self._plan.pricing.objectives)
                valid = record.values and all(abs(value) < float("inf") for value in values)
                if record.state == "complete":
                    self._results[number] = values
                self._schedule.ended(number, values if valid else None, max(record.violations.values(), default=0.0))

    def _refuse_hopeless(self, job: Ended) -> None:
        crashed = isinstance(job.outcome, RunFailed) and job.outcome.reason in ("exception", "user_error")
        self._crashed_in_a_row = self._crashed_in_a_row + 1 if crashed else 0
        if self._crashed_in_a_row >= HOPELESS_TRIALS and isinstance(job.outcome, RunFailed) and not self._works():
            rule = f"of the first {HOPELESS_TRIALS} trials one must not raise"
            raise UserError(rule, job.outcome.detail, f"mend the program; a log is {job.spec.out / 'logs'}")

    def _works(self) -> bool:
        """Whether some trial has shown that the program can be trained."""
        lives = self._table.trials.values()
        return any(life.state == "paused" or (life.finished and life.finished.state == "complete") for life in lives)


def interrupted(table: TrialTable, entries: Sequence[Entry]) -> list[TrialPaused]:
    """The ends, that nobody recorded, of the trials that ran when the last controller of ``entries`` ended."""
    found = []
    for number in table.of("running"):
        life = table.trials[number]
        seconds = max(entries[-1].at - life.begun_at, 0.0)
        whole = (life.average or life.first_workers) * (life.seconds + seconds)
        worker_seconds = max(whole - life.worker_seconds, 0.0)
        found.append(TrialPaused(number, life.epoch, seconds, worker_seconds, "its controller ended", cut_off=True))
    return found
