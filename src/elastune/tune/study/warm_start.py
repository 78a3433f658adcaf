"""Warm start: read the journals of earlier studies, see how alike their contexts are, take over what fits."""

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
from elastune.core.journal.trials import TrialSummary, fold
from elastune.core.sync_plan import SYNC_NAMES, SyncChoice
from elastune.runtime.clusters.base import Cluster
from elastune.runtime.job.output import JOURNAL
from elastune.runtime.job.pool import JobEvent, Pool
from elastune.train.program.space import Sample
from elastune.tune.search.schedule import FixedTrial, FixedTrials
from elastune.tune.search.warm_start import (
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
from elastune.tune.study.budget import Bounds
from elastune.tune.study.experiment import Tuning
from elastune.tune.study.proposals import NoProposals
from elastune.tune.study.request import StudyRequest
from elastune.tune.study.retention import Keeper, KeepNothing
from elastune.tune.study.study_loop import StudyLoop
from elastune.tune.study.trial_results import EXECUTION_PARAMETERS, settings
from elastune.tune.study.trials import check_params
from elastune.tune.study.validate import Plan

_MEANS = (*EXECUTION_PARAMETERS, "threads")  # they decide how long a training takes

_UNTRIED = Context("nothing trains", DataContext(), 0, "")


@dataclass(frozen=True)
class EarlierStudy:
    """An earlier study: its settings, and its trials that ended."""

    source: str
    settings: Mapping[str, Any]
    trials: tuple[TrialSummary, ...]


@dataclass(frozen=True)
class _FittingTrial(TransferableTrial):
    """A trial that fits, and where it comes from."""

    trial: TrialSummary

    @property
    def context(self) -> RunContext | None:
        finished = self.trial.finished
        return finished.run.context if finished is not None and finished.run is not None else None


@dataclass(frozen=True)
class _ComparedStudy:
    """An earlier study beside this one. ``best``: indices of those to try first; ``told``: of those to believe."""

    earlier: EarlierStudy
    fits: list[_FittingTrial]
    left_out: dict[str, int]
    similarity: float = 0.0
    differs: tuple[str, ...] = ()
    best: tuple[int, ...] = ()
    told: tuple[int, ...] = ()


def earlier_studies(request: StudyRequest, before: Sequence[Entry]) -> list[EarlierStudy]:
    """The studies that ``request`` begins with, but for those that its own journal, ``before``, tells of already.

    Raises ``UserError`` where one has no journal, or that of something else.
    """
    known = {entry.record.source for entry in before if isinstance(entry.record, WarmStarted)}
    sources = dict.fromkeys(path.resolve() for path in request.warm_start)
    if request.out.resolve() in sources:
        raise UserError("a study cannot begin with itself", request.out, "use another --out, or leave out --warm-start")
    return [_read(source) for source in sources if str(source) not in known]


def _read(source: Path) -> EarlierStudy:
    entries = read(source / JOURNAL)
    begun = next((e.record for e in entries if isinstance(e.record, StudyStarted)), None)
    if begun is None:
        raise UserError("a warm start needs the folder of a study", source, "give the --out of elastune tune")
    table = fold(entries)
    check_params(life.started for life in table.trials.values())
    return EarlierStudy(str(source), begun.settings, tuple(table.trials[number] for number in table.ended))


def take_over(
    plan: Plan, earlier: Sequence[EarlierStudy], cluster: Cluster, clock: Clock, interrupts: Callable[[], int]
) -> Iterator[WarmStarted]:
    """What this study takes over from each earlier one, the most similar first.

    To know how large data and model are here, and on what hardware, the best fitting configuration of each takes one
    step on one worker first.
    """
    compared = []
    for study in earlier:
        compared.append(_compare(plan, study, lambda sample: _try_out(plan, sample, cluster, clock, interrupts)))
        if interrupts():
            return
    room = TOLD // max(1, sum(bool(each.told) for each in compared))
    compared.sort(key=lambda each: -each.similarity)
    proposals = shares([each.similarity for each in compared], _trials_expected(plan.request, compared))
    for each, proposed in zip(compared, proposals, strict=True):
        believed = [each.fits[i] for i in each.told]
        chosen = spread_of(believed, plan.pricing.objectives, plan.pricing.constraints, room)
        yield WarmStarted(
            source=each.earlier.source,
            taken=len(each.fits),
            of=len(each.earlier.trials),
            similarity=each.similarity,
            left_out=each.left_out,
            differs=list(each.differs),
            told=[EarlierTrial(believed[i].sample.params, dict(believed[i].metrics)) for i in chosen],
            proposed=[each.fits[i].sample.params for i in each.best[:proposed]],
        )


def _trials_expected(request: StudyRequest, compared: Sequence[_ComparedStudy]) -> float | None:
    """How many trials there will be; where time bounds them, if they take as long as the earlier ones did."""
    took = [fit.trial.worker_seconds for each in compared for fit in each.fits if fit.trial.worker_seconds > 0]
    bounds = [float(bound) for bound in (request.trials, request.patience) if bound is not None]
    if took:
        budget_s = None if request.budget_s is None else request.budget_s * request.workers
        worker_s = None if request.worker_hours is None else request.worker_hours * 3600
        bounds += [each / median(took) for each in (budget_s, worker_s) if each is not None]
    return min(bounds, default=None)


def _compare(plan: Plan, earlier: EarlierStudy, try_out: Callable[[Sample], RunFinished | None]) -> _ComparedStudy:
    objectives, constraints = plan.pricing.objectives, plan.pricing.constraints
    fits, left_out = _fitting(plan, earlier)
    best = best_of(fits, objectives, constraints, PROPOSED)
    if not fits:
        return _ComparedStudy(earlier, fits, left_out)
    timed = clocked(objectives, constraints)
    first = fits[best[0] if best else 0]
    there = _context(str(earlier.settings.get("meaning", "")), first.context, timed)
    run = try_out(first.sample)
    here = _context(str(plan.settings["meaning"]), run.context, timed) if run is not None else _UNTRIED
    alike = similarity(here, there)
    same = alike == 1 and here.known
    told = [i for i, each in enumerate(fits) if same and _comparable(plan, earlier, each, here, timed)]
    differs = tuple(differences(here, there)) if run is not None else ("nothing trains here",)
    return _ComparedStudy(earlier, fits, left_out, alike, differs, tuple(best), tuple(told))


def _fitting(plan: Plan, earlier: EarlierStudy) -> tuple[list[_FittingTrial], dict[str, int]]:
    """The trials that fit this study's space and have what it judges by; and why others do not."""
    needed = [o.name for o in plan.pricing.objectives]
    needed += sorted({name for c in plan.pricing.constraints for name in c.names})
    dearer = _dearer(plan, earlier)
    fits: list[_FittingTrial] = []
    left_out: Counter[str] = Counter()
    for trial in earlier.trials:
        started, finished = trial.started, trial.finished
        assert finished is not None
        metrics = {name: value for name, value in finished.metrics.items() if name in needed}
        if dearer is None:  # other hosts, at other prices: no factor makes one of the other
            metrics.pop("cost", None)
        elif "cost" in metrics:
            metrics["cost"] *= dearer
        sample = fit(plan.space, started.params)
        why = (
            "it failed"
            if finished.run is None
            else "it began with another's weights"
            if started.parent is not None
            else ""
        )
        if isinstance(sample, str):
            why = why or sample
        else:
            found = _FittingTrial(sample, metrics, trial)
            why = why or (f"{missing} is missing" if (missing := lacking(needed, found)) else "")
            if not why:
                fits.append(found)
        if why:
            left_out[why] += 1
    return fits, dict(left_out)


def _dearer(plan: Plan, earlier: EarlierStudy) -> float | None:
    """What a cost of the earlier study is to be multiplied by to be one of this; None: they cannot be compared."""
    here, there = plan.settings["prices"], earlier.settings.get("prices")
    if here is None and there is None:
        return plan.pricing.price_per_worker_hour / float(earlier.settings.get("price_per_worker_hour", 1.0))
    return 1.0 if here == there else None


def _context(program: str, run: RunContext | None, timed: bool) -> Context:
    if run is None:
        return Context(program, DataContext(), 0, "" if timed else None)
    return Context(program, run.data, run.parameters, run.hardware if timed else None)


def _comparable(plan: Plan, earlier: EarlierStudy, trial: _FittingTrial, here: Context, timed: bool) -> bool:
    """Whether a trial of the same program had all the settings that it would have today, and the same data."""
    request, began = plan.request, trial.trial.started
    config, execution, _ = settings(trial.sample.values, plan.config, request.execution, request.workers)
    there = _context(here.program, trial.context, timed)
    same = [
        config == began.config,
        request.epochs == earlier.settings.get("epochs"),
        trial.sample.values["policy"] == began.execution.get("policy"),
        execution.precision == began.execution.get("precision"),
        execution.compress == began.execution.get("compress"),
        _agreed(trial.sample.values) == _agreed(began.execution),
        (here.data.samples, here.hardware) == (there.data.samples, there.hardware),
    ]
    if timed:  # where workers are shared out, how long a trial takes depends on the others
        told = execution.to_json()
        same += [told.get(name) == began.execution.get(name) for name in _MEANS]
        same += [request.trial_workers is None and earlier.settings.get("trial_workers") is None]
    return all(same)


def _agreed(values: Mapping[str, Any]) -> SyncChoice:
    """How workers agreed, in a trial that ran, or would."""
    return SyncChoice.of({name: values[name] for name in SYNC_NAMES if name in values})


class _TryOut(Tuning):
    """Trials of a step, of which nothing but the context counts."""

    def result(self, life: TrialSummary, ended: JobEvent) -> TrialFinished:
        run = ended.outcome if isinstance(ended.outcome, RunFinished) else None
        return TrialFinished(life.number, "infeasible" if run is None else "complete", run=run)


def _try_out(
    plan: Plan, sample: Sample, cluster: Cluster, clock: Clock, interrupts: Callable[[], int]
) -> RunFinished | None:
    """One step of a configuration on one worker; None where it does not come to that."""
    request = plan.request
    config, execution, _ = settings(sample.values, plan.config, request.execution, request.workers)
    limits = [limit for limit in (request.trial_timeout_s, request.budget_s) if limit is not None]
    one = FixedTrial(config, request.seed, replace(execution.on(1), mesh=None, copies=None), "calibrate", max_steps=1)
    folder = request.out / "warm"
    told: list[Record] = []  # for no journal: it is no trial of this study
    loop = StudyLoop(
        _TryOut(replace(plan, request=replace(request, out=folder)), cluster.files, checkpoints=False),
        FixedTrials("calibrate", [one]),
        NoProposals(),
        Pool(cluster, most=1, timeout_s=min(limits, default=None), clock=clock),
        clock,
        told.append,
        Keeper(KeepNothing(), cluster.files, folder),
    )
    try:
        loop.run(Bounds(), interrupts)
    finally:
        loop.close()
        cluster.files.remove(folder)
    return next((record.run for record in told if isinstance(record, TrialFinished)), None)
