"""The recipes: programs as people write them, and the same on a session; the page shows just what differs."""

from __future__ import annotations

import difflib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from tests.support.elastic_runs import Runs

from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster

ROOT = Path(__file__).parents[2]
RECIPES, PAGE = ROOT / "examples" / "recipes", ROOT / "docs" / "recipes.md"
NAMES = ("gpt", "images")
GOOD = {"gpt": (0.0, 2.6), "images": (0.6, 1.0)}  # a guess has 2.77 and 0.25
TWICE = {"gpt": 0.25, "images": 0.25}  # other draws than the plain program's


def body(path: Path) -> list[str]:
    """The lines behind the docstring."""
    return path.read_text().partition('\n"""\n')[2].splitlines()


def differences(name: str) -> list[str]:
    """The page's diff: one line around each place."""
    result = difflib.unified_diff(body(RECIPES / f"{name}_plain.py"), body(RECIPES / f"{name}.py"), lineterm="", n=1)
    return ["" if line.startswith("@@") else line.rstrip() for line in list(result)[2:]][1:]


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_what_differs(name: str) -> None:
    shown = re.findall(r"```diff\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    assert "\n".join(differences(name)) in shown


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    result = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(result)
    return result


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_learns_as_the_plain_program_does_and_alike_on_any_workers(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)  # where the plain one leaves its file
    runs = Runs(cluster, tmp_path, Program(RECIPES / f"{name}.py"))
    one, two = runs(1), runs(2)
    assert one.sha256 == two.sha256
    assert one.reports == two.reports
    ((metric, last),) = two.reports[-1].items()
    low, high = GOOD[name]
    assert low < last <= high
    assert imported(RECIPES / f"{name}_plain.py").main()[-1] == pytest.approx(last, abs=TWICE[name])
    assert (tmp_path / "1" / "best" / metric).is_dir()
