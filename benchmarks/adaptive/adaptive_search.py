"""Which trainings ``adaptive.py`` runs: every method is tuned by the same number of trials, then run on fresh seeds."""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from benchmarks.adaptive.adaptive_trial import Course, Setting, course_from_json, train

BATCHES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
TUNING_SEED = 100
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # five trials a method
CENTRE = 0.02  # of the learning rates at batch 64; it follows the root of the batch
LOOKS = 4  # an epoch, in the trainings that are reported


@dataclass(frozen=True)
class Method:
    """What is tuned and judged as one: a fixed batch, or policies and the batch they start from."""

    name: str
    data: str
    batch: int
    decay: str = "none"
    policies: tuple[str, ...] = ()

    @property
    def adaptive(self) -> bool:
        """Whether policies change it while it runs."""
        return bool(self.policies)


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    epochs: int = 4
    seeds: int = 3
    batches: tuple[int, ...] = BATCHES
    factors: tuple[float, ...] = FACTORS
    samples: int | None = None


@dataclass(frozen=True)
class Chosen:
    """A method at the learning rate its trials found best on validation data, and its runs on fresh seeds.

    ``tried``: (learning rate, validation accuracy at the end or None) of each trial.
    """

    method: Method
    lr: float
    tried: tuple[tuple[float, float | None], ...]
    courses: tuple[Course, ...]

    @property
    def at_edge(self) -> bool:
        """Whether the best rate is the first or last that was tried, so that a better one may lie outside."""
        rates = sorted(lr for lr, _ in self.tried)
        return self.lr in (rates[0], rates[-1])


def fixed_methods(data: str, batches: Sequence[int]) -> list[Method]:
    """Fixed batches, with a constant and with a cosine-decayed learning rate."""
    tails = {"none": "", "cosine": ", cosine"}
    return [Method(f"fixed {b}{tail}", data, b, decay) for decay, tail in tails.items() for b in batches]


def rates(batch: int, factors: Sequence[float]) -> list[float]:
    """The learning rates that are tried for a (first) batch: spread alike for all, about a centre ~ sqrt(batch)."""
    return [float(f"{CENTRE * math.sqrt(batch / 64) * factor:.3g}") for factor in factors]


def tuning(method: Method, size: Size) -> list[Setting]:
    """The trials of a method."""
    return [
        Setting(
            method.data, method.batch, lr, method.decay, method.policies,
            size.epochs, TUNING_SEED, 1, size.samples,
        )
        for lr in rates(method.batch, size.factors)
    ]  # fmt: skip


def best(courses: Iterable[Course]) -> Course | None:
    """The training with the best validation accuracy at its end; None where all failed."""
    ended = [course for course in courses if not course.lost]
    return max(ended, key=lambda course: course.looks[-1].validation, default=None)


def judged(setting: Setting, size: Size) -> list[Setting]:
    """The same on fresh seeds, looked at more often."""
    return [replace(setting, seed=seed, looks=LOOKS) for seed in range(size.seeds)]


def search(methods: Sequence[Method], size: Size, cache: Path, processes: int) -> list[Chosen]:
    """Tune and judge all ``methods``. What ``cache`` knows is not run again; 0 processes: nothing is run at all, and
    methods of which it lacks something are left out."""
    trials = run([setting for method in methods for setting in tuning(method, size)], cache, processes)
    results = [best(trials[s.key] for s in tuning(method, size) if s.key in trials) for method in methods]
    known = run([s for course in results if course for s in judged(course.setting, size)], cache, processes)
    return [chosen for method in methods if (chosen := choose(method, size, known)) is not None]


def choose(method: Method, size: Size, known: Mapping[str, Course]) -> Chosen | None:
    """The method as its trials in ``known`` tune it; None where trainings are missing or every trial was lost."""
    trials = [known.get(setting.key) for setting in tuning(method, size)]
    result = best(trial for trial in trials if trial is not None)
    if result is None or None in trials:
        return None
    courses = [known.get(setting.key) for setting in judged(result.setting, size)]
    tried = tuple((t.setting.lr, None if t.lost else t.looks[-1].validation) for t in trials if t is not None)
    if None in courses:
        return None
    return Chosen(method, result.setting.lr, tried, tuple(course for course in courses if course is not None))


def run(settings: Sequence[Setting], cache: Path, processes: int) -> dict[str, Course]:
    """The course of each setting by its key: from ``cache``, a line each, or run now and added to it."""
    known: dict[str, Course] = {}
    if cache.is_file():
        for line in cache.read_text().splitlines():
            course = course_from_json(json.loads(line))
            known[course.setting.key] = course
    missing = {setting.key: setting for setting in settings if setting.key not in known}
    if not missing or not processes:
        return known
    cache.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(train, setting) for setting in missing.values()]
        for count, future in enumerate(as_completed(futures), start=1):
            course = future.result()
            known[course.setting.key] = course
            with cache.open("a") as file:
                file.write(json.dumps(course.to_json()) + "\n")
            print(f"{count}/{len(futures)} {time.perf_counter() - started:.0f} s: {_line(course)}", file=sys.stderr)
    return known


def _line(course: Course) -> str:
    s = course.setting
    end = course.failed or f"validation {course.looks[-1].validation:.4f} after {course.looks[-1].count} steps"
    return f"{s.data} batch {s.batch} lr {s.lr} {s.decay} {' '.join(s.policies)} seed {s.seed}: {end}"
