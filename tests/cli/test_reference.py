"""The site's reference of commands has the options as the commands have them."""

from __future__ import annotations

from typing import Any

import typer

from elastune.cli.app import app
from elastune.cli.reference import commands_reference


def sections() -> dict[str, str]:
    _, *parts = commands_reference().split("## elastune ")
    return {part.splitlines()[0]: part for part in parts}


def test_every_command_has_a_section_with_every_option() -> None:
    group: Any = typer.main.get_command(app)
    found = sections()
    assert list(found) == list(group.commands)
    for name, command in group.commands.items():
        options = {option for each in command.params for option in each.opts if option.startswith("--")}
        assert {option for option in options - {"--help"} if f"`{option}`" not in found[name]} == set()


def test_a_row_names_keyword_and_help() -> None:
    found = {name: section.splitlines() for name, section in sections().items()}
    assert "| `--trial-timeout`, `trial_timeout_s` | Longest time of one trial: 30m. |" in found["tune"]
    assert any(row.startswith("| `--resume` |") for row in found["run"]), "its keyword has its name"
    assert any(row.startswith("| `--dry-run`, (no keyword) |") for row in found["run"])
    assert "In Python: `elastune.find_frontier`, with the keywords below." in found["frontier"]


def test_what_markdown_would_take_for_itself_is_escaped() -> None:
    assert "\\[default: one at each epoch's end\\]" in sections()["run"]
