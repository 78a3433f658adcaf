"""Three tables in ``OUT/csv``: ``values.csv``, ``settings.csv`` and ``events.csv``.

One value, setting or event a line, so no column ever has to be added.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from elastune.core.formatting import spreadsheet_cell
from elastune.core.journal.files import atomic_write
from elastune.loggers.events import flat_settings
from elastune.runtime.logger import (
    ArtifactLogged,
    Event,
    LineLogged,
    Logger,
    LogWriter,
    RunBegan,
    RunEnded,
    RunResumed,
    ValuesLogged,
)

FOLDER = "csv"
COLUMNS: dict[str, Sequence[object]] = {
    "values": ("time", "run", "step", "name", "value"),
    "settings": ("run", "parent", "name", "value"),
    "events": ("time", "run", "step", "topic", "text"),
}
RUN, STEP = 1, 2  # columns of values and events


@dataclass(frozen=True)
class CsvLogger(Logger):
    """Tables that any program reads: ``--log csv``.

    Example:
        >>> values = pandas.read_csv("out/csv/values.csv")
        >>> values.pivot_table(index="step", columns="name", values="value", aggfunc="last")
    """

    name: ClassVar[str] = "csv"

    def open(self, out: Path, ids: dict[str, str]) -> LogWriter:
        """Return a writer that adds lines to the tables in ``out``."""
        return CsvWriter(out / FOLDER)


class CsvWriter(LogWriter):
    """Collects lines, and adds them to the tables in ``folder`` when they are flushed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: dict[str, list[Sequence[object]]] = {table: [] for table in COLUMNS}

    def write(self, event: Event) -> None:
        """Collect the lines of ``event``."""
        match event:
            case RunBegan():
                parent = "" if event.parent is None else "study"
                settings = {"name": event.name, **flat_settings(event.settings)}
                self._rows["settings"] += [(event.run, parent, name, value) for name, value in settings.items()]
            case RunResumed():
                if event.step is not None:
                    self._void(event.run, event.step)
                self._add(event, event.step, "state", "resumed")
            case ValuesLogged():
                time = _stamp(event.at)
                self._rows["values"] += [(time, event.run, event.step, *each) for each in event.values.items()]
            case LineLogged():
                self._add(event, event.step, event.topic, event.line)
            case ArtifactLogged():
                self._add(event, event.step, f"artifacts/{event.name}", event.path)
            case RunEnded():
                time = _stamp(event.at)
                self._rows["values"] += [(time, event.run, None, f"results/{n}", v) for n, v in event.values.items()]
                self._add(event, None, "state", f"{event.state}: {event.line}" if event.line else event.state)

    def flush(self) -> None:
        """Add the collected lines to the tables."""
        self._folder.mkdir(exist_ok=True)
        for table, rows in self._rows.items():
            path = self._path(table)
            head = () if path.exists() else (COLUMNS[table],)
            with path.open("a", newline="", encoding="utf-8") as file:
                file.write(_text([*head, *rows]))
            rows.clear()

    def _add(self, event: Event, step: int | None, topic: str, text: str) -> None:
        self._rows["events"].append((_stamp(event.at), event.run, step, topic, text))

    def _void(self, run: str, step: int) -> None:
        """Remove the lines of ``run`` of steps after ``step``, and its results."""
        self.flush()
        for table in ("values", "events"):
            with self._path(table).open(newline="", encoding="utf-8") as file:
                head, *rows = list(csv.reader(file))
            kept = [row for row in rows if row[RUN] != run or (row[STEP] and int(row[STEP]) <= step)]
            atomic_write(self._path(table), _text([head, *kept]).encode())

    def _path(self, table: str) -> Path:
        return self._folder / f"{table}.csv"


def _text(rows: Sequence[Sequence[object]]) -> str:
    file = io.StringIO()
    csv.writer(file).writerows([[spreadsheet_cell(cell) for cell in row] for row in rows])
    return file.getvalue()


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
