"""How long a search takes: limits, published makespans, simulated ones, and the figures that were fitted."""

from __future__ import annotations

import heapq
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastune.core.plan.cluster_plan import (
    CROWDING,
    GENETIC,
    KEPT,
    RANDOM_SEARCH_FACTOR,
    VARIATION,
    SearchModel,
    longest_of,
)

RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "search_model.json"
PLAIN = SearchModel(runs=128, steps=100.0, base_batch=32, noise_scale=96.0, crowding=0.01)


def test_rounds_and_steps_of_a_search() -> None:
    search = SearchModel(runs=128, steps=100.0, base_batch=32, noise_scale=96.0, crowding=0.01)
    width = np.array([1.0, 16.0, 128.0])
    assert search.rounds(width).tolist() == [128, 10, 3]  # ceil(128 x 1.15 / 16), ceil(128 x 2.27 / 128)
    assert search.steps_of(np.array([32.0, 96.0])).tolist() == pytest.approx([100.0, 50.0])


def test_a_generation_bounds_what_runs_at_once_and_costs_no_further_training() -> None:
    """20 trainings in generations of 8: two whole ones, and 4 that are left."""
    bred = SearchModel(20, 1.0, 1, 0.0, crowding=0.5, generation=8)
    width = np.array([1.0, 2.0, 3.0, 8.0, 64.0])
    assert bred.needed(width).tolist() == [20] * 5
    assert bred.rounds(width).tolist() == [20, 10, 8, 3, 3]  # of 3: 3 + 3 + 2
    uneven = replace(bred, variation=0.4).rounds(width)
    assert uneven[0] == 20
    assert uneven[1] == pytest.approx(2 * (3 + longest_of(2, 0.4)) + 1 + longest_of(2, 0.4))
    assert uneven[4] == pytest.approx(2 * longest_of(8, 0.4) + longest_of(4, 0.4))


def test_what_a_training_takes_beside_its_steps_comes_once_a_round() -> None:
    one = np.array([2.0]), np.array([32.0]), np.array([0.5])
    assert replace(PLAIN, beside_s=3.0).seconds(*one)[0] == PLAIN.rounds(one[0])[0] * (100 * 0.5 + 3)


def test_without_noise_a_larger_batch_saves_no_step() -> None:
    assert SearchModel(1, 100.0, 32, 0.0).steps_of(np.array([64.0])).tolist() == [100.0]


def test_no_crowd_needs_more_trainings_than_random_search() -> None:
    crowd = replace(PLAIN, crowding=0.5, blind=4.0)
    assert crowd.rounds(np.array([1.0, 5.0, 64.0])).tolist() == [128, 77, 8]  # ceil(128 x 3 / 5), ceil(128 x 4 / 64)


def test_early_stopping_leaves_its_share_of_the_time() -> None:
    one = np.array([1.0]), np.array([32.0]), np.array([1.0])
    assert replace(PLAIN, kept=0.5).seconds(*one)[0] == 0.5 * PLAIN.seconds(*one)[0]


@pytest.mark.parametrize("generations", [False, True])
@pytest.mark.parametrize(("runs", "width"), [(128, 4), (128, 16), (128, 64), (32, 16), (20, 64)])
def test_rounds_are_those_of_simulated_searches(runs: int, width: int, generations: bool) -> None:
    """Gamma lengths with a coefficient of variation of .4; the model takes them as log-normal."""
    rng, result = np.random.default_rng(runs + width), []
    for _ in range(200):
        times = rng.gamma(1 / 0.4**2, 0.4**2, runs)
        if generations:
            result.append(sum(times[at : at + width].max() for at in range(0, runs, width)))
            continue
        free = [0.0] * width
        for each in times:
            heapq.heapreplace(free, free[0] + each)
        result.append(max(free))
    model = SearchModel(runs, 1.0, 1, 0.0, variation=0.4, generations=generations)
    assert model.rounds(np.array([float(width)]))[0] == pytest.approx(statistics.fmean(result), rel=0.08)


def test_published_makespans_are_met_at_their_ends() -> None:
    """Over M t / W for M = 128, cv .4: 1.01 to 1.81 for 4 to 64 at once, by generations 1.42 to 2.52."""
    ideal, width = 128 / np.array([4.0, 64.0]), np.array([4.0, 64.0])
    model = SearchModel(128, 1.0, 1, 0.0, variation=0.4)
    assert (model.rounds(width) / ideal).tolist() == pytest.approx([1.01, 1.81], rel=0.1)
    assert (replace(model, generations=True).rounds(width) / ideal).tolist() == pytest.approx([1.42, 2.52], rel=0.1)


def test_the_longest_of_one_is_the_mean_and_of_more_is_longer() -> None:
    assert longest_of(1.0, 0.4) == 1.0
    assert longest_of(8.0, 0.0) == 1.0
    results = [longest_of(count, 0.4) for count in (2.0, 8.0, 64.0)]
    assert results == sorted(results)
    assert results[0] == pytest.approx(1.22, abs=0.01)  # 1 + the half of a mean difference of two


def test_only_crowding_that_was_fitted_has_a_spread() -> None:
    width = np.array([1.0, 2.0, 32.0])
    assert PLAIN.spread(width).tolist() == [0, 0, 0]
    fitted = replace(PLAIN, crowding_within=(0.0, 0.1)).spread(width)
    assert fitted[0] == 0
    assert 0 < fitted[1] < fitted[2]


def test_what_is_taken_for_a_search_is_what_simulated_studies_had() -> None:
    data: dict[str, Any] = json.loads(RESULT.read_text())
    for generations, name in ((False, "asynchronous"), (True, "generations")):
        assert (data[name]["crowding"], tuple(data[name]["interval_80"])) == CROWDING[generations]
    by_seed = [share for each in data["asha"].values() for share in each["by_seed"]]
    assert statistics.median(by_seed) == pytest.approx(KEPT["asha"], abs=0.005)
    assert data["variation_one_batch"]["median"] == pytest.approx(VARIATION, abs=0.005)
    assert data["blind"]["factor"] == pytest.approx(RANDOM_SEARCH_FACTOR, abs=0.05)
    assert data["genetic"]["factor"] == GENETIC


@pytest.mark.parametrize(
    "bad",
    [
        {"kept": 0.0},
        {"kept": 1.1},
        {"blind": 0.5},
        {"variation": -1.0},
        {"runs": 0},
        {"steps": 0.0},
        {"noise_scale": -1.0},
        {"generation": -1},
        {"beside_s": -1.0},
        {"crowding": float("nan")},
    ],
)
def test_what_is_no_search_is_refused(bad: dict[str, float]) -> None:
    plain = {"runs": 1, "steps": 1.0, "base_batch": 1, "noise_scale": 1.0}
    with pytest.raises(ValueError, match="not"):
        SearchModel(**{**plain, **bad})  # type: ignore[arg-type]
