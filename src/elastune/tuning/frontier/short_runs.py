"""The short runs of a frontier: they measure step times here and look for execution settings that are faster.

``Calibration`` times one worker on several batch sizes and every worker layout that this machine has cores for. On
several hosts, a layout that fits one host is timed twice: on as few hosts as possible and spread over all of them.
This separates the links within a host from those across hosts.

``ExecutionSearch`` improves one layout, one setting after the other: threads, mechanism, topology, bucket size,
micro-batch. It takes a change only if it gives the same bits as before, so what is known of the quality still holds.
The fastest of many short runs is often a lucky one. The winner and the original are therefore timed again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from elastune.core.communication import Topology
from elastune.core.errors import UserError
from elastune.core.formatting import count
from elastune.core.journal.folds import TrialSummary, TrialTable
from elastune.core.journal.records import (
    ExecutionTimed,
    LinkMeasured,
    Phase,
    RunFinished,
    ThroughputTuned,
    TimesFitted,
    TrialFinished,
)
from elastune.core.layout import BUCKET_BYTES, FIRST_BUCKET_BYTES
from elastune.core.mesh import MechanismName, Mesh
from elastune.core.plan.data_parallel import Fit, Observation, fit_parts
from elastune.core.run import ExecutionSettings
from elastune.runtime.job.interrupts import Interrupted
from elastune.tuning.frontier.budget import TIMED_STEPS, PhaseBudget, TrainingCost, timed_steps
from elastune.tuning.frontier.checked_request import CheckedFrontier, check_target
from elastune.tuning.frontier.choice import Choice
from elastune.tuning.frontier.criteria import FrontierCriteria, Times, batch_of
from elastune.tuning.frontier.trainings import TIMED, Recipe, StepKind
from elastune.tuning.frontier.worker_layouts import timed_with
from elastune.tuning.search.schedule import FixedTrial, FixedTrials, Next, Schedule
from elastune.tuning.study.budget import Bounds
from elastune.tuning.study.study_loop import StudyLoop

GAIN = 1.05  # other settings must be faster by this factor: a step's time varies by as much from run to run
BUCKETS = (256 << 10, 1 << 20, 4 << 20, 64 << 20)
"""Bucket sizes that are tried, if the gradients fill more than one bucket."""
ROUTES = ("ring", "tree", "star")
"""Topologies that are tried, if more than two workers sum."""
STEPS = TIMED_STEPS
FIRST_STEPS = 12  # of the first short run, when the time of a step is not known yet
MOST_NAMED = 8  # kinds of steps named by the space that are timed before it is searched
CALIBRATE_SLACK = 1.5
"""If calibrating takes longer than planned by this factor, further short runs are left out."""


# --- faster execution settings with the same bits ---


@dataclass
class ExecutionSearch:
    """The search for faster execution settings of one worker layout.

    ``rounds`` yields the settings to time next, and ``observe`` takes the result of each short run.

    Attributes:
        layout: The layout with its own settings.
        batch: The global batch of all its short runs.
        cores: The cores that its workers share.
        free: Whether the user left mechanism and mesh open, so that another mechanism may be tried.
        tried: The settings that were timed, in order.
        hurried: Whether no time is left for further settings, so that only the best so far is timed again.
        grad_bytes: The size of all gradients, from the first short run.
    """

    layout: ExecutionSettings
    batch: int
    cores: int
    free: bool
    tried: list[ExecutionTimed] = field(default_factory=list)
    hurried: bool = False
    grad_bytes: int = 0
    _settings: list[ExecutionSettings] = field(default_factory=list)
    _best: int = 0
    _sha256: str = ""
    _again: list[int] = field(default_factory=list)

    @classmethod
    def most(cls, layout: ExecutionSettings, cores: int, free: bool = True) -> list[ExecutionSettings]:
        """The most settings that a search may time, the repetition of the best included.

        It assumes that no setting changes which further settings can be tried.
        """
        climb = cls(layout, layout.first_mesh.batch * 2, cores, free, grad_bytes=1 << 62)
        kinds = (climb._threads, climb._mechanisms, climb._routes, climb._buckets, climb._passes)
        return [layout, *(execution for kind in kinds for execution in kind(layout)), layout, layout]

    @property
    def repeats(self) -> bool:
        """Whether the newest round repeats settings that were timed before."""
        return bool(self._again)

    def rounds(self) -> Iterator[list[ExecutionSettings]]:
        """Yield the settings to time next. ``observe`` must get the results of a round before the next one."""
        yield [self.layout]
        if self.tried[0].step_s is None:
            return  # it fails by itself, or has too few steps to time
        for kind in (self._threads, self._mechanisms, self._routes, self._buckets, self._passes):
            if self.hurried:
                break
            yield kind(self._settings[self._best])
        if self._best:
            self._again = [0, self._best]
            yield [self.layout, self._settings[self._best]]
            original, winner = self.tried[-2:]
            lucky = (
                original.step_s is None
                or winner.step_s is None
                or winner.step_s * GAIN >= original.step_s
                or not winner.same
            )
            self._best = 0 if lucky else len(self.tried) - 1

    def give_up(self) -> None:
        """Keep the layout's own settings, because no time is left to time the best again."""
        self._best = 0

    def observe(self, execution: ExecutionSettings, run: RunFinished | None) -> None:
        """Take the result of a short run with ``execution``; None if it failed."""
        first = not self.tried
        if first and run is not None:
            self._sha256 = run.sha256
            self.grad_bytes = run.grad_bytes
        step_s = None if run is None else run.step_s
        same = None if run is None else run.sha256 == self._sha256
        words = changed(self.layout, execution) or "as asked for"
        self.tried.append(ExecutionTimed(execution.to_json(), words, step_s, same))
        self._settings.append(execution)
        if self._again:
            return
        best_s = self.tried[self._best].step_s
        if same and step_s is not None and best_s is not None and step_s * GAIN < best_s:
            self._best = len(self.tried) - 1

    @property
    def best(self) -> ExecutionSettings:
        """The fastest settings with the same bits."""
        return self._settings[self._best] if self._settings else self.layout

    @property
    def result(self) -> ThroughputTuned:
        """The record of this search. It has at least one entry: the layout's own settings."""
        return ThroughputTuned(self.batch, list(self.tried), self._best)

    def _threads(self, execution: ExecutionSettings) -> list[ExecutionSettings]:
        most = self.cores // execution.workers
        counts = [2**power for power in range(1, most.bit_length()) if 2**power <= most]
        return [replace(execution, threads=n) for n in dict.fromkeys((*counts, most)) if n > execution.threads]

    def _mechanisms(self, execution: ExecutionSettings) -> list[ExecutionSettings]:
        if not self.free or execution.workers == 1 or execution.parts != MechanismName():
            return []
        mesh = Mesh(shard=execution.workers)
        return [replace(execution, mesh=mesh, mechanism=name, topology=Topology()) for name in ("zero", "sharded")]

    def _routes(self, execution: ExecutionSettings) -> list[ExecutionSettings]:
        if execution.workers <= 2 or execution.parts != MechanismName() or execution.compress is not None:
            return []
        return [replace(execution, topology=Topology.parse(name)) for name in ROUTES if name != str(execution.topology)]

    def _buckets(self, execution: ExecutionSettings) -> list[ExecutionSettings]:
        """The sizes that divide the gradients into other buckets than the usual size does."""
        whole = execution.parts == MechanismName() and execution.compress is None
        if execution.workers == 1 or not whole:
            return []
        usual = BUCKET_BYTES + FIRST_BUCKET_BYTES
        sizes = [size for size in BUCKETS if self.grad_bytes > (size if size < BUCKET_BYTES else usual)]
        return [replace(execution, bucket_bytes=size) for size in sizes if size != execution.bucket_bytes]

    def _passes(self, execution: ExecutionSettings) -> list[ExecutionSettings]:
        share = -(-self.batch // execution.first_mesh.batch)
        half = min(share, execution.micro_batch or share) // 2
        return [replace(execution, micro_batch=half)] if half else []


def changed(layout: ExecutionSettings, execution: ExecutionSettings) -> str:
    """How ``execution`` differs from ``layout``, in words."""
    before, after = plain(layout), plain(execution)
    return ", ".join(f"{name} {value}" for name, value in after.items() if before.get(name) != value)


def plain(execution: ExecutionSettings) -> Mapping[str, object]:
    """Execution settings by name, with the mesh that results from them."""
    return {**execution.to_json(), "mesh": str(execution.first_mesh)}


def in_words(tuned: Sequence[ThroughputTuned]) -> str:
    """The results of all searches for faster settings in one sentence; "" without any."""
    taken = [
        f"{original.execution['workers']} by {chosen.changed} "
        f"({original.step_s / chosen.step_s:.2f} times as fast, timed again)"
        for original, chosen in (each.tried[-2:] for each in tuned if each.chosen)
        if chosen.step_s and original.step_s
    ]
    if not tuned:
        return ""
    runs = sum(len(each.tried) for each in tuned)
    other = sum(timed.same is False for each in tuned for timed in each.tried)
    words = (
        f"throughput: of {runs} short runs, {other} of them with other bits and so not taken, the fastest settings: "
    )
    return words + ("; ".join(taken) if taken else "those asked for")


# --- step times ---


@dataclass(frozen=True)
class Timing:
    """A short run that times the steps of one global batch on one layout.

    ``spread``: over all hosts, not over as few as possible. ``nth``: how often the same was timed before.
    """

    batch: int
    layout: ExecutionSettings
    spread: bool = False
    nth: int = 0


class Calibration:
    """The steps of one program as this controller measured them, and the model fitted to them.

    Trials of earlier controllers do not count, because their machine may have been another one.

    Attributes:
        workers_per_host: None if all workers are on one host.
        links: The links that short runs measured.
        plan: The checked request.
        cost: The cost of a training, once the first steps were timed.
        budget_s: Seconds of the whole frontier. Short runs take fewer steps if the steps are long.
    """

    def __init__(self, plan: CheckedFrontier, table: TrialTable, workers_per_host: int | None = None) -> None:
        self.workers_per_host = workers_per_host
        self.links: list[LinkMeasured] = []
        self.plan = plan
        self.cost: TrainingCost | None = None
        self.budget_s = math.inf
        self._table = table
        self._before = set(table.trials)
        self._started: set[Timing] = set()
        self._grad_bytes = 0

    def schedule(self, wanted: Iterable[Timing], phase: Phase = "calibrate", *, may_fail: bool = False) -> FixedTrials:
        """The schedule that times a few steps of each ``wanted`` timing, once only, alone on the machine.

        A training that diverges, or that takes too few steps to time, gives no time. Any other failure ends the
        frontier, unless the short run ``may_fail``, for example because of settings that the user did not ask for.
        """
        new = [timing for timing in dict.fromkeys(wanted) if timing not in self._started]
        self._started |= set(new)
        check = _accept if may_fail else self._refuse_failures
        return _OneByOne(phase, [self._trial(timing, phase) for timing in new], check)

    def fit(self) -> tuple[Times, TimesFitted]:
        """Fit the model to the measurements so far. Steps on several workers check it."""
        timed = self._timed()
        usual = {key: step for key, step in timed.items() if not key[1].apart}
        gradients = [(step.batch, step.step_s) for (_, kind, _), step in usual.items() if kind.workers == 1]
        several = {key: step for key, step in usual.items() if key[1].workers > 1}
        plain = [step for (_, kind, _), step in several.items() if kind.mesh.replica == 1]
        fit: Fit = fit_parts(gradients, self._grad_bytes, self.links, plain, self.workers_per_host)
        errors, factors = dict(fit.errors), defaultdict[StepKind, list[float]](list)
        for (_, kind, hosts), step in timed.items():
            ratio = fit.model.step_s(step.batch, kind.mesh.batch, hosts) / step.step_s
            if kind.mesh.tensor > 1 or kind.apart:
                factors[kind].append(1 / ratio)
            elif kind.mesh.replica > 1:
                errors[f"batch {step.batch} on {kind.mesh}"] = ratio
        fit = replace(fit, errors=errors)
        packed = sorted(timed.items(), key=lambda each: -each[0][2])  # the fewest hosts last: trainings run on these
        measured = {(batch, kind): step.step_s for (batch, kind, _), step in packed}
        slower = {kind: median(each) for kind, each in factors.items()}
        elsewhere = defaultdict[str, list[float]](list)
        for kind, factor in slower.items():
            elsewhere[kind.apart].append(factor)
        apart = {words: median(each) for words, each in elsewhere.items() if words}
        return Times(fit.model, measured, errors, slower, apart), fit.to_record()

    def was_started(self, timing: Timing) -> bool:
        """Whether a short run for ``timing`` was begun."""
        return timing in self._started

    def run_of(self, timing: Timing) -> RunFinished | None:
        """How the last short run for ``timing`` ended; None if there was none, or if it failed."""
        end = self._end_of(timing)
        return None if end is None else end.run

    def untimed(self, wanted: Iterable[Timing]) -> list[str]:
        """The layouts whose steps could not be timed, and why, in words."""
        ends = {timing: end for timing in dict.fromkeys(wanted) if (end := self._end_of(timing)) is not None}
        return [
            f"{timing.layout.first_mesh}, {timing.layout.mechanism}, batch {timing.batch}: "
            f"{end.reason or 'too few steps'}"
            for timing, end in ends.items()
            if end.run is None or end.run.step_s is None
        ]

    def _end_of(self, timing: Timing) -> TrialFinished | None:
        life = self._life_of(timing)
        return None if life is None else life.finished

    def _life_of(self, timing: Timing) -> TrialSummary | None:
        for life in reversed(self._ended()):
            started = life.started
            if (batch_of(started.config), started.execution) == (timing.batch, timing.layout.to_json()):
                return life
        return None

    def _timed(self) -> dict[tuple[int, StepKind, int], Observation]:
        """(batch, kind, hosts) -> the measured step."""
        observations: dict[tuple[int, StepKind, int], Observation] = {}
        for life in self._ended():
            run = life.finished.run if life.finished is not None else None
            if run is not None and run.step_s is not None:
                batch = batch_of(life.started.config)
                mean = min(batch, -(-run.samples // run.steps))  # a batch may exceed the data
                kind = self.plan.worker_layouts.kind_of(ExecutionSettings.from_json(life.started.execution))
                observations[batch, kind, run.hosts] = Observation(kind.workers, mean, run.step_s, hosts=run.hosts)
                if kind.workers == 1 and not kind.apart:
                    self._grad_bytes = run.grad_bytes
        return observations

    def _ended(self) -> list[TrialSummary]:
        ended = (self._table.trials[number] for number in self._table.ended if number not in self._before)
        return [life for life in ended if life.started.phase in TIMED]

    def _refuse_failures(self) -> None:
        """Raise ``UserError`` if the program fails with its own settings."""
        for life in self._ended():
            assert life.finished is not None
            if life.finished.run is None and not life.finished.reason.startswith("diverged"):
                fix = "fix the program's own settings before scaling them"
                raise UserError("the program must train with its own settings", life.finished.reason, fix)

    def _trial(self, timing: Timing, phase: Phase) -> FixedTrial:
        config = {**self.plan.config, "batch_size": timing.batch}
        return FixedTrial(config, self.plan.request.seed, timing.layout, phase, self.steps(timing.batch), timing.spread)

    def steps(self, batch: int) -> int:
        """How many steps a short run with a global ``batch`` takes. It is always the same, so that bits compare."""
        if self.cost is None:
            return FIRST_STEPS
        return timed_steps(self.cost.step_s * max(1.0, self.factor(batch)), self.budget_s)

    def factor(self, batch: int) -> float:
        """A global batch over the program's own."""
        return batch / self.plan.base_batch

    def learn_cost(self, timing: Timing) -> TrainingCost | None:
        """The cost of a training, from the short run for ``timing``; None if that was paused before its end."""
        life = self._life_of(timing)
        if life is None or life.finished is None:
            return None
        finished, run = life.finished, life.finished.run
        if run is None:  # it diverged: only the time of the whole run is known
            return TrainingCost(finished.seconds / FIRST_STEPS, FIRST_STEPS)
        step_s = run.step_s if run.step_s is not None else run.seconds / max(1, run.steps)
        planned = max((report.epochs for report, _ in life.reports), default=0)
        beside_s = max(0.0, run.seconds - run.steps * step_s) / max(1, len(life.reports))
        samples = None if run.context is None or run.context.data is None else run.context.data.samples
        steps = run.steps
        if run.stopped != "complete" and planned and samples:
            steps = planned * -(-samples // self.plan.real_batch(self.plan.base_batch))
        start_s = max(0.0, finished.seconds - run.seconds)
        reports = len(life.reports) if run.stopped == "complete" else max(1, planned)
        return TrainingCost(step_s, steps, beside_s, reports, start_s)


def _accept() -> None:
    """Accept all failures."""


class _OneByOne(FixedTrials):
    """Runs its trials one by one, and calls ``check`` before each."""

    def __init__(self, phase: Phase, trials: Sequence[FixedTrial], check: Callable[[], None]) -> None:
        super().__init__(phase, trials, at_once=1)
        self._check = check

    def next(self, fresh: bool) -> Next:
        self._check()
        return super().next(fresh)


def batches_to_measure(base: int, counts: Sequence[int], samples: int | None = None) -> list[int]:
    """The batches to time on one worker, the most informative first.

    They are the program's own, the largest and the smallest share of any worker count, and one in between. None is
    larger than the ``samples`` of the training set.
    """
    largest = base * max(counts) if samples is None else max(base, min(samples, base * max(counts)))
    smallest = max(1, base // max(counts))
    return list(dict.fromkeys((base, largest, smallest, round((base * largest) ** 0.5))))


def layout_timings(batch: int, layout: ExecutionSettings, workers_per_host: int | None) -> list[Timing]:
    """How a layout's steps are timed: packed as in training and, if it fits one of several hosts, also spread.

    Layouts that divide a replica are not spread, because the model does not cover their traffic.
    """
    mesh, packed = layout.first_mesh, Timing(batch, layout)
    fits = workers_per_host is not None and 1 < mesh.workers <= workers_per_host and mesh.replica == 1
    return [packed, Timing(batch, layout, spread=True)] if fits else [packed]


# --- the phases of short runs ---


class ShortRuns:
    """Runs the short runs of a frontier in the study loop, each within its part of the budget.

    Attributes:
        plan: The checked request.
        calibration: The step times measured so far.
        budget_s: Seconds of the whole frontier.
        phases: How the budget is split; None until the first steps were measured.
        left_out: Everything that there was no time for, in words.
        tuned: The result of the throughput phase for each layout.
    """

    def __init__(
        self,
        plan: CheckedFrontier,
        loop: StudyLoop,
        interrupts: Callable[[], int],
        workers_per_host: int | None,
        timeable: int,
    ) -> None:
        self.plan = plan
        self.calibration = Calibration(plan, loop.table, workers_per_host)
        self.budget_s = math.inf if plan.request.budget_s is None else plan.request.budget_s
        self.phases: PhaseBudget | None = None
        self.left_out: list[str] = []
        self.tuned: list[ThroughputTuned] = []
        self._loop = loop
        self._interrupts = interrupts
        self._workers_per_host = workers_per_host
        self._timeable = timeable

    def use(self, plan: CheckedFrontier) -> None:
        """Go on with a changed ``plan``."""
        self.plan = self.calibration.plan = plan

    def split(self, phases: PhaseBudget) -> None:
        """Take the split of the budget."""
        self.phases = phases
        self.budget_s = self.calibration.budget_s = phases.budget_s

    @property
    def timed_layouts(self) -> int:
        """How many of the layouts asked about can be timed."""
        return sum(layout.workers <= self._timeable for layout in self.plan.layouts)

    @property
    def _cost(self) -> TrainingCost:
        assert self.calibration.cost is not None
        return self.calibration.cost

    def _run(self, schedule: Schedule) -> None:
        """Run ``schedule``, at most until the budget ends."""
        bounds = Bounds() if self.budget_s == math.inf else Bounds(budget_s=self.budget_s, reserve_s=0.0)
        self._loop.run(bounds, self._interrupts, schedule)

    def first_steps(self, learn: Callable[[RunFinished], None]) -> TrainingCost:
        """Time the first steps of the program's own batch, twice, because the first run also loads shared files.

        Args:
            learn: Gets each short run that ended well.

        Returns:
            The cost of a training.

        Raises:
            UserError: If these steps take the whole budget, or if the quality cannot have the target.
        """
        single, cost = timed_with(self.plan.layouts, 1), None
        for nth in range(2):
            timing = Timing(self.plan.base_batch, single, nth=nth)
            self._run(self.calibration.schedule([timing]))
            if self._interrupts():
                raise Interrupted
            cost = self.calibration.learn_cost(timing)
            if cost is None:
                rule = "a budget must have time for the steps that are timed first"
                raise UserError(rule, f"{self.budget_s:g} s, of which these take all", "use a larger --budget")
            if (run := self.calibration.run_of(timing)) is not None:
                learn(run)
                check_target(self.plan.request.target, self.plan.quality, run.metrics.get(self.plan.quality.name))
            if nth == 0:
                self.calibration.cost, self.calibration.budget_s = cost, self.budget_s
        assert cost is not None
        self.calibration.cost = cost  # of the second run: the first may have waited for shared files
        return cost

    def measure(self) -> None:
        """Time all wanted steps, and two workers on each link that these did not measure.

        Short runs that would take much longer than planned are left out, and the model covers their steps.
        """
        layouts, cost = self.plan.layouts, self._cost
        limit_s = CALIBRATE_SLACK * self.phases.calibrate if self.phases is not None else math.inf
        skipped = 0
        for i, timing in enumerate(self.wanted()):
            took_s = cost.timing_s(self.calibration.factor(timing.batch), self.budget_s)
            if i > 0 and self._loop.elapsed_s + took_s > limit_s:
                skipped += 1
                continue
            self._run(self.calibration.schedule([timing]))
            if self._interrupts():
                raise Interrupted
        if skipped:
            runs = count(skipped, "short run")
            self.left_out.append(f"{runs} that would time steps here: these are modelled by fewer")
        several = layouts[-1].workers > 1 and self._timeable > 1
        pair = layout_timings(self._pair_batch, timed_with(layouts, 2), self._workers_per_host) if several else []
        for timing in pair:
            across = timing.spread or self._workers_per_host == 1
            if not any((link.hosts > 1) == across for link in self.calibration.links) and not self._interrupts():
                self._run(self.calibration.schedule([timing]))
        if self._interrupts():
            raise Interrupted

    @property
    def _pair_batch(self) -> int:
        return self.plan.real_batch(self.plan.base_batch * 2)

    def wanted(self) -> list[Timing]:
        """The timings beyond the program's own batch on one worker, the most informative first."""
        plan, layouts = self.plan, self.plan.layouts
        single = timed_with(layouts, 1)
        alone = [Timing(batch, single) for batch in batches_to_measure(plan.base_batch, plan.parts, plan.samples)[1:]]
        timeable = [layout for layout in layouts if layout.workers <= self._timeable]
        several = [
            t
            for layout in timeable
            for t in layout_timings(plan.naive_batch(layout.num_slots), layout, self._workers_per_host)
        ]
        first = Timing(plan.base_batch, single)
        return [t for t in (*alone[:1], *several, *alone[1:]) if t != first]

    def throughput(self, threads: int) -> None:
        """Time the settings that the space names, and look for faster settings that give the same bits.

        All of it fits into the planned time. Settings that do not fit are not tried, and the best are timed again.
        """
        cost = self._cost
        end_s = self._loop.elapsed_s + (self.phases.throughput if self.phases is not None else math.inf)

        def fits(batch: int, runs: int) -> bool:
            took_s = runs * cost.timing_s(self.calibration.factor(batch), self.budget_s)
            return self._loop.elapsed_s + took_s <= end_s

        for timing in self.named():
            if fits(timing.batch, 1):
                self._run(self.calibration.schedule([timing], "throughput", may_fail=True))
        cut: list[str] = []
        request = self.plan.request
        for layout in self.plan.layouts[: self.timed_layouts if request.throughput else 0]:
            free = request.execution.mechanism == "replicated" and layout.mesh is None
            climb = ExecutionSearch(layout, self.plan.naive_batch(layout.num_slots), threads, free)
            for execution in climb.rounds():
                if not climb.repeats and not fits(climb.batch, len(execution) + 2):
                    climb.hurried = True  # the best so far is timed again
                    if not climb.tried:
                        break
                    continue
                if climb.repeats and not fits(climb.batch, len(execution)):
                    climb.give_up()
                    break
                timings = [Timing(climb.batch, each, nth=int(climb.repeats)) for each in execution]
                self._run(self.calibration.schedule(timings, "throughput", may_fail=True))
                if self._interrupts():
                    raise Interrupted
                for timing in timings:
                    climb.observe(timing.layout, self.calibration.run_of(timing))
            cut += [str(layout.workers)] if climb.hurried else []
            if climb.tried:
                self.plan.worker_layouts.speed_up(layout, climb.best)
                self.tuned.append(climb.result)
                self._loop.write_record(climb.result)
        if cut:
            self.left_out.append(f"in the throughput phase, part of what could be tried on {', '.join(cut)} workers")

    def named(self) -> list[Timing]:
        """The kinds of steps that the space names, each on its layout, or on the widest layout that can be timed."""
        worker_layouts, timings = self.plan.worker_layouts, dict[StepKind, Timing]()
        widest = [layout for layout in self.plan.layouts if layout.workers <= self._timeable][-1:]
        for layout, variant in self.plan.named:
            if variant.agreed.sync.in_rounds:
                continue  # the median of a few steps does not show the cost of rounds
            for each in [layout] if layout.workers <= self._timeable else widest:
                execution = worker_layouts.by(each, variant)
                kind = worker_layouts.kind_of(execution)
                if (kind.apart or kind.workers > 1) and self.plan.is_possible(each, replace(variant, policies=())):
                    batch = self.plan.base_batch * each.num_slots
                    timings.setdefault(kind, Timing(batch, execution))
        return list(timings.values())[:MOST_NAMED]

    def time(self, timings: Sequence[Timing]) -> None:
        """Time the steps of the rows while the budget lasts; all others are modelled."""
        cost, skipped = self._cost, 0
        for timing in timings:
            took_s = cost.timing_s(self.calibration.factor(timing.batch), self.budget_s)
            if self._loop.elapsed_s + took_s > self.budget_s:
                skipped += not self.calibration.was_started(timing)
                continue
            self._run(self.calibration.schedule([timing], may_fail=True))
        if skipped:
            self.left_out.append(f"timing the steps of {count(skipped, 'row')}: these are modelled")

    def to_measure(self, parts: int, recipe: Recipe, by: FrontierCriteria, choice: Choice) -> list[Timing]:
        """The timings for the rows of ``recipe``, if this machine has the cores and the model size was calibrated.

        Strategies with rounds are only modelled, because the median step does not show the cost of rounds.
        """
        run = next((t.run for t in choice.tried(recipe, parts) if t.run is not None), None)
        same = run is not None and run.grad_bytes == by.times.model.grad_bytes
        steps, worker_layouts = not recipe.variant.agreed.sync.in_rounds, self.plan.worker_layouts
        layouts = [
            layout
            for layout in worker_layouts.layouts
            if layout.num_slots == parts and self.plan.is_possible(layout, recipe.variant)
        ]
        timed = [worker_layouts.by(layout, recipe.variant) for layout in layouts if same and steps]
        return [
            Timing(batch_of(recipe.config), execution) for execution in timed if execution.workers <= self._timeable
        ]
