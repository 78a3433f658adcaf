"""The reference of options in ``docs/commands.md``, made of the commands and the settings: one row for each option.

``python -m elastune.cli.reference`` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from elastune.cli.app import app
from elastune.core.fields import settings_of
from elastune.core.run import ExecutionSettings
from elastune.runtime.settings import RunSettings
from elastune.tuning.cluster_plan.settings import PlanSettings
from elastune.tuning.study.settings import FrontierSettings, StudySettings

KINDS = {"run": RunSettings, "tune": StudySettings, "frontier": FrontierSettings, "plan": PlanSettings}
HEADER = "| option | of | what it says |\n|---|---|---|"
EXECUTION = "execution"


def options_table() -> str:
    """Return the options of ``KINDS`` as a Markdown table, sorted by name."""
    rows: dict[tuple[str, str], tuple[list[str], str]] = {}
    for command, kind in KINDS.items():
        for option, text in _options(command):
            commands, _ = rows.setdefault((option, text), ([], _keyword(option, kind)))
            commands.append(command)
    lines = [
        f"| {_names(option, keyword)} | {', '.join(commands)} | {_cell(text)} |"
        for (option, text), (commands, keyword) in sorted(rows.items())
    ]
    return "\n".join([HEADER, *lines])


def _options(command: str) -> Iterator[tuple[str, str]]:
    """The name and the help text of each option of ``command``."""
    group: Any = typer.main.get_command(app)
    for parameter in group.commands[command].params:
        if parameter.opts[0].startswith("--") and parameter.opts[0] != "--help":
            yield parameter.opts[0], str(parameter.help)


def _keyword(option: str, kind: type) -> str:
    """The keyword that has the option's value in Python; "" for an option of the command line alone."""
    names = {setting.option_of(name): name for name, setting in settings_of(kind).items()}
    execution = {setting.option_of(name): name for name, setting in settings_of(ExecutionSettings).items()}
    value = execution.get(option)
    return names.get(option, "" if value is None else f"{EXECUTION}.{value}")


def _names(option: str, keyword: str) -> str:
    """The option, and its keyword in Python where that is not the option's name with underscores."""
    if not keyword:
        return f"`{option}` (no keyword)"
    return f"`{option}`" if keyword == option.removeprefix("--").replace("-", "_") else f"`{option}`, `{keyword}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(options_table())
