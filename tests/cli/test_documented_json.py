"""The parser of what docs/commands.md says of ``--json``, and objects that need no run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.documented import documented, text_on, unlike

from elastune.cli.chaos import verdict
from elastune.cli.commands.plan import plan
from elastune.cli.commands.run import run
from elastune.cli.commands.search import tune
from elastune.cli.results import result_of
from elastune.core.journal.files import JournalWriter
from elastune.core.journal.records import Entry, Measured, PolicyFailed, RunFailed, RunStarted
from elastune.report.adaptation import adaptation_json, gather_adaptation


def test_the_parser_knows_what_the_text_means() -> None:
    command = """--json: {kind: "run", a (of {all}), b: {c, d (where it is)}, e: [{f, g}] (bytes), h: {name: count},
        i: [low, high]}."""
    assert documented(command) == {
        "kind": (False, None),
        "a": (False, None),
        "b": (True, {"c": (False, None), "d": (True, None)}),
        "e": (False, {"f": (False, None), "g": (False, None)}),
        "h": (False, None),
        "i": (False, None),
    }
    said = {"kind": 1, "a": 1, "b": {"c": 1, "x": 1}, "e": [{"f": 1}], "h": {}}
    assert unlike(said, documented(command)) == ["b.x is not documented", "e.g is not printed", "i is not printed"]


def test_a_run_that_failed(tmp_path: Path) -> None:
    failed = RunFailed("exception", "no luck", 0, 1, wanted_bytes=9)
    with JournalWriter(tmp_path / "journal.jsonl") as journal:
        journal.write(RunStarted("p.py", {}, 0, {"mesh": "data=2"}))
        journal.write(failed)
    result = result_of(tmp_path).data
    text = " ".join(text_on("run").split())
    objects = documented(run, "A run that fails prints ")
    named = re.findall(r"\w+", text[text.index("}}, with mode") + 8 :].split(" as above")[0].replace(" and ", " "))
    assert unlike(result, {**objects, **dict.fromkeys(named, (False, None))}) == []


def test_what_policies_and_chaos_add() -> None:
    started = RunStarted("p.py", {}, 0, {}, adapt={"policies": ["Mine"]})
    seen = Measured(1, 0, 32, 1.0, 1, 32, 0.1, {})
    entries = [Entry(1.0, started), Entry(2.0, seen), Entry(3.0, PolicyFailed("Mine", "after_step", 1, 0, "no"))]
    adapt = adaptation_json(gather_adaptation(entries))["adapt"]
    assert unlike(adapt, documented(run, "also adapt: ")) == []
    assert unlike(verdict(entries).data, documented(run, "also chaos: ")) == []


@pytest.mark.parametrize("command", [run, tune, plan])
def test_every_object_ends(command: Callable[..., Any]) -> None:
    text = text_on(command.__name__)
    assert text.count("{") == text.count("}")
