"""What stands beside a figure: every script writes its result in one way, with the conditions of its measurement."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.common import result_file
from benchmarks.common.kept import Rows
from benchmarks.common.result_file import CONDITIONS, conditions, write_result

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(BENCHMARKS.glob("[!p]*/*.py")) + sorted(BENCHMARKS.glob("parallel/*.py"))
RESULTS = sorted(BENCHMARKS.glob("results/*.json"))
NO_RESULTS = {  # what they write is read again by the script that started them, or by nobody
    "peer_processes": "a path for an interpreter",
}
WRITER = {"benchmarks.common.result_file"}


def test_a_result_has_its_conditions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/one.py", "--only", "a b"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_result(tmp_path / "new" / "one.json", {"cells": [1, 2]})
    data = json.loads((tmp_path / "new" / "one.json").read_text())
    assert list(data) == [*CONDITIONS, "cells"]
    assert data["command"] == "OMP_NUM_THREADS=1 python -m benchmarks.one --only 'a b'"
    assert complete(data) == []
    assert data["cells"] == [1, 2]


def test_a_script_may_know_its_machine_better(tmp_path: Path) -> None:
    write_result(tmp_path / "one.json", {"machine": {"gpu": "H100"}})
    assert json.loads((tmp_path / "one.json").read_text())["machine"] == {"gpu": "H100"}


def test_the_commit_says_whether_files_differ_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "benchmarks"
    (here / "results").mkdir(parents=True)
    script, result = here / "result_file.py", here / "results" / "a.json"
    script.write_text("")
    result.write_text("{}")
    monkeypatch.setattr(result_file, "__file__", str(script))
    assert conditions()["commit"] == "unknown", "no repository"
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "one")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    assert re.fullmatch(r"[0-9a-f]{40}", conditions()["commit"])
    result.write_text('{"newer": 1}')
    assert re.fullmatch(r"[0-9a-f]{40}", conditions()["commit"]), "a result is none of what is measured"
    script.write_text("# other")
    assert re.fullmatch(r"[0-9a-f]{40}-changed", conditions()["commit"])


def complete(told: dict[str, Any]) -> list[str]:
    """What is missing of the conditions, or is none."""
    fits = {
        "commit": lambda value: re.fullmatch(r"unknown|[0-9a-f]{7,40}(-changed|-dirty)?", value),
        "command": lambda value: "python " in value,
        "machine": lambda value: isinstance(value, dict) and value,
        "load": lambda value: [len(value[when]) for when in ("begin", "end")] == [3, 3],
        "wall_s": lambda value: value >= 0,
    }
    return [name for name in CONDITIONS if name not in told or not fits[name](told[name])]


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_what_a_committed_result_says_of_its_conditions_is_whole(file: Path) -> None:
    """Results from before there was one way have a command and a machine at most."""
    data = json.loads(file.read_text())
    if isinstance(data, dict) and "wall_s" in data and isinstance(data.get("load"), dict):
        assert complete(data) == []
    elif isinstance(data, dict) and "command" in data:
        assert data["command"]


def writes(tree: ast.AST) -> list[int]:
    """Lines that write a text elsewhere than to the path of a worker's own message, ``Path(out)``."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "write_text"
        and isinstance(node.func.value, ast.Name | ast.Attribute | ast.BoolOp)
    ]


def imports(file: Path) -> set[str]:
    """The other benchmarks that ``file`` imports from, wherever in it."""
    results = {n.module for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ImportFrom) and n.module}
    return {name for name in results if file_of(name).is_file()}


def file_of(module: str) -> Path:
    return (
        BENCHMARKS.parent / f"{module.replace('.', '/')}.py" if module.startswith("benchmarks.") else BENCHMARKS / "no"
    )


def reaches_writer(file: Path, seen: frozenset[str] = frozenset()) -> bool:
    result = imports(file) - seen
    return bool(result & WRITER) or any(reaches_writer(file_of(n), seen | result) for n in result)


@pytest.mark.parametrize("file", [file for file in SCRIPTS if file.stem != "result_file"], ids=lambda file: file.stem)
def test_every_script_writes_its_result_with_conditions(file: Path) -> None:
    text = file.read_text()
    if file.stem not in NO_RESULTS and file.stem != "genetic_mnist":  # that one has a line for each training
        assert writes(ast.parse(text)) == [], "use result_file.write_result"
    if re.search(r'add_argument\(\s*"--(out|write)"', text):
        assert reaches_writer(file), "its result has no conditions"


def test_a_line_for_each_training_has_them_too() -> None:
    text = (BENCHMARKS / "sources" / "genetic_mnist.py").read_text()
    assert "written({**conditions(), **result})" in text
    assert len(writes(ast.parse(text))) == 1


def test_rows_that_are_kept_have_those_of_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/one.py"])
    Rows(tmp_path / "a.json").of("x", lambda: {"y": 1})
    data = json.loads((tmp_path / "a.json").read_text())
    assert complete(data) == []
    monkeypatch.setattr(result_file, "machine_context", lambda: {"cores": 99})
    rows = Rows(tmp_path / "a.json")
    rows.write()  # nothing is measured
    again = json.loads((tmp_path / "a.json").read_text())
    assert {name: again[name] for name in CONDITIONS} == {name: data[name] for name in CONDITIONS}
