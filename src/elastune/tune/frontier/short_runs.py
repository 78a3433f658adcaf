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
from elastune.core.journal.records import (
    ExecutionTimed,
    LinkMeasured,
    Phase,
    RunFinished,
    ThroughputTuned,
    TimesFitted,
    TrialFinished,
)
from elastune.core.journal.trials import TrialSummary, TrialTable
from elastune.core.layout import BUCKET_BYTES, FIRST_BUCKET_BYTES
from elastune.core.mesh import MechanismName, Mesh
from elastune.core.plan.data_parallel import Fit, Observation, fit_parts
from elastune.core.run import ExecutionSettings
from elastune.runtime.job.interrupts import Interrupted
from elastune.tune.frontier.budget import TIMED_STEPS, PhaseBudget, TrainingCost, timed_steps
from elastune.tune.frontier.checked_request import FrontierPlan, check_target
from elastune.tune.frontier.choice import Choice
from elastune.tune.frontier.criteria import FrontierCriteria, Times, batch_of
from elastune.tune.frontier.trainings import TIMED, Recipe, StepKind
from elastune.tune.frontier.worker_layouts import timed_with
from elastune.tune.search.schedule import FixedTrial, FixedTrials, Next, Schedule
from elastune.tune.study.budget import Bounds
from elastune.tune.study.study_loop import StudyLoop

# [throughput] The throughput phase: which means of a crew give the same bits sooner. Short runs, no quality, no training. Pure.
#
# One kind of means after the other (threads, mechanism, routes, bucket size, micro-batch), each from the best of those
# before. What ends with other bits than the crew's own means did, after as many steps from the same seed, is not taken,
# however fast it is: what was told of the crew's quality then holds of them, too. The fastest of many short runs is often
# a lucky one, so that it and the crew's own means are timed again, and it is taken if it is faster then, too.

GAIN = 1.05  # what is not faster by so much is not worth other means: a step's time varies by as much from run to run
BUCKETS = (256 << 10, 1 << 20, 4 << 20, 64 << 20)
"""Bytes of gradients that are summed in one message, where there are more of them."""
ROUTES = ("ring", "tree", "star")  # that are tried where more than two workers sum


@dataclass
class ExecutionSearch:
    """The tuning of one crew: it asks for ``pending`` to be timed, and is told what came of it.

    ``batch``: the global batch of all its short runs; ``cores``: how many its workers share; ``free``: whether nobody
    has said how its workers stand, so that another mechanism may do. ``grad_bytes``: of all gradients, as its first
    short run tells. ``hurried``: no time is left for more kinds of
    means; the best so far is timed again.
    """

    layout: ExecutionSettings
    batch: int
    cores: int
    free: bool
    tried: list[ExecutionTimed] = field(default_factory=list)
    hurried: bool = False
    grad_bytes: int = 0
    _means: list[ExecutionSettings] = field(default_factory=list)
    _best: int = 0
    _sha256: str = ""
    _again: list[int] = field(default_factory=list)

    @classmethod
    def most(cls, layout: ExecutionSettings, cores: int, free: bool = True) -> list[ExecutionSettings]:
        """All that could be tried of a crew, and the best again, if no kind changes what the next one can try."""
        climb = cls(layout, layout.first_mesh.batch * 2, cores, free, grad_bytes=1 << 62)
        kinds = (climb._threads, climb._mechanisms, climb._routes, climb._buckets, climb._passes)
        return [layout, *(execution for kind in kinds for execution in kind(layout)), layout, layout]

    @property
    def repeats(self) -> bool:
        """Whether what was asked for last was timed before."""
        return bool(self._again)

    def rounds(self) -> Iterator[list[ExecutionSettings]]:
        """What to time next, until nothing is left; ``hear`` must have been told of all of it by then."""
        yield [self.layout]
        if self.tried[0].step_s is None:
            return  # it fails by itself, or has too few steps to time
        for kind in (self._threads, self._mechanisms, self._routes, self._buckets, self._passes):
            if self.hurried:
                break
            yield kind(self._means[self._best])
        if self._best:
            self._again = [0, self._best]
            yield [self.layout, self._means[self._best]]
            own, other = self.tried[-2:]
            lucky = own.step_s is None or other.step_s is None or other.step_s * GAIN >= own.step_s or not other.same
            self._best = 0 if lucky else len(self.tried) - 1

    def give_up(self) -> None:
        """No time is left to time the best again: the crew keeps its own means."""
        self._best = 0

    def hear(self, execution: ExecutionSettings, run: RunFinished | None) -> None:
        """A short run by ``execution`` has ended; None: it failed."""
        first = not self.tried
        if first and run is not None:
            self._sha256 = run.sha256
            self.grad_bytes = run.grad_bytes
        step_s = None if run is None else run.step_s
        same = None if run is None else run.sha256 == self._sha256
        words = changed(self.layout, execution) or "as asked for"
        self.tried.append(ExecutionTimed(execution.to_json(), words, step_s, same))
        self._means.append(execution)
        if self._again:
            return
        best_s = self.tried[self._best].step_s
        if same and step_s is not None and best_s is not None and step_s * GAIN < best_s:
            self._best = len(self.tried) - 1

    @property
    def best(self) -> ExecutionSettings:
        """The fastest of those with the same bits."""
        return self._means[self._best] if self._means else self.layout

    @property
    def found(self) -> ThroughputTuned:
        """What to tell of it."""
        return ThroughputTuned(self.batch, list(self.tried), self._best)  # which has one at least: the crew's own

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
        """Sizes by which there are other buckets than by the usual ones."""
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
    """In what ``execution`` differ from those of ``layout``, in words."""
    before, after = plain(layout), plain(execution)
    return ", ".join(f"{name} {value}" for name, value in after.items() if before.get(name) != value)


def plain(execution: ExecutionSettings) -> Mapping[str, object]:
    """Means by name, the mesh as it comes out."""
    return {**execution.to_json(), "mesh": str(execution.first_mesh)}


def in_words(found: Sequence[ThroughputTuned]) -> str:
    """What came of all crews, in one sentence; "" where none was tuned."""
    taken = [
        f"{own.execution['workers']} by {chosen.changed} ({own.step_s / chosen.step_s:.2f} times as fast, timed again)"
        for own, chosen in (each.tried[-2:] for each in found if each.chosen)
        if chosen.step_s and own.step_s
    ]
    if not found:
        return ""
    runs = sum(len(each.tried) for each in found)
    other = sum(timed.same is False for each in found for timed in each.tried)
    words = f"throughput: of {runs} short runs, {other} of them with other bits and so not taken, the fastest means: "
    return words + ("; ".join(taken) if taken else "those asked for")


# [calibration] Measure step times here: one worker on several batch sizes, and the crews that this machine has cores for.
#
# On several hosts, crews that fit one of them are timed twice: on as few hosts as it takes, as they are trained, and
# on as many as there are, which tells the links within and across apart.

STEPS = TIMED_STEPS
FIRST_STEPS = 12  # of the first short run: nobody knows yet how long they are


@dataclass(frozen=True)
class Timing:
    """A global batch, and the crew whose step of it is timed; ``spread``: on as many hosts as there are. ``nth``:
    how often it was before."""

    batch: int
    layout: ExecutionSettings
    spread: bool = False
    nth: int = 0


class Calibration:
    """The steps of one program as this controller measured them, and the model fitted to them.

    ``cost``: of a training, once the first steps were timed; ``budget_s``: of the frontier. Short runs of long steps
    take fewer of them. ``workers_per_host``: None where all are on one host. Trials of earlier controllers, whose
    machine may have been another one, do not count.
    """

    def __init__(self, plan: FrontierPlan, table: TrialTable, workers_per_host: int | None = None) -> None:
        self.workers_per_host = workers_per_host
        self.links: list[LinkMeasured] = []
        self.plan = plan
        self.cost: TrainingCost | None = None
        self.budget_s = math.inf
        self._table = table
        self._before = set(table.trials)
        self._asked: set[Timing] = set()
        self._grad_bytes = 0

    def schedule(self, wanted: Iterable[Timing], phase: Phase = "calibrate", *, may_fail: bool = False) -> FixedTrials:
        """Time a few steps of each that is wanted, alone on the machine, once only.

        Where training diverges at a batch size, or the program takes too few steps to time, nothing is learned. Where
        it fails otherwise, the frontier does, unless it ``may_fail``: by means that nobody asked for, say.
        """
        new = [timing for timing in dict.fromkeys(wanted) if timing not in self._asked]
        self._asked |= set(new)
        check = _accept if may_fail else self._refuse_failures
        return _OneByOne(phase, [self._trial(timing, phase) for timing in new], check)

    def fit(self) -> tuple[Times, TimesFitted]:
        """The model from what was measured so far; steps of several workers that share batches check it."""
        timed = self._timed()
        usual = {key: step for key, step in timed.items() if not key[1].apart}
        gradients = [(step.batch, step.step_s) for (_, kind, _), step in usual.items() if kind.workers == 1]
        several = {key: step for key, step in usual.items() if key[1].workers > 1}
        plain = [step for (_, kind, _), step in several.items() if kind.mesh.replica == 1]
        found: Fit = fit_parts(gradients, self._grad_bytes, self.links, plain, self.workers_per_host)
        errors, factors = dict(found.errors), defaultdict[StepKind, list[float]](list)
        for (_, kind, hosts), step in timed.items():
            ratio = found.model.step_s(step.batch, kind.mesh.batch, hosts) / step.step_s
            if kind.mesh.tensor > 1 or kind.apart:
                factors[kind].append(1 / ratio)
            elif kind.mesh.replica > 1:
                errors[f"batch {step.batch} on {kind.mesh}"] = ratio
        found = replace(found, errors=errors)
        packed = sorted(timed.items(), key=lambda each: -each[0][2])  # the fewest hosts last: what a crew trains on
        measured = {(batch, kind): step.step_s for (batch, kind, _), step in packed}
        slower = {kind: median(each) for kind, each in factors.items()}
        elsewhere = defaultdict[str, list[float]](list)
        for kind, factor in slower.items():
            elsewhere[kind.apart].append(factor)
        apart = {words: median(each) for words, each in elsewhere.items() if words}
        return Times(found.model, measured, errors, slower, apart), found.to_record()

    def asked(self, timing: Timing) -> bool:
        """Whether a short run for it was begun."""
        return timing in self._asked

    def run_of(self, timing: Timing) -> RunFinished | None:
        """How the last short run for it ended; None where it was not made, or failed."""
        end = self._end_of(timing)
        return None if end is None else end.run

    def untimed(self, wanted: Iterable[Timing]) -> list[str]:
        """Whose steps were to be timed and could not be, and why."""
        ends = {timing: end for timing in dict.fromkeys(wanted) if (end := self._end_of(timing)) is not None}
        return [
            f"{timing.layout.first_mesh}, {timing.layout.mechanism}, batch {timing.batch}: {end.reason or 'too few steps'}"
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
        """(batch, kind, hosts) -> the step that was measured."""
        found: dict[tuple[int, StepKind, int], Observation] = {}
        for life in self._ended():
            run = life.finished.run if life.finished is not None else None
            if run is not None and run.step_s is not None:
                batch = batch_of(life.started.config)
                mean = min(batch, -(-run.samples // run.steps))  # a batch may exceed the data
                kind = self.plan.worker_layouts.kind_of(ExecutionSettings.from_json(life.started.execution))
                found[batch, kind, run.hosts] = Observation(kind.workers, mean, run.step_s, hosts=run.hosts)
                if kind.workers == 1 and not kind.apart:
                    self._grad_bytes = run.grad_bytes
        return found

    def _ended(self) -> list[TrialSummary]:
        ended = (self._table.trials[number] for number in self._table.ended if number not in self._before)
        return [life for life in ended if life.started.phase in TIMED]

    def _refuse_failures(self) -> None:
        """Raise ``UserError`` where a program fails by itself: no scaling would help it."""
        for life in self._ended():
            assert life.finished is not None
            if life.finished.run is None and not life.finished.reason.startswith("diverged"):
                fix = "fix the program's own settings before scaling them"
                raise UserError("the program must train with its own settings", life.finished.reason, fix)

    def _trial(self, timing: Timing, phase: Phase) -> FixedTrial:
        config = {**self.plan.config, "batch_size": timing.batch}
        return FixedTrial(config, self.plan.request.seed, timing.layout, phase, self.steps(timing.batch), timing.spread)

    def steps(self, batch: int) -> int:
        """How many steps a short run with a global ``batch`` takes: always as many, so that their bits compare."""
        if self.cost is None:
            return FIRST_STEPS
        return timed_steps(self.cost.step_s * max(1.0, self.factor(batch)), self.budget_s)

    def factor(self, batch: int) -> float:
        """A global batch over the program's own."""
        return batch / self.plan.base_batch

    def learn_cost(self, timing: Timing) -> TrainingCost | None:
        """What a training takes, from the short run for ``timing``; None where it was paused before its end."""
        life = self._life_of(timing)
        if life is None or life.finished is None:
            return None
        finished, run = life.finished, life.finished.run
        if run is None:  # it diverged: of its steps no time is known but that of all
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
    """Whatever has failed."""


class _OneByOne(FixedTrials):
    """Each when the one before has ended, ``check``ed by then."""

    def __init__(self, phase: Phase, trials: Sequence[FixedTrial], check: Callable[[], None]) -> None:
        super().__init__(phase, trials, at_once=1)
        self._check = check

    def next(self, fresh: bool) -> Next:
        self._check()
        return super().next(fresh)


def batches_to_measure(base: int, counts: Sequence[int], samples: int | None = None) -> list[int]:
    """Shares of one worker, what tells most first: its own, the largest and the smallest of any count, one between.

    None holds more than the ``samples`` of the training set.
    """
    largest = base * max(counts) if samples is None else max(base, min(samples, base * max(counts)))
    smallest = max(1, base // max(counts))
    return list(dict.fromkeys((base, largest, smallest, round((base * largest) ** 0.5))))


def layout_timings(batch: int, layout: ExecutionSettings, workers_per_host: int | None) -> list[Timing]:
    """How a crew's step is timed: as it is trained and, where it fits one of several hosts, over as many as there are.

    What divides a replica is not spread: the model knows nothing of its traffic.
    """
    mesh, packed = layout.first_mesh, Timing(batch, layout)
    fits = workers_per_host is not None and 1 < mesh.workers <= workers_per_host and mesh.replica == 1
    return [packed, Timing(batch, layout, spread=True)] if fits else [packed]


# [short runs] The short runs of a frontier: they time steps, look for faster execution, and end within their part of the budget.

MOST_NAMED = 8  # kinds of steps that a space names, and that are timed before it is searched
CALIBRATE_SLACK = 1.5  # of what calibrating was predicted to take: beyond, short runs are left out


class ShortRuns:
    """Of ``plan``, by ``loop``. ``timeable``: workers whose steps can be timed, one each a core.

    ``workers_per_host``: None where all are on one host. ``phases``: how the budget is split, once that is known.
    ``left_out``: what there was no time for, in words; ``tuned``: what was found for each crew.
    """

    def __init__(
        self,
        plan: FrontierPlan,
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

    def use(self, plan: FrontierPlan) -> None:
        """Go on with what was learned of ``plan``."""
        self.plan = self.calibration.plan = plan

    def split(self, phases: PhaseBudget) -> None:
        """The budget is split."""
        self.phases = phases
        self.budget_s = self.calibration.budget_s = phases.budget_s

    @property
    def timed_layouts(self) -> int:
        """How many of the crews asked about can be timed."""
        return sum(layout.workers <= self._timeable for layout in self.plan.layouts)

    @property
    def _cost(self) -> TrainingCost:
        assert self.calibration.cost is not None
        return self.calibration.cost

    def _run(self, schedule: Schedule) -> None:
        """At most until the budget is over."""
        bounds = Bounds() if self.budget_s == math.inf else Bounds(budget_s=self.budget_s, reserve_s=0.0)
        self._loop.run(bounds, self._interrupts, schedule)

    def first_steps(self, learn: Callable[[RunFinished], None]) -> TrainingCost:
        """Time the first steps of the program's own batch, twice: what is begun first also loads what all need.

        Raises ``UserError`` where these take the whole budget, and for a target that the quality cannot have.
        """
        own, found = timed_with(self.plan.layouts, 1), None
        for nth in range(2):
            timing = Timing(self.plan.base_batch, own, nth=nth)
            self._run(self.calibration.schedule([timing]))
            if self._interrupts():
                raise Interrupted
            found = self.calibration.learn_cost(timing)
            if found is None:
                rule = "a budget must have time for the steps that are timed first"
                raise UserError(rule, f"{self.budget_s:g} s, of which these take all", "use a larger --budget")
            if (run := self.calibration.run_of(timing)) is not None:
                learn(run)
                check_target(self.plan.request.target, self.plan.quality, run.metrics.get(self.plan.quality.name))
            if nth == 0:
                self.calibration.cost, self.calibration.budget_s = found, self.budget_s
        assert found is not None
        self.calibration.cost = found  # the second: the first may have waited for what all runs need
        return found

    def measure(self) -> None:
        """Time a few steps of each, and of two workers for each link that none of these has told of.

        What would take much longer than was planned is left to the model.
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
        """What is timed beside the program's own batch on one worker, what tells most first."""
        plan, layouts = self.plan, self.plan.layouts
        own = timed_with(layouts, 1)
        one = [Timing(batch, own) for batch in batches_to_measure(plan.base_batch, plan.parts, plan.samples)[1:]]
        timeable = [layout for layout in layouts if layout.workers <= self._timeable]
        several = [
            t
            for layout in timeable
            for t in layout_timings(plan.naive_batch(layout.num_slots), layout, self._workers_per_host)
        ]
        first = Timing(plan.base_batch, own)
        return [t for t in (*one[:1], *several, *one[1:]) if t != first]

    def throughput(self, threads: int) -> None:
        """Time what the space names beside what was asked for; look for means that give the same bits sooner.

        In the time that was planned for it: what does not fit is not tried, and what was best is timed again.
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
                    climb.hear(timing.layout, self.calibration.run_of(timing))
            cut += [str(layout.workers)] if climb.hurried else []
            if climb.tried:
                self.plan.worker_layouts.speed_up(layout, climb.best)
                self.tuned.append(climb.found)
                self._loop.tell(climb.found)
        if cut:
            self.left_out.append(f"in the throughput phase, part of what could be tried on {', '.join(cut)} workers")

    def named(self) -> list[Timing]:
        """The kinds of steps that the space names, each on who it names or, where these are too many, on fewer."""
        worker_layouts, found = self.plan.worker_layouts, dict[StepKind, Timing]()
        widest = [layout for layout in self.plan.layouts if layout.workers <= self._timeable][-1:]
        for layout, variant in self.plan.named:
            if variant.agreed.sync.in_rounds:
                continue  # the median step of a few tells nothing of rounds
            for each in [layout] if layout.workers <= self._timeable else widest:
                execution = worker_layouts.by(each, variant)
                kind = worker_layouts.kind_of(execution)
                if (kind.apart or kind.workers > 1) and self.plan.is_possible(each, replace(variant, policies=())):
                    batch = self.plan.base_batch * each.num_slots
                    found.setdefault(kind, Timing(batch, execution))
        return list(found.values())[:MOST_NAMED]

    def time(self, found: Sequence[Timing]) -> None:
        """Time the steps of what was found, while the budget lasts; what is not measured is modelled."""
        cost, skipped = self._cost, 0
        for timing in found:
            took_s = cost.timing_s(self.calibration.factor(timing.batch), self.budget_s)
            if self._loop.elapsed_s + took_s > self.budget_s:
                skipped += not self.calibration.asked(timing)
                continue
            self._run(self.calibration.schedule([timing], may_fail=True))
        if skipped:
            self.left_out.append(f"timing the steps of {count(skipped, 'row')}: these are modelled")

    def to_measure(self, parts: int, recipe: Recipe, by: FrontierCriteria, choice: Choice) -> list[Timing]:
        """The steps to time for rows, where this machine can and the program is the one that was calibrated.

        Rounds are not seen in the median step: of these there are models alone.
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
