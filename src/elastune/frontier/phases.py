"""The main job: how far does a program scale before accuracy pays, and which settings buy it back?

Slots make a training's result independent of the worker count. So each configuration is trained once, on one worker,
and stands for every worker count; what changes with the count is its time, which is measured where this machine has
the cores and modelled beyond. Phases: calibrate, naive rule, search, confirm, answer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from statistics import fmean, median
from typing import Any

from elastune.cluster.base import Cluster
from elastune.cluster.local import LocalCluster
from elastune.core.clock import Clock, SystemClock
from elastune.core.errors import UserError
from elastune.core.run import Config
from elastune.frontier.calibration import Calibration, batches_to_measure
from elastune.frontier.plan import FrontierPlan, check
from elastune.frontier.rows import FrontierCriteria, Times, answer, batch_of, hypervolumes, mark_front, row, support
from elastune.frontier.trainings import Training, Trainings, key
from elastune.job.machine import machine_context
from elastune.job.output_dir import open_out
from elastune.job.run import Observe
from elastune.job.signals import Interrupted, Interrupts
from elastune.journal.entry import Entry
from elastune.journal.reader import read
from elastune.journal.records import (
    FrontierFound,
    FrontierRow,
    Record,
    StudyFinished,
    StudyStarted,
    TrialFinished,
    TrialStarted,
)
from elastune.journal.trials import fold
from elastune.journal.writer import JournalWriter
from elastune.search.analysis.front import pick
from elastune.search.samplers.suggest import Suggester
from elastune.study.request import FrontierRequest
from elastune.study.results.command import run_command
from elastune.study.trial_results import Pricing
from elastune.study.validate import check_same_study
from elastune.train.machine import cores

CONFIRM_SHARE = 0.3  # of the budget is kept for confirming what the search found with fresh seeds
TWINS = 30  # suggestions in a row that were trained already: the space holds hardly more
FRESH_SEEDS = 1000  # confirmations use seeds that no search has seen


def frontier(
    request: FrontierRequest,
    *,
    cluster: Cluster | None = None,
    observe: Observe | None = None,
    clock: Clock | None = None,
) -> FrontierFound:
    """Answer the question within ``request.budget_s`` (the naive rule's trainings are always finished).

    The journal, from which ``elastune report`` draws the report, lies in ``request.out``; a frontier that was killed
    resumes from it.
    """
    plan = check(request)
    path = open_out(request.out, request.resume)
    before = read(path) if path.exists() else []
    check_same_study(plan.settings, before, path)
    with JournalWriter(path) as journal, Interrupts() as interrupts, ExitStack() as stack:
        place = cluster or stack.enter_context(LocalCluster(capacity=cores()))

        def keep(record: Record) -> None:
            journal.write(record, durable=isinstance(record, (TrialFinished, FrontierFound, StudyFinished)))
            if observe is not None:
                observe(record)

        job = _Frontier(plan, place, keep, clock or SystemClock(), lambda: interrupts.count > 0)
        stack.callback(job.abandon)  # whatever happens: a cluster that is not ours lives on, its trainings must not
        return job.run(before)


class _Frontier:
    """The phases in order, and what they know."""

    def __init__(
        self,
        plan: FrontierPlan,
        cluster: Cluster,
        keep: Callable[[Record], None],
        clock: Clock,
        interrupted: Callable[[], bool],
    ) -> None:
        self._plan = plan
        self._request = plan.request
        self._keep = keep
        self._clock = clock
        self._started = clock.now()
        self._spent_before_s = 0.0
        self._interrupted = interrupted
        self._suggester = Suggester(
            plan.space,
            plan.searched,
            plan.constraints,
            sampler=self._request.sampler,
            seed=self._request.seed,
        )
        reported = Pricing((plan.quality,), plan.constraints, self._request.price_per_worker_hour)
        self._trainings = Trainings(self._request, reported, cluster, keep, self._suggester.reserve)
        self._calibration = Calibration(self._request, self._trainings, keep, interrupted)
        self._rules: dict[str, str] = {}

    def run(self, before: list[Entry]) -> FrontierFound:
        request = self._request
        self._spent_before_s = fold(before).seconds
        self._suggester.replay(before)
        self._trainings.replay(before)
        begun = [e.record for e in before if isinstance(e.record, TrialStarted)]
        self._rules = {key(r.config, 0): r.tags["lr_rule"] for r in begun if "lr_rule" in r.tags}
        self._keep(StudyStarted(self._plan.settings, machine_context(), resumed=bool(before)))
        try:
            by = self._yardstick(self._calibrate())
            self._naive()
        except Interrupted:
            self._keep(StudyFinished("interrupted", self._elapsed_s()))
            raise
        self._search(by)
        tuned = self._confirm(by)
        self._measure_found(tuned, by)
        by = self._yardstick(self._calibration.fit())
        found = self._conclude(tuned, by)
        self._keep(found)
        reason = "interrupted" if self._interrupted() else f"a budget of {request.budget_s:g} s"
        self._keep(StudyFinished(reason, self._elapsed_s()))
        return found

    def abandon(self) -> None:
        """End what runs and let go of the search's files. Idempotent."""
        self._trainings.abandon()

    def _elapsed_s(self) -> float:
        return self._spent_before_s + self._clock.now() - self._started

    def _within(self, share: float) -> Callable[[], bool]:
        return lambda: not self._interrupted() and self._elapsed_s() < share * self._request.budget_s

    def _yardstick(self, times: Times) -> FrontierCriteria:
        return FrontierCriteria(self._plan.quality, self._request.target, self._request.price_per_worker_hour, times)

    def _seeds(self, first: int = 0) -> range:
        return range(self._request.seed + first, self._request.seed + first + self._request.seeds)

    # -- phases -------------------------------------------------------------------------------------------------------

    def _calibrate(self) -> Times:
        config, base = self._plan.config, self._plan.base_batch
        for batch in batches_to_measure(base, self._request.workers):
            self._calibration.measure(config, batch, 1)
        for workers in self._request.workers:
            if self._calibration.measurable(workers):
                self._calibration.measure(config, base * workers, workers)
        if max(self._request.workers) > 1 and not self._trainings.links and cores() > 1:
            self._calibration.measure(config, base * 2, 2)
        return self._calibration.fit()

    def _naive(self) -> None:
        """Batch and learning rate x W, whatever comes of it."""
        wanted = [(self._plan.naive(workers), seed) for workers in self._request.workers for seed in self._seeds()]
        self._trainings.all_of(wanted, "naive", {}, lambda: not self._interrupted())
        if any(key(config, seed) not in self._trainings.done for config, seed in wanted):
            raise Interrupted  # a missing row would read as one that diverged

    def _search(self, by: FrontierCriteria) -> None:
        twins = 0
        go_on = self._within(1 - CONFIRM_SHARE)
        while go_on() or self._trainings.running:
            while self._trainings.room and go_on() and twins < TWINS:
                suggestion = self._suggester.ask()
                if suggestion is None:
                    break
                config, rule = self._plan.resolve(suggestion.values)
                self._rules[key(config, 0)] = rule
                twin = self._trainings.done.get(key(config, self._request.seed))
                if twin is not None:  # another parametrisation of what was trained already
                    self._tell(suggestion.number, twin, by)
                    twins += 1
                    continue
                twins = 0
                means = self._request.means
                started = TrialStarted(
                    suggestion.number, config, asdict(means), self._request.seed, "search",
                    suggestion.params, suggestion.distributions, {"lr_rule": rule},
                )  # fmt: skip
                self._trainings.start(started, means)
            if not self._trainings.running:
                return
            for training in self._trainings.pump():
                self._tell(training.trial, training, by)
            if not self._within(1.0)():
                self._trainings.abandon()

    def _tell(self, number: int, training: Training, by: FrontierCriteria) -> None:
        """The search sees quality and the time at the largest worker count: any other follows from the same steps."""
        result = training.result
        if training.run is not None:
            seconds, _ = by.seconds(training, max(self._request.workers))
            values = {self._plan.quality.name: result.metrics[self._plan.quality.name], "seconds": seconds}
            result = replace(result, trial=number, values=values)
        self._suggester.tell(number, replace(result, trial=number))

    def _confirm(self, by: FrontierCriteria) -> dict[int, Config]:
        """Per worker count the fastest configuration that holds the base quality over fresh seeds.

        A single lucky seed proves nothing: whatever looks best is run again until what looks best has been.
        """
        within = self._within(1.0)
        while True:
            best = {workers: self._best(workers, by) for workers in self._request.workers}
            wanted = {key(config, 0): config for config in best.values() if not self._confirmed(config)}
            if not wanted or not within():
                break
            tasks = [(config, seed) for config in wanted.values() for seed in self._seeds(FRESH_SEEDS)]
            self._trainings.all_of(tasks, "confirm", {}, within)
        return {workers: self._best(workers, by, confirmed_only=True) for workers in self._request.workers}

    def _confirmed(self, config: Config) -> bool:
        return all(key(config, seed) in self._trainings.done for seed in self._seeds(FRESH_SEEDS)) or all(
            key(config, seed) in self._trainings.done for seed in self._seeds()
        )

    def _tried(self, config: Config) -> list[Training]:
        """The trainings that speak for a configuration: fresh seeds if complete, else the naive ones, else any."""
        done = self._trainings.done
        for first in (FRESH_SEEDS, 0):
            found = [done.get(key(config, seed)) for seed in self._seeds(first)]
            if all(found):
                return [t for t in found if t is not None]
        return [t for t in done.values() if t.config == config]

    def _best(self, workers: int, by: FrontierCriteria, *, confirmed_only: bool = False) -> Config:
        """The fastest configuration that looks good enough; where none does, the one of the best quality."""
        base = self._mean_quality(self._plan.naive(self._request.workers[0]))
        candidates = {key(t.config, 0): t.config for t in self._trainings.done.values() if t.result.state == "complete"}
        scored = []
        for config in candidates.values():
            if confirmed_only and not self._confirmed(config):
                continue
            quality = self._mean_quality(config)
            if quality is not None:
                seconds = median(by.seconds(t, workers)[0] for t in self._tried(config) if t.run is not None)
                scored.append((quality, seconds, config))
        if not scored:
            return self._plan.naive(self._request.workers[0])
        enough = [
            (seconds, config)
            for quality, seconds, config in scored
            if by.reaches(quality) and (by.target is not None or base is None or not by.better(base, quality))
        ]
        if enough:
            return min(enough, key=lambda pair: pair[0])[1]
        sign = -1.0 if by.quality.direction == "max" else 1.0
        return min(scored, key=lambda each: sign * each[0])[2]

    def _mean_quality(self, config: Config) -> float | None:
        """Mean validation quality over the trainings of ``config``; None where one diverged."""
        tried = self._tried(config)
        if not tried or any(t.run is None for t in tried):
            return None
        return fmean(t.result.metrics[self._plan.quality.name] for t in tried)

    def _measure_found(self, tuned: dict[int, Config], by: FrontierCriteria) -> None:
        """Time the chosen configurations on the worker counts that this machine has."""
        for workers, config in tuned.items():
            training = next((t for t in self._tried(config) if t.run is not None), None)
            same = (
                training is not None
                and training.run is not None
                and training.run.grad_bytes == by.times.model.grad_bytes
            )
            if same and self._calibration.measurable(workers) and not self._interrupted():
                with suppress(Interrupted):  # the answer is there, with fewer of its times measured
                    self._calibration.measure(self._plan.config, batch_of(config), workers)

    def _conclude(self, tuned: dict[int, Config], by: FrontierCriteria) -> FrontierFound:
        means, counts = self._request.means, list(self._request.workers)
        made: list[FrontierRow | None] = []
        for workers in counts:
            naive = self._plan.naive(workers)
            of_naive = [t for s in self._seeds() if (t := self._trainings.done.get(key(naive, s))) is not None]
            made.append(row("naive", workers, naive, "linear", of_naive, by, means))
        for workers, config in tuned.items():
            rule = self._rules.get(key(config, 0), "linear")
            made.append(row("tuned", workers, config, rule, self._tried(config), by, means))
        rows = [r for r in made if r is not None]
        if not rows:
            raise UserError("some training must succeed", "all diverged or failed", "lower the program's lr")
        rows = mark_front(rows, by)
        naive_volume, volume = hypervolumes(rows, by)
        chosen = self._pick(rows, by)
        words, supported = support(rows[0] if chosen is None else rows[chosen], by.times.model)
        return FrontierFound(
            quality=by.quality.name,
            direction=by.quality.direction,
            target=by.target,
            price_per_worker_hour=by.price_per_worker_hour,
            rows=rows,
            hypervolume_naive=naive_volume,
            hypervolume_tuned=volume,
            answer=answer(rows, counts, by),
            pick=chosen,
            command="" if chosen is None else self._command(rows[chosen]),
            support=words,
            supported_workers=supported,
        )

    def _pick(self, rows: list[FrontierRow], by: FrontierCriteria) -> int | None:
        """The fastest row that reaches the target; without a target the knee. None where the target is out of reach."""
        on_front = [i for i, r in enumerate(rows) if r.on_front]
        values = [
            {by.quality.name: rows[i].validation, "seconds": rows[i].seconds, "cost": rows[i].cost} for i in on_front
        ]
        if by.target is None:
            return on_front[pick(values, self._plan.axes).index]
        if not any(by.reaches(v[by.quality.name]) for v in values):
            return None
        return on_front[pick(values, self._plan.axes, targets={by.quality.name: by.target}).index]

    def _command(self, chosen: FrontierRow) -> str:
        means: dict[str, Any] = {**asdict(self._request.means), "workers": chosen.workers}
        return run_command(self._request.program.path, chosen.config, means, self._request.seed, self._request.epochs)
