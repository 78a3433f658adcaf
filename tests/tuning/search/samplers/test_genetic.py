import math
import statistics
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import FloatDistribution
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial
from tests.soaked import soaked

from elastune.core.errors import UserError
from elastune.core.journal.records import Entry, TrialFinished, TrialStarted
from elastune.tuning.search.constraint import parse_constraints
from elastune.tuning.search.front import hypervolume
from elastune.tuning.search.genetic import GeneticOptions, Lineage, parents, parse_genetics, place, unfinished
from elastune.tuning.search.objective import parse_objectives
from elastune.tuning.search.registry import check_sampler
from elastune.tuning.search.suggester import Suggester, replay

ONE = parse_objectives({"y": "min"})
TWO = parse_objectives({"f": "min", "g": "min"})
MIN = [StudyDirection.MINIMIZE]
BREAKS = {"memory": 1.0}


def onemax(trial):
    return {f"b{i}": trial.suggest_categorical(f"b{i}", [0, 1, 2, 3]) for i in range(12)}


def ones(values):
    return {"y": -sum(each == 3 for each in values.values())}


def sphere(trial):
    return {f"x{i}": trial.suggest_float(f"x{i}", -5, 5) for i in range(5)}


def distance(values):
    return {"y": sum((x - 1) ** 2 for x in values.values())}


def zdt1(trial):
    return {f"x{i}": trial.suggest_float(f"x{i}", 0, 1) for i in range(6)}


def zdt1_values(values):
    first, *rest = values.values()
    g = 1 + 9 * sum(rest) / len(rest)
    return {"f": first, "g": g * (1 - math.sqrt(first / g))}


def branching(trial):
    results = {"lr": trial.suggest_float("lr", 1e-4, 1.0, log=True), "width": trial.suggest_int("width", 1, 64)}
    if trial.suggest_categorical("optimizer", ["sgd", "adam"]) == "sgd":
        return {**results, "momentum": trial.suggest_float("momentum", 0.0, 0.99)}
    return {**results, "beta": trial.suggest_float("beta", 0.8, 0.99)}


def off(values):
    branch = abs(values["momentum"] - 0.9) if "momentum" in values else 0.5 + values["beta"]
    return {"y": (math.log10(values["lr"]) + 2) ** 2 + branch}


def search(space, measure, trials, *, at_once=1, sampler="genetic", objectives=ONE, seed=1, suggester=None, limits=()):
    """Runs ``trials`` trials, ``at_once`` outstanding, the oldest ends first; returns suggester, entries, values."""
    suggester = suggester or Suggester(space, objectives, limits, sampler=sampler, seed=seed)
    entries, running, result = [], [], []

    def end(asked):
        measured = measure(asked.values)
        result.append(measured)
        record = TrialFinished(asked.number, "complete" if measured else "infeasible", measured or {})
        suggester.tell(asked.number, record)
        entries.append(Entry(float(len(entries)), record))

    for _ in range(trials):
        asked = suggester.ask()
        entries.append(Entry(float(len(entries)), started(asked)))
        running.append(asked)
        if len(running) == at_once:
            end(running.pop(0))
    for asked in running:
        end(asked)
    return suggester, entries, result


def started(asked):
    return TrialStarted(asked.number, asked.values, {}, seed=0, params=asked.params, distributions=asked.distributions)


def told(values, constraints=None, state=TrialState.COMPLETE):
    """A past: one trial for each of ``values`` (one objective), ``constraints`` by trial."""
    trials = []
    for number, value in enumerate(values):
        running = value is None
        trial = create_trial(
            state=TrialState.RUNNING if running else state,
            value=None if running else float(value),
            params={"x": number / 1000},
            distributions={"x": FloatDistribution(0.0, 1.0)},
        )
        trial.number = number
        for text, violation in (constraints or {}).get(number, {}).items():
            trial.set_constraint(text, violation)
        trials.append(trial)
    return trials


def numbers(trials):
    return [trial.number for trial in trials]


# demes, generations, migration

SMALL = GeneticOptions(demes=2, population=2, migration=2, steady=0)


def test_demes_take_turns_and_fill_generation_after_generation():
    assert [place(i, SMALL) for i in range(6)] == [
        Lineage(0, 0), Lineage(1, 0), Lineage(0, 0), Lineage(1, 0), Lineage(0, 1), Lineage(1, 1),
    ]  # fmt: skip


def test_demes_breed_apart():
    past = told([5, 1, 4, 2, 3, 0, 9, 9])
    assert parents(past[:3], MIN, SMALL) == []
    assert numbers(parents(past[:4], MIN, SMALL)) == [2, 0]
    assert numbers(parents(past[:5], MIN, SMALL)) == [1, 3]


def test_synchronous_parents_are_of_earlier_generations_steady_ones_of_any():
    past = told([5, 1, 4, 2, 0, 9])  # the next is the second of deme 0's generation 1; trial 4 is its first
    assert numbers(parents(past, MIN, SMALL)) == [2, 0]
    assert numbers(parents(past, MIN, GeneticOptions(demes=2, population=2, steady=1))) == [4, 2]


def test_the_best_of_a_deme_joins_the_next_one_every_k_generations():
    values = [50, 10, 51, 11, 52, 12, 53, 13, 0, 60, 54, 61]  # deme 0: even numbers; 8..11 are generation 2
    never = GeneticOptions(demes=2, population=2, migration=0, steady=0)
    assert numbers(parents(told(values[:7]), MIN, SMALL)) == [1, 3], "generation 1: nobody came yet"
    assert numbers(parents(told(values[:8]), MIN, SMALL)) == [1, 0], "generation 2: trial 1 came from deme 1"
    assert numbers(parents(told(values[:8]), MIN, never)) == [0, 2]
    assert numbers(parents(told(values[:9]), MIN, SMALL)) == [1, 3], "trial 0 came to deme 1, but is not fit enough"
    third = told([*values, 70])
    assert numbers(parents(third, MIN, SMALL)) == [1, 3], "generation 3: trial 8 stays in its deme until generation 4"
    fourth = told([*values, 70, 71, 72, 73, 74])
    assert numbers(parents(fourth, MIN, SMALL)) == [8, 1], "generation 4: trial 8 came"


def test_a_ring_of_demes_passes_the_best_on():
    genetics = GeneticOptions(demes=3, population=2, migration=1, steady=0)
    values = [1, 50, 60, 51, 52, 61] + [70] * 12
    where = {
        generation: [0 in numbers(parents(told(values[: generation * 6 + deme]), MIN, genetics)) for deme in range(3)]
        for generation in (1, 2)
    }
    assert where == {1: [True, True, False], 2: [True, True, True]}


def test_who_breaks_a_constraint_does_not_migrate():
    values = [50, 10, 51, 11, 52, 12, 53, 13]  # the next is of deme 0's generation 2
    assert numbers(parents(told(values, {1: BREAKS}), MIN, SMALL)) == [3, 0]
    assert numbers(parents(told(values, dict.fromkeys((1, 3, 5, 7), BREAKS)), MIN, SMALL)) == [0, 2]


@given(st.integers(1, 4), st.integers(2, 5), st.integers(1, 60), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_without_migration_parents_are_the_best_finished_of_the_same_deme(demes, population, n, seed):
    genetics = GeneticOptions(demes=demes, population=population, migration=0)
    rng = np.random.default_rng(seed)
    past = told([None if rng.random() < 0.2 else value for value in rng.permutation(n)])
    result = parents(past, MIN, genetics)
    own = [trial for i, trial in enumerate(past) if i % demes == n % demes and trial.state == TrialState.COMPLETE]
    if place(n, genetics).generation == 0:
        assert result == []
    elif own:
        assert numbers(result) == numbers(sorted(own, key=lambda trial: trial.value)[:population])


def test_those_who_break_a_constraint_breed_only_while_nobody_keeps_all():
    values = [5, 1, 4, 2]
    one = parents(told(values, {0: BREAKS, 1: BREAKS}), MIN, SMALL)
    assert numbers(one) == [2]
    other = parents(told(values, {0: BREAKS, 2: BREAKS}), MIN, SMALL)
    assert numbers(other) == [1, 3], "none of its own deme keeps all, so the others' best breed"
    nobody = parents(told(values, {i: {"memory": 9.0 - i} for i in range(4)}), MIN, SMALL)
    assert numbers(nobody) == [2, 0], "those that break least"


def test_those_without_values_or_forbidden_to_start_never_breed():
    values = [5, 1, 4, 2]
    assert numbers(parents(told(values, {0: {"trained": 1.0}}), MIN, SMALL)) == [2]
    assert parents(told(values, {i: {"trained": 1.0} for i in range(4)}), MIN, SMALL) == []
    assert parents(told(values, {1: {"allowed": 1.0}}), MIN, SMALL) == [], "its place is still to be filled"


def test_a_synchronous_drive_learns_how_many_to_wait_for():
    assert unfinished(told([1, None, None]), SMALL) == 0, "the first generation is not full yet"
    assert unfinished(told([1, None, None, 2]), SMALL) == 2
    assert unfinished(told([1, 2, 3, 4, None]), SMALL) == 0


def test_a_drive_that_waits_breeds_from_whole_generations():
    genetics = GeneticOptions(demes=2, population=3, steady=0, migration=0)
    rng = np.random.default_rng(0)
    past, running = told([]), []
    for number in range(24):
        while unfinished(past, genetics) or len(running) == 4:
            ended = running.pop(int(rng.integers(len(running))))
            past[ended] = told([*[0.0] * ended, rng.random()])[ended]
        generation = place(number, genetics).generation
        due = [
            trial for i, trial in enumerate(past) if place(i, genetics).generation < generation and i % 2 == number % 2
        ]
        fittest = sorted(due, key=lambda trial: trial.value)[:3]
        assert numbers(parents(past, MIN, genetics)) == numbers(fittest)
        assert len(due) == 3 * generation
        past.append(told([None] * (number + 1))[number])
        running.append(number)


# settings


def test_settings_are_read_and_what_is_not_named_keeps_its_default():
    assert parse_genetics("genetic") == GeneticOptions()
    result = parse_genetics("genetic:demes=4, population=32,mutation=.1,steady=0")
    assert result == GeneticOptions(demes=4, population=32, mutation=0.1, steady=0)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("genetic:islands=2", "genetic has no such option .got islands.: known: crossover, demes"),
        ("genetic:demes=2,demes=3", "given once"),
        ("genetic:demes=two", "demes of genetic must be a whole number from 1 to 1024"),
        ("genetic:demes", "option of genetic is written OPTION=VALUE"),
        ("genetic:population=1", "population of genetic must be a whole number from 2"),
        ("genetic:mutation=1.5", "mutation of genetic must be a number from 0 to 1"),
        ("genetic:mutation=nan", "mutation of genetic must be a number from 0 to 1"),
        ("tpe:demes=2", "tpe has no such option"),
        ("genetics", "a sampler must be known"),
    ],
)
def test_wrong_settings_are_user_errors(text, rule):
    with pytest.raises(UserError, match=rule):
        check_sampler(text, ONE)


# searches


@cache  # random search is what several are compared with
def median(space, measure, sampler, trials, score, objectives=ONE):
    """Over five seeds, with eight outstanding."""
    return statistics.median(
        score(search(space, measure, trials, at_once=8, sampler=sampler, seed=seed, objectives=objectives)[2])
        for seed in range(5)
    )


def lowest(found):
    return min(each["y"] for each in found)


def covered(found):
    return hypervolume(np.array([[each["f"], each["g"]] for each in found]), np.array([1.1, 7.0]))


@pytest.mark.parametrize("sampler", ["genetic", *soaked("genetic:steady=0", "genetic:step=0.1")])
def test_with_one_objective_it_is_better_than_random(sampler):
    assert median(onemax, ones, sampler, 120, lowest) <= median(onemax, ones, "random", 120, lowest) - 2
    assert median(sphere, distance, sampler, 120, lowest) < median(sphere, distance, "random", 120, lowest) / 2


@pytest.mark.parametrize("sampler", ["genetic", *soaked("genetic:steady=0")])
def test_with_two_objectives_it_covers_more_than_random(sampler):
    results = [median(zdt1, zdt1_values, name, 120, covered, TWO) for name in (sampler, "random")]
    assert results[0] > results[1] + 0.2


def test_maximising_mirrors_minimising():
    upwards = parse_objectives({"y": "max"})
    result = search(sphere, distance, 60)[2]
    mirrored = search(sphere, lambda values: {"y": -distance(values)["y"]}, 60, objectives=upwards)[2]
    assert [each["y"] for each in result] == [-each["y"] for each in mirrored]


def test_conditional_genes_are_inherited():
    _, entries, result = search(branching, off, 100, at_once=4)
    last = [entry.record for entry in entries if isinstance(entry.record, TrialStarted)][-30:]
    assert sum(record.params["optimizer"] == "sgd" for record in last) > 20
    assert lowest(result[-30:]) < lowest(result[:20])
    earlier = {entry.record.params.get("momentum") for entry in entries[:150] if isinstance(entry.record, TrialStarted)}
    assert sum(record.params.get("momentum") in earlier for record in last) > 10


def test_no_configuration_is_tried_twice():
    _, entries, _ = search(onemax, ones, 150, sampler="genetic:mutation=0,demes=1")
    tried = [tuple(sorted(e.record.params.items())) for e in entries if isinstance(e.record, TrialStarted)]
    assert len(set(tried)) == 150


@pytest.mark.parametrize("sampler", ["genetic:population=3,migration=1", "genetic:population=3,steady=0,demes=3"])
@pytest.mark.parametrize("at_once", [1, 4])
def test_a_replayed_study_goes_on_alike(sampler, at_once):
    limits = parse_constraints(["width <= 60", "y <= 3"])
    settings = {"sampler": sampler, "at_once": at_once, "limits": limits}
    begun, entries, _ = search(branching, off, 30, **settings)
    resumed = Suggester(branching, ONE, limits, sampler=sampler, seed=1)
    replay(resumed, entries)
    one, other = [search(branching, off, 25, at_once=at_once, suggester=each)[1] for each in (begun, resumed)]
    assert one == other


def test_a_proposal_needs_nothing_but_the_trials_and_the_seed():
    _, entries, _ = search(sphere, distance, 40)
    twins = [Suggester(sphere, ONE, sampler="genetic", seed=1) for _ in range(2)]
    for twin in twins:
        replay(twin, entries)
    assert twins[0].ask() == twins[1].ask()
    other = Suggester(sphere, ONE, sampler="genetic", seed=2)
    replay(other, entries)
    assert other.ask() != twins[0].ask()


def test_trials_lost_in_a_crash_do_not_stop_the_search():
    _, entries, _ = search(sphere, distance, 60, at_once=8)
    lost = [e for e in entries if not (isinstance(e.record, TrialFinished) and e.record.trial in (40, 57, 59))]
    resumed = Suggester(sphere, ONE, sampler="genetic", seed=1)
    replay(resumed, lost)
    result = search(sphere, distance, 60, at_once=8, suggester=resumed)[2]
    assert lowest(result) < min(e.record.values["y"] for e in lost if isinstance(e.record, TrialFinished))


def test_diverged_trials_are_avoided():
    def failing(values):
        return None if values["x0"] > 0 else distance(values)

    _, _, result = search(sphere, failing, 100, at_once=8)
    assert sum(each is None for each in result[-40:]) <= sum(each is None for each in result[:20])
    assert sum(each is None for each in result[-40:]) < 10


def test_a_gene_whose_range_moves_stays_in_its_range():
    def moving(trial):
        depth = trial.suggest_int("depth", 1, 4)
        return {"depth": depth, "width": trial.suggest_int("width", 8 * depth, 64)}

    _, entries, _ = search(moving, lambda values: {"y": float(values["width"])}, 80)
    values = [entry.record.config for entry in entries if isinstance(entry.record, TrialStarted)]
    assert all(8 * each["depth"] <= each["width"] <= 64 for each in values)
