"""Scripts for other frameworks change in one line or two: each has both versions in it, which a variable chooses."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
NAMES = ("accelerated", "fabricated", "hugging", "lightened")


class Chosen(ast.NodeTransformer):
    """A script as it is where ``..._ITSELF`` is set, or is not."""

    def __init__(self, *, itself: bool) -> None:
        self._itself = itself

    def _takes_body(self, test: ast.expr) -> bool | None:
        text = ast.unparse(test)
        if "_ITSELF" not in text:
            return None
        return self._itself != text.startswith("not ")

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        takes = self._takes_body(node.test)
        if takes is None:
            return self.generic_visit(node)
        return node.body if takes else node.orelse

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        takes = self._takes_body(node.test)
        if takes is None:
            return self.generic_visit(node)
        return node.body if takes else node.orelse


def changed_lines(name: str) -> int:
    """Lines of the framework's own script that are others on a session, or more."""
    text = (PROGRAMS / f"{name}.py").read_text()
    before, after = (ast.unparse(Chosen(itself=itself).visit(ast.parse(text))).splitlines() for itself in (True, False))
    assert not any("_ITSELF" in line for line in (*before, *after))
    matched = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return sum(max(i2 - i1, j2 - j1) for what, i1, i2, j1, j2 in matched.get_opcodes() if what != "equal")


@pytest.mark.parametrize("name", NAMES)
def test_one_line_changes_or_two(name: str) -> None:
    assert 1 <= changed_lines(name) <= 2
