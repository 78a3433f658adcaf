"""Trials as an earlier study recorded them: whatever is asked for, the nearest of its trials answers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from elastune.core.cost import MEASURED
from elastune.core.errors import UserError
from elastune.core.run import Config
from elastune.job.output_dir import JOURNAL
from elastune.journal.entry import Entry
from elastune.journal.reader import read
from elastune.journal.records import TimesFitted
from elastune.journal.trials import TrialLife, fold
from elastune.plan.steps.data_parallel import DataParallelStep
from elastune.search.space.space import from_json

Scaling = Callable[[Config, int, int], float]
"""Config, workers measured, workers wanted -> time wanted over time measured."""
_REMEMBERED = 65_536


@dataclass(frozen=True)
class Epoch:
    """A recorded training pass: its seconds on ``workers`` workers, and what was reported up to its end."""

    seconds: float
    workers: int
    metrics: dict[str, float]


@dataclass
class TrialTrace:
    """A recorded trial: what it reported after each epoch, as (seconds, workers, metrics)."""

    config: Config
    logs: dict[str, bool] = field(default_factory=dict)  # parameters -> whether on a log scale
    samples: int = 0
    steps: int = 0
    reports: dict[int, tuple[float, int, dict[str, float]]] = field(default_factory=dict)

    def epochs(self) -> list[Epoch]:
        """Its training passes. Those without a report share the time to the next one, and report what was before."""
        found: list[Epoch] = []
        at_s, metrics = 0.0, dict[str, float]()
        for epoch, (seconds, workers, news) in sorted(self.reports.items()):
            silent = epoch - len(found)
            found += [Epoch((seconds - at_s) / silent, workers, metrics)] * (silent - 1)
            metrics = {**metrics, **news}
            found.append(Epoch((seconds - at_s) / silent, workers, metrics))
            at_s = seconds
        return found


class RecordedModel:
    """The courses of the finished trials in a study's journal; the model of trials that a simulated cluster asks.

    Nearest: by the settings in which the recorded trials differ; numbers scaled to the range that was recorded (on a
    log scale where the space has one), other values equal or not; Euclidean distance. Worker counts other than those
    recorded: ``scaling``. Raises ``UserError`` where no finished trial reported anything.
    """

    def __init__(
        self, out: Path, scaling: str = "linear", *, start_s: float = 0.0, resize_pause_s: float = 0.0
    ) -> None:
        entries = read(out / JOURNAL)
        self.start_s = start_s
        self.resize_pause_s = resize_pause_s
        self.distances: list[float] = []  # of what was asked for to what answered; 0 to sqrt(number of settings)
        self._scaling = parse_scaling(scaling, entries)
        courses = _traces(entries)
        if not courses:
            raise UserError("recorded trials must have ended and reported", out, "record a study with finished trials")
        self._courses = [(course, course.epochs()) for course in courses]
        self._metric = _Metric([course.config for course in courses], courses[-1].logs)
        self._nearest = lru_cache(maxsize=_REMEMBERED)(self._find)
        self._label = f"the nearest of {len(courses)} recorded trials in {out}, {scaling} scaling"

    @property
    def source(self) -> str:
        """What it rests on, and how near what was asked for was to what answered."""
        near = f"; distance {median(self.distances):.2g} in the median" if self.distances else ""
        return self._label + near

    def epochs(self, config: Config, asked: int | None) -> int:
        told = len(self._course(config)[1])
        if asked is not None and asked > told:
            rule = f"the nearest recorded trial has {told} epochs"
            raise UserError(rule, f"{asked} asked", "ask for fewer with --epochs")
        return told if asked is None else asked

    def samples(self, config: Config) -> int:
        return self._course(config)[0].samples

    def batch(self, config: Config) -> int:
        course = self._course(config)[0]
        return max(1, round(course.samples / course.steps))

    def metrics(self, config: Config, seed: int, epoch: int) -> dict[str, float]:
        return dict(self._course(config)[1][epoch - 1].metrics)

    def epoch_s(self, config: Config, workers: int, epoch: int) -> float:
        recorded = self._course(config)[1][epoch - 1]
        return recorded.seconds * self._scaling(config, recorded.workers, workers)

    def _course(self, config: Config) -> tuple[TrialTrace, list[Epoch]]:
        return self._courses[self._nearest(json.dumps(config, sort_keys=True))]

    def _find(self, key: str) -> int:
        distances = self._metric.distances(json.loads(key))
        nearest = int(distances.argmin())
        self.distances.append(float(distances[nearest]))
        return nearest


class _Metric:
    """How far configurations are from the recorded ones."""

    def __init__(self, configs: Sequence[Config], logs: Mapping[str, bool]) -> None:
        self._scales: dict[str, tuple[bool, float, float]] = {}  # numbers: on a log scale?, lowest, range
        self._numbers: dict[str, Any] = {}
        self._others: dict[str, list[str]] = {}
        self._count = len(configs)
        for name in sorted({name for config in configs for name in config}):
            column = [config.get(name) for config in configs]
            if len({_text(value) for value in column}) == 1:
                continue
            if all(_is_number(value) for value in column):
                numbers = np.asarray(column, dtype=float)
                log = logs.get(name, False) and bool((numbers > 0).all())
                numbers = np.log(numbers) if log else numbers
                low, span = float(numbers.min()), float(np.ptp(numbers))
                self._scales[name] = log, low, span
                self._numbers[name] = (numbers - low) / span
            else:
                self._others[name] = [_text(value) for value in column]

    def distances(self, config: Config) -> np.ndarray[Any, np.dtype[np.float64]]:
        """To each of the recorded ones. A setting that is missing, or no number where others are, is 1 away."""
        squares = np.zeros(self._count)
        for name, (log, low, span) in self._scales.items():
            value = config.get(name)
            if isinstance(value, int | float) and _is_number(value) and not (log and value <= 0):
                squares += (((math.log(value) if log else value) - low) / span - self._numbers[name]) ** 2
            else:
                squares += 1.0
        for name, column in self._others.items():
            text = _text(config.get(name))
            squares += np.asarray([text != other for other in column], dtype=float)
        return np.sqrt(squares)


def parse_scaling(text: str, entries: Sequence[Entry] = ()) -> Scaling:
    """How times change with workers: "linear"; "amdahl:F", F of the work not shared (Amdahl, AFIPS 1967); "fitted", by
    the step-time model in the journal, for the ``batch_size`` of the configuration. Raises ``UserError``."""
    name, _, rest = text.partition(":")
    fix = "use linear, amdahl:0.05 or fitted"
    if text == "linear":
        return lambda config, measured, wanted: measured / wanted
    if name == "amdahl":
        try:
            serial = float(rest)
        except ValueError:
            serial = math.nan
        if not 0 <= serial <= 1:
            raise UserError("the part that is not shared is from 0 to 1", text, fix)
        return lambda config, measured, wanted: _amdahl(serial, wanted) / _amdahl(serial, measured)
    fits = [e.record for e in entries if isinstance(e.record, TimesFitted)]
    if text == "fitted" and fits:
        return _fitted(DataParallelStep.from_record(fits[-1]))
    if text == "fitted":
        raise UserError("fitted scaling needs the step times of a frontier", "none in this journal", fix)
    raise UserError("unknown scaling", text, fix)


def _fitted(model: DataParallelStep) -> Scaling:
    def ratio(config: Config, measured: int, wanted: int) -> float:
        batch = config.get("batch_size")
        if isinstance(batch, bool) or not isinstance(batch, int):
            raise UserError("fitted scaling needs the batch size", "no batch_size", "use linear or amdahl:0.05")
        return model.step_s(batch, wanted) / model.step_s(batch, measured)

    return ratio


def _amdahl(serial: float, workers: int) -> float:
    return serial + (1 - serial) / workers


def _traces(entries: Sequence[Entry]) -> list[TrialTrace]:
    """The finished trials that began by themselves and reported."""
    lives = fold(entries).trials.values()
    ran = [life for life in lives if life.finished is not None and life.finished.run is not None]
    found = [_trace(life) for life in ran if life.started.parent is None]
    return [trace for trace in found if trace.reports]


def _trace(life: TrialLife) -> TrialTrace:
    logs = {n: bool(getattr(d, "log", False)) for n, d in from_json(life.started.distributions).items()}
    trace = TrialTrace(life.started.config, logs)
    for report, workers in life.reports:
        if report.epoch <= 0:
            continue
        _, _, before = trace.reports.get(report.epoch, (0.0, 0, {}))
        metrics = {name: value for name, value in report.metrics.items() if name not in MEASURED}
        trace.reports[report.epoch] = report.seconds, workers, {**before, **metrics}
        if not trace.samples or report.epoch == 1:
            trace.samples = max(1, report.samples // report.epoch)
            trace.steps = max(1, report.step // report.epoch)
    return trace


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)
