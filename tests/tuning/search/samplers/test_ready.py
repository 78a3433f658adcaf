"""Whether a search may be asked now: only a genetic one with ``steady=0`` ever makes its driver wait."""

import pytest

from elastune.core.journal.records import Entry, TrialFinished, TrialStarted
from elastune.tuning.search.objective import parse_objectives
from elastune.tuning.search.suggester import Suggester, replay

ONE = parse_objectives({"y": "min"})


def space(trial):
    return {"x": trial.suggest_float("x", 0, 1), "n": trial.suggest_int("n", 1, 9)}


def suggester(sampler="genetic:demes=2,population=2,steady=0"):
    return Suggester(space, ONE, sampler=sampler, seed=1)


def end(search, asked):
    search.tell(asked.number, TrialFinished(asked.number, "complete", {"y": asked.values["x"]}))


def test_a_generation_waits_for_all_of_the_one_before():
    search = suggester()
    for _ in range(3):
        generation = []
        for _ in range(4):
            assert search.ready()
            generation.append(search.ask())
        assert not search.ready()
        for asked in generation[:-1]:
            end(search, asked)
            assert not search.ready()
        end(search, generation[-1])
    assert search.ready()


def test_within_a_generation_nobody_waits():
    search = suggester()
    first = [search.ask() for _ in range(4)]
    for asked in first:
        end(search, asked)
    open_ones = [search.ask() for _ in range(3)]
    assert len(open_ones) == 3
    assert search.ready()


def test_a_failed_trial_has_ended_too():
    search = suggester()
    for asked in [search.ask() for _ in range(4)]:
        assert not search.ready()
        search.tell(asked.number, TrialFinished(asked.number, "infeasible", reason="diverged"))
    assert search.ready()


@pytest.mark.parametrize("sampler", ["random", "tpe", "nsga2", "grid", "genetic", "genetic:demes=1,population=2"])
def test_others_never_wait(sampler):
    def finite(trial):
        return {"n": trial.suggest_int("n", 1, 9)}

    search = Suggester(finite, ONE, sampler=sampler, seed=1)
    for _ in range(5):
        assert search.ready()
        search.ask()
    assert search.ready()


@pytest.mark.parametrize(("unfinished", "ready"), [("open", False), ("drop", True)])
def test_a_resumed_search_waits_for_trials_that_go_on(unfinished, ready):
    search = suggester()
    asked = [search.ask() for _ in range(4)]
    entries = [
        Entry(0.0, TrialStarted(each.number, each.values, {}, 0, params=each.params, distributions=each.distributions))
        for each in asked
    ]
    entries += [Entry(1.0, TrialFinished(each.number, "complete", {"y": 1.0})) for each in asked[:3]]
    resumed = suggester()
    replay(resumed, entries, unfinished=unfinished)
    assert resumed.ready() == ready
