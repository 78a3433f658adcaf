"""Benchmarks are run seldom, so what they import of the package is looked at here."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def imported(file: Path) -> list[tuple[str, str]]:
    """(module, name) of every ``from elastune... import name``."""
    found = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    return [(n.module, a.name) for n in found if n.module and n.module.split(".")[0] == "elastune" for a in n.names]


@pytest.mark.parametrize("file", sorted(BENCHMARKS.rglob("*.py")), ids=lambda file: file.stem)
def test_what_a_benchmark_imports_of_the_package_is_there(file: Path) -> None:
    missing = []
    for module, name in imported(file):
        package = importlib.import_module(module)
        if not hasattr(package, name) and importlib.util.find_spec(f"{module}.{name}") is None:
            missing.append(f"{module}.{name}")
    assert not missing
