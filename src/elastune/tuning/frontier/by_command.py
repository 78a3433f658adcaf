"""``elastune frontier --command``: the frontier of a script that trains in processes of its own.

Here ``{workers}`` are real processes. Each training of the table runs alone on the machine: its time is measured, and
its quality is that of what ran. The phases are those of other frontiers, without short runs: the naive rule, the
search, and confirming with fresh seeds. Counts beyond this machine's cores have modelled times, and no quality.

The time of a training on other counts is modelled as ``serial_s + parallel_s / workers`` (Amdahl), fitted to the times
of the naive rule. A batch of several processes is shared out among them, so the work of an epoch stays the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from scipy.optimize import nnls

from elastune.core.clock import Clock, SystemClock
from elastune.core.errors import UserError
from elastune.core.formatting import count, duration
from elastune.core.journal.files import read
from elastune.core.journal.folds import TrialSummary, fold
from elastune.core.journal.records import (
    Entry,
    FrontierFound,
    Phase,
    Record,
    RunFinished,
    StudyFinished,
    TrialFinished,
    TrialPaused,
)
from elastune.core.plan.data_parallel import DataParallelStep
from elastune.runtime.clusters.base import Cluster
from elastune.runtime.clusters.command import CommandCluster
from elastune.runtime.clusters.kind import ClusterRequest
from elastune.runtime.job.interrupts import Interrupted, Interrupts
from elastune.runtime.job.output import check_out
from elastune.runtime.job.pool import Pool
from elastune.runtime.job.run import Observe, journal_in
from elastune.train.machine import cores
from elastune.tuning.frontier.checked_request import CheckedFrontier, check
from elastune.tuning.frontier.choice import FRESH_SEEDS, Cell, Choice, Confirm
from elastune.tuning.frontier.conclusion import SEARCH, TUNED, conclude, sides
from elastune.tuning.frontier.criteria import Estimate, FrontierCriteria, Times
from elastune.tuning.frontier.experiment import FrontierExperiment
from elastune.tuning.frontier.trainings import Recipe, StepKind, Training, Trainings, name_of
from elastune.tuning.search.registry import make_schedule
from elastune.tuning.search.schedule import FixedTrial, FixedTrials, IntermediateResult, Schedule
from elastune.tuning.search.suggester import Suggester
from elastune.tuning.study.budget import Bounds
from elastune.tuning.study.experiment import TrialProofs
from elastune.tuning.study.proposals import Proposals
from elastune.tuning.study.request import FrontierRequest
from elastune.tuning.study.resume import study_changes
from elastune.tuning.study.retention import Keeper, KeepNothing
from elastune.tuning.study.run import refuse_other_hosts
from elastune.tuning.study.study_loop import StudyLoop
from elastune.tuning.study.trial_results import intermediate_result
from elastune.tuning.study.validate import check_command, check_same_study

NAIVE_SHARE, SEARCH_SHARE = 0.4, 0.75  # of the budget: the naive rule ends, and the search ends
LASTING = (TrialFinished, TrialPaused, FrontierFound, StudyFinished)
UNFITTED = DataParallelStep(0.0, 0.0, 0.0, 0.0, 0)  # steps of a command are never modelled


# --- times ---


@dataclass(frozen=True)
class CommandTimes(Times):
    """The times of a command's trainings: measured on the processes that ran, modelled on any others.

    Attributes:
        serial_s: The seconds of a training that more processes do not shorten.
        parallel_s: The seconds that they share.
    """

    serial_s: float = 1.0
    parallel_s: float = 0.0

    def estimate(
        self, batch: int, kind: StepKind, run: RunFinished, slots: int, *, batch_varies: bool = False
    ) -> Estimate:
        steps = max(1, run.steps)
        if kind.workers == run.workers:
            return Estimate(run.seconds / steps, measured=True)
        return Estimate(run.seconds / steps * self.shape(kind.workers) / self.shape(run.workers), measured=False)

    def shape(self, workers: int) -> float:
        """The modelled seconds of a training of the naive rule."""
        return self.serial_s + self.parallel_s / workers


def fitted(seconds: Mapping[int, Sequence[float]]) -> CommandTimes:
    """Fit the model of time to the trainings of the naive rule.

    Args:
        seconds: The measured times by processes. One count alone says nothing of others: no gain is then assumed.

    Example:
        >>> fitted({1: [10.0], 2: [6.0]}).shape(4)
        4.0
    """
    measured = {workers: median(each) for workers, each in seconds.items() if each}
    if len(measured) < 2:
        return CommandTimes(UNFITTED, {})
    times = np.array(list(measured.values()))
    terms = np.array([[1.0, 1.0 / workers] for workers in measured])
    (serial_s, parallel_s), _ = nnls(terms / times[:, None], np.ones(len(times)))  # relative errors count
    times_model = CommandTimes(UNFITTED, {}, serial_s=float(serial_s), parallel_s=float(parallel_s))
    errors = {f"{workers} workers": times_model.shape(workers) / took for workers, took in measured.items()}
    return replace(times_model, errors=errors if len(measured) > 2 else {})  # two points fit exactly


# --- the experiment ---


class CommandExperiment(FrontierExperiment):
    """The trainings of a command's frontier: the search sees the time that each had on its own processes."""

    def intermediate(self, life: TrialSummary) -> IntermediateResult | None:
        result = intermediate_result(life, self._pricing)
        return None if result is None else replace(result, values=(*result.values, life.reports[-1][0].seconds))

    def _seen_by_search(self, training: Training) -> TrialFinished:
        result = training.result
        if training.run is None:
            return result
        name = self._plan.quality.name
        return replace(result, values={name: result.metrics[name], "seconds": training.run.seconds})


# --- the frontier ---


def command_frontier(
    request: FrontierRequest,
    *,
    cluster: Cluster | ClusterRequest | None = None,
    observe: Observe | None = None,
    clock: Clock | None = None,
) -> FrontierFound:
    """Run the frontier of a command; arguments, result and errors as of ``find_frontier.frontier``.

    Args:
        request: The request. ``request.program.command`` is the command.
        cluster: None, or the cluster of commands; others are refused.
        observe: Gets every record of the journal.
        clock: The clock; None: the system's.

    Returns:
        The rows, the front and the answer.

    Raises:
        UserError: For a wrong request, a command that fails with its own settings, or a budget that is too small.
        Interrupted: If an interrupt came before the first rows were trained.
    """
    plan, before = checked_command(request, cluster)
    changed = study_changes(plan.settings, before, request.program, request.accept_changes)
    with (
        journal_in(request.out, request.resume) as journal,
        Interrupts() as interrupts,
        ExitStack() as stack,
    ):

        def keep(record: Record) -> None:
            journal.write(record, durable=isinstance(record, LASTING))
            if observe is not None:
                observe(record)

        room = max(cores(), plan.layouts[-1].workers)
        place = cluster if isinstance(cluster, Cluster) else stack.enter_context(CommandCluster(capacity=room))
        job = _CommandFrontier(plan, place, keep, clock or SystemClock(), lambda: interrupts.count)
        stack.callback(job.loop.close)
        job.resume(before, changed)
        return job.run()


def checked_command(
    request: FrontierRequest, cluster: Cluster | ClusterRequest | None = None
) -> tuple[CheckedFrontier, list[Entry]]:
    """Run all checks of ``command_frontier`` that need no journal. Nothing is started.

    Args:
        request: As ``command_frontier`` takes it.
        cluster: As ``command_frontier`` takes it.

    Returns:
        The checked request, for the counts that this machine can run, and the entries that the journal already has.

    Raises:
        UserError: As ``command_frontier`` raises it.
    """
    refuse_other_hosts(request.program, cluster)
    command = request.program.command
    assert command is not None
    for name, value in (("--mesh", request.meshes), ("--throughput", request.throughput)):
        if value:
            raise UserError("a command decides itself how its processes compute", name, "leave it out")
    request = replace(request, execution=replace(request.execution, mode="fast"))
    here = tuple(workers for workers in request.workers if workers <= cores())
    if not here:
        fewest = f"{request.workers[0]} on {count(cores(), 'core')}"
        raise UserError("the fewest processes of a command must run here", fewest, "ask about fewer --workers")
    plan = check(replace(request, workers=here), cores())
    own = {name: value for name, value in plan.config.items() if value is not None}
    check_command(request, command, {**plan.config, "batch_size": own["batch_size"]}, plan.user_space)
    beyond = tuple(workers for workers in request.workers if workers > cores())
    plan = replace(plan, request=replace(plan.request, workers=here), beyond=beyond)
    path = check_out(request.out, request.resume)
    before = read(path) if path.exists() else []
    check_same_study(plan.settings, before, path)
    return plan, before


class _CommandFrontier:
    """One frontier of a command while it runs."""

    def __init__(
        self,
        plan: CheckedFrontier,
        cluster: Cluster,
        keep: Callable[[Record], None],
        clock: Clock,
        interrupts: Callable[[], int],
    ) -> None:
        request = plan.request
        self._plan = plan
        self._interrupts = interrupts
        self._experiment = CommandExperiment(plan, cluster.files)
        self._search = make_schedule(request.stopping, plan.searched, request.seed)
        suggester = Suggester(plan.space, plan.searched, plan.constraints, sampler=request.sampler, seed=request.seed)
        self.loop = StudyLoop(
            self._experiment,
            self._search,
            Proposals(suggester, inline=False),
            Pool(cluster, most=max(cores(), plan.layouts[-1].workers), clock=clock),
            clock,
            keep,
            Keeper(KeepNothing(), cluster.files, request.out),
            proofs=TrialProofs(unchecked=True),
        )
        self._trainings = Trainings(self.loop.table)
        self._choice = Choice(plan, self._trainings)
        self._budget_s = math.inf if request.budget_s is None else request.budget_s
        self._left_out: list[str] = []

    def resume(self, before: Sequence[Entry], changed: Sequence[str]) -> None:
        """Take over the trainings of earlier controllers; ``changed``: accepted changes."""
        for life in fold(before).trials.values():
            if rule := life.started.tags.get("lr_rule"):
                self._experiment.rules[name_of(life.started.config)] = rule
        self.loop.replay(before, self._plan.settings, self._plan.request.command, changed)
        self._experiment.set_trainings(self._trainings)

    def run(self) -> FrontierFound:
        """Run all phases and return the answer."""
        try:
            self._naive()
        except Interrupted:
            self.loop.finish("interrupted")
            raise
        by = self._criteria()
        self._experiment.by = by
        why = self._search_for()
        searched = any(t.phase == "search" and t.run is not None for t in self._trainings.done.values())
        compared = sides(self._plan, self._choice, self._trainings.searched, by)
        if searched:
            self._confirm(by, [cell for side in reversed(compared) for cell in side.cells])
        else:
            compared = [side for side in compared if side.name not in (TUNED, SEARCH)]
        by = self._criteria()
        tuned = {parts: self._tuned(parts, by, searched) for parts in self._plan.worker_layouts.parts}
        for workers in self._plan.beyond:
            many = f"{workers} workers: this machine has {count(cores(), 'core')}"
            self._left_out.append(f"{many}, so times there are modelled and no {self._plan.quality.name} is known")
        found = conclude(self._plan, self._choice, tuned, self._experiment.rules, by, compared, left_out=self._left_out)
        self.loop.write_record(found)
        spent = self.loop.elapsed_s >= self._budget_s or why.startswith("a budget")
        ended = "interrupted" if self._interrupts() else why
        self.loop.finish(f"a budget of {self._budget_s:g} s" if spent and ended != "interrupted" else ended)
        return found

    def _naive(self) -> None:
        """Train the naive rule, each training alone, all counts with one seed first."""
        seeds, end_s = self._choice.seeds(), NAIVE_SHARE * self._budget_s
        cells: list[Cell] = [(self._plan.naive_recipe(parts), parts) for parts in self._plan.parts]
        first = [trial for trial in self._fixed("naive", cells) if trial.seed == seeds[0]]
        self._run(FixedTrials("naive", first, at_once=1), self._budget_s)
        more = sorted(self._fixed("naive", cells), key=lambda trial: trial.seed)
        self._run(FixedTrials("naive", more, at_once=1), end_s)
        if self._interrupts():
            raise Interrupted
        trained = {parts: [self._choice.of_seed(r, parts, seed) for seed in seeds] for r, parts in cells}
        if trained[self._plan.parts[0]][0] is None:
            took = f"{self._budget_s:g} s"
            fix = f"use --budget {math.ceil(4 * self._budget_s)}s or more"
            raise UserError("a budget must have time for one training with the command's own settings", took, fix)
        failed = [t.result.reason for t in trained[self._plan.parts[0]] if t is not None and t.run is None]
        if failed and len(failed) == len([t for t in trained[self._plan.parts[0]] if t is not None]):
            fix = "fix the command's own settings before scaling them"
            raise UserError("the command must train with its own settings", failed[0], fix)
        lost = [parts for parts, each in trained.items() if each[0] is None]
        for parts in lost:
            self._left_out.append(f"{parts} workers: there was no time for a training")
        kept = [each for parts, each in trained.items() if parts not in lost]
        whole = [all(each[nth] is not None for each in kept) for nth in range(len(seeds))]
        complete = whole.index(False) if False in whole else len(whole)
        if complete < len(seeds):
            self._left_out.append(f"{count(len(seeds) - complete, 'seed')} for each cell: there was no time")
        layouts = self._plan.worker_layouts.without(lost) if lost else self._plan.worker_layouts
        request = replace(self._plan.request, seeds=complete)
        self._plan = replace(self._plan, worker_layouts=layouts, request=request)
        self._choice = Choice(self._plan, self._trainings)
        self._experiment.use(self._plan)

    def _search_for(self) -> str:
        """Search until three quarters of the budget; without a budget, for as long as the naive rule took."""
        end_s = SEARCH_SHARE * self._budget_s
        if math.isinf(end_s):
            end_s = 2 * self.loop.elapsed_s
        if end_s - self.loop.elapsed_s < self._usual_s:
            self._left_out.append(f"the search: a training takes {duration(self._usual_s)}, and no time was left")
            return "no time for a search"
        return self.loop.run(Bounds(budget_s=end_s, reserve_s=self._usual_s), self._interrupts, self._search)

    def _confirm(self, by: FrontierCriteria, compared: list[Cell]) -> None:
        """Train the best recipes with fresh seeds, then the ``compared`` cells, each training alone."""

        def wanted() -> list[FixedTrial]:
            best = self._fixed("confirm", self._choice.unconfirmed(by), FRESH_SEEDS)
            return best or sorted(self._fixed("confirm", compared, FRESH_SEEDS), key=lambda trial: trial.seed)

        def busy() -> bool:
            return bool(self._trainings.open("confirm"))

        self._run(Confirm(wanted, busy, at_once=1), self._budget_s)
        if lost := sorted({parts for _, parts in self._choice.unconfirmed(by)}):
            counts = ", ".join(map(str, lost))
            self._left_out.append(f"confirming what looked best for {counts} workers: there was no time")

    def _tuned(self, parts: int, by: FrontierCriteria, searched: bool) -> list[Recipe]:
        """The confirmed recipes of the table beside the naive rule's; none without a search."""
        naive = self._plan.naive_recipe(parts).name
        best = self._choice.bests(parts, by, confirmed_only=True) if searched else []
        return [recipe for recipe in best if recipe.name != naive]

    def _fixed(self, phase: Phase, cells: list[Cell], first: int = 0) -> list[FixedTrial]:
        missing = self._choice.missing(phase, cells, first)
        return [
            FixedTrial(recipe.config, seed, self._plan.execution(parts, recipe.variant), phase, parts=parts)
            for recipe, parts, seed in missing
        ]

    def _run(self, schedule: Schedule, end_s: float) -> None:
        """Run ``schedule``; no training begins that would end after ``end_s``."""
        usual_s = self._usual_s
        bounds = Bounds() if math.isinf(end_s) else Bounds(budget_s=max(end_s, 0.001), reserve_s=usual_s)
        self.loop.run(bounds, self._interrupts, schedule)

    @property
    def _usual_s(self) -> float:
        """The median seconds of a training of the naive rule; 0 before the first."""
        took = [t.result.seconds for t in self._trainings.done.values() if t.phase == "naive" and t.run is not None]
        return median(took) if took else 0.0

    def _criteria(self) -> FrontierCriteria:
        alone: defaultdict[int, list[float]] = defaultdict(list)
        for training in self._trainings.done.values():
            if training.phase == "naive" and training.run is not None:
                alone[training.run.workers].append(training.run.seconds)
        request = self._plan.request
        return FrontierCriteria(
            self._plan.quality, request.target, request.price_per_worker_hour, fitted(alone), request.margin
        )
