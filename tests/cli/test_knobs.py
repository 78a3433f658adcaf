"""A knob of a study has one type, one default and one meaning: on the command line, in Python, and in what is asked."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

import elastune
from elastune.cli import main
from elastune.cli.app import app
from elastune.core.run import ExecutionSettings, Program, StartFrom
from elastune.core.sync_plan import SyncChoice
from elastune.tuning.study.request import StudyRequest

HERE = Path(__file__)
ASKED = {"objectives": {"loss": "min"}, "trials": 7}
OF_PYTHON = {"train", "space", "out", "cluster"}  # parameters of the function that are no knobs
OF_NOBODY = {"program", "out", "simulated", "command"}  # fields that no knob sets


class Knob(NamedTuple):
    """A field of the request; how the command line and Python (None: it cannot) ask for this value of it."""

    field: str
    options: list[str]
    arguments: dict[str, Any] | None
    value: Any


KNOBS = [
    Knob("objectives", ["--objective", "accuracy:max"], {"objectives": {"accuracy": "max"}}, {"accuracy": "max"}),
    Knob("constraints", ["--constraint", "lr <= 1"], {"constraints": ["lr <= 1"]}, ("lr <= 1",)),
    Knob("sampler", ["--sampler", "random"], {"sampler": "random"}, "random"),
    Knob("trials", ["--trials", "3"], {"trials": 3}, 3),
    Knob("budget_s", ["--budget", "1.5m"], {"budget_s": 90.0}, 90.0),
    Knob("worker_hours", ["--worker-hours", "2"], {"worker_hours": 2.0}, 2.0),
    Knob("until", ["--until", "loss < 1"], {"until": "loss < 1"}, ("loss < 1",)),
    Knob("patience", ["--patience", "5"], {"patience": 5}, 5),
    Knob("target", ["--target", "loss < 2"], {"target": "loss < 2"}, "loss < 2"),
    Knob("stopping", ["--stopping", "asha"], {"stopping": "asha"}, "asha"),
    Knob("trial_workers", ["--trial-workers", "1:2"], {"trial_workers": (1, 2)}, (1, 2)),
    Knob("allocation", ["--allocation", "steepest"], {"allocation": "steepest"}, "steepest"),
    Knob("workers", ["--workers", "2"], {"workers": 2}, 2),
    Knob("warm_start", ["--warm-start", "old"], {"warm_start": ["old"]}, (Path("old"),)),
    Knob("config", ["--set", "lr=0.5"], {"config": {"lr": 0.5}}, {"lr": 0.5}),
    Knob("seed", ["--seed", "4"], {"seed": 4}, 4),
    Knob("divergence", ["--divergence", "off"], {"divergence": None}, None),
    Knob("price_per_worker_hour", ["--price", "2.5"], {"price_per_worker_hour": 2.5}, 2.5),
    Knob("grace_s", ["--grace", "1m"], {"grace_s": 60.0}, 60.0),
    Knob(
        "sync",
        ["--sync", "local:learners=2,every=3", "--sync-schedule", "9=allreduce"],
        {"sync": "local:learners=2,every=3", "sync_schedule": "9=allreduce"},
        SyncChoice.parse("local:learners=2,every=3", "9=allreduce"),
    ),
    Knob("keep", ["--keep", "front+last:3"], {"keep": "front+last:3"}, "front+last:3"),
    Knob("keep_bytes", ["--keep-size", "2MB"], {"keep_bytes": 2_000_000}, 2_000_000),
    Knob("monitors", ["--monitor", "noise_scale"], {"monitors": ["noise_scale"]}, ("noise_scale",)),
    Knob("plan", ["--plan", "there"], {"plan": "there"}, Path("there")),
    Knob("resume", ["--resume"], {"resume": True}, True),
    Knob("accept_changes", ["--accept-changes"], {"accept_changes": True}, True),
    Knob("execution", ["--threads", "2"], None, ExecutionSettings(mode="fast", threads=2)),
    Knob("epochs", ["--epochs", "3"], None, 3),
    Knob("trial_timeout_s", ["--trial-timeout", "30m"], None, 1800.0),
    Knob("collective_timeout_s", ["--collective-timeout", "40s"], None, 40.0),
    Knob("start_from", ["--start-from", str(HERE)], None, StartFrom(HERE.resolve())),
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


@pytest.mark.parametrize("knob", KNOBS, ids=[knob.field for knob in KNOBS])
def test_a_knob_is_the_same_wherever_it_is_set(knob: Knob) -> None:
    asked = by_command(knob.options)
    expected = StudyRequest(Program(HERE), Path("out"), **{**ASKED, knob.field: knob.value})
    assert asked == expected
    assert getattr(asked, knob.field) != getattr(StudyRequest(Program(HERE), Path("out"), **ASKED), knob.field)
    if knob.arguments is not None:
        assert by_function(knob.arguments) == expected


def test_prices_are_the_same_wherever_they_are_set() -> None:
    Path("prices.csv").write_text("kind,price\nany,3\n")
    command, function = by_command(["--prices", "prices.csv"]), by_function({"prices": "prices.csv"})
    assert command == function
    assert (command.prices is not None, command.price_per_worker_hour) == (True, 3.0)


def test_every_knob_is_known_here() -> None:
    assert {knob.field for knob in KNOBS} | OF_NOBODY | {"prices"} == {each.name for each in fields(StudyRequest)}
    known = {name for knob in KNOBS for name in knob.arguments or ()}
    assert known | OF_PYTHON | {"prices"} == set(inspect.signature(elastune.tune).parameters)


def test_what_is_told_of_a_knob_is_the_help_of_its_option() -> None:
    shown = "".join(CliRunner().invoke(app, ["tune", "--help"]).output.split())
    told = [each.metadata["help"] for each in fields(StudyRequest) if "help" in each.metadata]
    assert told
    assert [text for text in told if "".join(text.split()) not in shown] == []
