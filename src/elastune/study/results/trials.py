"""The result of each trial of a study, also as a flat row for tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from optuna.distributions import BaseDistribution

from elastune.core.cost import Cost
from elastune.core.errors import UserError
from elastune.journal.records import TrialStarted
from elastune.journal.trials import TrialLife, TrialTable
from elastune.search.space.space import from_json


@dataclass(frozen=True)
class Trial:
    """A trial that has ended, or is paused.

    Attributes:
        state: "complete", "paused" or another end.
        config: All settings.
        means: System parameters.
        values: One number for each objective if ``state`` is "complete". For a "paused" trial: the objectives that its
            last report tells.
        seconds: How long it ran, without pauses.
        worker_seconds: The time of all its workers together.
        epochs: Training passes that it completed.
        started_at, ended_at: Seconds since 1970.
        ended_s: Its end, in seconds of the study's own time.
        params: What the search chose, out of ``distributions`` (JSON of Optuna).
    """

    number: int
    state: str
    config: dict[str, Any]
    means: dict[str, Any]
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
    """Paused by no decision of the search: the study ended first."""
    held: bool = False
    """The study ended first, while it was held back: it waited for idle workers."""
    noise_scale: tuple[float, float | None] | None = None
    """The gradient's noise scale at its end, in samples, and its standard error; None where it was not measured."""

    @property
    def batch_size(self) -> int | None:
        """Its global batch, from beginning to end; None where its settings do not tell, or a policy may change it."""
        told = self.config.get("batch_size")
        fixed = self.means.get("policy", "none") == "none" and isinstance(told, int) and not isinstance(told, bool)
        return told if fixed else None


def outcomes(
    table: TrialTable, objectives: Sequence[str] = (), price_per_worker_hour: float = 1.0
) -> tuple[Trial, ...]:
    """Return the trials that have ended, in the order of their ends, then those that are paused.

    Args:
        table: All trials of the study.
        objectives: The objectives whose values paused trials show.
        price_per_worker_hour: The price by which costs are counted.
    """
    over = [_over(table.trials[number]) for number in table.ended]
    return (*over, *(_resting(table.trials[n], objectives, price_per_worker_hour) for n in table.of("paused")))


def check_params(trials: Iterable[Trial | TrialStarted]) -> None:
    """Check that every trial's parameters belong to the distributions that it names.

    Raises:
        UserError: For a trial where they do not.
    """
    known: dict[str, BaseDistribution] = {}
    rule, fix = "a trial's parameters must be of its distributions", "restore the journal"
    for trial in trials:
        number = trial.number if isinstance(trial, Trial) else trial.trial
        if trial.params.keys() != trial.distributions.keys():
            raise UserError(rule, f"trial {number}, {', '.join(trial.distributions)}"[:200], fix)
        for name, value in trial.params.items():
            text = trial.distributions[name]
            if text not in known:
                known |= {text: from_json({name: text})[name]}
            if not _within(known[text], value):
                raise UserError(rule, f"trial {number}, {name}={value!r:.60}", fix)


def _within(distribution: BaseDistribution, value: Any) -> bool:
    try:
        return distribution._contains(distribution.to_internal_repr(value))
    except (ValueError, TypeError, OverflowError):
        return False


def _over(life: TrialLife) -> Trial:
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


def _resting(life: TrialLife, names: Sequence[str], price_per_worker_hour: float) -> Trial:
    assert life.pause is not None
    known: dict[str, float] = {}
    if life.reports:
        report, _ = life.reports[-1]
        trained = Cost((life.average or float(life.first_workers)) * report.seconds, price_per_worker_hour)
        cost = trained.total if life.cost is None else life.cost
        known = {**report.metrics, "seconds": report.seconds, "cost": cost}
    return Trial(
        state="paused",
        values={name: known[name] for name in names if name in known},
        metrics=known,
        reason=life.pause.reason,
        cut_off=life.pause.cut_off,
        held=life.pause.held,
        **_common(life),
    )


def _common(life: TrialLife) -> dict[str, Any]:
    started = life.started
    return {
        "number": started.trial,
        "config": started.config,
        "means": started.means,
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


GROUPS = ("params", "config", "means", "values", "metrics")
"""Of a trial's fields, those that are mappings: a column each key, "params.lr"."""

PLAIN = ("number", "state", "phase", "seed", "parent", "epochs", "seconds", "worker_seconds", "started_at", "ended_at")


def flat_row(trial: Trial) -> dict[str, Any]:
    """Return a trial as one row: "number", "state", ..., "params.lr", ..., "values.accuracy", ..., "reason".

    ``params`` is what the search chose, ``config`` all settings. Times are in seconds; a name that ends in ``_at``
    counts them since 1970.
    """
    row: dict[str, Any] = {name: getattr(trial, name) for name in PLAIN}
    for group in GROUPS:
        row |= {f"{group}.{name}": value for name, value in getattr(trial, group).items()}
    return {**row, "reason": trial.reason}
