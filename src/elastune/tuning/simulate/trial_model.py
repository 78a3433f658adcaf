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
from elastune.core.journal.folds import TrialSummary, fold
from elastune.core.journal.records import Entry, TimesFitted
from elastune.core.plan.data_parallel import DataParallelStep
from elastune.core.run import Config, Position
from elastune.runtime.job.output import JOURNAL
from elastune.train.program.space import from_json

PROGRESS = "simulated.json"
_SAME = 1e-6  # of a step: times this close to a step's end are its end
_REMEMBERED = 65_536  # nearest trials in the cache

# --- the contract, and the progress of a run ---


class TrialModel(Protocol):
    """How fast a simulated trial runs, and what it reports: the contract of all models.

    Methods are pure: the same arguments give the same result. Epochs count from 1. An exception of a method is a
    failure of the run that calls it.
    """

    start_s: float
    """Seconds from the start of a worker to its first step."""
    resize_pause_s: float
    """Seconds for which training stands still when workers change."""

    def epochs(self, config: Config, requested: int | None) -> int:
        """Return the planned epochs. ``requested``: the user's number of them; None: the program decides."""
        ...

    def samples(self, config: Config) -> int:
        """Return the samples of one training pass."""
        ...

    def batch(self, config: Config) -> int:
        """Return the samples of one step."""
        ...

    def metrics(self, config: Config, seed: int, epoch: int) -> dict[str, float]:
        """Return the metrics reported after ``epoch`` training passes."""
        ...

    def epoch_s(self, config: Config, workers: int, epoch: int) -> float:
        """Return the seconds of training pass number ``epoch`` on ``workers`` workers."""
        ...


@dataclass(frozen=True)
class Progress:
    """How far a simulated run is: the content of its checkpoint.

    Attributes:
        position: Its position in training.
        seconds: Its training time.
        metrics: The newest metrics.
        history: Pairs of a digest of configuration and seed, and the step up to which the run trained with these.
        losses: The losses by which divergence is detected.
    """

    position: Position = field(default_factory=Position)
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    history: tuple[tuple[str, int], ...] = ()
    losses: dict[str, LossTrack] = field(default_factory=dict)

    def trained(self, digest: str, position: Position, seconds: float) -> Progress:
        """Return the progress after further training with the configuration and seed of ``digest``."""
        earlier = self.history[:-1] if self.history and self.history[-1][0] == digest else self.history
        return replace(self, position=position, seconds=seconds, history=(*earlier, (digest, position.step)))

    @property
    def sha256(self) -> str:
        """A digest of the state: equal for runs that trained the same steps with the same configurations and seeds."""
        return hashlib.sha256(json.dumps(self.history).encode()).hexdigest()


@dataclass(frozen=True)
class RunSegment:
    """Steps of equal length from second ``since`` on, at most to the end of an epoch of ``samples`` samples."""

    since: float
    start: Position
    batch: int
    samples: int
    step_s: float

    @property
    def steps(self) -> int:
        return -(-(self.samples - self.start.offset) // self.batch)

    def when(self, steps: int) -> float:
        """Return the time at which ``steps`` steps are complete."""
        return self.since + steps * self.step_s

    def done(self, now: float) -> int:
        """Return the steps completed by ``now``."""
        return self.steps if self.step_s == 0 else min(self.steps, max(0, math.floor(self._steps_by(now) + _SAME)))

    def boundary(self, at: float) -> int:
        """Return the steps completed at the first step boundary from ``at`` on; beyond the end, more than ``steps``."""
        return 0 if self.step_s == 0 else max(0, math.ceil(self._steps_by(at) - _SAME))

    def after(self, steps: int) -> Position:
        """Return the position after ``steps`` steps."""
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
    """Return a short digest of a run's configuration and seed."""
    return hashlib.sha256(json.dumps([config, seed], sort_keys=True).encode()).hexdigest()[:16]


def save_progress(folder: Path, progress: Progress, at: float) -> None:
    """Save ``progress`` of time ``at`` in ``folder`` atomically, beside the progress from before that time.

    If a controller dies before it records the end of a run, the run ends again under the next controller. The progress
    from which it began must therefore stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = _read(folder)
    earlier = before.pop("before", {})
    if before.get("at", -math.inf) >= at - _SAME:
        before = earlier
    atomic_write(folder / PROGRESS, json.dumps({**asdict(progress), "at": at, "before": before}).encode())


def load_progress(folder: Path, at: float) -> Progress | None:
    """Return the progress that ``folder`` held at time ``at``; None if it held none.

    The folder may be ahead of the journal by one end that no controller recorded. Raises ``UserError`` for a file that
    does not hold progress.
    """
    tree = _read(folder)
    if tree and tree.get("at", 0.0) > at:
        tree = tree["before"]
    if not tree:
        return None
    losses = {name: LossTrack.from_json(track) for name, track in tree["losses"].items()}
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


# --- trials recorded by an earlier study ---

Scaling = Callable[[Config, int, int], float]
"""Config, measured workers, wanted workers -> wanted time over measured time."""


@dataclass(frozen=True)
class Epoch:
    """A recorded training pass: its seconds on ``workers`` workers, and the metrics reported by its end."""

    seconds: float
    workers: int
    metrics: dict[str, float]


@dataclass
class TrialTrace:
    """A recorded trial: its ``reports`` hold (seconds, workers, metrics) after each epoch."""

    config: Config
    logs: dict[str, bool] = field(default_factory=dict)  # parameters -> whether on a log scale
    samples: int = 0
    steps: int = 0
    reports: dict[int, tuple[float, int, dict[str, float]]] = field(default_factory=dict)

    def epochs(self) -> list[Epoch]:
        """Return its passes. Passes without a report share the time to the next report, and repeat the last metrics."""
        passes: list[Epoch] = []
        at_s, metrics = 0.0, dict[str, float]()
        for epoch, (seconds, workers, reported) in sorted(self.reports.items()):
            silent = epoch - len(passes)
            passes += [Epoch((seconds - at_s) / silent, workers, metrics)] * (silent - 1)
            metrics = {**metrics, **reported}
            passes.append(Epoch((seconds - at_s) / silent, workers, metrics))
            at_s = seconds
        return passes


class RecordedModel:
    """A model that replays the finished trials of a study's journal: the nearest recorded trial stands for each trial.

    The distance is Euclidean, over the settings in which the recorded trials differ. Numbers are scaled to their
    recorded range, on a log scale where the space has one. Other values are equal or not.

    Args:
        out: The folder of the recorded study.
        scaling: How times change to numbers of workers that were not recorded: see ``parse_scaling``.
        start_s: Seconds from the start of a worker to its first step.
        resize_pause_s: Seconds for which training stands still when workers change.

    Raises:
        UserError: If no finished trial reported anything.
    """

    def __init__(
        self, out: Path, scaling: str = "linear", *, start_s: float = 0.0, resize_pause_s: float = 0.0
    ) -> None:
        entries = read(out / JOURNAL)
        self.start_s = start_s
        self.resize_pause_s = resize_pause_s
        self.distances: list[float] = []  # to the nearest trials; 0 to sqrt(number of settings)
        self._scaling = parse_scaling(scaling, entries)
        traces = _traces(entries)
        if not traces:
            raise UserError("recorded trials must have ended and reported", out, "record a study with finished trials")
        self._trial_curves = [(trace, trace.epochs()) for trace in traces]
        self._metric = _Metric([trace.config for trace in traces], traces[-1].logs)
        self._nearest = lru_cache(maxsize=_REMEMBERED)(self._find)
        self._label = f"the nearest of {len(traces)} recorded trials in {out}, {scaling} scaling"

    @property
    def source(self) -> str:
        """The recorded study in words, and the median distance to the nearest trials."""
        near = f"; distance {median(self.distances):.2g} in the median" if self.distances else ""
        return self._label + near

    def epochs(self, config: Config, requested: int | None) -> int:
        recorded = len(self._curve(config)[1])
        if requested is not None and requested > recorded:
            rule = f"the nearest recorded trial has {recorded} epochs"
            raise UserError(rule, f"{requested} asked", "ask for fewer with --epochs")
        return recorded if requested is None else requested

    def samples(self, config: Config) -> int:
        return self._curve(config)[0].samples

    def batch(self, config: Config) -> int:
        trace = self._curve(config)[0]
        return max(1, round(trace.samples / trace.steps))

    def metrics(self, config: Config, seed: int, epoch: int) -> dict[str, float]:
        return dict(self._curve(config)[1][epoch - 1].metrics)

    def epoch_s(self, config: Config, workers: int, epoch: int) -> float:
        recorded = self._curve(config)[1][epoch - 1]
        return recorded.seconds * self._scaling(config, recorded.workers, workers)

    def _curve(self, config: Config) -> tuple[TrialTrace, list[Epoch]]:
        return self._trial_curves[self._nearest(json.dumps(config, sort_keys=True))]

    def _find(self, key: str) -> int:
        distances = self._metric.distances(json.loads(key))
        nearest = int(distances.argmin())
        self.distances.append(float(distances[nearest]))
        return nearest


class _Metric:
    """The distances of configurations to the recorded ones."""

    def __init__(self, configs: Sequence[Config], logs: Mapping[str, bool]) -> None:
        self._scales: dict[str, tuple[bool, float, float]] = {}  # of numbers: (log scale?, lowest, range)
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
        """Return the distance to each recorded configuration. A missing setting, or a text among numbers, is 1 away."""
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
    """Return how times change with the number of workers.

    Args:
        text: "linear"; "amdahl:F", where workers do not share the part F of the work (Amdahl, AFIPS 1967); or "fitted":
            by the step-time model in the journal, for the ``batch_size`` of the configuration.
        entries: The journal.

    Raises:
        UserError: For another text, or if the journal has no step-time model.
    """
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
    """The finished trials that reported and had no parent."""
    summaries = fold(entries).trials.values()
    finished = [summary for summary in summaries if summary.finished is not None and summary.finished.run is not None]
    traces = [_trace(summary) for summary in finished if summary.started.parent is None]
    return [trace for trace in traces if trace.reports]


def _trace(summary: TrialSummary) -> TrialTrace:
    logs = {n: bool(getattr(d, "log", False)) for n, d in from_json(summary.started.distributions).items()}
    trace = TrialTrace(summary.started.config, logs)
    for report, workers in summary.reports:
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
