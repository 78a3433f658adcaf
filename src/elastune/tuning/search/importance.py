"""How much each parameter decides an objective: Optuna's PED-ANOVA, one objective at a time.

A parameter is important if its values among the best quarter of the trials are distributed differently from its values
among all trials (Watanabe, Bansal, Hutter, "PED-ANOVA", IJCAI 2023). The method takes milliseconds and uses log scales.
It compares a parameter that only some trials have among these trials alone. With few trials some parameter always seems
important. So importance is computed again with shuffled values of the objective, and results below that are not shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastune.tuning.search.objective import Objective, oriented

FEWEST = 10  # trials that an importance needs at least
FEWEST_PER_PARAMETER = 2
MOST = 500  # trials that count, evenly spread over the study: more would cost time and change little
SHUFFLES = 19  # a one in twenty chance to report an importance that is only chance


@dataclass(frozen=True)
class EvaluatedTrial:
    """A trial: its parameters, their distributions (Optuna's JSON), and the values of its objectives."""

    params: Mapping[str, Any]
    distributions: Mapping[str, str]
    values: Mapping[str, float]


@dataclass(frozen=True)
class ParameterShare:
    """The share, from 0 to 1, of parameter ``name`` in the importance of all parameters for an objective.

    ``trials`` is how many trials have the parameter.
    """

    name: str
    share: float
    trials: int


@dataclass(frozen=True)
class Importance:
    """Which parameters decide one objective.

    Attributes:
        objective: The name of the objective.
        trials: How many trials have a value of it.
        parameters: The parameters, the most important first; their shares sum to 1.
        why_not: The reason if there are no parameters, else "".
    """

    objective: str
    trials: int
    parameters: tuple[ParameterShare, ...] = ()
    why_not: str = ""


def importance(tried: Sequence[EvaluatedTrial], objectives: Sequence[Objective]) -> tuple[Importance, ...]:
    """Return one ``Importance`` for each objective, in their order. The same trials give the same figures."""
    return tuple(_importance(tried, objective) for objective in objectives)


def _importance(tried: Sequence[EvaluatedTrial], objective: Objective) -> Importance:
    from optuna.trial import create_trial  # here: the report of a run does without Optuna

    from elastune.train.program.space import from_json
    from elastune.tuning.search.history import new_study, quiet

    name = objective.name
    valued = [trial for trial in tried if math.isfinite(trial.values.get(name, math.nan)) and trial.params]
    n = len(valued)
    if not valued:
        return Importance(name, n, why_not="no trial has a value of it")
    if n > MOST:
        valued = [valued[i] for i in np.linspace(0, n - 1, MOST).astype(int)]
    with_ranges = [(trial, from_json({name: trial.distributions[name] for name in trial.params})) for trial in valued]
    searched = {param for _, ranges in with_ranges for param, range_ in ranges.items() if not range_.single()}
    if not searched:
        return Importance(name, n, why_not="no parameter was searched")
    fewest = max(FEWEST, FEWEST_PER_PARAMETER * len(searched))
    if n < fewest:
        why = f"{n} trials are too few for {len(searched)} parameters, {fewest} are needed"
        return Importance(name, n, why_not=why)
    y = np.array([oriented(trial.values, [objective])[0] for trial in valued])
    if np.ptp(y) == 0:
        return Importance(name, n, why_not="all trials reached the same")
    with quiet():
        study = new_study([objective])
        for trial, ranges in with_ranges:
            study.add_trial(create_trial(params=dict(trial.params), distributions=ranges, value=0.0))
        weights = _weights(study, y)
        draw = np.random.default_rng(0)
        chance = max(sum(_weights(study, draw.permutation(y)).values()) for _ in range(SHUFFLES))
    whole = sum(weights.values())
    if whole <= chance:
        why = "the parameters do not predict it: with its values shuffled they seem to decide it as much"
        return Importance(name, n, why_not=why)
    shares = [
        ParameterShare(param, float(weights[param] / whole), sum(param in trial.params for trial in valued))
        for param in sorted(searched)
    ]
    return Importance(name, n, tuple(sorted(shares, key=lambda share: -share.share)))


def _weights(study: Any, y: Any) -> dict[str, float]:
    """By parameter, how much its values among the best quarter by ``y`` (smaller is better) differ from all values."""
    from optuna.importance import PedAnovaImportanceEvaluator  # here: it brings scikit-learn along, a second of a start

    evaluator = PedAnovaImportanceEvaluator(target_quantile=0.25)
    return evaluator.evaluate(study, target=lambda trial: float(y[trial.number]))
