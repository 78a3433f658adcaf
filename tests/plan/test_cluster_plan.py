"""How a cluster is split: against brute force, bounds, and words."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.plan.cluster_plan import PlanBounds, ProgramForecast, best_plans, doublings
from elastune.plan.divisions import Allowed, Nodes, divisions
from elastune.plan.fitting import fit_in_words
from elastune.plan.search_time import SearchModel
from elastune.plan.steps.memory import HeldAlone
from elastune.plan.steps.splits import StepSplits
from elastune.plan.steps.step_model import prior_model
from elastune.plan.steps.terms import CONSTANTS, Constant, seconds
from elastune.plan.steps.work import StepWork

GIB = 2.0**30
BASE = 64
WORK = StepWork(*(np.array(x) for x in (4.0, 1.0, 0.0, 0.01, 1.0, 0.0, 0.0)))
HELD = HeldAlone(4 * GIB, 4 * GIB, 8 * GIB, 0.1 * GIB, 0.1 * GIB)
ALLOWED = Allowed(tuple(BASE * 2**i for i in range(5)), (BASE, 16), 64, tensor=8, pipeline=4)


def forecast(search: SearchModel, work: StepWork = WORK, **constants: float) -> ProgramForecast:
    plain = {"flop_s": 1 / (4 * BASE), "across_hop_s": 1e-4, "across_byte_s": 1e-3, "pass_s": 1e-3}
    told = [Constant(name, {**plain, **constants}.get(name, 1e-12), 1.5) for name in CONSTANTS]
    empty = StepSplits(*(np.ones(0) for _ in range(7)))
    return ProgramForecast(prior_model(told, work, empty, 0.01), work, HELD, search)


SEARCH = SearchModel(128, 1000.0, BASE, 4.0 * BASE, 0.02)


def test_the_best_plan_is_the_shortest_of_all() -> None:
    asked, nodes = forecast(SEARCH), Nodes(8, 4)
    every = divisions(nodes, ALLOWED)
    step_s = seconds(np.exp(asked.model.best.log_constants), WORK, every.splits)
    shortest = float(np.min(SEARCH.seconds(every.width, every.splits.batch, step_s)))
    best = best_plans(asked, nodes, ALLOWED, PlanBounds(), 5)
    assert best[0].seconds == pytest.approx(shortest)
    assert [plan.seconds for plan in best] == sorted(plan.seconds for plan in best)
    assert len({(plan.width, plan.mesh) for plan in best}) == 5
    assert all(plan.workers <= 32 for plan in best)
    assert all(plan.interval_s[0] < plan.seconds < plan.interval_s[1] for plan in best)


def test_a_deadline_is_kept_as_cheaply_as_can_be() -> None:
    asked, nodes = forecast(SEARCH), Nodes(8, 4)
    fastest = best_plans(asked, nodes, ALLOWED, PlanBounds(price_per_worker_hour=2.0), 1)[0]
    bound = PlanBounds(deadline_s=4 * fastest.seconds, price_per_worker_hour=2.0)
    cheap = best_plans(asked, nodes, ALLOWED, bound, 1)[0]
    assert cheap.interval_s[1] <= 4 * fastest.seconds
    assert cheap.odds(4 * fastest.seconds) >= 0.9
    assert cheap.odds(cheap.seconds) == pytest.approx(0.5)
    assert cheap.odds(cheap.interval_s[1]) == pytest.approx(0.9)
    assert cheap.cost < fastest.cost
    assert cheap.cost == pytest.approx(cheap.seconds * cheap.workers / 3600 * 2.0)


def test_a_deadline_that_nobody_can_keep_names_the_nearest() -> None:
    with pytest.raises(UserError, match="the nearest is"):
        best_plans(forecast(SEARCH), Nodes(2, 1), ALLOWED, PlanBounds(deadline_s=1e-3), 1)


def test_a_deadline_that_is_kept_in_the_middle_of_cases_alone_is_none() -> None:
    asked, nodes = forecast(SEARCH), Nodes(8, 4)
    safest = min(each.interval_s[1] for each in best_plans(asked, nodes, ALLOWED, PlanBounds(), 100))
    fastest = best_plans(asked, nodes, ALLOWED, PlanBounds(), 1)[0]
    between = (fastest.seconds + safest) / 2
    assert fastest.seconds < between < safest
    with pytest.raises(UserError, match=r"in 9 cases of 10 \(.* expected\)"):
        best_plans(asked, nodes, ALLOWED, PlanBounds(deadline_s=between), 1)


def test_memory_makes_a_plan_share_its_state() -> None:
    asked = forecast(SEARCH)
    best = best_plans(asked, Nodes(8, 4), ALLOWED, PlanBounds(memory_bytes=12 * GIB), 5)
    assert all(plan.memory_bytes <= 12 * GIB for plan in best)
    assert all(plan.mesh.shard * plan.mesh.tensor * plan.mesh.pipeline > 1 for plan in best)


def test_parameters_are_divided_where_nothing_less_fits() -> None:
    allowed = replace(ALLOWED, tensor=1, pipeline=1, micros=(1,))
    best = best_plans(forecast(SEARCH), Nodes(8, 4), allowed, PlanBounds(memory_bytes=3 * GIB), 5)
    assert all(plan.sharded for plan in best)


def test_what_nothing_holds_is_told_with_what_comes_nearest() -> None:
    with pytest.raises(UserError, match=r"at best .* of 100 MiB a worker"):
        best_plans(forecast(SEARCH), Nodes(2, 1), ALLOWED, PlanBounds(memory_bytes=100 * 2.0**20), 1)


def test_memory_in_words() -> None:
    held = HeldAlone(10 * GIB, 10 * GIB, 10 * GIB, 0.0, 1 * GIB)
    told = [fit_in_words(held, WORK, size * GIB, 1, 16) for size in (40, 24, 5, 0.5)]
    assert told[0] == "fits: 31 GiB of 40 GiB a worker"
    assert told[1] == "does not fit: 31 GiB of 24 GiB a worker; 'zero' on 2 would"
    assert told[2] == "does not fit: 31 GiB of 5 GiB a worker; 'sharded' on 8 would"
    assert "nor does" in told[3]


def test_twice_the_workers_along_an_axis_are_what_brute_force_says() -> None:
    asked, nodes = forecast(SEARCH), Nodes(8, 4)
    best = best_plans(asked, nodes, ALLOWED, PlanBounds(), 1)[0]
    gains = doublings(asked, best, nodes, ALLOWED)
    assert set(gains) <= {"width", "data", "tensor", "pipeline"}
    if "width" in gains:
        rounds = SEARCH.rounds(np.array([best.width, 2 * best.width], float))
        assert gains["width"] == pytest.approx(rounds[0] / rounds[1])


@pytest.mark.parametrize("nodes", [Nodes(2048, 1), Nodes(2048, 8), Nodes(55_440, 1)], ids=str)
def test_a_large_cluster_is_judged_within_seconds_of_one_core(nodes: Nodes) -> None:
    """The goal is 2 s (benchmarks/planning_time.py: .1 to .5): CPU time, on a machine that others may slow down."""
    asked = forecast(SEARCH)
    allowed = replace(ALLOWED, micros=(8, 16, 32, BASE), width=128, pipeline=16)
    begun = time.process_time()
    best = best_plans(asked, nodes, allowed, PlanBounds(memory_bytes=12 * GIB), 5)[0]
    doublings(asked, best, nodes, allowed)
    assert time.process_time() - begun < 4


def test_the_seed_s_two_splits_are_what_is_best_on_one_machine_of_two_sizes() -> None:
    """16 x 8 x 16 = 2,048 and, at 4 times the batch, 8 x 4 x 4 = 128: reachable regimes, not what every program gets.

    Constants were drawn until both came out of the same ones: that was so in about one of 500 draws.
    """
    search = SearchModel(64, 1000.0, BASE, 1662.0, 0.03)
    work = StepWork(*(np.array(x) for x in (4.0, 1.0, 0.0, 0.0026, 3.74, 0.0, 0.0)))
    constants = {
        "launch_s": 3.6e-4,
        "across_hop_s": 7.7e-5,
        "across_byte_s": 5.9e-3,
        "update_byte_s": 1.07e-3,
        "pass_s": 1.6e-3,
    }
    allowed = Allowed(tuple(BASE * 2**i for i in range(6)), (4096,), 64, tensor=32, shard=False)
    asked = forecast(search, work, **constants)
    small = best_plans(asked, Nodes(128, 1), allowed, PlanBounds(), 1)[0]
    large = best_plans(asked, Nodes(2048, 1), allowed, PlanBounds(), 1)[0]
    assert (small.width, small.mesh, small.batch) == (8, Mesh(data=4, tensor=4), 4 * BASE)
    assert (large.width, large.mesh) == (16, Mesh(data=16, tensor=8))
