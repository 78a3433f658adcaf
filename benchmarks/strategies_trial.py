"""One training of ``strategies.py`` on one worker, which carries all learners; and the search for its learning rate."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strategies_task import Task, accuracy, train
from torch import nn

from elastune.core.errors import Diverged
from elastune.core.run import Means
from elastune.core.sync_plan import SyncPlan
from elastune.plan.intervals import mean_ci
from elastune.testing.sessions import lone_session

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

    @property
    def score(self) -> float:
        """By which learning rates are compared: the last look, on validation data."""
        return -1.0 if self.failed else self.looks[-1][1]


class Cache:
    """Trainings that were done before, one JSON line each; a line that a death cut off is left out."""

    def __init__(self, path: Path | None, ends_at: float = float("inf")) -> None:
        """``ends_at`` (``time.monotonic``): from then on nothing that is not there is begun."""
        self._path, self._ends_at = path, ends_at
        self._found: dict[tuple[Any, ...], Course] = {}
        for line in path.read_text().splitlines() if path is not None and path.exists() else []:
            try:
                found = json.loads(line)
            except json.JSONDecodeError:
                print(f"{path}: a line was cut off; that training is done again", flush=True)
                continue
            looks = tuple((step, value) for step, value in found.pop("looks"))
            self._keep(Course(**found, looks=looks))

    def _keep(self, course: Course) -> None:
        self._found[course.task, course.sync, course.lr, course.seed] = course

    def get(self, task: Task, plan: SyncPlan, lr: float, seed: int) -> Course | None:
        """The training, run now if it never was; None where the time is up."""
        key = (repr(task), str(plan), lr, seed)
        if key not in self._found:
            if time.monotonic() > self._ends_at:
                return None
            course = run(task, plan, lr, seed)
            self._keep(course)
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a") as file:
                    file.write(json.dumps(asdict(course)) + "\n")
        return self._found[key]


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
        means = Means(mode="fast", num_slots=plan.learners)
        session = lone_session(Path(folder), seed=seed, sync=plan, means=means)
        try:
            train(session, task, lr, after, sets.train)
        except Diverged as error:
            failed = str(error)
    assert failed or found is not None, "the training ended before its last step"
    course = Course(repr(task), str(plan), lr, seed, tuple(looks), found, failed, time.process_time() - began)
    told = failed or f"validation {100 * course.score:.1f}, test {100 * (found or 0):.2f} %"
    print(f"  {task.name} {plan} lr={lr} seed={seed}: {told} ({course.cpu_s:.1f} s)", flush=True)
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


def tuned(cache: Cache, task: Task, plan: SyncPlan, seeds: Sequence[int]) -> Tuned | None:
    """None where the time is up before all is done, or no learning rate comes to anything."""
    trials = [cache.get(task, plan, lr, TUNING_SEED) for lr in task.lrs]
    done = [course for course in trials if course is not None]
    if len(done) < len(trials) or all(course.failed for course in done):
        return None
    best = max(done, key=lambda course: course.score)
    courses = [cache.get(task, plan, best.lr, seed) for seed in seeds]
    complete = tuple(course for course in courses if course is not None)
    if len(complete) < len(courses):
        return None
    return Tuned(task, plan, tuple((course.lr, course.score) for course in done), best.lr, complete)
