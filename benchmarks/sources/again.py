"""Measures again what ``docs/sources.md`` shows, and prints the new figures beside the committed ones.

    make sources            # or: python -m benchmarks.sources.again
    make sources FULL=1     # or: python -m benchmarks.sources.again --full

The small size has few seeds and rounds, so that it shows whether everything still runs and where figures lie; its
verdicts are mostly "not shown". It begins nothing after 13 minutes, and ends what runs after 15. The full size is that
of the committed results: it prints its hours first.

A run that was interrupted goes on with the parts that had not ended (and within a part, where its script can). A run
that ended begins anew. Results stay in ``--folder``; nothing that is committed changes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sources.compared import Row, Section
from benchmarks.sources.page import DOCUMENTS, RESULTS, ROOT, ages, figures, read, rows_of

from elastune.core.journal.files import atomic_write

SMALL_S, LAST_BEGIN_S = 900, 780
OUT = "OUT"
"""In a part's options: the path of its result."""


@dataclass(frozen=True)
class Part:
    """One script: the result that it writes, and its options at each size.

    ``small_s`` and ``full_h``: about how long it takes on two quiet cores. ``data``: what it needs of the folder of
    data sets ("" where nothing). ``small_writes``: whether the small size has a result.
    """

    result: str
    module: str
    small: str
    full: str
    small_s: int
    full_h: float
    data: str = ""
    small_writes: bool = True


PARTS = (
    Part(
        "splits",
        "benchmarks.parallel.splits",
        f"--rounds 3 --links 1gbit --out {OUT}",
        f"--rounds 5 --out {OUT}",
        120,
        0.2,
    ),
    Part(
        "monitoring",
        "benchmarks.adaptive.monitoring",
        f"--models lenet --workers 2 --modes exact fast --monitors noise_scale --rounds 4 --out {OUT}",
        f"--out {OUT}",
        60,
        6.0,
    ),
    Part(
        "mechanisms",
        "benchmarks.parallel.mechanisms",
        f"--cells mlp_10m:4 --rounds 3 --only ddp,replicated,zero_fast,zero_redundancy,fsdp2 --out {OUT}",
        f"--large --out {OUT}",
        60,
        2.0,
    ),
    Part(
        "topologies",
        "benchmarks.parallel.topologies",
        f"--rounds 3 --size 1048576 --out {OUT}",
        f"--rounds 4 --out {OUT}",
        60,
        0.3,
    ),
    Part("overlap", "benchmarks.parallel.overlap", f"--smoke --out {OUT}", f"--out {OUT}", 20, 0.3),
    Part("overhead", "benchmarks.parallel.overhead", f"--smoke --out {OUT}", f"--out {OUT}", 60, 0.7),
    Part("combined", "benchmarks.sources.combined", f"--smoke --out {OUT}", f"--full --out {OUT}", 60, 3.0),
    Part("genetic_mnist", "benchmarks.sources.genetic_mnist", f"--smoke --out {OUT}", f"--live --out {OUT}", 60, 0.8),
    Part("switching", "benchmarks.adaptive.switching", f"--smoke --out {OUT}", f"--seeds 3 --out {OUT}", 60, 1.5),
    Part(
        "prediction_here",
        "benchmarks.parallel.prediction_here",
        "--smoke",
        f"--minutes 60 --out {OUT}",
        60,
        0.8,
        small_writes=False,
    ),
    Part("adaptive", "benchmarks.adaptive.adaptive", "--smoke", f"--out {OUT}", 60, 4.0, "mnist", False),
    Part(
        "spot",
        "benchmarks.adaptive.spot",
        f"--smoke --no-live --out {OUT}",
        f"--seconds 40 --windows 5 --out {OUT}",
        90,
        0.3,
        "spot_traces",
    ),
)


def hours(parts: Sequence[Part]) -> str:
    """What ``--full`` prints before it starts anything."""
    each = ", ".join(f"{part.result} {part.full_h:g}" for part in parts)
    return f"about {sum(part.full_h for part in parts):.1f} hours on two quiet cores ({each})"


def words(part: Part, full: bool, out: Path) -> list[str]:
    """The command of a part, without the interpreter."""
    options = shlex.split(part.full if full else part.small)
    return ["-m", part.module, *(str(out) if word == OUT else word for word in options)]


def missing(part: Part, data: str | None) -> str:
    """Why a part cannot run here, or ""."""
    if part.data and not (data and (Path(data) / part.data).is_dir()):
        return f"no {part.data} in ELASTUNE_DATA"
    return ""


def left(parts: Sequence[Part], done: Sequence[str]) -> list[Part]:
    """The parts that an interrupted run has not ended."""
    return [part for part in parts if part.result not in done]


def beside(section: Section, committed: Mapping[str, Any], again: Mapping[str, Any]) -> Iterator[str]:
    """Lines: each row of a section as committed and as measured again."""
    before = {row.name: row for row in rows_of(section, committed)}
    after = {row.name: row for row in rows_of(section, again)}
    for name in dict.fromkeys([*before, *after]):
        texts = [shown(rows[name], section) if name in rows else "no such row" for rows in (before, after)]
        yield f"  {name}: {texts[0]} | again {texts[1]}"


def shown(row: Row, section: Section) -> str:
    """A row in a line: figure, interval, number of seeds, verdict."""
    value, interval, seeds, _, verdict = figures(row, section.digits)
    text = f"{value} [{interval}] of {seeds}" if interval else f"{value} of {seeds}" if value else ""
    return f"{text} {verdict.replace('*', '')}".strip()


def measure(folder: Path, full: bool) -> list[str]:
    """Run every part that is left; the names of those that failed or had no time."""
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / "unfinished.json"
    done: list[str] = json.loads(state.read_text()) if state.is_file() else []
    if not state.is_file():
        for part in PARTS:
            (folder / f"{part.result}.json").unlink(missing_ok=True)
        atomic_write(state, b"[]\n")
    failed, began = [], time.monotonic()
    for part in left(PARTS, done):
        spent = time.monotonic() - began
        if reason := missing(part, os.environ.get("ELASTUNE_DATA")):
            print(f"{part.result}: left out: {reason}", flush=True)
        elif not full and spent > LAST_BEGIN_S:
            print(f"{part.result}: left out: no time", flush=True)
            failed.append(part.result)
            continue
        else:
            code = run(words(part, full, folder / f"{part.result}.json"), None if full else SMALL_S - spent)
            seconds = time.monotonic() - began - spent
            print(f"{part.result}: {code} after {seconds:.0f} s", flush=True)
            if code != "ok":
                failed.append(part.result)
                continue
        done.append(part.result)
        atomic_write(state, f"{json.dumps(done)}\n".encode())
    if not failed:
        state.unlink()
    return failed


def run(command: Sequence[str], limit_s: float | None) -> str:
    """Run one part; "ok", its exit code, or that its time was over."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment) as child:
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            child.terminate()
            child.wait()
            return "ended, its time was over"
        except BaseException:
            child.terminate()
            raise
    return "ok" if code == 0 else f"exit code {code}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the size of the committed results")
    parser.add_argument("--folder", type=Path, help="keeps results; default: elastune-out/sources/SIZE")
    options = parser.parse_args()
    folder = options.folder or ROOT / "elastune-out" / "sources" / ("full" if options.full else "small")
    if options.full:
        print(hours(PARTS), flush=True)
    failed = measure(folder, options.full)
    committed, again = read(RESULTS), read(folder)
    for document in DOCUMENTS:
        for section in (each for each in document.sections if each.result in again):
            print(f"{document.name}: {section.title} ({section.compared})")
            print("\n".join(beside(section, committed, again)))
    print("Age of the committed results:", *ages(committed), sep="\n  ")
    if failed:
        print(f"not measured: {', '.join(failed)}; the same command goes on with them")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
