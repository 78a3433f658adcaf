"""What a user sets over a program's config: understood, or refused before a worker starts."""

from __future__ import annotations

from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.train.program.overrides import override

OWN: dict[str, Any] = {
    "lr": 0.1,
    "epochs": 3,
    "nesterov": True,
    "betas": [0.9, 0.99],
    "optimizer": "sgd",
    "name": "",
    "clip": None,
    "optim": {"lr": 0.1, "schedule": {"gamma": 0.5}},
}


def space(trial: Any) -> dict[str, Any]:
    clip = trial.suggest_categorical("clip_at", ["none", "1"])
    return {
        "optimizer": trial.suggest_categorical("optimizer", ["sgd", "adam"]),
        "epochs": trial.suggest_categorical("epochs", [1, "all"]),
        "lr": "auto" if clip == "none" else 0.1,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"lr": 1},
        {"epochs": 0.5},
        {"lr": None},
        {"nesterov": False},
        {"betas": [0.5]},
        {"name": 3},
        {"name": "anything"},
        {"clip": "any"},
        {"optimizer": "adam"},
        {"epochs": "all"},
        {"lr": "auto"},
    ],
)
def test_what_can_be_meant_is_taken(changes: dict[str, Any]) -> None:
    assert override(OWN, changes, space) == {**OWN, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": "abc"}, r"the setting lr must be a number.*\(got 'abc'\): there it is 0.1"),
        ({"lr": True}, "lr must be a number"),
        ({"lr": [0.1]}, "lr must be a number"),
        ({"nesterov": "yes"}, "nesterov must be true or false"),
        ({"nesterov": 1}, "nesterov must be true or false"),
        ({"betas": 0.9}, "betas must be a list"),
        ({"optimizer": "adma"}, "optimizer must be one of the choices.*'adma'.*use one of sgd, adam"),
        ({"epochs": "none"}, "epochs must be one of the choices.*use one of 1, all"),
        ({"optim.lr": "abc"}, "the setting optim.lr must be a number"),
        ({"optim.rate": 1}, "one of the program's config.*optim.rate.*optim.lr, optim.schedule.gamma, optimizer"),
        ({"lr.x": 1}, "one of the program's config"),
        ({"optim.lr.x": 1}, "one of the program's config"),
        ({"rate": 1}, "one of the program's config"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        override(OWN, changes, space)


def test_a_kind_is_checked_without_a_space_and_a_space_that_fails_is_no_hindrance() -> None:
    def broken(trial: Any) -> dict[str, Any]:
        raise ValueError("not today")

    for given in (None, broken):
        assert override(OWN, {"optimizer": "adma"}, given)["optimizer"] == "adma"
        with pytest.raises(UserError, match="lr must be a number"):
            override(OWN, {"lr": "abc"}, given)
    assert override({}, {"lr": "abc"}) == {"lr": "abc"}, "a program without a config says nothing of its settings"
    assert override({}, {"optim.lr": 1}) == {"optim": {"lr": 1}}


def test_a_nested_setting_is_set_and_leaves_the_programs_own_alone() -> None:
    changed = override(OWN, {"optim.lr": 0.5, "optim.schedule.gamma": 0.25})
    assert changed["optim"] == {"lr": 0.5, "schedule": {"gamma": 0.25}}
    assert OWN["optim"] == {"lr": 0.1, "schedule": {"gamma": 0.5}}
    assert override({"optim.lr": 0.1}, {"optim.lr": 0.2}) == {"optim.lr": 0.2}, "a name may hold a dot"
