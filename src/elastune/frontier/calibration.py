"""Measure step times here: one worker on several batch sizes, and the crews that this machine has cores for.

On several hosts, crews that fit one of them are timed twice: on as few hosts as it takes, as they are trained, and
on as many as there are, which tells the links within and across apart.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from elastune.core.errors import UserError
from elastune.core.run import Means
from elastune.frontier.criteria import Times, batch_of
from elastune.frontier.phase_budget import TIMED_STEPS, TrainingCost, timed_steps
from elastune.frontier.plan import FrontierPlan
from elastune.frontier.trainings import TIMED
from elastune.frontier.ways import StepKind
from elastune.journal.records import LinkMeasured, Phase, RunFinished, TimesFitted, TrialFinished
from elastune.journal.trials import TrialLife, TrialTable
from elastune.plan.steps.timed_steps import Fit, Observation, fit_parts
from elastune.search.stopping.schedule import FixedTrial, Next
from elastune.study.loop.fixed_trials import FixedTrials

STEPS = TIMED_STEPS
FIRST_STEPS = 12  # of the first short run: nobody knows yet how long they are


@dataclass(frozen=True)
class Timing:
    """A global batch, and the crew whose step of it is timed; ``spread``: on as many hosts as there are. ``nth``:
    how often it was before."""

    batch: int
    crew: Means
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
            f"{timing.crew.first_mesh}, {timing.crew.mechanism}, batch {timing.batch}: {end.reason or 'too few steps'}"
            for timing, end in ends.items()
            if end.run is None or end.run.step_s is None
        ]

    def _end_of(self, timing: Timing) -> TrialFinished | None:
        life = self._life_of(timing)
        return None if life is None else life.finished

    def _life_of(self, timing: Timing) -> TrialLife | None:
        for life in reversed(self._ended()):
            started = life.started
            if (batch_of(started.config), started.means) == (timing.batch, timing.crew.to_json()):
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
                kind = self.plan.lineup.kind_of(Means.from_json(life.started.means))
                found[batch, kind, run.hosts] = Observation(kind.workers, mean, run.step_s, hosts=run.hosts)
                if kind.workers == 1 and not kind.apart:
                    self._grad_bytes = run.grad_bytes
        return found

    def _ended(self) -> list[TrialLife]:
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
        return FixedTrial(config, self.plan.request.seed, timing.crew, phase, self.steps(timing.batch), timing.spread)

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


def layouts(batch: int, crew: Means, workers_per_host: int | None) -> list[Timing]:
    """How a crew's step is timed: as it is trained and, where it fits one of several hosts, over as many as there are.

    What divides a replica is not spread: the model knows nothing of its traffic.
    """
    mesh, packed = crew.first_mesh, Timing(batch, crew)
    fits = workers_per_host is not None and 1 < mesh.workers <= workers_per_host and mesh.replica == 1
    return [packed, Timing(batch, crew, spread=True)] if fits else [packed]
