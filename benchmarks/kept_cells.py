"""Results that hold a row for each study: called again, a benchmark measures only what they lack.

A row has at least ``hypervolume_at``, by budget ("50"). Its key is "instance sampler ... seed", parted by blanks.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from verdicts import Reached

from elastune.journal.atomic import atomic_write

Cells = dict[str, dict[str, Any]]


class Keyed(Protocol):
    """A study."""

    @property
    def key(self) -> str: ...


Measure = Callable[[Any], dict[str, Any]]
"""From a study to its row; one that travels to other processes must be found there by its name."""


def cells_in(path: Path) -> Cells:
    """The rows that the results of ``path`` have, none where there are no results."""
    found: Cells = json.loads(path.read_text())["cells"] if path.exists() else {}
    return found


def complete(
    path: Path,
    wanted: Sequence[Keyed],
    budget: int,
    measure: Measure,
    document: Callable[[Cells], dict[str, Any]],
    processes: int = 1,
) -> Cells:
    """Measure those of ``wanted`` whose rows stop before ``budget``; the results are written after each."""
    cells = cells_in(path)
    told = {key: row["hypervolume_at"] for key, row in cells.items()}
    missing = [study for study in wanted if str(budget) not in told.get(study.key, {})]
    print(f"{len(missing)} of {len(wanted)} studies are missing", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    for key, row in rows(missing, measure, processes):
        cells[key] = row
        print(key, row, flush=True)
        atomic_write(path, (json.dumps(document(cells), indent=1) + "\n").encode())
    return cells


def rows(studies: Sequence[Keyed], measure: Measure, processes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Key and row of each study: in their order by one process, as they end by several."""
    of = partial(_row, measure)
    if processes == 1:
        yield from map(of, studies)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves the pool, which ends its processes
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(of, studies)


def _row(measure: Measure, study: Keyed) -> tuple[str, dict[str, Any]]:
    return study.key, measure(study)


def reached(cells: Cells, budget: int) -> Reached:
    """What was reached by the rows that go so far."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for key, row in cells.items():
        instance, *by, seed = key.split()
        if str(budget) in row["hypervolume_at"]:
            at = found.setdefault(instance, {}).setdefault(" ".join(by), {})
            at[int(seed)] = row["hypervolume_at"][str(budget)]
    return found
