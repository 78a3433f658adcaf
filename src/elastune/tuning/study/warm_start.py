"""Warm start: read the journals of earlier studies, compare their contexts, take over the trials that fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from elastune.core.clock import Clock
from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.folds import TrialSummary, fold
from elastune.core.journal.records import (
    DataContext,
    EarlierTrial,
    Entry,
    Record,
    RunContext,
    RunFinished,
    StudyStarted,
    TrialFinished,
    WarmStarted,
)
from elastune.core.sync_plan import SYNC_NAMES, SyncChoice
from elastune.runtime.clusters.base import Cluster
from elastune.runtime.job.output import JOURNAL
from elastune.runtime.job.pool import JobEvent, Pool
from elastune.train.program.space import Sample
from elastune.tuning.search.schedule import FixedTrial, FixedTrials
from elastune.tuning.search.suggester import (
    PROPOSED,
    TOLD,
    Context,
    TransferableTrial,
    best_of,
    clocked,
    differences,
    fit,
    lacking,
    shares,
    similarity,
    spread_of,
)
from elastune.tuning.study.budget import Bounds
from elastune.tuning.study.experiment import Tuning
from elastune.tuning.study.proposals import NoProposals
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.retention import Keeper, KeepNothing
from elastune.tuning.study.study_loop import StudyLoop
from elastune.tuning.study.trial_results import EXECUTION_PARAMETERS, settings
from elastune.tuning.study.trials import check_params
from elastune.tuning.study.validate import Plan

_TIME_SETTINGS = (*EXECUTION_PARAMETERS, "threads")  # they decide how long a training takes
_UNTRIED = Context("nothing trains", DataContext(), 0, "")


@dataclass(frozen=True)
class EarlierStudy:
    """An earlier study: its folder, its settings, and its trials that ended."""

    source: str
    settings: Mapping[str, Any]
    trials: tuple[TrialSummary, ...]


@dataclass(frozen=True)
class _FittingTrial(TransferableTrial):
    """An earlier trial that fits, with its record."""

    trial: TrialSummary

    @property
    def context(self) -> RunContext | None:
        finished = self.trial.finished
        return finished.run.context if finished is not None and finished.run is not None else None


@dataclass(frozen=True)
class _ComparedStudy:
    """An earlier study, compared with this one.

    Attributes:
        earlier: The earlier study.
        fits: Its trials that fit the present space.
        left_out: Why other trials do not fit, with their numbers.
        similarity: The similarity of the contexts.
        differs: The differences of the contexts, in words.
        best: Indices of the trials of ``fits`` to try first.
        results: Indices of the trials of ``fits`` that count as results.
    """

    earlier: EarlierStudy
    fits: list[_FittingTrial]
    left_out: dict[str, int]
    similarity: float = 0.0
    differs: tuple[str, ...] = ()
    best: tuple[int, ...] = ()
    results: tuple[int, ...] = ()


def earlier_studies(request: StudyRequest, before: Sequence[Entry]) -> list[EarlierStudy]:
    """Return the studies of ``request.warm_start`` that its own journal ``before`` does not have yet.

    Raises ``UserError`` for a folder without a study's journal.
    """
    taken_over = {entry.record.source for entry in before if isinstance(entry.record, WarmStarted)}
    sources = dict.fromkeys(Path(folder).resolve() for folder in request.warm_start)
    if request.out.resolve() in sources:
        raise UserError("a study cannot begin with itself", request.out, "use another --out, or leave out --warm-start")
    return [_read(source) for source in sources if str(source) not in taken_over]


def _read(source: Path) -> EarlierStudy:
    entries = read(source / JOURNAL)
    study_start = next((e.record for e in entries if isinstance(e.record, StudyStarted)), None)
    if study_start is None:
        raise UserError("a warm start needs the folder of a study", source, "give the --out of elastune tune")
    table = fold(entries)
    check_params(life.started for life in table.trials.values())
    return EarlierStudy(str(source), study_start.settings, tuple(table.trials[number] for number in table.ended))


def take_over(
    plan: Plan, earlier: Sequence[EarlierStudy], cluster: Cluster, clock: Clock, interrupts: Callable[[], int]
) -> Iterator[WarmStarted]:
    """Yield what this study takes over from each earlier one, the most similar first.

    First the best fitting configuration of each takes one step on one worker, to learn the sizes of data and model, and
    the hardware.
    """
    compared = []
    for study in earlier:
        compared.append(_compare(plan, study, lambda sample: _try_out(plan, sample, cluster, clock, interrupts)))
        if interrupts():
            return
    most_results = TOLD // max(1, sum(bool(each.results) for each in compared))
    compared.sort(key=lambda each: -each.similarity)
    proposals = shares([each.similarity for each in compared], _trials_expected(plan.request, compared))
    for each, proposed in zip(compared, proposals, strict=True):
        comparable = [each.fits[i] for i in each.results]
        chosen = spread_of(comparable, plan.pricing.objectives, plan.pricing.constraints, most_results)
        yield WarmStarted(
            source=each.earlier.source,
            taken=len(each.fits),
            of=len(each.earlier.trials),
            similarity=each.similarity,
            left_out=each.left_out,
            differs=list(each.differs),
            results=[EarlierTrial(comparable[i].sample.params, dict(comparable[i].metrics)) for i in chosen],
            proposed=[each.fits[i].sample.params for i in each.best[:proposed]],
        )


def _trials_expected(request: StudyRequest, compared: Sequence[_ComparedStudy]) -> float | None:
    """The expected number of trials; under a time budget, trials are assumed to take as long as the earlier ones."""
    durations = [fit.trial.worker_seconds for each in compared for fit in each.fits if fit.trial.worker_seconds > 0]
    bounds = [float(bound) for bound in (request.trials, request.patience) if bound is not None]
    if durations:
        budget_s = None if request.budget_s is None else request.budget_s * request.workers
        worker_s = None if request.worker_hours is None else request.worker_hours * 3600
        bounds += [each / median(durations) for each in (budget_s, worker_s) if each is not None]
    return min(bounds, default=None)


def _compare(plan: Plan, earlier: EarlierStudy, try_out: Callable[[Sample], RunFinished | None]) -> _ComparedStudy:
    objectives, constraints = plan.pricing.objectives, plan.pricing.constraints
    fits, left_out = _fitting(plan, earlier)
    best = best_of(fits, objectives, constraints, PROPOSED)
    if not fits:
        return _ComparedStudy(earlier, fits, left_out)
    timed = clocked(objectives, constraints)
    first = fits[best[0] if best else 0]
    earlier_context = _context(str(earlier.settings.get("program_digest", "")), first.context, timed)
    run = try_out(first.sample)
    context = _context(str(plan.settings["program_digest"]), run.context, timed) if run is not None else _UNTRIED
    likeness = similarity(context, earlier_context)
    same = likeness == 1 and context.known
    results = [i for i, each in enumerate(fits) if same and _comparable(plan, earlier, each, context, timed)]
    differs = tuple(differences(context, earlier_context)) if run is not None else ("nothing trains here",)
    return _ComparedStudy(earlier, fits, left_out, likeness, differs, tuple(best), tuple(results))


def _fitting(plan: Plan, earlier: EarlierStudy) -> tuple[list[_FittingTrial], dict[str, int]]:
    """The trials that fit this study's space and have all metrics it needs, and why others do not."""
    needed = [o.name for o in plan.pricing.objectives]
    needed += sorted({name for c in plan.pricing.constraints for name in c.names})
    price_factor = _price_factor(plan, earlier)
    fits: list[_FittingTrial] = []
    left_out: Counter[str] = Counter()
    for trial in earlier.trials:
        started, finished = trial.started, trial.finished
        assert finished is not None
        metrics = {name: value for name, value in finished.metrics.items() if name in needed}
        if price_factor is None:  # other hosts at other prices: no factor converts the costs
            metrics.pop("cost", None)
        elif "cost" in metrics:
            metrics["cost"] *= price_factor
        sample = fit(plan.space, started.params)
        reason = (
            "it failed"
            if finished.run is None
            else "it began with another's weights"
            if started.parent is not None
            else ""
        )
        if isinstance(sample, str):
            reason = reason or sample
        else:
            fitting = _FittingTrial(sample, metrics, trial)
            reason = reason or (f"{missing} is missing" if (missing := lacking(needed, fitting)) else "")
            if not reason:
                fits.append(fitting)
        if reason:
            left_out[reason] += 1
    return fits, dict(left_out)


def _price_factor(plan: Plan, earlier: EarlierStudy) -> float | None:
    """The factor from costs of the earlier study to costs of this one; None: they are not comparable."""
    prices, earlier_prices = plan.settings["prices"], earlier.settings.get("prices")
    if prices is None and earlier_prices is None:
        return plan.pricing.price_per_worker_hour / float(earlier.settings.get("price_per_worker_hour", 1.0))
    return 1.0 if prices == earlier_prices else None


def _context(program: str, run: RunContext | None, timed: bool) -> Context:
    if run is None:
        return Context(program, DataContext(), 0, "" if timed else None)
    return Context(program, run.data, run.parameters, run.hardware if timed else None)


def _comparable(plan: Plan, earlier: EarlierStudy, trial: _FittingTrial, context: Context, timed: bool) -> bool:
    """Whether a trial of the same program had the settings that it would have now, and the same data."""
    request, started = plan.request, trial.trial.started
    config, execution, _ = settings(trial.sample.values, plan.config, request.execution, request.workers)
    trial_context = _context(context.program, trial.context, timed)
    same = [
        config == started.config,
        request.epochs == earlier.settings.get("epochs"),
        trial.sample.values["policy"] == started.execution.get("policy"),
        execution.precision == started.execution.get("precision"),
        execution.compress == started.execution.get("compress"),
        _strategy_of(trial.sample.values) == _strategy_of(started.execution),
        (context.data.samples, context.hardware) == (trial_context.data.samples, trial_context.hardware),
    ]
    if timed:  # if workers move between trials, the duration of a trial depends on the others
        execution_values = execution.to_json()
        same += [execution_values.get(name) == started.execution.get(name) for name in _TIME_SETTINGS]
        same += [request.trial_workers is None and earlier.settings.get("trial_workers") is None]
    return all(same)


def _strategy_of(values: Mapping[str, Any]) -> SyncChoice:
    """The training strategy in the values of a trial."""
    return SyncChoice.of({name: values[name] for name in SYNC_NAMES if name in values})


class _TryOut(Tuning):
    """Trials of one step, which only measure the context."""

    def result(self, life: TrialSummary, ended: JobEvent) -> TrialFinished:
        run = ended.outcome if isinstance(ended.outcome, RunFinished) else None
        return TrialFinished(life.number, "infeasible" if run is None else "complete", run=run)


def _try_out(
    plan: Plan, sample: Sample, cluster: Cluster, clock: Clock, interrupts: Callable[[], int]
) -> RunFinished | None:
    """Train one step of a configuration on one worker; None if the trial fails."""
    request = plan.request
    config, execution, _ = settings(sample.values, plan.config, request.execution, request.workers)
    limits = [limit for limit in (request.trial_timeout_s, request.budget_s) if limit is not None]
    trial = FixedTrial(config, request.seed, replace(execution.on(1), mesh=None, copies=None), "calibrate", max_steps=1)
    folder = request.out / "warm"
    records: list[Record] = []  # not for the journal: it is not a trial of this study
    loop = StudyLoop(
        _TryOut(replace(plan, request=replace(request, out=folder)), cluster.files, checkpoints=False),
        FixedTrials("calibrate", [trial]),
        NoProposals(),
        Pool(cluster, most=1, timeout_s=min(limits, default=None), clock=clock),
        clock,
        records.append,
        Keeper(KeepNothing(), cluster.files, folder),
    )
    try:
        loop.run(Bounds(), interrupts)
    finally:
        loop.close()
        cluster.files.remove(folder)
    return next((record.run for record in records if isinstance(record, TrialFinished)), None)
