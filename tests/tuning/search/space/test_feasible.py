import pytest

from elastune.core.errors import UserError
from elastune.tuning.search.constraint import parse_constraints
from elastune.tuning.study.validate import check_feasible


def continuous(trial):
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1.0, log=True),
        "workers": 2 ** trial.suggest_int("log_workers", 0, 2),
        "micro_batch": trial.suggest_categorical("micro_batch", [32, 64, 128]),
        "scale": 3 * trial.suggest_float("third", 0.0, 1.0),
    }


def finite(trial):
    workers = trial.suggest_int("workers", 1, 4)
    results = {"workers": workers, "batch": trial.suggest_int("batch", 16, 64, step=16)}
    if workers == 4:
        results["momentum"] = trial.suggest_float("momentum", 0.8, 0.9, step=0.1)
    return results


@pytest.mark.parametrize(
    ("space", "texts"),
    [
        (continuous, ["workers >= 8"]),
        (continuous, ["workers < 1"]),
        (continuous, ["lr > 1"]),
        (continuous, ["lr > 0.5", "lr < 0.1"]),
        (continuous, ["lr >= 0.5", "0.5 > lr"]),
        (continuous, ["accuracy > 0.9", "accuracy < 0.5"]),
        (continuous, ["accuracy == 0.9", "accuracy < 0.5"]),
        (continuous, ["lr * 100 >= 200"]),
        (continuous, ["lr + workers >= 5.5"]),
        (continuous, ["workers * micro_batch == 4096"]),
        (continuous, ["workers * micro_batch == 256", "workers * micro_batch == 128"]),
        (continuous, ["workers * micro_batch == 128", "workers == 4", "micro_batch >= 64"]),
        (continuous, ["epochs >= 20"]),
        (continuous, ["epochs * workers > 40"]),
        (continuous, ["lr == 0.3"]),
        (continuous, ["scale * workers == 2.5"]),
        (continuous, ["scale > 2.9999999"]),
        (continuous, ["accuracy >= 0.5", "0.5 > accuracy"]),
        (continuous, ["accuracy == 0.5", "accuracy == 0.5 + 1"]),
        (finite, ["workers * batch == 100"]),
        (finite, ["workers == 4", "momentum + workers < 4.75"]),
    ],
)
def test_contradictions_are_found_without_running(space, texts):
    with pytest.raises(UserError) as caught:
        check_feasible(space, parse_constraints(texts), {"epochs": 10}, seed=0)
    assert "\n" not in str(caught.value)
    assert any(text in str(caught.value) for text in texts)


@pytest.mark.parametrize(
    ("space", "texts"),
    [
        (continuous, []),
        (continuous, ["workers * micro_batch == 256", "lr < 0.1"]),
        (continuous, ["accuracy > 0.9", "accuracy < 0.95", "seconds <= 100"]),
        (continuous, ["accuracy >= 0.5", "accuracy <= 0.5"]),
        (continuous, ["accuracy == 0.5", "accuracy <= 0.5"]),
        (continuous, ["accuracy > 1 / 0", "accuracy < 0.5"]),
        (continuous, ["accuracy > seconds", "accuracy < 0.5"]),
        (finite, ["workers * batch == 256"]),
        (finite, ["momentum <= 0.8"]),
        (finite, ["epochs == 10"]),
    ],
)
def test_what_may_be_feasible_is_let_through(space, texts):
    check_feasible(space, parse_constraints(texts), {"epochs": 10}, seed=0)


def test_the_closest_miss_is_told():
    with pytest.raises(UserError, match="none of the space does, the closest breaks 'workers > 4.5' by 0.5"):
        check_feasible(finite, parse_constraints(["workers > 4.5", "batch >= 16"]), {}, seed=0)
    with pytest.raises(UserError, match="some accuracy must satisfy .*: loosen it") as caught:
        check_feasible(finite, parse_constraints(["accuracy > 0.9", "accuracy < 0.5", "workers < 3"]), {})
    assert "nothing lies above 0.9 and below 0.5" in str(caught.value)
