"""Every ``elastune`` command in the pages can be typed: its options are there, and take the values that it gives."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer
from tests.pages.blocks import PAGES, ROOT, Block, all_blocks, blocks
from tests.pages.commands import elastune_commands

from elastune.cli.app import app
from elastune.recipes.datasets import digits

GROUP: Any = typer.main.get_command(app)
BUDGETS = {"--trials", "--budget", "--worker-hours", "--patience"}
"""A study needs one of them."""


@pytest.mark.parametrize(
    "block", [block for block in all_blocks("sh") if elastune_commands(block)], ids=lambda b: b.place
)
def test_a_command_in_a_block_can_be_typed(block: Block) -> None:
    for words in elastune_commands(block):
        takes(words)


def takes(words: list[str]) -> None:
    """Whether the command line takes the words; it starts nothing."""
    if words == ["--version"]:
        return
    name, *rest = words
    assert "..." not in rest, "a command stands in full"
    with GROUP.commands[name].make_context(name, list(rest)) as context:
        study = name in ("tune", "simulate") and not context.params.get("availability")
    own = rest[: rest.index("--")] if "--" in rest else rest
    for file in (word for word in own if word.startswith("examples/")):
        assert (ROOT / file).is_file()
        if name == "simulate" and study:
            assert "def surrogate(" in (ROOT / file).read_text()
    if study and "--resume" not in rest and "grid" not in rest:
        assert BUDGETS & set(rest), "a study needs a budget"


def spans() -> list[tuple[str, str]]:
    """The commands within the text of the pages: between single backquotes, with an option at least."""
    found = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
        for code in re.findall(r"`(elastune [a-z]+ [^`]*--[^`]*)`", text):
            found.append((str(page), " ".join(code.split())))
    return found


@pytest.mark.parametrize(("page", "code"), spans())
def test_an_option_in_the_text_is_one_of_its_command(page: str, code: str) -> None:
    _, name, *rest = shlex.split(code)
    own = rest[: rest.index("--")] if "--" in rest else rest
    if name == "resume":  # takes the options of the command that it continues
        return
    known = {option for each in GROUP.commands[name].params for option in (*each.opts, *each.secondary_opts)}
    options = {word.split("=")[0].rstrip(",.") for word in own if word.startswith("--")}
    assert options - known - {"--help"} == set()


def test_each_block_says_its_language() -> None:
    languages = ("sh", "python", "text", "diff", "toml", "yaml", "csv", "{eval-rst}")
    found = [block for page in PAGES for block in blocks(page)]
    assert found
    assert [block.place for block in found if block.language not in languages] == []


def test_the_ledger_of_the_readme_has_the_samples_that_digits_have() -> None:
    (length, of) = re.findall(r"epoch 1: ([\d,]+)/([\d,]+) seen once", (ROOT / "README.md").read_text())[0]
    assert int(length.replace(",", "")) == int(of.replace(",", "")) == len(digits().train)


def test_what_cannot_be_typed_is_found() -> None:
    with pytest.raises(Exception, match="--wrkers"):
        takes(["run", "train.py", "--wrkers", "2"])
    with pytest.raises(AssertionError, match="a study needs a budget"):
        takes(["tune", "train.py"])
