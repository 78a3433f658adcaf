"""The page of commands has the options as the commands have them."""

from pathlib import Path

from elastune.cli.reference import options_table

PAGE = Path(__file__).parent.parent.parent / "docs" / "commands.md"


def test_the_page_has_every_option_as_it_is_declared() -> None:
    assert options_table() in PAGE.read_text(), "put python -m elastune.cli.reference into docs/commands.md"


def test_a_row_names_commands_keyword_and_help() -> None:
    rows = options_table().splitlines()
    assert "| `--trial-timeout`, `trial_timeout_s` | tune | Longest time of one trial: 30m. |" in rows
    assert any(row.startswith("| `--resume` | run, tune, frontier |") for row in rows), "its keyword has its name"
    assert any(row.startswith("| `--dry-run` (no keyword) | run, tune, frontier |") for row in rows)
