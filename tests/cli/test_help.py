"""``--help``: panels with the common options first, two examples that can be typed, and no schema of JSON."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from elastune.cli.app import app
from elastune.cli.options import COMMON_OPTIONS, EXAMPLES, OTHERS, PANELS
from elastune.core.fields import COMMON, settings_of
from elastune.core.run import ExecutionSettings
from elastune.runtime.settings import RunSettings
from elastune.tuning.cluster_plan.settings import PlanSettings
from elastune.tuning.study.settings import FrontierSettings, StudySettings

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def help_of(command: str) -> str:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    return result.output


def panels_of(text: str) -> list[str]:
    return [name for name in re.findall(r"^(\w[\w ]*):$", text, re.MULTILINE) if name in PANELS]


@pytest.mark.parametrize("command", ["run", "tune", "frontier"])
def test_panels_are_in_order_and_the_common_options_come_first(command: str) -> None:
    text = help_of(command)
    panels = panels_of(text)
    assert panels[0] == COMMON
    assert panels == sorted(panels, key=PANELS.index)
    assert {"Training", "Execution", "Cluster"} < set(panels)
    common = text.partition(f"\n{COMMON}:\n")[2].partition("\n\n")[0]
    shown = re.findall(r"^  (--[a-z-]+)", common, re.MULTILINE)
    assert shown == [option for option in COMMON_OPTIONS if option in shown]
    assert {"--workers", "--epochs", "--set", "--seed", "--out", "--resume"} <= set(shown)
    assert ("--budget" in shown) == (command != "run")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_two_examples_of_options_that_it_has(command: str) -> None:
    text = help_of(command)
    known = {option for parameter in COMMANDS[command].params for option in parameter.opts}
    known |= {"--workers", "--epochs"}  # elastune resume hands on what it does not know
    assert len(EXAMPLES[command]) == 2
    for line in EXAMPLES[command]:
        assert f"  {line}\n" in text
        assert len(line) <= 100
        program, name, *words = shlex.split(line.partition(" -- ")[0])
        assert (program, name) == ("elastune", command)
        assert {word for word in words if word.startswith("--")} <= known
    assert EXAMPLES.keys() == COMMANDS.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_no_help_holds_a_schema(command: str) -> None:
    assert "--json: {" not in " ".join(help_of(command).split())


@pytest.mark.parametrize("kind", [RunSettings, StudySettings, FrontierSettings, PlanSettings, ExecutionSettings])
def test_every_setting_declares_a_panel(kind: type) -> None:
    panels = {name: setting.panel for name, setting in settings_of(kind).items()}
    assert set(panels.values()) <= set(PANELS) - {OTHERS}, "an empty panel says nothing"
