import math

import optuna
import pytest

from elastune.core.errors import UserError
from elastune.core.journal.files import JournalWriter, read
from elastune.core.journal.records import Entry, TrialFinished, TrialStarted
from elastune.tuning.search.constraint import parse_constraints
from elastune.tuning.search.front import nondominated
from elastune.tuning.search.gaussian import GaussianSampler
from elastune.tuning.search.history import TRAINED
from elastune.tuning.search.objective import oriented, parse_objectives
from elastune.tuning.search.registry import SAMPLERS
from elastune.tuning.search.suggester import Suggester, replay

TWO = parse_objectives({"accuracy": "max", "seconds": "min"})
ONE = parse_objectives({"accuracy": "max"})


def flat(trial):
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1.0, log=True),
        "workers": trial.suggest_int("workers", 1, 8),
        "batch_size": trial.suggest_categorical("batch_size", [32, 64, 128]),
    }


def conditional(trial):
    result = flat(trial)
    if trial.suggest_categorical("optimizer", ["sgd", "adam"]) == "sgd":
        result["momentum"] = trial.suggest_float("momentum", 0.0, 0.99)
    return result


def finite(trial):
    results = {"lr": trial.suggest_float("lr", 0.1, 0.4, step=0.1), "workers": trial.suggest_int("workers", 1, 4)}
    if results["workers"] == 2:
        results["mode"] = trial.suggest_categorical("mode", ["exact", "fast"])
    return results


def train(values):
    """A toy: an optimum in log lr, more workers are faster and a little worse; lr above 0.3 diverges."""
    if values["lr"] > 0.3:
        return None
    off = math.log10(values["lr"]) + 2
    accuracy = 0.95 - 0.1 * off**2 - 0.005 * values["workers"] - 0.02 * abs(values.get("momentum", 0.9) - 0.9)
    return {"accuracy": accuracy, "seconds": 10 / values["workers"] + values.get("batch_size", 64) / 100}


def finish(number, values):
    result = train(values)
    if result is None:
        return TrialFinished(number, "infeasible", metrics={"loss": math.nan}, reason="diverged")
    return TrialFinished(number, "complete", values=result, metrics={"loss": 1.0}, seconds=result["seconds"])


def started(suggestion):
    return TrialStarted(
        suggestion.number,
        suggestion.values,
        {},
        seed=0,
        params=suggestion.params,
        distributions=suggestion.distributions,
    )


def study(trials, at_once=2, **settings):
    """Runs ``trials`` trials; returns the suggester, the suggestions and the journal's entries."""
    settings = {"space": flat, "objectives": TWO, "seed": 1, **settings}
    suggester = Suggester(settings.pop("space"), settings.pop("objectives"), **settings)
    entries, suggestions, running = [], [], []
    for _ in range(trials):
        suggestion = suggester.ask()
        entries.append(Entry(float(len(entries)), started(suggestion)))
        suggestions.append(suggestion)
        running.append(suggestion)
        if len(running) == at_once:
            step(suggester, running.pop(0), entries)
    while running:
        step(suggester, running.pop(0), entries)
    return suggester, suggestions, entries


def step(suggester, suggestion, entries):
    finished = finish(suggestion.number, suggestion.values)
    suggester.tell(suggestion.number, finished)
    entries.append(Entry(float(len(entries)), finished))


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name not in ("grid", "cmaes")])
def test_every_sampler_goes_on_through_failures(sampler):
    trials = 13 if sampler == "gp" else 15
    suggester, suggestions, _ = study(trials, sampler=sampler, space=conditional)
    assert [s.number for s in suggestions] == list(range(trials))
    assert any(train(s.values) is None for s in suggestions)
    assert len({tuple(s.params.values()) for s in suggestions}) > 10
    assert suggester.rejected == 0


def test_cmaes_goes_on_through_failures():
    _, suggestions, _ = study(15, sampler="cmaes", objectives=ONE)
    assert {s.sampler for s in suggestions} == {"cmaes"}


@pytest.mark.parametrize("sampler", ["random", "gp", "nsga2", "nsga3"])
def test_three_objectives(sampler):
    three = parse_objectives({"accuracy": "max", "seconds": "min", "lr": "min"})
    suggester = Suggester(flat, three, sampler=sampler)
    measured = {}
    for _ in range(11):
        suggestion = suggester.ask()
        assert suggestion.sampler == sampler
        result = train(suggestion.values)
        state = "infeasible" if result is None else "complete"
        values = {**(result or {}), "lr": suggestion.values["lr"]}
        suggester.tell(suggestion.number, TrialFinished(suggestion.number, state, values))
        if result is not None:
            measured[suggestion.number] = values
    assert 3 <= len(measured) < 11, "some trials fail"
    learnt = {t.number: t.values for t in suggester._history.frozen() if t.constraints[TRAINED] <= 0}
    assert learnt == {number: [v["accuracy"], v["seconds"], v["lr"]] for number, v in measured.items()}
    kept = nondominated(oriented(list(measured.values()), three))
    front = {number for number, stays in zip(measured, kept, strict=True) if stays}
    best = suggester._history.study.best_trials
    assert {trial.number for trial in best} == front
    assert all(len(trial.values) == 3 for trial in best)


def test_auto_is_gp_until_the_space_proves_conditional():
    assert {s.sampler for s in study(11, 1, sampler="auto")[1]} == {"gp"}
    names = [s.sampler for s in study(12, sampler="auto", space=conditional)[1]]
    assert names[0] == "gp"
    assert names[-1] == "tpe"


def test_gp_learns_where_trials_fail_and_where_the_optimum_is():
    def wide(trial):
        return {"lr": trial.suggest_float("lr", 1e-3, 1e3, log=True), "workers": 4}

    def tried(sampler):
        values = [s.values for s in study(20, sampler=sampler, space=wide, objectives=ONE)[1]]
        failures = sum(train(each) is None for each in values[10:])
        return failures, max(train(each)["accuracy"] for each in values if train(each))

    (gp_failures, gp_best), (random_failures, random_best) = tried("gp"), tried("random")
    assert gp_failures < random_failures
    assert gp_best >= random_best


@pytest.mark.parametrize("sampler", ["gp", "tpe", "nsga2"])
def test_a_study_whose_first_trials_all_fail_recovers(sampler):
    suggester = Suggester(flat, TWO, sampler=sampler, seed=5)
    for _ in range(8):
        suggestion = suggester.ask()
        suggester.tell(suggestion.number, TrialFinished(suggestion.number, "infeasible", reason="out of memory"))
    for _ in range(3):
        suggestion = suggester.ask()
        suggester.tell(
            suggestion.number, TrialFinished(suggestion.number, "complete", {"accuracy": 0.5, "seconds": 1000.0})
        )
    result = suggester._history.frozen()
    assert {tuple(trial.values) for trial in result} == {(0.5, 1000.0)}, "failures were told the worst value known"
    assert [trial.constraints["trained"] for trial in result] == [1.0] * 8 + [-1.0] * 3


def test_values_that_are_not_finite_count_as_a_failure():
    suggester = Suggester(flat, TWO, sampler="gp")
    for i in range(12):
        suggestion = suggester.ask()
        bad = {"accuracy": [math.nan, math.inf][i % 2], "seconds": 1.0}
        good = {"accuracy": 0.9, "seconds": 1.0}
        suggester.tell(suggestion.number, TrialFinished(suggestion.number, "complete", bad if i < 4 else good))
    assert all(math.isfinite(v) for trial in suggester._history.frozen() for v in trial.values)


@pytest.mark.parametrize("sampler", ["random", "gp", "tpe", "nsga2", "nsga3"])
def test_a_statically_decidable_constraint_is_never_broken(sampler):
    constraints = parse_constraints(["workers * batch_size == 256", "accuracy >= 0.5", "lr <= limit"])
    trials = 11 if sampler == "gp" else 20
    suggester, suggestions, _ = study(trials, 1, sampler=sampler, constraints=constraints, known={"limit": 0.5})
    assert all(s.values["workers"] * s.values["batch_size"] == 256 for s in suggestions)
    assert all(s.values["lr"] <= 0.5 for s in suggestions)
    assert suggester.rejected > 0


def test_a_constraint_on_a_metric_is_learnt():
    constraints = parse_constraints(["seconds >= 3", "seconds <= 4"])

    def space(trial):
        return {"lr": 0.01, "workers": trial.suggest_float("workers", 1, 8)}

    suggester, suggestions, _ = study(20, 1, sampler="gp", constraints=constraints, objectives=ONE, space=space)
    kept = [3 <= train(s.values)["seconds"] <= 4 for s in suggestions]
    assert sum(kept[10:]) > 2 * sum(kept[:10])
    result = suggester._history.frozen()
    for trial, asked in zip(result, suggestions, strict=True):
        assert trial.constraints["seconds <= 4"] == pytest.approx(train(asked.values)["seconds"] - 4)
        assert set(trial.constraints) == {"seconds >= 3", "seconds <= 4"}


def test_an_impossible_constraint_ends_with_a_user_error():
    suggester = Suggester(flat, TWO, parse_constraints(["workers * lr == 123.456"]), sampler="random")
    with pytest.raises(UserError, match="some configuration must satisfy"):
        suggester.ask()


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"sampler": "magic"}, "a sampler must be known"),
        ({"sampler": "cmaes"}, "one objective"),
        ({"sampler": "grid"}, "finitely many values"),
    ],
)
def test_a_sampler_that_cannot_is_a_user_error(settings, rule):
    with pytest.raises(UserError, match=rule):
        Suggester(flat, TWO, **settings)


def test_a_grid_is_visited_once_and_ends():
    suggester = Suggester(finite, TWO, parse_constraints(["workers <= 3"]), sampler="grid", seed=2)
    seen = []
    while (suggestion := suggester.ask()) is not None:
        seen.append(tuple(suggestion.values.values()))
        suggester.tell(suggestion.number, finish(suggestion.number, {**suggestion.values}))
    assert len(seen) == len(set(seen)) == 4 * (1 + 2 + 1)
    assert suggester.rejected == 4
    assert suggester.ask() is None


def test_a_resumed_grid_visits_only_the_rest():
    entries = []
    for _ in range(3):
        suggester = Suggester(finite, TWO, sampler="grid", seed=2)
        replay(suggester, entries)
        for _ in range(7):
            if (suggestion := suggester.ask()) is None:
                break
            entries.append(Entry(0.0, started(suggestion)))
            if suggestion.number % 7 != 3:  # one trial of each session is lost
                entries.append(Entry(0.0, finish(suggestion.number, suggestion.values)))
    done = {e.record.trial for e in entries if isinstance(e.record, TrialFinished)}
    configurations = [
        tuple(e.record.config.values())
        for e in entries
        if getattr(e.record, "kind", "") == "trial_started" and e.record.trial in done
    ]
    assert len(configurations) == len(set(configurations)) == 18


@pytest.mark.parametrize(
    ("sampler", "stop"), [("random", 9), ("gp", 11), ("tpe", 20), ("nsga2", 45), ("nsga3", 45), ("cmaes", 25)]
)
def test_a_resumed_study_goes_on_exactly_as_if_it_had_not_stopped(sampler, stop, tmp_path):
    settings = {"sampler": sampler, "objectives": ONE if sampler == "cmaes" else TWO}
    _, whole, entries = study(stop + 1, 1, **settings)
    with JournalWriter(tmp_path / "journal.jsonl") as journal:
        for entry in entries[: 2 * stop]:
            journal.write(entry.record)
    resumed = Suggester(flat, settings["objectives"], sampler=sampler, seed=1)
    replay(resumed, read(tmp_path / "journal.jsonl"))
    assert resumed.ask() == whole[stop]


def test_an_unfinished_trial_leaves_no_zombie_and_its_number_is_not_reused():
    _, suggestions, entries = study(6, sampler="tpe")
    lost = [e for e in entries if not (isinstance(e.record, TrialFinished) and e.record.trial == 4)]
    resumed = Suggester(flat, TWO, sampler="tpe", seed=1)
    replay(resumed, lost)
    trials = resumed._history.frozen()
    assert len(trials) == 5
    assert all(trial.state == optuna.trial.TrialState.COMPLETE for trial in trials)
    assert resumed.ask().number == 6
    with pytest.raises(ValueError, match="not open"):
        resumed.tell(4, finish(4, suggestions[4].values))
    with pytest.raises(ValueError, match="before the first ask"):
        replay(resumed, entries)


def test_numbers_of_other_trials_are_not_given_out():
    entries = [
        Entry(0.0, TrialStarted(7, {"lr": 0.1}, {}, seed=0, phase="naive")),
        Entry(1.0, TrialFinished(7, "complete")),
    ]
    suggester = Suggester(flat, TWO)
    replay(suggester, entries)
    assert suggester.reserve() == 8
    assert suggester.ask().number == 9
    assert suggester.reserve() == 10
    assert len(suggester._history) == 1


def test_a_trial_that_was_started_twice_counts_once():
    _, _, entries = study(3, sampler="random")
    suggester = Suggester(flat, TWO, sampler="random", seed=1)
    replay(suggester, [entries[0], *entries])
    states = [trial.state.name for trial in suggester._history.frozen()]
    assert sorted(states) == ["COMPLETE"] * 3 + ["FAIL"]
    suggester = Suggester(flat, TWO, sampler="random", seed=1)
    replay(suggester, [*entries, entries[0]])
    states = [trial.state.name for trial in suggester._history.frozen()]
    assert sorted(states) == ["COMPLETE"] * 3 + ["FAIL"]


def test_a_space_without_parameters_can_be_studied():
    suggester = Suggester(lambda trial: {"lr": 0.1}, TWO, sampler="auto")
    for _ in range(12):
        suggestion = suggester.ask()
        assert suggestion.values == {"lr": 0.1}
        suggester.tell(
            suggestion.number, TrialFinished(suggestion.number, "complete", {"accuracy": 0.9, "seconds": 1.0})
        )


def test_rejected_and_broken_trials_keep_what_is_known():
    constraints = parse_constraints(["accuracy >= 0.9"])
    suggester = Suggester(flat, TWO, constraints, sampler="gp")
    facts = [
        TrialFinished(0, "complete", {"accuracy": 0.95, "seconds": 5.0}, violations={"accuracy >= 0.9": -0.05}),
        TrialFinished(1, "infeasible", {"accuracy": 0.5, "seconds": 9.0}, violations={"accuracy >= 0.9": 0.4}),
        TrialFinished(2, "rejected", reason="does not fit in memory"),
        TrialFinished(3, "infeasible", {"accuracy": 0.99, "seconds": 0.1}, reason="worker lost"),
    ]
    for fact in facts:
        suggester.tell(suggester.ask().number, fact)
    result = suggester._history.frozen()
    assert [trial.values for trial in result] == [[0.95, 5.0], [0.5, 9.0], [0.5, 9.0], [0.5, 9.0]]
    assert [trial.constraints["accuracy >= 0.9"] for trial in result] == pytest.approx([-0.05, 0.4, 0.0, -0.09])
    assert [trial.constraints["trained"] for trial in result] == [-1.0, -1.0, 1.0, 1.0]


def test_optuna_stays_quiet(capfd, recwarn):
    study(12, sampler="auto", space=conditional)
    assert capfd.readouterr().err == ""
    assert not recwarn.list


def test_the_front_of_a_study_excludes_its_failures():
    _, suggestions, _ = study(12, sampler="random")
    rows = [train(s.values) or {"accuracy": math.nan, "seconds": math.nan} for s in suggestions]
    front = nondominated(oriented(rows, TWO))
    assert front.any()
    assert not any(front[i] for i, s in enumerate(suggestions) if train(s.values) is None)


def test_a_samplers_error_is_not_told_as_one_of_the_space(monkeypatch):
    def broken(*arguments):
        raise ArithmeticError("a sampler's own")

    search = Suggester(flat, ONE, sampler="gp", seed=0)
    for number in range(12):
        search.tell(search.ask().number, TrialFinished(number, "complete", values={"accuracy": 0.05 * number}))
    monkeypatch.setattr(GaussianSampler, "_sample_relative_impl", broken)
    with pytest.raises(ArithmeticError, match="a sampler's own"):
        search.ask()
