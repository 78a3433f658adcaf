"""Which trials of a study may be recommended: those of one task, above a simple baseline, that reach ``--until``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

from elastune.journal.trials import TrialTable
from elastune.search.space.constraint import Constraint, fulfilled
from elastune.search.space.objective import Objective, chance
from elastune.study.results.trials import Trial

TREE, NODE, GROUP = "tree", "node", "group"
"""Settings of a program that is trained for the nodes, or the groups, of a tree of classes."""


def tasks(trials: Sequence[Trial]) -> tuple[str, ...]:
    """Return the parts of a tree of classes that ``trials`` were trained for; () where all have one task."""
    of_trees = [trial.config for trial in trials if isinstance(trial.config.get(TREE), list)]
    named = [task_of(config) for config in of_trees if {NODE, GROUP} & config.keys()]
    different = tuple(dict.fromkeys(named))
    return different if len(different) > 1 else ()


def task_of(config: Mapping[str, Any]) -> str:
    """Return the name of the part of a tree of classes that a trial with this ``config`` was trained for."""
    name = str(config.get(NODE, config.get(GROUP, "")))
    return name or "the root"


def reaching(trials: Sequence[Trial], rules: Sequence[Constraint]) -> list[Trial]:
    """Return those of ``trials`` that fulfil all ``rules``, by their settings and metrics."""
    return [trial for trial in trials if fulfilled(rules, {**trial.config, **trial.means, **seen(trial)})]


def seen(trial: Trial) -> dict[str, float]:
    """Return the metrics of ``trial`` that a search may see."""
    return {name: value for name, value in trial.metrics.items() if not name.startswith("test_")}


def largest_class(table: TrialTable) -> float:
    """Return the share of the most frequent class of the data that the trials were trained on; 0 where not known."""
    runs = [life.finished.run for life in table.trials.values() if life.finished is not None]
    return max((run.context.data.largest_class for run in runs if run is not None and run.context), default=0.0)


def floor(
    trials: Sequence[Trial], objective: Objective, defaults: Mapping[str, Any], largest: float = 0.0
) -> float | None:
    """Return the value of ``objective`` below which no trial is recommended; None where nothing is known.

    It is that of chance, or the mean of the trials that have the program's own settings, whichever is better. Chance is
    known of an AUC, and of an accuracy where the share of the ``largest`` class is.
    """
    own = [t.values[objective.name] for t in trials if defaults and defaults.items() <= t.config.items()]
    known = [fmean(own)] if own else []
    guess = chance(objective.name)
    if objective.name.endswith("accuracy") and largest > 0:
        guess = largest
    known += [] if guess is None or objective.direction != "max" else [guess]
    return max(known, key=lambda value: value if objective.direction == "max" else -value, default=None)


def proportional(trials: Sequence[Trial], objectives: Collection[str], settings: Mapping[str, Any]) -> frozenset[str]:
    """Return the objectives that are another one times a constant in every trial of a study with these ``settings``.

    A cost is, at one price and with a fixed number of workers. It follows from the settings alone, not from values.
    """
    if not {"seconds", "cost"} <= set(objectives) or settings.get("prices") or settings.get("trial_workers"):
        return frozenset()
    counts = {trial.means.get("workers", 1) for trial in trials}
    searched = any({"workers", "mesh"} & trial.distributions.keys() for trial in trials)
    return frozenset() if searched or len(counts) > 1 else frozenset({"cost"})
