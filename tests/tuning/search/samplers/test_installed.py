"""A sampler that another package offers by an entry point: what CONTRIBUTING tells of adding one."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
from optuna.samplers import BaseSampler, RandomSampler

from elastune.core import plugins
from elastune.core.errors import UserError
from elastune.core.journal.records import TrialFinished
from elastune.tuning.search.objective import parse_objectives
from elastune.tuning.search.suggester import Suggester

OBJECTIVES = parse_objectives(["loss:min"])


class Halving(RandomSampler):
    """Proposes half of the best value so far: it must see what was told."""

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        done = [t for t in study.get_trials(deepcopy=False) if t.values is not None]
        if not done:
            return param_distribution.high
        return min(done, key=lambda t: t.values[0]).params[param_name] / 2


def halving(seed: int) -> BaseSampler:
    return Halving(seed=seed)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"halving": halving, "seven": 7, "wrong": lambda seed: "a text"}

    def points(group: str) -> EntryPoints:
        assert group == "elastune.samplers"
        return EntryPoints(EntryPoint(name, f"toys:{name}", group) for name in [*values, "broken"])

    def load(point: EntryPoint) -> Any:
        if point.name == "broken":
            raise ImportError("no module named toys")
        return values[point.name]

    monkeypatch.setattr(plugins, "entry_points_of", points)
    monkeypatch.setattr(EntryPoint, "load", load)


def space(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 0.0, 1.0)}


def suggester(sampler: str) -> Suggester:
    return Suggester(space, OBJECTIVES, sampler=sampler)


def test_it_proposes_and_learns() -> None:
    search = suggester("halving")
    proposed = []
    for number in range(4):
        suggestion = search.ask()
        assert suggestion is not None
        assert suggestion.sampler == "halving"
        proposed.append(suggestion.params["lr"])
        search.tell(number, TrialFinished(number, "complete", {"loss": suggestion.params["lr"]}))
    assert proposed == [1.0, 0.5, 0.25, 0.125]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "a sampler must be known .* halving"),
        ("broken", "must load: ImportError"),
        ("seven", "must name a function of a seed"),
        ("halving:demes=2", "halving has no such option"),
    ],
)
def test_what_is_wrong_is_told_before_a_trial(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        suggester(name)


def test_what_it_makes_must_be_a_sampler() -> None:
    with pytest.raises(UserError, match="derive it from optuna's BaseSampler"):
        suggester("wrong").ask()
