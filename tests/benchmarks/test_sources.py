"""The page of the sources: it is what the committed results give, and its verdicts are what its rule gives."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from benchmarks.sources.compared import HOW, Ours, Range, Row, about, about_percent, at_least, at_most, judged
from benchmarks.sources.page import DOCUMENTS, PAGE, conditions, page, read, rows_of

ROOT = Path(__file__).parents[2]
SECTIONS = [section for document in DOCUMENTS for section in document.sections]
VERDICTS = {"agrees", "differs", "not shown", "base"}


def row(given: Range | None, ours: Ours | None, base: bool = False) -> Row:
    return Row("a row", (), (), given, ours, "measured", base)


@pytest.mark.parametrize(
    ("given", "ours", "verdict"),
    [
        (about(1.5), Ours(1.6, (1.5, 1.7), 3), "agrees"),
        (about(1.5), Ours(1.5, (1.2, 1.875), 3), "agrees"),  # both ends of the range
        (about(1.5), Ours(1.5, (1.19, 1.6), 3), "not shown"),  # the value agrees, its interval does not
        (about(1.5), Ours(1.5, (1.6, 1.88), 3), "not shown"),
        (about(1.5), Ours(2.0, (1.9, 2.1), 3), "differs"),
        (about(1.5), Ours(1.0, (0.9, 1.1), 3), "differs"),
        (about(1.5), Ours(1.5, (1.5, 1.5), 2), "not shown"),  # two seeds
        (about(1.5), Ours(9.0, (9.0, 9.0), 2), "not shown"),
        (about(1.5), Ours(1.5, None, 99), "not shown"),  # no interval
        (about(1.5), None, "not shown"),
        (None, Ours(1.5, (1.5, 1.5), 9), "not shown"),
        (about_percent(98.6), Ours(98.2, (98.1, 99.1), 3), "agrees"),
        (about_percent(98.6), Ours(98.0, (97.9, 98.09), 3), "differs"),
        (at_most(1.01), Ours(0.99, (0.9, 1.01), 3), "agrees"),
        (at_most(1.01), Ours(1.03, (1.02, 1.04), 3), "differs"),
        (at_least(1), Ours(1.1, (0.99, 1.2), 3), "not shown"),
    ],
)
def test_the_rule(given: Range | None, ours: Ours | None, verdict: str) -> None:
    result, reason = judged(row(given, ours))
    assert result == verdict
    assert bool(reason) == (verdict == "not shown"), "a verdict that shows nothing says why"


def test_what_others_are_divided_by_has_no_verdict() -> None:
    assert judged(row(about(1), Ours(1, (1, 1), 9), base=True)) == ("base", "")


def test_the_page_is_what_the_results_give() -> None:
    assert PAGE.read_text() == page(read()), "draw it anew: python -m benchmarks.sources.page"


@dataclass
class Table:
    """A table of a section as it is printed: its rows, with the cells that the line below gives for every row."""

    compared: str
    seeds: str
    rows: list[dict[str, str]]


def tables(text: str) -> list[Table]:
    """The tables of all sections with a result."""
    found = []
    for section in SECTIONS:
        below = text.split(f"### {section.title}\n")[1].split("\n#")[0]
        lines = [line.strip("| ").split(" | ") for line in below.splitlines() if line.startswith("| ")]
        if lines:
            (every,) = re.findall(r"In every row: (.*?)\. Interval: ", " ".join(below.split())) or [""]
            common = dict(re.findall(rf"\b({section.seeds}) (\d+)", every))
            if "; not shown (" in every:
                common["verdict"] = "not shown"
            rows = [common | dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
            found.append(Table(section.compared, section.seeds, rows))
    return found


def test_every_verdict_on_the_page_is_what_the_rule_gives_for_its_printed_row() -> None:
    """From the text alone: an interval beside a verdict, and the counts at the top."""
    text = PAGE.read_text()
    results = read()
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    expected = [judged(row)[0] for section in SECTIONS for row in rows_of(section, results)]
    said = [row["verdict"].replace("*", "").split(" (")[0] for table in tables(text) for row in table.rows]
    assert said == expected
    for table in tables(text):
        for row in table.rows:
            if row["verdict"].replace("*", "") in ("agrees", "differs"):
                figure = row[table.compared]
                assert re.fullmatch(r"[\d.]+ \([\d.]+ to [\d.]+\)", figure), "no verdict without an interval"
                assert int(row[table.seeds]) >= 3, "nor with fewer than three seeds"
    for document in DOCUMENTS:
        (counts,) = (row[1:4] for row in cells if row[0] == document.name)
        verdicts = [judged(row)[0] for section in document.sections for row in rows_of(section, results)]
        assert [int(n) for n in counts] == [verdicts.count(v) for v in ("agrees", "differs", "not shown")]


def test_another_result_is_another_page() -> None:
    results = read()
    changed = copy.deepcopy(results)
    (split,) = (r for r in changed["splits"]["rows"] if (r["case"], r["link"]) == ("split", "1gbit"))
    split |= {"speedup": 0.39, "lowest": 0.38, "highest": 0.4}
    line = next(line for line in page(changed).splitlines() if line.startswith("| model split over 4, 1gbit"))
    assert "0.39 (0.38 to 0.40)" in line
    assert line.endswith("**differs** |")
    assert page(changed) != page(results)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_a_section_without_a_result_says_how_to_measure_it(section: Any) -> None:
    results = read()
    results.pop(section.result, None)
    text = page(results).split(f"### {section.title}\n")[1].split("\n#")[0]
    assert f"**Not measured yet**: `{section.command}`" in text
    assert "|" not in text


def test_conditions_are_those_of_the_result() -> None:
    section = next(section for section in SECTIONS if section.result == "splits")
    recorded = {
        "commit": "0123456789abcdef-changed",
        "machine": {"cores": 2, "processor": "a processor", "torch": "2.13.0"},
        "load": {"begin": [0.1, 0.2, 0.3], "end": [1.5, 1, 1]},
        "wall_s": 1234.5,
    }
    line = conditions(section, recorded)
    for part in (
        "0123456789ab;",
        "2 cores, a processor, torch 2.13.0",
        "load 0.1 to 1.5",
        "1,234.5 s",
        section.command,
    ):
        assert part in line
    assert conditions(section, {}) == f"`splits.json`; `{section.command}`.", "what was not recorded is left out"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_a_section_names_what_is_there(section: Any) -> None:
    for module in re.findall(r"python -m ([\w.]+)", section.command):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
    assert re.match(r"python -m |elastune ", section.command)
    assert [place for place in section.room if not (ROOT / place).is_dir()] == []
    for row in rows_of(section, read()):
        assert row.how in HOW
        assert len(row.document) == len(section.document_columns)
        assert len(row.more) == len(section.our_columns)


@pytest.mark.parametrize("count", [0, 1])
def test_a_result_of_few_rows_is_drawn_too(count: int) -> None:
    """As small runs and interrupted ones have them."""
    full = read()
    for section in (each for each in SECTIONS if each.result and each.result != "adaptive"):
        result = {
            key: value[:count] if isinstance(value, list) else value for key, value in full[section.result].items()
        }
        assert section.title in page({**full, section.result: result})
    assert "sync_by_size" not in page({**full, "switching": {"cells": {}}}).split("### Section 6.2")[1].split("###")[0]
    combined = copy.deepcopy(full["combined"])
    for row in combined["combined"]:
        row["speed_up_multiplied"] = None
    del combined["replayed"], combined["at_scale"]
    assert "Do the speed-ups multiply?" not in page({**full, "combined": combined})


def test_the_readme_has_the_same_counts() -> None:
    text = " ".join((ROOT / "README.md").read_text().split()).split("## What it answers")[1].split("## ")[0]
    results = read()
    verdicts = [judged(row)[0] for section in SECTIONS for row in rows_of(section, results)]
    assert f"{verdicts.count('agrees')} rows agree, {verdicts.count('differs')} differ, most show nothing" in text
    assert verdicts.count("not shown") > len(verdicts) / 2
    (both,) = (row for row in results["combined"]["combined"] if row["row"] == "model + data parallel")
    assert f"{both['speed_up_measured']:.2f}, not {both['speed_up_multiplied']:.2f}" in text
