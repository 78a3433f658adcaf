"""The pure part of benchmarks/adaptive/switching.py: equal accuracies, and whether a policy meets the goal."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.adaptive.switching_verdict import cell, judge, words


def ran(accuracies: tuple[float, ...], phases: tuple[float, float], whole: float) -> dict[str, Any]:
    return cell([{"accuracy": each, "phases": phases, "whole": whole} for each in accuracies], 2)


ACCURATE, LESS = (0.80, 0.81, 0.82), (0.70, 0.71, 0.72)
FIXED = {"allreduce": ran(ACCURATE, (100, 100), 100), "local": ran(ACCURATE, (90, 300), 150)}
LOSSY = {**FIXED, "lossy": ran(LESS, (500, 500), 500)}


def test_a_less_accurate_strategy_is_nothing_to_keep_up_with() -> None:
    verdict = judge(ran(ACCURATE, (96, 290), 160), LOSSY)
    assert (verdict["left_out"], verdict["more_accurate"]) == (["lossy"], [])
    assert verdict["behind_best_fixed"] == [0.04, 0.033]
    assert (verdict["whole_over_best_fixed"], verdict["met"]) == (1.067, True)
    assert "without lossy" in words("it", verdict)


@pytest.mark.parametrize(
    ("accuracies", "phases", "whole"),
    [
        (ACCURATE, (94, 300), 160),  # 6 % behind in the first phase
        (ACCURATE, (100, 300), 150),  # not ahead
        (LESS, (100, 300), 160),  # fast, and less accurate
    ],
)
def test_what_misses_the_goal(accuracies: tuple[float, ...], phases: tuple[float, float], whole: float) -> None:
    verdict = judge(ran(accuracies, phases, whole), FIXED)
    assert verdict["met"] is False
    assert words("it", verdict).endswith("MISSED")
    assert (verdict["more_accurate"] == ["allreduce", "local"]) == (accuracies == LESS)


def test_of_one_seed_nothing_is_shown() -> None:
    verdict = judge(ran((0.9,), (100, 300), 200), {name: ran((0.1,), (100, 100), 100) for name in FIXED})
    assert (verdict["left_out"], verdict["met"]) == ([], None)
    assert "not shown" in words("it", verdict)
