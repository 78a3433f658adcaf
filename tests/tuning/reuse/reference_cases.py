"""The predictions that selections are compared on, and how others' choices on them were made.

What DeepHyper's and AutoGluon's selectors choose is in reference_selections.json. It was made by, in an environment of
their own with one of the two (they and this package need other versions of the same libraries):

    pip install numpy==2.4.6 deephyper==0.13.2          # and, in another environment: autogluon.core==1.6.3
    python tests/tuning/reuse/reference_cases.py deephyper     # adds or replaces its choices in the file

Predictions come of whole numbers and one division each: the same bits everywhere.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).parent / "reference_selections.json"
ROUNDS = 25
MEMBERS = 4  # DeepHyper's selector stops at so many different ones


@dataclass(frozen=True)
class Case:
    """``score``: log_loss, accuracy or mse. ``skill``: how much better the best candidates are than chance."""

    score: str
    seed: int
    candidates: int = 12
    rows: int = 80
    classes: int = 4
    skill: int = 60

    @property
    def name(self) -> str:
        return f"{self.score}-{self.seed}"

    def made(self) -> tuple[np.ndarray, np.ndarray]:
        """What candidates say, (candidates, rows, classes or 1), and what is right."""
        random = np.random.RandomState(self.seed)  # whose stream never changes
        if self.score == "mse":
            right = random.randint(-500, 500, (self.rows, 1))
            off = random.randint(-400, 400, (self.candidates, self.rows, 1))
            bias = random.randint(-200, 200, (self.candidates, 1, 1))
            return (right[None] + off + bias) / 256, right / 256
        right = random.randint(self.classes, size=self.rows)
        result = random.randint(1, 100, (self.candidates, self.rows, self.classes))
        helped = random.randint(0, self.skill, (self.candidates, 1)) * random.randint(
            0, 3, (self.candidates, self.rows)
        )
        result[:, np.arange(self.rows), right] += helped
        return result / result.sum(-1, keepdims=True), right


CASES = [Case(score, seed) for score in ("log_loss", "accuracy", "mse") for seed in range(6)]


def autogluon(case: Case) -> list[float]:
    """Weights by AutoGluon's ``EnsembleSelection``."""
    from autogluon.core.metrics import accuracy, log_loss, mean_squared_error
    from autogluon.core.models.greedy_ensemble.ensemble_selection import EnsembleSelection

    metric = {"log_loss": log_loss, "accuracy": accuracy, "mse": mean_squared_error}[case.score]
    said, right = case.made()
    kind = "regression" if case.score == "mse" else "multiclass"
    result = EnsembleSelection(ROUNDS, kind, metric, tie_breaker="random" if kind == "regression" else "second_metric")
    flat = said[..., 0] if kind == "regression" else said
    result.fit(list(flat), right.reshape(-1))
    return [float(weight) for weight in result.weights_]


def deephyper(case: Case) -> list[float]:
    """Weights by DeepHyper's ``GreedySelector`` that begins with the best one and stops where nothing is better."""
    from deephyper.ensemble.aggregator import MeanAggregator
    from deephyper.ensemble.loss import CategoricalCrossEntropy, SquaredError, ZeroOneLoss
    from deephyper.ensemble.selector import GreedySelector

    losses: dict[str, Any] = {
        "log_loss": CategoricalCrossEntropy(),
        "accuracy": ZeroOneLoss(predict_proba=True),
        "mse": SquaredError(),
    }
    said, right = case.made()
    selector = GreedySelector(losses[case.score], MeanAggregator(), k=MEMBERS, k_init=1, max_it=ROUNDS, eps_tol=0.0)
    weights = dict(zip(*selector.select(right, list(said)), strict=True))
    return [float(weights.get(at, 0.0)) for at in range(case.candidates)]


REFERENCES = {"autogluon": ("autogluon.core", autogluon), "deephyper": ("deephyper", deephyper)}


def weights_of(chosen: list[int], candidates: int) -> list[float]:
    """How often each was chosen, as its part."""
    counts = Counter(chosen)
    return [counts[at] / len(chosen) for at in range(candidates)]


def main(name: str) -> None:
    package, select = REFERENCES[name]
    result = json.loads(FILE.read_text()) if FILE.exists() else {}
    weights = {case.name: [round(weight, 12) for weight in select(case)] for case in CASES}
    result[name] = {"version": version(package), "weights": weights}
    FILE.write_text(text_of(result))


def text_of(told: dict[str, Any]) -> str:
    """One line a choice."""
    parts = []
    for name, one in sorted(told.items()):
        rows = ",\n".join(f'   "{case}": {json.dumps(weights)}' for case, weights in one["weights"].items())
        parts.append(f' "{name}": {{\n  "version": "{one["version"]}",\n  "weights": {{\n{rows}\n  }}\n }}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main(sys.argv[1])
