"""What the README and ``docs/policies.md`` show can be typed as it stands: commands, their options, and Python."""

from __future__ import annotations

import ast
import builtins
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import elastune
from elastune.adapt.policies.base import Policy
from elastune.cli.app import app
from elastune.recipes.datasets import digits

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
POLICIES = (ROOT / "docs" / "policies.md").read_text()
GIVEN = {"elastune", "session", "trial", "train", "space"}  # what the text around a block of the README has


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands() -> Iterator[list[str]]:
    """Every ``elastune ...`` of the README, in words: from its shell blocks and its tables; others' names left out."""
    lines = [line for block in blocks(README, "sh") for line in block.splitlines()]
    lines += [cell for row in README.splitlines() if row.startswith("|") for cell in re.findall(r"`([^`]+)`", row)]
    for line in lines:
        if line.startswith("elastune "):
            yield shlex.split(line, comments=True)[1:]


def options_of(name: str) -> set[str]:
    from typer.main import get_command

    command: Any = get_command(app)
    return {option for each in command.commands[name].params for option in (*each.opts, *each.secondary_opts)}


@pytest.mark.parametrize("words", list(commands()), ids=lambda words: " ".join(words)[:60])
def test_a_command_of_the_readme_has_its_options(words: list[str]) -> None:
    name, *rest = words[: words.index("--")] if "--" in words else words
    known = options_of(name)
    assert [word for word in rest if word.startswith("--") and word.split("=")[0] not in known] == []
    for file in (word for word in rest if word.startswith("examples/")):
        assert (ROOT / file).is_file()
        if name == "simulate":
            assert "def surrogate(" in (ROOT / file).read_text()
    if name in ("tune", "simulate") and "..." not in rest and "--availability" not in rest:
        assert {"--trials", "--budget", "--worker-hours", "--patience"} & set(rest), "a study needs a budget"


def unknown(code: str) -> set[str]:
    """The names that a block uses and nobody has made: no scopes are told apart, so this is the least."""
    tree = ast.parse(code)
    nodes = list(ast.walk(tree))
    made = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    made |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    made |= {
        (a.asname or a.name).split(".")[0] for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names
    }
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return used - made - set(vars(builtins))


@pytest.mark.parametrize("code", blocks(README, "python"), ids=lambda code: code.splitlines()[0][:50])
def test_python_of_the_readme_names_what_there_is(code: str) -> None:
    assert unknown(code) <= GIVEN


def test_what_is_unknown_is_found() -> None:
    code = "from a import b\n@dataclass\nclass C:\n    x: float = math.inf\n    def f(self, y): return b(y)"
    assert unknown(code) == {"dataclass", "math"}


def classes(code: str, given: dict[str, Any]) -> list[type[Any]]:
    """Run a block of ours; the classes in it."""
    module = ModuleType("shown")
    vars(module).update(given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "shown", module)  # dataclasses look there
        exec(compile(code, "page", "exec", dont_inherit=True), vars(module))
    return [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == "shown"]


@pytest.mark.parametrize("code", blocks(POLICIES, "python"), ids=lambda code: code.split("class ")[1].split("(")[0])
def test_python_of_the_policies_page_runs_alone(code: str) -> None:
    found = [each for each in classes(code, {}) if issubclass(each, Policy)]
    assert found
    assert all(each() is not None for each in found)


def test_policies_of_the_readme_run() -> None:
    codes = [code for code in blocks(README, "python") if "elastune.Policy" in code]
    names = [each.__name__ for code in codes for each in classes(code, {"elastune": elastune})]
    assert names == ["GNSPolicy", "Doubling"]


def test_the_ledger_of_the_readme_has_the_samples_that_digits_have() -> None:
    (length, of) = re.findall(r"epoch 1: ([\d,]+)/([\d,]+) seen once", README)[0]
    assert int(length.replace(",", "")) == int(of.replace(",", "")) == len(digits().train)
