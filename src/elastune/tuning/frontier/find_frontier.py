"""``find_frontier``: how far does a program scale before accuracy pays, and which settings buy it back?

The phases run in order, each as a schedule of one study loop: calibrate step times, tune throughput, train the
naive rule, train the given policies, search, confirm the best settings with fresh seeds, time the rows. All phases
share one budget, which is split after the first measured steps (``budget.py``). No training begins that would not
end within the time of its phase, and the answer lists everything that was left out.

A row for W workers uses one slot for each part of the batch, so it has the random streams and batch statistics of W
workers. In exact mode the result does not depend on who computes a slot. One worker therefore trains for all of
them (the row is *emulated*), and the printed command gives the same result to the last bit. In fast mode the W
workers train themselves. Step times are measured where this machine has the cores, and modelled beyond.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from elastune.adapt.policies.library.registry import policies_of
from elastune.core.clock import Clock, SystemClock
from elastune.core.errors import UserError
from elastune.core.fields import keywords_of
from elastune.core.formatting import count, duration
from elastune.core.journal.files import read
from elastune.core.journal.folds import fold
from elastune.core.journal.records import (
    Entry,
    FrontierFound,
    LinkMeasured,
    Phase,
    PhasesPlanned,
    Proved,
    Record,
    RunFinished,
    StudyFinished,
    TimesFitted,
    TrialFinished,
    TrialPaused,
)
from elastune.core.plan.data_parallel import DataParallelStep
from elastune.core.run import ExecutionSettings
from elastune.core.sync_plan import SYNC_NAMES
from elastune.runtime.clusters.base import Cluster
from elastune.runtime.clusters.hosts import HostsCluster
from elastune.runtime.clusters.kind import CapacityRequest, ClusterRequest, opened
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.clusters.registry import print_line
from elastune.runtime.job.interrupts import Interrupted, Interrupts
from elastune.runtime.job.output import check_out
from elastune.runtime.job.pool import Pool
from elastune.runtime.job.preflight import is_checked
from elastune.runtime.job.run import Observe, journal_in
from elastune.runtime.logger import check_loggers, logging_to
from elastune.train.machine import cores
from elastune.tuning.frontier.budget import (
    LANE,
    LEAST_SEEDS,
    SEARCH_SHARE,
    PhaseBudget,
    PhaseWork,
    TrainingCost,
    plan_phases,
    refuse_small,
    trainings_s,
)
from elastune.tuning.frontier.by_command import checked_command, command_frontier
from elastune.tuning.frontier.checked_request import CheckedFrontier, check
from elastune.tuning.frontier.choice import FRESH_SEEDS, Cell, Choice, Confirm
from elastune.tuning.frontier.conclusion import SEARCH, TUNED, conclude, sides
from elastune.tuning.frontier.criteria import FrontierCriteria, Times
from elastune.tuning.frontier.experiment import FrontierExperiment
from elastune.tuning.frontier.short_runs import Calibration, ExecutionSearch, ShortRuns
from elastune.tuning.frontier.trainings import Recipe, Training, Trainings, name_of
from elastune.tuning.frontier.worker_layouts import LayoutKey, layout_key
from elastune.tuning.search.front import nondominated
from elastune.tuning.search.registry import make_schedule
from elastune.tuning.search.schedule import FixedTrial, FixedTrials, Schedule
from elastune.tuning.search.suggester import Suggester
from elastune.tuning.study.api import Train, below_cell, program_of, results_folder
from elastune.tuning.study.budget import Bounds
from elastune.tuning.study.control.acts import StudyControl
from elastune.tuning.study.control.requests import Inbox
from elastune.tuning.study.experiment import TrialProofs, trials_left
from elastune.tuning.study.proposals import Proposals
from elastune.tuning.study.rebalancer import sharing
from elastune.tuning.study.request import FrontierRequest, frontier_request
from elastune.tuning.study.resume import study_changes
from elastune.tuning.study.retention import Keeper, KeepNothing
from elastune.tuning.study.settings import FrontierSettings
from elastune.tuning.study.study_loop import StudyLoop
from elastune.tuning.study.validate import check_same_study

MOST = 4
"""The most layouts that the search adds to the table, because each of them may have to be confirmed."""
TIMING_SPARE = 2.0
"""The factor on the planned time for timing the rows: a measured time is worth more than one more seed."""
LASTING = (TrialFinished, TrialPaused, FrontierFound, StudyFinished)
"""The records that are written durably before the frontier goes on."""


@keywords_of(FrontierSettings)
def find_frontier(train: Train, settings: FrontierSettings) -> FrontierFound:
    """Find how far ``train`` scales before accuracy pays, and which settings buy it back.

    This is ``elastune frontier`` as a function. The file of ``train`` must also define ``space(trial)``,
    ``objectives``, and a ``config`` with ``lr`` and ``batch_size``.

    Args:
        train: A plain function at the top level of a file, ``train(session)``.
        settings: What to ask, and how long it may take. Each field of ``FrontierSettings`` is a keyword; names that end
            in ``_s`` are seconds.

    Returns:
        The rows of the table, the front among them, and ``found.answer``: which row to take
        (``found.rows[found.pick]``), what its settings and what its workers buy, and ``found.command``.

    Raises:
        UserError: For a wrong request, for a program that fails with its own settings, and for a budget that is too
            small, once the first steps were measured; the fix names the budget that it needs.

    Example:
        >>> found = elastune.find_frontier(train, workers=(1, 2, 4), target=0.95, budget_s=90)
        >>> print(found.answer.sentence, found.command)
    """
    program, cluster = program_of(train, cells=True), settings.place(settings.grace_s, print_line)
    request = frontier_request(settings, program, Path(), settings.execution or ExecutionSettings())
    loggers = check_loggers(settings.log)
    with (
        results_folder(settings.out, train, program, "frontier", resume=settings.resume) as (folder, program),
        logging_to(loggers, folder, print_line),
        below_cell("study", None, request.budget_s) as observe,
    ):
        return frontier(replace(request, out=folder, program=program), cluster=cluster, observe=observe)


def frontier(
    request: FrontierRequest,
    *,
    cluster: Cluster | ClusterRequest | None = None,
    observe: Observe | None = None,
    clock: Clock | None = None,
) -> FrontierFound:
    """Run all phases within ``request.budget_s`` and return the answer.

    The journal lies in ``request.out``; ``elastune report`` draws the report from it. A frontier that was killed
    resumes from the journal, and unfinished trainings resume from their last checkpoints.

    A ``cluster`` of other hosts is opened after all checks, with room for the most workers asked about. All step times
    are then measured on it, on as few hosts as possible. Trainings that outlived an earlier controller (within
    ``request.grace_s``) end first.

    Args:
        request: The request.
        cluster: Where trainings run; None: this machine.
        observe: Gets every record of the journal.
        clock: The clock; None: the system's.

    Returns:
        The rows, the front and the answer.

    Raises:
        UserError: For a wrong request, a program that fails with its own settings, or a budget that is too small for a
            search, unless the request is ``short``.
        Interrupted: If an interrupt came before the first rows were trained.
    """
    if request.program.command is not None:
        return command_frontier(request, cluster=cluster, observe=observe, clock=clock)
    plan, before = checked(request, cluster)
    elsewhere = _elsewhere(cluster)
    changed = study_changes(plan.settings, before, request.program, request.accept_changes)
    widest = plan.layouts[-1].workers
    most = widest if plan.together else 1
    wanted = widest if elsewhere else max(cores(), most)
    room = CapacityRequest(
        request.out, wanted, wanted, grows=False, grace_s=request.grace_s, adopts=trials_left(request.out, before)
    )
    with (
        journal_in(request.out, request.resume) as journal,  # first: its lock keeps other controllers out
        opened(cluster, room) as opened_cluster,
        Interrupts() as interrupts,
        ExitStack() as stack,
    ):
        place = opened_cluster or stack.enter_context(LocalCluster(capacity=wanted))

        def keep(record: Record) -> None:
            journal.write(record, durable=isinstance(record, LASTING))
            if observe is not None:
                observe(record)

        # A training that is wider than the machine runs by itself.
        pool = Pool(place, most=None if elsewhere or isinstance(cluster, Cluster) else cores(), clock=clock)
        job = _Frontier(plan, place, pool, keep, clock or SystemClock(), lambda: interrupts.count, before)
        stack.callback(job.loop.close)  # a cluster of the caller's stays open, but its trainings must end
        job.resume(changed)
        if not before and is_checked(request.program):
            keep(Proved("checked"))
        if isinstance(cluster, ClusterRequest) and isinstance(place, HostsCluster):
            place.gather(wanted, cluster.access.gather_s, lambda: interrupts.count > 0)
        return job.run(place.capacity if elsewhere else cores(), 1 if elsewhere else cores())


def checked(
    request: FrontierRequest, cluster: Cluster | ClusterRequest | None = None
) -> tuple[CheckedFrontier, list[Entry]]:
    """Run all checks that ``frontier`` makes before it opens its journal and its cluster. Nothing is started.

    Args:
        request: As ``frontier`` takes it.
        cluster: As ``frontier`` takes it.

    Returns:
        The checked request, and the entries that the journal already has.

    Raises:
        UserError: As ``frontier`` raises it.

    Example:
        >>> plan, before = checked(request)
    """
    if request.program.command is not None:
        return checked_command(request, cluster)
    plan = check(request, None if _elsewhere(cluster) else cores())
    path = check_out(request.out, request.resume)
    before = read(path) if path.exists() else []
    check_same_study(plan.settings, before, path)
    most = plan.layouts[-1].workers if plan.together else 1
    if isinstance(cluster, Cluster) and cluster.capacity < most:
        rule = "in fast mode, and under a policy, only so many workers train as so many do"
        fix = "use --mode exact and no policy, or fewer --workers"
        raise UserError(rule, f"{most} workers, room for {cluster.capacity}", fix)
    return plan, before


def _elsewhere(cluster: Cluster | ClusterRequest | None) -> bool:
    """Whether workers run on other hosts."""
    return cluster.varies if isinstance(cluster, Cluster) else cluster is not None and not cluster.kind.here


class _Frontier:
    """One frontier while it runs: its phases in order, and the state that they share."""

    def __init__(
        self,
        plan: CheckedFrontier,
        cluster: Cluster,
        pool: Pool,
        keep: Callable[[Record], None],
        clock: Clock,
        interrupts: Callable[[], int],
        before: Sequence[Entry],
    ) -> None:
        request = self._request = plan.request
        self._plan = plan
        self._keep_record = keep
        control = StudyControl(Inbox(request.out), divided=True)
        self._interrupts: Callable[[], int] = lambda: interrupts() + control.ends
        self._before = before
        start_s = before[0].at if before else clock.wall()
        self._prices = None if request.prices is None else request.prices.since(start_s)
        self._experiment = FrontierExperiment(plan, cluster.files)
        self._search = make_schedule(request.stopping, plan.searched, request.seed)
        suggester = Suggester(plan.space, plan.searched, plan.constraints, sampler=request.sampler, seed=request.seed)
        self.loop = StudyLoop(
            self._experiment,
            self._search,
            Proposals(suggester, inline=False),
            pool,
            clock,
            self._keep,
            Keeper(KeepNothing(), cluster.files, request.out),
            share=sharing(request.trial_workers, plan.execution(plan.parts[-1])),
            proofs=TrialProofs(unchecked=request.unchecked),
            control=control,
        )
        self._trainings = Trainings(self.loop.table)
        self._choice = Choice(plan, self._trainings)
        self._budget_s = math.inf if request.budget_s is None else request.budget_s
        self._short_runs: ShortRuns | None = None
        self._cluster = cluster
        self._pool = pool
        self._phases: PhaseBudget | None = None
        self._took: dict[str, float] = {}

    def run(self, timeable: int, threads: int) -> FrontierFound:
        """Run all phases and return the answer.

        ``timeable``: the most workers whose steps can be timed, one for each core. ``threads``: the threads that the
        workers of a short run may share.
        """
        rooms = self._cluster.host_rooms
        per_host = rooms[0] if len(rooms) > 1 else None
        runs = self._short_runs = ShortRuns(self._plan, self.loop, self._interrupts, per_host, timeable)
        try:
            cost = runs.first_steps(lambda run: self._learn_samples([run]))
            phases = self._split(runs, cost)
            runs.measure()
            self._note("calibrate")
            runs.throughput(threads)
            self._note("throughput")
            by = self._fitted(runs.calibration)
            self._naive(runs, cost)
        except Interrupted:
            self.loop.finish("interrupted")
            raise
        phases = self._phases or phases
        why = self._search_for(phases) if phases.searches else ""
        self._note("search")
        searched = any(t.phase == "search" and t.run is not None for t in self._trainings.done.values())
        for layout in added_layouts(self._plan, [*self._trainings.done.values(), *self._experiment.reused], by):
            self._plan.worker_layouts.join(layout)
        compared = sides(self._plan, self._choice, self._trainings.searched, by)
        if searched:
            self._confirm(by, [cell for side in reversed(compared) for cell in side.cells])
        else:
            compared = [side for side in compared if side.name not in (TUNED, SEARCH)]
        self._note("confirm")
        tuned = {parts: self._tuned_recipes(parts, by, searched) for parts in self._plan.worker_layouts.parts}
        timings = [
            t
            for parts, each in tuned.items()
            for recipe in each
            for t in runs.to_measure(parts, recipe, by, self._choice)
        ]
        runs.time(timings)
        self._note("timing")
        by = self._fitted(runs.calibration)
        rules, untimed = self._experiment.rules, runs.calibration.untimed(timings)
        answer = conclude(self._plan, self._choice, tuned, rules, by, compared, runs.tuned, untimed, runs.left_out)
        self._record_phases(phases)
        self.loop.write_record(answer)
        self.loop.finish(self._end(why, searched))
        return answer

    def resume(self, changed: Sequence[str]) -> None:
        """Take over the trainings of earlier controllers. The search learns of them by the earlier step times.

        Trainings that outlived their controller run to their ends first, because no step can be timed beside them.
        ``changed``: the accepted changes of the program, space or data.
        """
        earlier = fold(self._before)
        fits = [entry.record for entry in self._before if isinstance(entry.record, TimesFitted)]
        if fits:
            self._experiment.by = self._criteria(Times(DataParallelStep.from_record(fits[-1]), {}))
        runs = [life.finished.run for life in earlier.trials.values() if life.finished is not None]
        self._learn_samples([run for run in runs if run is not None])
        for life in earlier.trials.values():
            if rule := life.started.tags.get("lr_rule"):
                self._experiment.rules[name_of(life.started.config)] = rule
        self.loop.replay(self._before, self._plan.settings, self._request.command, changed)
        self._experiment.set_trainings(self._trainings)
        self.loop.await_running(self._interrupts)

    def _keep(self, record: Record) -> None:
        if isinstance(record, LinkMeasured) and self._short_runs is not None:
            self._short_runs.calibration.links.append(record)
        self._keep_record(record)

    def _criteria(self, times: Times) -> FrontierCriteria:
        request = self._request
        return FrontierCriteria(
            self._plan.quality, request.target, request.price_per_worker_hour, times, request.margin, self._prices
        )

    def _fitted(self, calibration: Calibration) -> FrontierCriteria:
        times, record = calibration.fit()
        self.loop.write_record(record)
        self._experiment.by = self._criteria(times)
        return self._experiment.by

    def _run(self, schedule: Schedule, bounds: Bounds | None = None) -> str:
        """Run ``schedule`` until it has no more trials to begin, or until the budget ends. Returns why it ended."""
        return self.loop.run(bounds or self._within(self._budget_s), self._interrupts, schedule)

    def _within(self, end_s: float, training_s: float = 0.0) -> Bounds:
        """Bounds under which no training begins that would end after ``end_s``, if a training takes ``training_s``."""
        if self._budget_s == math.inf:
            return Bounds()
        return Bounds(budget_s=self._budget_s, reserve_s=max(0.0, self._budget_s - end_s + training_s))

    def _use(self, plan: CheckedFrontier) -> None:
        """Go on with a changed ``plan``."""
        self._plan = plan
        self._choice = Choice(plan, self._trainings)
        self._experiment.use(plan)
        if self._short_runs is not None:
            self._short_runs.use(plan)

    def _note(self, phase: str) -> None:
        """Record how long ``phase`` took, now that it is over."""
        self._took[phase] = max(0.0, self.loop.elapsed_s - sum(self._took.values()))

    def _record_phases(self, phases: PhaseBudget) -> None:
        took = {name: round(seconds, 3) for name, seconds in self._took.items()} if "timing" in self._took else {}
        planned = {name: round(seconds, 3) for name, seconds in phases.seconds.items()}
        self.loop.write_record(PhasesPlanned(phases.budget_s, planned, phases.seeds, took, self._left_out))

    @property
    def _left_out(self) -> list[str]:
        """Everything that there was no time for, in words."""
        return [] if self._short_runs is None else self._short_runs.left_out

    def _end(self, why: str, searched: bool) -> str:
        """Why the frontier ended. ``why``: why its search ended."""
        if self._interrupts():
            return "interrupted"
        if not searched:
            return f"no time for a search in a budget of {self._budget_s:g} s"
        spent = why.startswith("a budget") or self.loop.elapsed_s >= self._budget_s
        return f"a budget of {self._budget_s:g} s" if spent else why

    def _learn_samples(self, runs: Sequence[RunFinished]) -> None:
        """Learn the size of the training set from the newest of ``runs`` that reports it; batches are cut there."""
        counts = [run.context.data.samples for run in runs if run.context is not None and run.context.data is not None]
        positive = [samples for samples in counts if samples > 0]
        if positive and self._plan.samples != positive[-1]:
            self._use(replace(self._plan, samples=positive[-1]))

    def _split(self, runs: ShortRuns, cost: TrainingCost) -> PhaseBudget:
        """Split the budget among the phases. Raises ``UserError`` if the search would get less than its share."""
        searched_s = sum(life.seconds for life in self.loop.table.trials.values() if life.started.phase == "search")
        began = searched_s > 0
        phases = plan_phases(
            cost, self._work(runs, searched_s / self._lanes), self._request.budget_s, short=self._short
        )
        if not self._short and not began:
            refuse_small(phases, cost)
        if began and not phases.searches:
            phases = replace(phases, searches=True, left_out=())  # it goes on in the time that is left
        self._budget_s = phases.budget_s
        self._phases = phases
        runs.split(phases)
        runs.left_out += [*self._plan.cut, *phases.left_out]
        self._record_phases(phases)
        return phases

    @property
    def _short(self) -> bool:
        return self._request.short

    def _work(self, runs: ShortRuns, searched_s: float = 0.0) -> PhaseWork:
        """The work that is left."""
        plan, cells = self._plan, [(self._plan.naive_recipe(n), n) for n in self._plan.parts]
        policy_sets = [policies_of(text) for text in self._request.policies]
        layouts, wanted, factor = plan.layouts[: runs.timed_layouts], runs.wanted(), runs.calibration.factor
        tries = (
            sum(len(ExecutionSearch.most(layout, self._lanes)) for layout in layouts) if self._request.throughput else 0
        )
        return PhaseWork(
            trainers=tuple(plan.execution(n).workers for n in plan.parts),
            policies=tuple(
                plan.execution(n, plan.naive_recipe(n, policies).variant).workers
                for policies in policy_sets
                for n in plan.parts
            ),
            seeds=self._request.seeds,
            cores=self._lanes,
            timings=tuple(factor(timing.batch) for timing in wanted),
            throughput=sum(timing not in wanted for timing in runs.named()) + tries,
            rows=tuple(factor(plan.naive_batch(layout.num_slots)) for layout in layouts),
            spent_s=self.loop.elapsed_s,
            done=len(cells) * self._request.seeds - len(self._choice.missing("naive", cells)),
            searched_s=searched_s,
        )

    def _naive(self, runs: ShortRuns, cost: TrainingCost) -> None:
        """Train the naive rule (batch and learning rate x W), then the same under each given policy.

        One seed for every worker count comes first. The time of these trainings shows how many further seeds fit into
        the budget.
        """
        assert self._phases is not None
        cells = [(self._plan.naive_recipe(n), n) for n in self._plan.parts]
        first = [trial for trial in self._fixed("naive", cells) if trial.seed == self._request.seed]
        self._run(FixedTrials("naive", first), self._within(self._budget_s, cost.training_s))
        phases, seeds = self._phases, self._phases.seeds
        if (usual_s := self._usual_s) is not None and not self._interrupts():
            work = replace(self._work(runs), timings=(), throughput=0)
            again = plan_phases(replace(cost, whole_s=usual_s / self._slowed), work, phases.budget_s, short=self._short)
            seeds = min(phases.seeds, again.seeds if again.searches or not phases.searches else LEAST_SEEDS)
        after_s = self._least_after_s(phases, cost)
        lasts = self._within(self._budget_s - after_s, self._usual_s or cost.training_s)
        low = self._request.seed
        more = [trial for trial in self._fixed("naive", cells) if trial.seed < low + seeds]
        self._run(FixedTrials("naive", sorted(more, key=lambda trial: trial.seed)), lasts)
        self._note("naive")
        policy_sets = [policies_of(text) for text in self._request.policies]
        under = [(self._plan.naive_recipe(n, policies), n) for policies in policy_sets for n in self._plan.parts]
        if self._interrupts():
            raise Interrupted  # a missing row would look like a diverged one
        self._keep_trained(cells, cost)
        if under:
            last = self._request.seed + self._choice.seeds().stop - self._choice.seeds().start
            more = [trial for trial in self._fixed("policy", under) if trial.seed < last]
            self._run(FixedTrials("policy", sorted(more, key=lambda trial: trial.seed)), lasts)
            lost = [each for each in self._choice.missing("", under) if each[1] in self._plan.parts]
            if lost:
                self._left_out.append(f"{count(len(lost), 'training')} under policies: there was no time")
        self._note("policy")
        if self._interrupts():
            raise Interrupted

    def _keep_trained(self, cells: Sequence[Cell], cost: TrainingCost) -> None:
        """Go on with the worker counts and seeds that were trained. Raises ``UserError`` if the first count was not."""
        ended = {
            parts: [self._choice.of_seed(r, parts, seed) is not None for seed in self._choice.seeds()]
            for r, parts in cells
        }
        if not any(ended[self._plan.parts[0]]):
            rule = "a budget must have time for one training with the program's own settings"
            took = f"{self._budget_s:g} s, where one takes about {duration(cost.training_s)} here now"
            raise UserError(rule, took, f"use --budget {math.ceil(max(self._phases_needs_s, 2 * self._budget_s)):.0f}s")
        lost = [parts for parts, seeds in ended.items() if not seeds[0]]
        whole = [
            all(seeds[i] for parts, seeds in ended.items() if parts not in lost) for i in range(self._request.seeds)
        ]
        seeds = whole.index(False) if False in whole else len(whole)
        if lost:
            workers = ", ".join(str(layout.workers) for layout in self._plan.layouts if layout.num_slots in lost)
            self._left_out.append(f"{workers} workers: there was no time for a training")
        planned = self._phases.seeds if self._phases is not None else seeds
        if seeds < planned:
            self._left_out.append(f"{count(planned - seeds, 'seed')} for each cell of the table: trainings took longer")
        if self._phases is not None:
            self._phases = replace(self._phases, seeds=seeds)
        worker_layouts = self._plan.worker_layouts.without(lost) if lost else self._plan.worker_layouts
        self._use(
            replace(self._plan, worker_layouts=worker_layouts, request=replace(self._plan.request, seeds=max(1, seeds)))
        )

    @property
    def _phases_needs_s(self) -> float:
        return 0.0 if self._phases is None else self._phases.needs_s

    @property
    def _usual_s(self) -> float | None:
        """The median seconds of a training of the naive rule; None if none has ended."""
        took = [t.result.seconds for t in self._trainings.done.values() if t.phase == "naive" and t.run is not None]
        return median(took) if took else None

    @property
    def _lanes(self) -> int:
        """How many workers may train at a time now; hosts may join later."""
        return max(1, self._pool.capacity)

    @property
    def _reserved_s(self) -> float:
        """The seconds within which three of four trainings of search and confirmation ended.

        The maximum would let one slow training end the phase.
        """
        phases = ("search", "confirm")
        took = [t.result.seconds for t in self._trainings.done.values() if t.phase in phases and t.run is not None]
        return max(sorted(took)[3 * (len(took) - 1) // 4] if took else 0.0, self._usual_s or 0.0)

    @property
    def _slowed(self) -> float:
        """By which factor a training takes longer if all workers train at once."""
        return self._lanes / (1 + LANE * (self._lanes - 1))

    def _least_after_s(self, phases: PhaseBudget, cost: TrainingCost) -> float:
        """Seconds of the budget that the search needs, together with the least confirmation and timing after it."""
        if not phases.searches:
            return 0.0
        usual_s = (self._usual_s or cost.training_s) / self._slowed
        widest = self._plan.execution(self._plan.parts[-1]).workers
        least_s = trainings_s((widest,) * LEAST_SEEDS, usual_s, self._lanes)
        return SEARCH_SHARE * phases.budget_s + least_s + phases.timing

    def _search_for(self, phases: PhaseBudget) -> str:
        """Search in its share of the budget and in the time that earlier phases left over. Returns why it ended."""
        start_s, usual_s = self.loop.elapsed_s, self._usual_s or 0.0
        searched = sum(life.started.phase == "search" for life in self.loop.table.trials.values())
        widest = self._plan.execution(self._plan.parts[-1]).workers
        least_s = trainings_s((widest,) * len(self._choice.seeds()), usual_s / self._slowed, self._lanes)
        free_s = phases.budget_s - start_s - phases.timing
        confirm_s = max(least_s, min(phases.confirm, free_s - SEARCH_SHARE * phases.budget_s))
        end_s = start_s + free_s - confirm_s
        if end_s - start_s < usual_s and not searched:
            took, planned = duration(start_s), duration(phases.calibrate + phases.naive + phases.policy)
            self._left_out.append(f"the search: the phases before it took {took}, not {planned}, and no time was left")
            return ""
        why = self._run(self._search, Bounds(budget_s=max(end_s, start_s), reserve_s=usual_s))
        got_s = self.loop.elapsed_s - start_s
        if got_s < 0.95 * SEARCH_SHARE * phases.budget_s and why.startswith("a budget") and not searched:
            part = f"{got_s / phases.budget_s:.0%} of the budget instead of {SEARCH_SHARE:.0%}"
            self._left_out.append(
                f"part of the search: it had {part}, since trainings took longer than their first steps"
            )
        return why

    def _confirm(self, by: FrontierCriteria, compared: list[Cell]) -> None:
        """Train the best recipes with fresh seeds, then the ``compared`` cells by seeds, while the budget lasts."""

        def wanted() -> list[FixedTrial]:
            best = self._fixed("confirm", self._choice.unconfirmed(by), FRESH_SEEDS)
            return best or sorted(self._fixed("confirm", compared, FRESH_SEEDS), key=lambda trial: trial.seed)

        schedule = Confirm(wanted, lambda: bool(self._trainings.open("confirm")))
        end_s = self._budget_s - (0.0 if self._phases is None else TIMING_SPARE * self._phases.timing)
        self._run(schedule, self._within(end_s, self._reserved_s))
        if lost := sorted({parts for _, parts in self._choice.unconfirmed(by)}):
            workers = ", ".join(
                str(layout.workers) for layout in self._plan.worker_layouts.layouts if layout.num_slots in lost
            )
            self._left_out.append(f"confirming what looked best for {workers} workers: there was no time")

    def _tuned_recipes(self, parts: int, by: FrontierCriteria, searched: bool) -> list[Recipe]:
        """The recipes shown as tuned: never the naive rule itself; without a search, only recipes under a policy."""
        naive = self._plan.naive_recipe(parts).name
        best = self._choice.bests(parts, by, confirmed_only=True)
        return [recipe for recipe in best if recipe.name != naive and (searched or recipe.variant.policies)]

    def _fixed(self, phase: Phase, cells: list[Cell], first: int = 0) -> list[FixedTrial]:
        trials = []
        for recipe, parts, seed in self._choice.missing(phase, cells, first):
            execution, recorded = (
                self._plan.execution(parts, recipe.variant),
                recipe.variant.to_record(ExecutionSettings()),
            )
            beside = {name: recorded[name] for name in ("policy", *SYNC_NAMES) if name in recorded}
            trials.append(FixedTrial(recipe.config, seed, execution, phase, sync_and_policies=beside, parts=parts))
        return trials


def added_layouts(
    plan: CheckedFrontier, trainings: Sequence[Training], by: FrontierCriteria
) -> list[ExecutionSettings]:
    """The worker layouts that the space chose and that earn rows of their own, the fastest first.

    A layout earns rows if no other training of the search beats one of its trainings in validation quality, time and
    cost.
    """
    searched = [t for t in trainings if t.phase == "search" or t.layout is not None]
    good = [t for t in searched if t.run is not None and t.result.state == "complete"]
    if not good:
        return []
    name, sign = plan.quality.name, -1.0 if plan.quality.direction == "max" else 1.0
    table = []
    for training in good:
        kind = plan.kind_for_search(training)
        seconds, _ = by.seconds(training, kind)
        table.append([sign * training.result.metrics[name], seconds, by.cost(kind.workers, seconds)])
    existing = set(map(layout_key, plan.worker_layouts.layouts))
    best: dict[LayoutKey, ExecutionSettings] = {}
    for place in sorted(np.flatnonzero(nondominated(np.array(table))), key=lambda i: table[i][1]):
        layout = good[place].layout
        if layout is not None and layout_key(layout) not in existing:
            best.setdefault(layout_key(layout), layout)
    return list(best.values())[:MOST]
