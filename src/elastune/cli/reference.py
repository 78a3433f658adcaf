"""The reference of the site (``make docs``): every command and its options, with their keywords in Python.

``python -m elastune.cli.reference`` prints it.
"""

from __future__ import annotations

import inspect
from typing import Any

import typer

from elastune.cli.app import app
from elastune.core.fields import settings_of
from elastune.core.run import ExecutionSettings
from elastune.runtime.settings import RunSettings
from elastune.tuning.cluster_plan.settings import PlanSettings
from elastune.tuning.study.settings import FrontierSettings, StudySettings

FUNCTIONS = {
    "run": ("run", RunSettings),
    "tune": ("tune", StudySettings),
    "frontier": ("find_frontier", FrontierSettings),
    "plan": ("find_plan", PlanSettings),
}
"""Commands that are functions of the package, too, and the settings that are their keywords."""
EXECUTION = "execution"


def commands_reference() -> str:
    """Return all commands of elastune as Markdown: a section for each, in the order of ``elastune --help``."""
    group: Any = typer.main.get_command(app)
    return "\n\n".join(_section(name, command) for name, command in group.commands.items())


def _section(name: str, command: Any) -> str:
    words = " ".join(command.collect_usage_pieces(typer.Context(command)))
    lines = [f"## elastune {name}", f"```text\nelastune {name} {words}\n```", _paragraphs(str(command.help))]
    function, kind = FUNCTIONS.get(name, ("", None))
    if function:
        lines.append(f"In Python: `elastune.{function}`, with the keywords below.")
    rows = [_row(parameter, kind) for parameter in command.params if "--help" not in parameter.opts]
    return "\n\n".join([*lines, "\n".join(["| option | what it says |", "|---|---|", *rows])])


def _paragraphs(text: str) -> str:
    """The help of a command; its examples, which are indented, as they are."""
    return _escaped(inspect.cleandoc(text.replace("\b\n", "")))


def _row(parameter: Any, kind: type | None) -> str:
    option = max(parameter.opts, key=len)
    names = [f"`{each}`" for each in (*parameter.opts, *parameter.secondary_opts)]
    if not option.startswith("--"):
        names = [f"`{parameter.name.upper()}`"]
    elif kind is not None:
        keyword = _keyword(option, kind)
        if not keyword:
            names.append("(no keyword)")
        elif keyword != option.removeprefix("--").replace("-", "_"):
            names.append(f"`{keyword}`")
    return f"| {', '.join(names)} | {_escaped(' '.join(str(parameter.help or '').split()))} |"


def _keyword(option: str, kind: type) -> str:
    """The keyword that has the option's value in Python; "" for an option of the command line alone."""
    names = {setting.option_of(name): name for name, setting in settings_of(kind).items()}
    execution = {setting.option_of(name): name for name, setting in settings_of(ExecutionSettings).items()}
    value = execution.get(option)
    return names.get(option, "" if value is None else f"{EXECUTION}.{value}")


def _escaped(text: str) -> str:
    """Plain text as Markdown that shows the same."""
    for sign in "\\*_<>[]`$|":
        text = text.replace(sign, f"\\{sign}")
    return text


if __name__ == "__main__":
    print(commands_reference())
