"""How fast a simulated trial runs and what it reports: the contract, and a model replayed from an earlier study.

The recorded model answers every configuration by the nearest recorded trial. The only side effect in this file is the
progress file, which stands for a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np

from elastune.core.cost import MEASURED
from elastune.core.divergence import LossTrack
from elastune.core.errors import UserError
from elastune.core.journal.files import atomic_write, read
from elastune.core.journal.records import Entry, TimesFitted
from elastune.core.journal.trials import TrialSummary, fold
from elastune.core.plan.data_parallel import DataParallelStep
from elastune.core.run import Config, Position
from elastune.runtime.job.output import JOURNAL
from elastune.train.program.space import from_json

# [trial model] What a simulated run has to know of its trial, and how far it is: pure, but for the file that keeps it.

PROGRESS = "simulated.json"
_SAME = 1e-6  # of a step: times this close to a step's end are its end


class TrialModel(Protocol):
    """How trials would go. Pure: the same arguments give the same answer.

    Epochs are counted from 1. What a method raises is the failure of the run that asked.
    """

    start_s: float
    """From the start of a worker to its first step."""
    resize_pause_s: float
    """What training stands still for when workers change."""

    def epochs(self, config: Config, asked: int | None) -> int:
        """Planned training passes, of which the user ``asked`` for so many (None: what the program says)."""
        ...

    def samples(self, config: Config) -> int:
        """Samples of one training pass."""
        ...

    def batch(self, config: Config) -> int:
        """Samples of one step."""
        ...

    def metrics(self, config: Config, seed: int, epoch: int) -> dict[str, float]:
        """What is reported after ``epoch`` training passes."""
        ...

    def epoch_s(self, config: Config, workers: int, epoch: int) -> float:
        """Seconds of training pass number ``epoch`` on so many workers."""
        ...


@dataclass(frozen=True)
class Progress:
    """How far a simulated run is: what its checkpoint holds.

    ``history``: (digest of configuration and seed, the step up to which it was trained with these). ``losses``: what
    divergence is judged by.
    """

    position: Position = field(default_factory=Position)
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    history: tuple[tuple[str, int], ...] = ()
    losses: dict[str, LossTrack] = field(default_factory=dict)

    def trained(self, digest: str, position: Position, seconds: float) -> Progress:
        """Further progress, with the configuration and seed of ``digest``."""
        earlier = self.history[:-1] if self.history and self.history[-1][0] == digest else self.history
        return replace(self, position=position, seconds=seconds, history=(*earlier, (digest, position.step)))

    @property
    def sha256(self) -> str:
        """Equal for runs that trained as many steps with the same configurations and seeds: their states are equal."""
        return hashlib.sha256(json.dumps(self.history).encode()).hexdigest()


@dataclass(frozen=True)
class RunSegment:
    """Steps at one pace, from second ``since`` on: at most ``steps``, to the end of an epoch of ``samples`` samples."""

    since: float
    start: Position
    batch: int
    samples: int
    step_s: float

    @property
    def steps(self) -> int:
        return -(-(self.samples - self.start.offset) // self.batch)

    def when(self, steps: int) -> float:
        """The time at which so many steps are completed."""
        return self.since + steps * self.step_s

    def done(self, now: float) -> int:
        """Steps completed by ``now``."""
        return self.steps if self.step_s == 0 else min(self.steps, max(0, math.floor(self._steps_by(now) + _SAME)))

    def boundary(self, at: float) -> int:
        """Steps completed at the first step boundary at or after ``at``; more than there are, if it is past the end."""
        return 0 if self.step_s == 0 else max(0, math.ceil(self._steps_by(at) - _SAME))

    def after(self, steps: int) -> Position:
        """Where the run is then."""
        used = min(steps * self.batch, self.samples - self.start.offset)
        offset = self.start.offset + used
        over = offset == self.samples
        return Position(
            epoch=self.start.epoch + over,
            offset=0 if over else offset,
            step=self.start.step + steps,
            samples=self.start.samples + used,
        )

    def _steps_by(self, at: float) -> float:
        return (at - self.since) / self.step_s


def digest_of(config: Config, seed: int) -> str:
    """A name for a run's meaning."""
    return hashlib.sha256(json.dumps([config, seed], sort_keys=True).encode()).hexdigest()[:16]


def save_progress(folder: Path, progress: Progress, at: float) -> None:
    """Keep it in ``folder``, whole or not at all, as of time ``at``; and what was kept there before that time.

    A run whose end nobody heard of ends again under the next controller, and the next: what it began from must stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = _read(folder)
    earlier = before.pop("before", {})
    if before.get("at", -math.inf) >= at - _SAME:
        before = earlier
    atomic_write(folder / PROGRESS, json.dumps({**asdict(progress), "at": at, "before": before}).encode())


def load_progress(folder: Path, at: float) -> Progress | None:
    """What ``folder`` held at time ``at``; None where it held nothing.

    A journal may be behind the folder, by one end that nobody heard of. Raises ``UserError`` for anything else than
    progress.
    """
    tree = _read(folder)
    if tree and tree.get("at", 0.0) > at:
        tree = tree["before"]
    if not tree:
        return None
    losses = {name: LossTrack.from_json(told) for name, told in tree["losses"].items()}
    return Progress(Position(**tree["position"]), tree["seconds"], tree["metrics"], _pairs(tree["history"]), losses)


def _read(folder: Path) -> dict[str, Any]:
    try:
        tree: dict[str, Any] = json.loads((folder / PROGRESS).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError("a simulated run goes on from what it kept", f"{folder}: {error}", "start it again") from error
    return tree


def _pairs(history: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    return tuple((digest, step) for digest, step in history)


# [recorded model] Trials as an earlier study recorded them: whatever is asked for, the nearest of its trials answers.

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
        self._trial_curves = [(course, course.epochs()) for course in courses]
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
        return self._trial_curves[self._nearest(json.dumps(config, sort_keys=True))]

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


def _trace(life: TrialSummary) -> TrialTrace:
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
