"""The logger csv: its kit, and its tables as other programs read them."""

from __future__ import annotations

import csv
from pathlib import Path

import pandas as pd

from elastune.loggers.csv import CsvLogger
from elastune.runtime.logger import Logger
from elastune.testing.kits.logger import FINISHED, STARTED, LoggedRun, LoggerKit, reported


def rows(out: Path, table: str) -> list[dict[str, str]]:
    path = out / "csv" / f"{table}.csv"
    return list(csv.DictReader(path.open(newline=""))) if path.exists() else []


class TestCsv(LoggerKit):
    def make(self, folder: Path) -> Logger:
        return CsvLogger()

    def read(self, out: Path, folder: Path) -> dict[str, LoggedRun]:
        runs: dict[str, LoggedRun] = {}
        for row in rows(out, "settings"):
            run = runs.setdefault(row["run"], LoggedRun(parent="" if row["parent"] == "study" else None))
            run.settings[row["name"]] = row["value"]
        for row in rows(out, "values"):
            runs.setdefault(row["run"], LoggedRun()).values[row["name"], int(row["step"] or -1)] = float(row["value"])
        for row in rows(out, "events"):
            run = runs.setdefault(row["run"], LoggedRun())
            if row["topic"].startswith("artifacts/"):
                run.artifacts[row["topic"].removeprefix("artifacts/")] = row["text"]
            run.lines.append(row["text"])
            run.ended = row["topic"] == "state" and row["text"] != "resumed"
        return runs

    def test_pandas_reads_the_curves(self) -> None:
        self.log(STARTED, reported(10, accuracy=0.5, loss=2.0), reported(20, accuracy=0.75, loss=1.0), FINISHED)
        values = pd.read_csv(self.out / "csv" / "values.csv")
        curves = values.pivot_table(index="step", columns="name", values="value", aggfunc="last")
        assert list(curves["metrics/loss"].dropna()) == [2.0, 1.0]

    def test_no_cell_is_a_formula(self) -> None:
        self.log(STARTED, reported(10, **{"=1+1": 1.0}), FINISHED)
        cells = [
            cell for table in ("values", "settings", "events") for row in rows(self.out, table) for cell in row.values()
        ]
        assert any("1+1" in cell for cell in cells)
        assert not [cell for cell in cells if cell.startswith("=")]
