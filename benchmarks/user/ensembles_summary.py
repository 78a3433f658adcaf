"""Figures of benchmarks/user/ensembles.py: means with intervals, and whether the issue's goals were met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from elastune.core.plan.confidence_intervals import mean_ci

OWN, ONE = "own beginnings", "one beginning"
BEST = "best single"
NEEDED_POINTS = 0.5


@dataclass(frozen=True)
class Row:
    """One way to use a search.

    Attributes:
        search: ``OWN`` or ``ONE``.
        test: What the test set says, in %.
        members: How many trials it is made of.
        training_s: Worker-seconds of these trials, and of what they began with.
        parameters: Numbers that one answer goes through, over those of the best single trial.
        answer_s: CPU seconds of one thread for all of the test set.
    """

    search: str
    name: str
    test: float
    members: int
    training_s: float
    parameters: float
    answer_s: float


def summary(per_seed: Sequence[Sequence[Row]]) -> list[dict[str, Any]]:
    """Over seeds: means, and the gain over the best single trial of the same search, paired by seed, with its CI."""
    results = []
    for at, first in enumerate(per_seed[0]):
        column = [rows[at] for rows in per_seed]
        single = [next(r for r in rows if r.search == first.search) for rows in per_seed]
        assert all((row.search, row.name) == (first.search, first.name) for row in column)
        gains = [row.test - best.test for row, best in zip(column, single, strict=True)]
        mean, half = mean_ci(gains)
        answers = [row.answer_s / best.answer_s for row, best in zip(column, single, strict=True)]
        results.append(
            {
                "search": first.search,
                "name": first.name,
                "test_percent": round(fmean(row.test for row in column), 3),
                "gain_points": round(mean, 3),
                "gain_ci95_half": None if half is None else round(half, 3),
                "gains": [round(gain, 3) for gain in gains],
                "seeds_no_worse": sum(gain >= 0 for gain in gains),
                "members": round(fmean(row.members for row in column), 1),
                "training_worker_seconds": round(fmean(row.training_s for row in column), 2),
                "inference_parameters": round(fmean(row.parameters for row in column), 2),
                "inference_time": round(median(answers), 2),
                "inference_times": [round(ratio, 2) for ratio in answers],
                "answer_cpu_seconds": round(median(row.answer_s for row in column), 5),
            }
        )
    return results


def goals(rows: Sequence[dict[str, Any]], seeds: int) -> list[dict[str, Any]]:
    """The issue's goals, of the searches that they speak of: see the docstring of ensembles.py."""
    results = {(row["search"], row["name"]): row for row in rows}
    greedy, soup = results[OWN, "greedy ensemble"], results[ONE, "greedy soup"]
    every = f"{greedy['seeds_no_worse']} of {seeds} seeds"
    half = soup["gain_ci95_half"]
    return [
        _goal("greedy ensemble no worse than the best single trial in every seed", greedy["seeds_no_worse"] == seeds)
        | {"measured": every},
        _goal(f"greedy ensemble at least +{NEEDED_POINTS} points in the mean", greedy["gain_points"] >= NEEDED_POINTS)
        | {"measured": points(greedy)},
        _goal("greedy soup above the best single trial, the interval without 0", soup["gain_points"] > (half or 0.0))
        | {"measured": f"{points(soup)}, at {soup['inference_parameters']:g}x the parameters"},
    ]


def points(row: dict[str, Any]) -> str:
    """The gain as text."""
    half = "" if row["gain_ci95_half"] is None else f" ± {row['gain_ci95_half']:.2f}"
    return f"{row['gain_points']:+.2f}{half} points"


def _goal(what: str, met: bool) -> dict[str, Any]:
    return {"goal": what, "verdict": "met" if met else "MISSED"}


def line(task: str, row: dict[str, Any], seeds: int) -> str:
    """A row as text."""
    gain = f"{points(row)}, no worse in {row['seeds_no_worse']} of {seeds} seeds"
    cost = f"{row['members']:.1f} members, {row['training_worker_seconds']:.1f} worker-seconds"
    answer = f"inference {row['inference_parameters']:.1f}x in parameters, {row['inference_time']:.1f}x in time"
    return f"{task:9} {row['search']:15} {row['name']:18} {row['test_percent']:6.2f} % ({gain}; {cost}; {answer})"
