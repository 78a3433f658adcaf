"""The result of each trial of a study, also as a table row, and which trials may be recommended.

A trial may be recommended if it belongs to the task, is better than a simple baseline, and satisfies ``--until``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from elastune.core.cost import Cost
from elastune.core.errors import UserError
from elastune.core.journal.folds import TrialSummary, TrialTable
from elastune.core.journal.records import TrialStarted
from elastune.tuning.search.constraint import Constraint, fulfilled
from elastune.tuning.search.objective import Objective, chance

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


@dataclass(frozen=True)
class Trial:
    """A trial that has ended, or is paused.

    Attributes:
        state: "complete", "paused" or another end.
        config: All settings.
        execution: The execution settings.
        values: One number for each objective if ``state`` is "complete". For a "paused" trial: the objectives of its
            last report.
        seconds: How long it ran, without pauses.
        worker_seconds: The time of all its workers together.
        epochs: Training passes that it completed.
        started_at: When it started, in seconds since 1970.
        ended_at: When it ended, in seconds since 1970.
        ended_s: Its end, in seconds of the study's own time.
        params: The parameters that the search chose from ``distributions`` (JSON of Optuna).
    """

    number: int
    state: str
    config: dict[str, Any]
    execution: dict[str, Any]
    values: dict[str, float]
    metrics: dict[str, float]
    seconds: float
    reason: str
    phase: str
    tags: dict[str, Any]
    seed: int = 0
    params: dict[str, Any] = field(default_factory=dict)
    distributions: dict[str, str] = field(default_factory=dict)
    worker_seconds: float = 0.0
    epochs: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0
    ended_s: float = 0.0
    parent: int | None = None
    cut_off: bool = False
    """Paused because the study ended, not by the search."""
    held: bool = False
    """Held back when the study ended: it waited for idle workers."""
    noise_scale: tuple[float, float | None] | None = None
    """The gradient noise scale at its end, in samples, and its standard error; None if it was not measured."""

    @property
    def batch_size(self) -> int | None:
        """Its global batch for the whole training; None if its settings lack one, or a policy may change it."""
        setting = self.config.get("batch_size")
        fixed = (
            self.execution.get("policy", "none") == "none"
            and isinstance(setting, int)
            and not isinstance(setting, bool)
        )
        return setting if fixed else None


def outcomes(
    table: TrialTable, objectives: Sequence[str] = (), price_per_worker_hour: float = 1.0
) -> tuple[Trial, ...]:
    """Return the trials that have ended, in the order of their ends, then those that are paused.

    Args:
        table: All trials of the study.
        objectives: The objectives whose values paused trials show.
        price_per_worker_hour: The price by which costs are counted.
    """
    over = [_ended_trial(table.trials[number]) for number in table.ended]
    return (*over, *(_paused_trial(table.trials[n], objectives, price_per_worker_hour) for n in table.of("paused")))


def check_params(trials: Iterable[Trial | TrialStarted]) -> None:
    """Check that every trial's parameters belong to its distributions.

    Raises:
        UserError: For a trial with other parameters.
    """
    from elastune.train.program.space import from_json  # loads Optuna, which the report of a run does without

    distributions: dict[str, BaseDistribution] = {}
    rule, fix = "a trial's parameters must be of its distributions", "restore the journal"
    for trial in trials:
        number = trial.number if isinstance(trial, Trial) else trial.trial
        if trial.params.keys() != trial.distributions.keys():
            raise UserError(rule, f"trial {number}, {', '.join(trial.distributions)}"[:200], fix)
        for name, value in trial.params.items():
            text = trial.distributions[name]
            if text not in distributions:
                distributions |= {text: from_json({name: text})[name]}
            if not _within(distributions[text], value):
                raise UserError(rule, f"trial {number}, {name}={value!r:.60}", fix)


def _within(distribution: BaseDistribution, value: Any) -> bool:
    from elastune.train.program.space import contains

    try:
        return contains(distribution, value)
    except (ValueError, TypeError, OverflowError):
        return False


def _ended_trial(life: TrialSummary) -> Trial:
    finished = life.finished
    assert finished is not None
    return Trial(
        state=finished.state,
        values=finished.values,
        metrics=finished.metrics,
        reason=finished.reason,
        noise_scale=None if finished.run is None else finished.run.signals.get("noise_scale"),
        **_common(life),
    )


def _paused_trial(life: TrialSummary, names: Sequence[str], price_per_worker_hour: float) -> Trial:
    assert life.pause is not None
    newest: dict[str, float] = {}
    if life.reports:
        report, _ = life.reports[-1]
        trained = Cost((life.average or float(life.first_workers)) * report.seconds, price_per_worker_hour)
        cost = trained.total if life.cost is None else life.cost
        newest = {**report.metrics, "seconds": report.seconds, "cost": cost}
    return Trial(
        state="paused",
        values={name: newest[name] for name in names if name in newest},
        metrics=newest,
        reason=life.pause.reason,
        cut_off=life.pause.cut_off,
        held=life.pause.held,
        **_common(life),
    )


def _common(life: TrialSummary) -> dict[str, Any]:
    started = life.started
    return {
        "number": started.trial,
        "config": started.config,
        "execution": started.execution,
        "phase": started.phase,
        "tags": started.tags,
        "seed": started.seed,
        "params": started.params,
        "distributions": started.distributions,
        "seconds": life.seconds,
        "worker_seconds": life.worker_seconds,
        "epochs": life.epochs_done,
        "started_at": life.started_at,
        "ended_at": life.last_at,
        "ended_s": life.last_s,
        "parent": started.parent,
    }


GROUPS = ("params", "config", "execution", "values", "metrics")
"""The fields of a trial that are mappings: each key is a column, such as "params.lr"."""
PLAIN = ("number", "state", "phase", "seed", "parent", "epochs", "seconds", "worker_seconds", "started_at", "ended_at")


def flat_row(trial: Trial) -> dict[str, Any]:
    """Return a trial as one row: "number", "state", ..., "params.lr", ..., "values.accuracy", ..., "reason".

    ``params`` are the parameters that the search chose, ``config`` all settings. Times are in seconds; a name that ends
    in ``_at`` counts them since 1970.
    """
    row: dict[str, Any] = {name: getattr(trial, name) for name in PLAIN}
    for group in GROUPS:
        row |= {f"{group}.{name}": value for name, value in getattr(trial, group).items()}
    return {**row, "reason": trial.reason}


# --- which trials may be recommended ---

TREE, NODE, GROUP = "tree", "node", "group"
"""Settings of a program that trains the nodes, or the groups, of a tree of classes."""


def tasks(trials: Sequence[Trial]) -> tuple[str, ...]:
    """Return the parts of a tree of classes that ``trials`` were trained for; () if all have one task."""
    of_trees = [trial.config for trial in trials if isinstance(trial.config.get(TREE), list)]
    named = [task_of(config) for config in of_trees if {NODE, GROUP} & config.keys()]
    different = tuple(dict.fromkeys(named))
    return different if len(different) > 1 else ()


def task_of(config: Mapping[str, Any]) -> str:
    """Return the name of the part of a tree of classes that a trial with this ``config`` was trained for."""
    name = str(config.get(NODE, config.get(GROUP, "")))
    return name or "the root"


def reaching(trials: Sequence[Trial], rules: Sequence[Constraint]) -> list[Trial]:
    """Return the ``trials`` that fulfil all ``rules``, by their settings and metrics."""
    return [trial for trial in trials if fulfilled(rules, {**trial.config, **trial.execution, **seen(trial)})]


def seen(trial: Trial) -> dict[str, float]:
    """Return the metrics of ``trial`` that a search may see."""
    return {name: value for name, value in trial.metrics.items() if not name.startswith("test_")}


def largest_class(table: TrialTable) -> float:
    """Return the share of the most frequent class in the training data of the trials; 0: unknown."""
    runs = [life.finished.run for life in table.trials.values() if life.finished is not None]
    return max((run.context.data.largest_class for run in runs if run is not None and run.context), default=0.0)


def floor(
    trials: Sequence[Trial], objective: Objective, defaults: Mapping[str, Any], largest: float = 0.0
) -> float | None:
    """Return the value of ``objective`` below which no trial is recommended; None: unknown.

    It is the value of chance, or the mean of the trials with the program's own settings, whichever is better. Chance is
    known for an AUC, and for an accuracy if the share of the ``largest`` class is known.
    """
    default_values = [t.values[objective.name] for t in trials if defaults and defaults.items() <= t.config.items()]
    baselines = [fmean(default_values)] if default_values else []
    guess = chance(objective.name)
    if objective.name.endswith("accuracy") and largest > 0:
        guess = largest
    baselines += [] if guess is None or objective.direction != "max" else [guess]
    return max(baselines, key=lambda value: value if objective.direction == "max" else -value, default=None)


def proportional(trials: Sequence[Trial], objectives: Collection[str], settings: Mapping[str, Any]) -> frozenset[str]:
    """Return the objectives that are another one times a constant in every trial of a study.

    A cost is proportional to the time at one price and with a fixed number of workers. This follows from ``settings``
    and the distributions of the trials, not from values.
    """
    if not {"seconds", "cost"} <= set(objectives) or settings.get("prices") or settings.get("trial_workers"):
        return frozenset()
    counts = {trial.execution.get("workers", 1) for trial in trials}
    searched = any({"workers", "mesh"} & trial.distributions.keys() for trial in trials)
    return frozenset() if searched or len(counts) > 1 else frozenset({"cost"})
