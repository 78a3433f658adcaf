import math

import pytest

from elastune.core.journal.records import TrialFinished
from elastune.train.program.space import Sample, probe
from elastune.tuning.search.constraint import parse_constraints
from elastune.tuning.search.history import History, Outcome
from elastune.tuning.search.objective import parse_objectives
from elastune.tuning.search.registry import GENERATIONAL, make_sampler
from elastune.tuning.search.suggester import Suggester

TWO = parse_objectives({"error": "min", "seconds": "min"})
ONE = parse_objectives({"error": "min"})


def space(trial):
    return {"lr": trial.suggest_float("lr", 1e-4, 1.0, log=True), "width": trial.suggest_int("width", 1, 64)}


def finished(number, error=0.5, seconds=1.0, state="complete"):
    values = {"error": error, "seconds": seconds} if state == "complete" else {}
    return TrialFinished(number, state, values=values, reason="" if values else "diverged")


def twins(sampler, objectives=TWO, **settings):
    return [Suggester(space, objectives, sampler=sampler, seed=3, **settings) for _ in range(2)]


@pytest.mark.parametrize("sampler", ["random", "tpe", "nsga2", "genetic", "gp"])
def test_what_is_asked_depends_only_on_the_last_estimates(sampler):
    straight, winding = twins(sampler)
    for one in (straight, winding):
        for number in range(12):
            one.ask()
            if number % 2:
                one.tell(number, finished(number, error=0.1 * number, seconds=1.0 / number))
    for number in range(0, 12, 2):
        winding.estimate(number, (0.9, 50.0))
    for one in (straight, winding):
        for number in range(0, 12, 2):
            one.estimate(number, (0.3 + 0.01 * number, 2.0))
    assert straight.ask().params == winding.ask().params


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_the_result_counts_as_if_there_had_been_no_estimate(sampler):
    plain, estimated = twins(sampler)
    for one in (plain, estimated):
        for _ in range(12):
            one.ask()
    for number in range(12):
        estimated.estimate(number, (9.0, 9.0))
        for one in (plain, estimated):
            one.tell(number, finished(number, error=math.sin(number), seconds=number + 1.0))
    assert plain.ask().params == estimated.ask().params


def test_samplers_learn_from_estimates():
    ignorant, result = twins("gp", ONE)
    for one in (ignorant, result):
        for number in range(12):
            lr = one.ask().params["lr"]
            if one is result:
                one.estimate(number, (abs(math.log10(lr) + 2),))
    near = [abs(math.log10(one.ask().params["lr"]) + 2) for one in (ignorant, result) for _ in range(3)]
    assert sum(near[3:]) < 0.5 * sum(near[:3])


def test_one_objective_with_cma_es_too():
    plain, estimated = twins("cmaes", ONE)
    for number in range(12):
        for one in (plain, estimated):
            one.ask()
        estimated.estimate(number, (5.0,))
        for one in (plain, estimated):
            one.tell(number, finished(number, error=0.1 * number))
    assert plain.ask().params == estimated.ask().params


@pytest.mark.parametrize("reenact", [False, True])
def test_a_revised_history_is_one_that_was_built_anew(reenact):
    """Values are changed in place, failures and constraints by building anew: the study must be the same."""
    samples = [s for s in probe(space, 6, 1) if isinstance(s, Sample)]
    history = History(TWO, ["memory <= 1"], penalise=False, reenact=reenact)
    for i, sample in enumerate(samples):
        name = GENERATIONAL[0] if reenact else "random"
        history.add(sample, lambda i=i, name=name: make_sampler(name, i, []))
    history.estimate(0, Outcome((1.0, 2.0), {"memory <= 1": -1.0}, True))
    history.tell(1, Outcome(None, {}, False))
    assert history.frozen()[1].values == [1.0, 2.0]
    history.estimate(0, Outcome((3.0, 2.0), {"memory <= 1": -1.0}, True))
    assert [t.values for t in history.frozen()[:2]] == [[3.0, 2.0], [3.0, 2.0]]
    history.estimate(0, Outcome((0.5, 2.0), {"memory <= 1": 4.0}, True))
    history.estimate(2, Outcome((1.0, 1.0), {"memory <= 1": -1.0}, True))
    history.drop(2)
    history.tell(0, Outcome((0.7, 0.8), {"memory <= 1": 4.0}, True))
    trials = history.frozen()
    assert [t.values for t in trials[:2]] == [[0.7, 0.8], [0.7, 0.8]]
    assert trials[0].constraints["memory <= 1"] == 4.0
    assert [t.state.name for t in trials] == ["COMPLETE", "COMPLETE", "FAIL", "RUNNING", "RUNNING", "RUNNING"]


def test_a_violated_estimate_is_infeasible_to_the_sampler():
    suggester = Suggester(space, TWO, parse_constraints(["memory <= 4"]), sampler="tpe", seed=0)
    for _ in range(2):
        suggester.ask()
    suggester.estimate(0, (0.1, 1.0), violation=2.0)
    suggester.estimate(1, (0.2, 1.0), violation=-1.0)
    first, second = suggester._history.frozen()[:2]
    assert first.constraints["memory <= 4"] == 2.0
    assert second.constraints["memory <= 4"] == -1.0


@pytest.mark.parametrize("values", [(0.1,), (0.1, math.nan), (0.1, math.inf)])
def test_estimates_are_finite_and_complete(values):
    suggester = Suggester(space, TWO, sampler="random")
    suggester.ask()
    with pytest.raises(ValueError, match="finite"):
        suggester.estimate(0, values)


def test_only_open_trials_are_estimated():
    suggester = Suggester(space, TWO, sampler="random")
    suggester.ask()
    suggester.estimate(0, (0.25, 1.0))
    suggester.tell(0, finished(0))
    with pytest.raises(ValueError, match="not open"):
        suggester.estimate(0, (0.1, 1.0))


def test_a_first_failure_among_estimates_alone_costs_no_proposal():
    search, _ = twins("gp")
    for _ in range(12):
        search.ask()
    for number in range(11):
        search.estimate(number, (0.3 + 0.01 * number, 2.0 + number))
    search.tell(11, finished(11, state="infeasible"))
    assert search.ask().params
