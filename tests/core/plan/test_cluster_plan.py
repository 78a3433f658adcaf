"""How a cluster is split: against brute force, bounds, and words."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.plan.cluster_plan import (
    Allowed,
    ClusterPlan,
    Nodes,
    PlanBounds,
    ProgramForecast,
    SearchModel,
    best_plans,
    divisions,
    doublings,
)
from elastune.core.plan.memory import HeldAlone, fit_text, peak_bytes
from elastune.core.plan.step_model import prior_model
from elastune.core.plan.step_time import CONSTANTS, Constant, StepSplits, StepWork, seconds

GIB = 2.0**30
BASE = 64
WORK = StepWork(*(np.array(x) for x in (4.0, 1.0, 0.0, 0.01, 1.0, 0.0, 0.0)))
HELD = HeldAlone(4 * GIB, 4 * GIB, 8 * GIB, 0.1 * GIB, 0.1 * GIB)
ALLOWED = Allowed(tuple(BASE * 2**i for i in range(5)), (BASE, 16), 64, tensor=8, pipeline=4)


def forecast(search: SearchModel, work: StepWork = WORK, **constants: float) -> ProgramForecast:
    plain = {"flop_s": 1 / (4 * BASE), "across_hop_s": 1e-4, "across_byte_s": 1e-3, "pass_s": 1e-3}
    results = [Constant(name, {**plain, **constants}.get(name, 1e-12), 1.5) for name in CONSTANTS]
    empty = StepSplits(*(np.ones(0) for _ in range(7)))
    return ProgramForecast(prior_model(results, work, empty, 0.01), work, HELD, search)


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
    forecasts = forecast(SEARCH)
    best = best_plans(forecasts, Nodes(8, 4), ALLOWED, PlanBounds(memory_bytes=12 * GIB), 5)
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
    results = [fit_text(held, WORK, size * GIB, 1, 16) for size in (40, 24, 5, 0.5)]
    assert results[0] == "fits: 31 GiB of 40 GiB a worker"
    assert results[1] == "does not fit: 31 GiB of 24 GiB a worker; 'zero' on 2 would"
    assert results[2] == "does not fit: 31 GiB of 5 GiB a worker; 'sharded' on 8 would"
    assert "nor does" in results[3]


def test_twice_the_workers_along_an_axis_are_what_brute_force_says() -> None:
    asked, nodes = forecast(SEARCH), Nodes(8, 4)
    best = best_plans(asked, nodes, ALLOWED, PlanBounds(), 1)[0]
    more = doublings(asked, best, nodes, ALLOWED)
    assert set(more) == {"width", "data", "shard", "tensor", "pipeline"}
    rounds = SEARCH.rounds(np.array([best.width, 2 * best.width], float))
    assert more["width"].factor == pytest.approx(rounds[0] / rounds[1])
    constants = np.exp(asked.model.best.log_constants)
    for axis in ("data", "shard", "tensor", "pipeline"):
        factor = more[axis].factor
        assert factor is not None
        step_s = [
            seconds(constants, WORK, columns(best, mesh, nodes))[0]
            for mesh in (best.mesh, replace(best.mesh, **{axis: 2 * best.mesh.size(axis)}))
        ]
        assert factor == pytest.approx(step_s[0] / step_s[1])
    assert [each.factor for each in more.values()] == sorted((each.factor for each in more.values()), reverse=True)


def test_a_faster_step_does_not_shorten_what_a_training_takes_beside_its_steps() -> None:
    nodes = Nodes(8, 4)
    plain = replace(best_plans(forecast(SEARCH), nodes, ALLOWED, PlanBounds(), 1)[0], width=4, mesh=Mesh(), micro=16)
    steps_s = float(SEARCH.steps_of(np.array([float(plain.batch)]))[0] * SEARCH.kept * plain.step_s)
    slow = forecast(replace(SEARCH, beside_s=99 * steps_s))
    factors = [doublings(each, plain, nodes, ALLOWED)["data"].factor or 0.0 for each in (forecast(SEARCH), slow)]
    assert factors[0] > 1.5
    assert 1 < factors[1] < 1.1


def columns(plan: ClusterPlan, mesh: Mesh, nodes: Nodes) -> StepSplits:
    micro = min(plan.micro, -(-plan.batch // mesh.batch))
    results = (plan.batch, micro, mesh.data, mesh.shard, mesh.tensor, mesh.pipeline, nodes.workers_each)
    return StepSplits(*(np.array([each], float) for each in results))


def test_reasons_say_what_falls_what_grows_and_what_ends() -> None:
    nodes = Nodes(8, 4)
    best = best_plans(forecast(SEARCH), nodes, ALLOWED, PlanBounds(), 1)[0]
    plain = replace(best, width=4, mesh=Mesh(), batch=BASE, micro=16)
    more = doublings(forecast(SEARCH), plain, nodes, ALLOWED)
    assert more["width"].why.startswith("34 rounds of trainings become 19, not half as many: concurrent proposals know")
    assert more["data"].why.startswith("less of a step for compute (")
    assert "; a worker holds " in more["shard"].why
    dear = doublings(forecast(SEARCH, gradient_byte_s=10.0), plain, nodes, ALLOWED)
    assert "more of a step for gradients (" in dear["data"].why
    full = replace(plain, width=64, mesh=Mesh(data=BASE, tensor=8, pipeline=4))
    result = doublings(forecast(SEARCH), full, nodes, ALLOWED)
    assert all(each.factor is None for each in result.values())
    assert result["tensor"].why == "its layers are divided into 8 at most"
    assert result["width"].why == "the search has 64 trainings in all"
    assert result["data"].why == result["shard"].why


def test_a_model_as_large_as_is_told_fits_and_a_larger_one_does_not() -> None:
    nodes, bound = Nodes(8, 4), PlanBounds(memory_bytes=12 * GIB)
    forecasts = forecast(SEARCH)
    for plan in best_plans(forecasts, nodes, ALLOWED, bound, 20):
        splits = columns(plan, plan.mesh, nodes)
        for factor, fits in ((0.99, True), (1.01, False)):
            grown = factor * plan.most_parameters / HELD.parameters
            state = {name: grown * getattr(HELD, name) for name in ("parameters", "gradients", "optimizer")}
            held = peak_bytes(replace(HELD, **state), WORK, splits, plan.sharded)[0]
            assert (held <= 12 * GIB) == fits


def test_what_is_not_known_of_crowding_widens_time_and_cost() -> None:
    sure = SearchModel(128, 1000.0, BASE, 4.0 * BASE, 0.02)
    unsure = replace(sure, crowding_within=(0.0, 0.1))
    nodes = Nodes(16, 4)
    one, two = (
        next(p for p in best_plans(forecast(each), nodes, ALLOWED, PlanBounds(), 100) if p.width == 32)
        for each in (sure, unsure)
    )
    assert two.seconds == pytest.approx(one.seconds)
    assert two.interval_s[1] > 1.1 * one.interval_s[1]
    assert two.cost_interval[1] / two.cost == pytest.approx(two.interval_s[1] / two.seconds)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (Mesh(data=3), "3 of 32 workers"),
        (Mesh(tensor=16), "tensor=16 of 8"),
        (Mesh(pipeline=8), "pipeline=8 of 4"),
        (Mesh(data=32, shard=1), "data x shard=32 of 24"),
    ],
    ids=str,
)
def test_a_mesh_that_does_not_divide_is_refused(mesh: Mesh, words: str) -> None:
    allowed = replace(ALLOWED, batches=(24,), mesh=mesh)
    with pytest.raises(UserError, match=words):
        best_plans(forecast(SEARCH), Nodes(8, 4), allowed, PlanBounds(), 1)


def test_one_mesh_alone_is_looked_at() -> None:
    mesh = Mesh(data=2, tensor=4)
    plans = best_plans(forecast(SEARCH), Nodes(8, 4), replace(ALLOWED, mesh=mesh), PlanBounds(), 10)
    assert {plan.mesh for plan in plans} == {mesh}
    assert {plan.width for plan in plans} == {1, 2, 4}


@pytest.mark.parametrize("nodes", [Nodes(2048, 1), Nodes(2048, 8), Nodes(55_440, 1)], ids=str)
def test_a_large_cluster_is_judged_within_seconds_of_one_core(nodes: Nodes) -> None:
    """The goal is 2 s (benchmarks/parallel/planning_time.py: .1 to .5): CPU time, as others may slow this machine."""
    forecasts = forecast(SEARCH)
    allowed = replace(ALLOWED, micros=(8, 16, 32, BASE), width=128, pipeline=16)
    begun = time.process_time()
    best = best_plans(forecasts, nodes, allowed, PlanBounds(memory_bytes=12 * GIB), 5)[0]
    doublings(forecasts, best, nodes, allowed)
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
    forecasts = forecast(search, work, **constants)
    small = best_plans(forecasts, Nodes(128, 1), allowed, PlanBounds(), 1)[0]
    large = best_plans(forecasts, Nodes(2048, 1), allowed, PlanBounds(), 1)[0]
    assert (small.width, small.mesh, small.batch) == (8, Mesh(data=4, tensor=4), 4 * BASE)
    assert (large.width, large.mesh) == (16, Mesh(data=16, tensor=8))
