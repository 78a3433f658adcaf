"""One training of ``strategies.py`` on one worker, which carries all learners; and the search for its learning rate."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.adaptive.strategies_task import Task, accuracy, train
from benchmarks.common.kept import Row, Rows
from tests.support.sessions import lone_session
from torch import nn

from elastune.core.errors import Diverged
from elastune.core.plan.confidence_intervals import mean_ci
from elastune.core.run import ExecutionSettings
from elastune.core.sync_plan import SyncPlan

TUNING_SEED = 0


@dataclass(frozen=True)
class Course:
    """What became of a training. ``looks``: after how many steps, and the accuracy on validation data.

    ``failed``: why it has no result (it diverged, or guessed); ``test`` is None then.
    """

    task: str
    sync: str
    lr: float
    seed: int
    looks: tuple[tuple[int, float], ...]
    test: float | None
    failed: str
    cpu_s: float

    @classmethod
    def of(cls, row: Row) -> Course:
        """What was kept."""
        looks = tuple((step, value) for step, value in row["looks"])
        return cls(**{each.name: row[each.name] for each in fields(cls)} | {"looks": looks})

    @property
    def score(self) -> float:
        """By which learning rates are compared: the last look, on validation data."""
        return -1.0 if self.failed else self.looks[-1][1]


def trained(rows: Rows, task: Task, plan: SyncPlan, lr: float, seed: int) -> Course:
    """The training, run now if ``rows`` has not got it. Raises ``OutOfTime``."""
    return Course.of(rows.of(key_of(task, plan, lr, seed), lambda: asdict(run(task, plan, lr, seed))))


def key_of(task: Task, plan: SyncPlan, lr: float, seed: int) -> str:
    """What a training depends on."""
    return f"{task!r} {plan} lr={lr:g} seed={seed}"


def run(task: Task, plan: SyncPlan, lr: float, seed: int) -> Course:
    """In ``fast`` mode, where a learner's part of a batch is one pass; neither network has dropout or BatchNorm, so
    that is ``exact`` up to rounding."""
    sets = task.data()
    looks: list[tuple[int, float]] = []
    each = plan.every if plan.in_rounds else 1
    met = 0
    found: float | None = None
    failed = ""

    def after(model: nn.Module) -> None:
        nonlocal met, found
        met += 1
        step = met * each
        if step % task.every:
            return
        looks.append((step, accuracy(model, sets.validation)))
        if step >= task.steps / 3 and looks[-1][1] < task.collapsed:
            raise Diverged(f"it guesses after {step} steps")
        if step == task.steps:
            found = accuracy(model, sets.test)

    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        execution = ExecutionSettings(mode="fast", num_slots=plan.learners)
        session = lone_session(Path(folder), seed=seed, sync=plan, execution=execution)
        try:
            train(session, task, lr, after, sets.train)
        except Diverged as error:
            failed = str(error)
    assert failed or found is not None, "the training ended before its last step"
    course = Course(repr(task), str(plan), lr, seed, tuple(looks), found, failed, time.process_time() - began)
    result = failed or f"validation {100 * course.score:.1f}, test {100 * (found or 0):.2f} %"
    print(f"  {task.name} {plan} lr={lr} seed={seed}: {result} ({course.cpu_s:.1f} s)", flush=True)
    return course


@dataclass(frozen=True)
class Tuned:
    """A strategy with the learning rate that its trials found best, trained on fresh seeds."""

    task: Task
    plan: SyncPlan
    tried: tuple[tuple[float, float], ...]  # learning rate, score
    lr: float
    courses: tuple[Course, ...]

    @property
    def lost(self) -> int:
        """How many seeds came to nothing."""
        return sum(bool(course.failed) for course in self.courses)

    @functools.cached_property
    def test(self) -> tuple[float | None, float | None]:
        """Mean and half-width of its 95 % interval over the seeds, of those that came to something; see ``mean_of``."""
        return mean_of([course.test for course in self.courses if course.test is not None])

    @property
    def score(self) -> float | None:
        """Mean accuracy at the last look, on validation data."""
        return mean_of([course.score for course in self.courses if not course.failed])[0]

    def steps_to(self, target: float) -> list[int | None]:
        """For each seed, after how many steps validation accuracy was first seen at ``target``."""
        return [next((step for step, value in c.looks if value >= target), None) for c in self.courses]


def mean_of(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and half-width of its 95 % interval; None where there are too few values for it."""
    return mean_ci(list(values)) if values else (None, None)


def tuned(rows: Rows, task: Task, plan: SyncPlan, seeds: Sequence[int]) -> Tuned | None:
    """None where no learning rate comes to anything. Raises ``OutOfTime``."""
    trials = [trained(rows, task, plan, lr, TUNING_SEED) for lr in task.lrs]
    if all(course.failed for course in trials):
        return None
    best = max(trials, key=lambda course: course.score)
    courses = tuple(trained(rows, task, plan, best.lr, seed) for seed in seeds)
    return Tuned(task, plan, tuple((course.lr, course.score) for course in trials), best.lr, courses)
