"""Draws ``docs/sources.md``: the figures of three documents beside those of the committed results.

    python -m benchmarks.sources.page             # writes the page
    python -m benchmarks.sources.page --check     # exit code 1 where page and results differ
    python -m benchmarks.sources.page --age       # how many commits each result is old

A test does what ``--check`` does. The page has no date and no age in it, so that it depends on the results alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sources.compared import HOW, NOT_GIVEN, RULE, Document, Row, Section, judged
from benchmarks.sources.heye import HEYE
from benchmarks.sources.kungfu import KUNGFU
from benchmarks.sources.rojas import ROJAS

from elastune.core.journal.files import atomic_write

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "sources.md"
RESULTS = ROOT / "benchmarks" / "results"
USUAL_MACHINE = "2 cores, AMD EPYC, torch 2.13.0+cpu"
DOCUMENTS = (ROJAS, KUNGFU, HEYE)
Results = Mapping[str, Any]

HEAD = f"""\
# Measured against its sources

elastune exists to answer three documents. Each table has a document's figures on the left and this repository's results
on the right. `python -m benchmarks.sources.page` draws the page from `benchmarks/results/`; a test compares them. `make
sources` measures again at a small size, and counts the commits since each result.

Below a table stand what all rows have in common, its interval, the result's file and, where recorded, commit, load and
wall time; then the command. The machine has {USUAL_MACHINE} unless another one is named. Figures
*{NOT_GIVEN}* are in a text that was not at hand; none was filled in.

## The rule of a verdict

{RULE}

*How* is one of five words:

{chr(10).join(f"- *{how}*: {text}" for how, text in HOW.items())}

## What is not answered

- **A real cluster.** Hosts are network namespaces of one machine with two cores. Nothing ran on several hosts or on
  several GPUs.
- **ImageNet** was not trained. ResNet-50 ran some steps on one GPU ([gpu](gpu.md)). Models here are small.
- **32 and 240 GPUs, 128 and 2,048 nodes.** At most 16 workers trained together here. Larger sizes are modelled,
  simulated or replayed.
- **Horovod's throughput** is not measured. One short run shows that its adapter works.
"""


def page(results: Results, documents: Sequence[Document] = DOCUMENTS) -> str:
    """The whole page. ``results``: the JSON of each result by its stem; sections without one say so."""
    parts = [HEAD, summary(results, documents)]
    for document in documents:
        parts.append(f"## {document.name}\n\n{_prose(document.asked)}\n\n{_prose(document.address)}\n")
        parts += [drawn(section, results) for section in document.sections]
    return "\n".join(parts).rstrip() + "\n"


def summary(results: Results, documents: Sequence[Document]) -> str:
    """Verdicts by document, and the sections without a result."""
    lines = [
        "## In short",
        "",
        "| document | agrees | differs | not shown | sections not measured yet |",
        "|---" * 5 + "|",
    ]
    for document in documents:
        counts = Counter(judged(row)[0] for section in document.sections for row in rows_of(section, results))
        missing = sum(section.result not in results for section in document.sections)
        cells = (document.name, *(str(counts[v]) for v in ("agrees", "differs", "not shown")), str(missing))
        lines.append(_line(cells))
    return "\n".join([*lines, ""])


def rows_of(section: Section, results: Results) -> Sequence[Row]:
    """The rows of a section; none where its result is missing."""
    return tuple(section.rows(results[section.result])) if section.result in results else ()


def drawn(section: Section, results: Results) -> str:
    """A section in Markdown."""
    lines = [f"### {section.title}", "", _prose(section.differs), ""]
    if section.result not in results:
        return "\n".join([*lines, f"**Not measured yet**: `{section.command}`", ""])
    rows = rows_of(section, results)
    columns, cells, same = _apart(section, rows)
    lines += [_line(columns), "|---" * len(columns) + "|", *(_line(row) for row in cells)]
    every = f"In every row: {'; '.join(same)}. " if same else ""
    lines += ["", _prose(f"{every}Interval: {section.interval}. {conditions(section, results[section.result])}"), ""]
    after = _prose(section.after(results[section.result]))
    return "\n".join([*lines, *([after, ""] if after else [])])


def _apart(section: Section, rows: Sequence[Row]) -> tuple[list[str], list[list[str]], list[str]]:
    """The columns in which rows differ, their cells, and in words what every row has."""
    names = ["row", *(f"theirs: {name}" for name in section.document_columns), *section.our_columns, section.compared]
    cells = []
    for row in rows:
        value, interval, seeds, how, verdict = figures(row, section.digits)
        figure = f"{value} ({interval})" if interval else value
        cells.append([row.name, *row.document, *row.more, figure, seeds, how if row.ours else "", verdict])
    names += [section.seeds, "how", "verdict"]
    kept, same = [], []
    for nth, name in enumerate(names):
        ours_alone = nth >= len(names) - 3  # empty in rows that nobody measured
        values = {row[nth] for row in cells if row[nth] or not ours_alone}
        shown = name in ("row", section.compared) or "**" in "".join(values)
        if len(rows) < 2 or len(values) != 1 or shown:
            kept.append(nth)
        else:
            same.append(values.pop() if name in ("how", "verdict") else f"{name} {values.pop()}")
    return [names[nth] for nth in kept], [[row[nth] for nth in kept] for row in cells], same


def figures(row: Row, digits: int) -> tuple[str, ...]:
    """Our figure, its interval, its seeds, how it came about, and the verdict."""
    verdict, reason = judged(row)
    said = f"**{verdict}**" if verdict in ("agrees", "differs") else verdict
    said += f" ({reason})" if reason else ""
    if row.ours is None:
        return "", "", "", row.how, said
    low_high = row.ours.interval
    interval = "" if low_high is None else f"{low_high[0]:.{digits}f} to {low_high[1]:.{digits}f}"
    if row.base:
        interval = ""
    return f"{row.ours.value:.{digits}f}", interval, str(row.ours.seeds), row.how, said


def conditions(section: Section, result: Mapping[str, Any]) -> str:
    """The file, with what it was measured as far as it says so (commit, machine, load, time), and the command."""
    machine = result.get("machine") or {}
    named = [f"{machine['cores']} cores"] if "cores" in machine else []
    named += [str(machine[key]) for key in ("processor", "cpu", "gpu") if key in machine]
    named += [f"torch {machine['torch']}"] if "torch" in machine else []
    recorded = [f"commit {str(result['commit'])[:12]}"] if "commit" in result else []
    machine_in_words = ", ".join(named)
    recorded += [machine_in_words] if machine_in_words not in ("", USUAL_MACHINE) else []
    recorded += [f"load {load_of(result)}"] if load_of(result) else []
    recorded += [f"wall time {result['wall_s']:,} s"] if "wall_s" in result else []
    return f"{'; '.join([f'`{section.result}.json`', *recorded])}; `{section.command}`."


def load_of(result: Mapping[str, Any]) -> str:
    """The load averages over one minute, at begin and end; "" where none was recorded."""
    load = result.get("load", result.get("load_average"))
    if isinstance(load, Mapping):
        return f"{load['begin'][0]} to {load['end'][0]}"
    if isinstance(load, Sequence) and load and isinstance(load[0], int | float):
        return f"{load[0]:.1f}"
    return ""


def _prose(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def read(folder: Path = RESULTS) -> dict[str, Any]:
    """The results that the page is drawn from."""
    stems = {section.result for document in DOCUMENTS for section in document.sections if section.result}
    files = [folder / f"{stem}.json" for stem in sorted(stems)]
    return {file.stem: json.loads(file.read_text()) for file in files if file.is_file()}


def ages(results: Results) -> Iterator[str]:
    """Lines: how many commits touched a section's room since its result. Needs git."""
    for document in DOCUMENTS:
        for section in document.sections:
            if section.result in results:
                began = since(section.result, results[section.result])
                count = _git("rev-list", "--count", f"{began}..HEAD", "--", *section.room) if began else ""
                says = f"{count} commits in {', '.join(section.room)} since {began[:12]}" if count else "age not known"
                yield f"{document.name}: {section.title}: {says}"


def since(stem: str, result: Mapping[str, Any]) -> str:
    """The commit that a result was measured at or, where it names none that is known, the one that brought its file."""
    named = str(result.get("commit", "")).split("-")[0]
    if named and _git("rev-parse", "--verify", "--quiet", f"{named}^{{commit}}"):
        return named
    return _git("log", "-1", "--format=%H", "--", f"benchmarks/results/{stem}.json")


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where page and results differ")
    parser.add_argument("--age", action="store_true", help="write nothing; print how many commits each result is old")
    options = parser.parse_args()
    results = read()
    if options.age:
        print("\n".join(ages(results)))
        return 0
    text = page(results)
    if options.check:
        same = PAGE.is_file() and PAGE.read_text() == text
        print(f"{PAGE.relative_to(ROOT)}: {'as the results' if same else 'differs from the results'}")
        return int(not same)
    atomic_write(PAGE, text.encode())
    print(PAGE.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
