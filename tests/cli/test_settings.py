"""A setting has one type, one default and one meaning: on the command line, in Python, and in the request."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

import elastune
from elastune.cli import main
from elastune.cli.app import app
from elastune.core.errors import UserError
from elastune.core.fields import settings_of
from elastune.core.mesh import Mesh
from elastune.core.run import Elastic, ExecutionSettings, Program, StartFrom
from elastune.core.sync_plan import SyncChoice
from elastune.runtime.settings import RunSettings
from elastune.tuning.cluster_plan.settings import PlanSettings
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.settings import FrontierSettings, StudySettings

HERE = Path(__file__)
ASKED = {"objectives": {"loss": "min"}, "trials": 7}
OF_PYTHON = {"train", "space", "out", "cluster", "interface", "token_file", "tls", "gather_s", "prices", "kind", "log"}
"""Parameters of the function that a request has in another form, or not at all."""
OF_NOBODY = {"program", "out", "simulated", "command"}  # fields that no setting has


class Written(NamedTuple):
    """A field of the request; how the command line and Python ask for this value of it."""

    field: str
    options: list[str]
    arguments: dict[str, Any]
    value: Any
    slots: int = 1


SETTINGS = [
    Written("objectives", ["--objective", "accuracy:max"], {"objectives": {"accuracy": "max"}}, {"accuracy": "max"}),
    Written("constraints", ["--constraint", "lr <= 1"], {"constraints": ["lr <= 1"]}, ("lr <= 1",)),
    Written("sampler", ["--sampler", "random"], {"sampler": "random"}, "random"),
    Written("trials", ["--trials", "3"], {"trials": 3}, 3),
    Written("budget_s", ["--budget", "1.5m"], {"budget_s": 90.0}, 90.0),
    Written("worker_hours", ["--worker-hours", "2"], {"worker_hours": 2.0}, 2.0),
    Written("until", ["--until", "loss < 1"], {"until": "loss < 1"}, ("loss < 1",)),
    Written("patience", ["--patience", "5"], {"patience": 5}, 5),
    Written("target", ["--target", "loss < 2"], {"target": "loss < 2"}, "loss < 2"),
    Written("stopping", ["--stopping", "asha"], {"stopping": "asha"}, "asha"),
    Written("trial_workers", ["--trial-workers", "1:2"], {"trial_workers": (1, 2)}, (1, 2), slots=2),
    Written("allocation", ["--allocation", "steepest"], {"allocation": "steepest"}, "steepest"),
    Written("workers", ["--workers", "2"], {"workers": 2}, 2),
    Written("warm_start", ["--warm-start", "old"], {"warm_start": ["old"]}, (Path("old"),)),
    Written("config", ["--set", "lr=0.5"], {"config": {"lr": 0.5}}, {"lr": 0.5}),
    Written("seed", ["--seed", "4"], {"seed": 4}, 4),
    Written("divergence", ["--divergence", "off"], {"divergence": None}, None),
    Written("price_per_worker_hour", ["--price", "2.5"], {"price_per_worker_hour": 2.5}, 2.5),
    Written("grace_s", ["--grace", "1m"], {"grace_s": 60.0}, 60.0),
    Written(
        "sync",
        ["--sync", "local:learners=2,every=3", "--sync-schedule", "9=allreduce"],
        {"sync": "local:learners=2,every=3", "sync_schedule": "9=allreduce"},
        SyncChoice.parse("local:learners=2,every=3", "9=allreduce"),
        slots=2,
    ),
    Written("keep", ["--keep", "front+last:3"], {"keep": "front+last:3"}, "front+last:3"),
    Written("keep_bytes", ["--keep-size", "2MB"], {"keep_bytes": 2_000_000}, 2_000_000),
    Written(
        "keep_checkpoints",
        ["--keep-checkpoints", "last:3,every:100"],
        {"keep_checkpoints": "last:3,every:100"},
        "last:3,every:100",
    ),
    Written("monitors", ["--monitor", "noise_scale"], {"monitors": ["noise_scale"]}, ("noise_scale",)),
    Written("plan", ["--plan", "there"], {"plan": "there"}, Path("there")),
    Written("resume", ["--resume"], {"resume": True}, True),
    Written("accept_changes", ["--accept-changes"], {"accept_changes": True}, True),
    Written("verify", ["--verify", "every=5"], {"verify": "every=5"}, "every=5"),
    Written("unchecked", ["--unchecked"], {"unchecked": True}, True),
    Written(
        "execution",
        ["--threads", "2"],
        {"execution": ExecutionSettings(mode="fast", threads=2)},
        ExecutionSettings(mode="fast", threads=2),
    ),
    Written("epochs", ["--epochs", "3"], {"epochs": 3}, 3),
    Written("trial_timeout_s", ["--trial-timeout", "30m"], {"trial_timeout_s": 1800.0}, 1800.0),
    Written("collective_timeout_s", ["--collective-timeout", "40s"], {"collective_timeout_s": 40.0}, 40.0),
    Written(
        "start_from",
        ["--start-from", str(HERE), "--rename", "a.=b.", "--fresh", "head.*"],
        {"start_from": HERE, "rename": ["a.=b."], "fresh": "head.*"},
        StartFrom(HERE.resolve(), (("a.", "b."),), ("head.*",)),
    ),
]


class Asked(Exception):
    """What the study was to be."""


@pytest.fixture(autouse=True)
def nothing_runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def note(request: StudyRequest, **how: Any) -> None:
        raise Asked(request)

    monkeypatch.setattr("elastune.tuning.study.run.tune", note)
    monkeypatch.setattr("elastune.tuning.study.api.run_study", note)


def train(session: elastune.Session) -> None: ...


def by_command(options: list[str]) -> Any:
    own = [] if "--objective" in options else ["--objective", "loss:min"]
    own += [] if "--trials" in options else ["--trials", "7"]
    with pytest.raises(Asked) as found:
        main(["tune", str(HERE), "--out", "out", "--device", "cpu", *own, *options])
    return found.value.args[0]


def by_function(arguments: dict[str, Any]) -> Any:
    with pytest.raises(Asked) as found:
        elastune.tune(train, lambda trial: {}, out="out", **{**ASKED, **arguments})
    return found.value.args[0]


def test_all_begin_with_the_same() -> None:
    assert by_command([]) == by_function({}) == StudyRequest(Program(HERE), Path("out"), **ASKED)


@pytest.mark.parametrize("written", SETTINGS, ids=[written.field for written in SETTINGS])
def test_a_setting_is_the_same_wherever_it_is_set(written: Written) -> None:
    asked = by_command(written.options)
    execution = ExecutionSettings(mode="fast", num_slots=written.slots)
    expected = StudyRequest(
        Program(HERE), Path("out"), **{**ASKED, "execution": execution, written.field: written.value}
    )
    assert asked == expected
    assert getattr(asked, written.field) != getattr(StudyRequest(Program(HERE), Path("out"), **ASKED), written.field)
    assert by_function(written.arguments) == expected


def test_prices_are_the_same_wherever_they_are_set() -> None:
    Path("prices.csv").write_text("kind,price\nany,3\n")
    command, function = by_command(["--prices", "prices.csv"]), by_function({"prices": "prices.csv"})
    assert command == function
    assert (command.prices is not None, command.price_per_worker_hour) == (True, 3.0)


def test_every_setting_of_a_study_is_known_here() -> None:
    assert {written.field for written in SETTINGS} | OF_NOBODY | {"prices"} == {f.name for f in fields(StudyRequest)}
    known = {name for written in SETTINGS for name in written.arguments}
    assert known | OF_PYTHON == {"train", "space", *(f.name for f in fields(StudySettings))}


@pytest.mark.parametrize(
    ("function", "command", "kind", "own"),
    [
        (elastune.run, "run", RunSettings, {"train"}),
        (elastune.tune, "tune", StudySettings, {"train", "space"}),
        (elastune.find_frontier, "frontier", FrontierSettings, {"train"}),
        (elastune.find_plan, "plan", PlanSettings, {"train"}),
    ],
)
def test_keywords_options_and_help_come_from_the_settings(
    function: Any, command: str, kind: type, own: set[str]
) -> None:
    assert set(inspect.signature(function).parameters) == own | {each.name for each in fields(kind)}
    shown = "".join(CliRunner().invoke(app, [command, "--help"]).output.split())
    settings = settings_of(kind)
    assert settings.keys() | {"execution"} >= {each.name for each in fields(kind)}
    for name, setting in settings.items():
        assert "".join(setting.help.split()) in shown, name
        assert f"{setting.option_of(name)}" in shown
        assert f"    {name}: " in function.__doc__


@pytest.mark.parametrize(
    ("keyword", "fix"), [("trails", "use trials"), ("budget", "use budget_s"), ("qqqq", "help(elastune.tune) lists")]
)
def test_an_unknown_keyword_names_the_nearest(keyword: str, fix: str) -> None:
    with pytest.raises(UserError, match=re.escape(fix)) as refused:
        elastune.tune(train, lambda trial: {}, **{**ASKED, keyword: 3})
    assert refused.value.value == keyword


def test_a_list_and_a_single_text_are_settled_as_tuples() -> None:
    settings = StudySettings(until="loss < 1", constraints=["lr <= 1"], warm_start="old", plan="there")
    assert (settings.until, settings.constraints) == (("loss < 1",), ("lr <= 1",))
    assert (settings.warm_start, settings.plan) == ((Path("old"),), Path("there"))


@pytest.mark.parametrize("workers", [0, -1, 2.0, True, (0, 4), (1, "4")])
def test_a_run_has_whole_numbers_of_workers(workers: Any) -> None:
    with pytest.raises(UserError, match="workers must be (whole numbers of at least 1|a whole number)"):
        elastune.run(train, workers=workers)


@pytest.mark.parametrize("workers", [(4, 2), (1, 2, 3), (1,)])
def test_bounds_of_a_run_are_two_the_lower_first(workers: Any) -> None:
    with pytest.raises(UserError, match="LOW first"):
        elastune.run(train, workers=workers)


def test_a_run_may_change_its_workers_within_bounds() -> None:
    changing, fixed = RunSettings(workers=(2, 4)), RunSettings(workers=3)
    assert changing.elastic(Mesh(data=3)) == (3, Elastic(2, 4))
    assert (fixed.elastic(None), fixed.changes, changing.changes) == ((3, Elastic()), False, True)


def test_a_mapping_as_a_default_is_not_shared() -> None:
    assert StudySettings().config is not StudySettings().config
    assert StudySettings().objectives is not StudySettings().objectives


@pytest.mark.parametrize("settings", [RunSettings, StudySettings, FrontierSettings])
def test_no_config_and_a_config_that_changes_later(settings: Any) -> None:
    assert settings(config=None).config == {}
    config = {"lr": 0.1}
    made = settings(config)
    config["lr"] = 0.2
    assert made.config == {"lr": 0.1}
