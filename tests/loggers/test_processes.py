"""Loggers in processes of their own: what they do to the command that has them, and what becomes of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.fake_package import write_package

from elastune.core.errors import UserError
from elastune.core.journal.files import JournalWriter
from elastune.runtime import logger
from elastune.runtime.logger import check_loggers, logging_to, parse_logger
from elastune.testing.kits.logger import FINISHED, STARTED, reported

TOYS = """
from dataclasses import dataclass
import time
from typing import ClassVar
from elastune.runtime.logger import Logger, LogWriter

@dataclass(frozen=True)
class Away(Logger):
    name: ClassVar[str] = "away"
    def open(self, out, ids):
        print("this is for the log")
        raise ConnectionError("no route to tracker.example:5000")

@dataclass(frozen=True)
class Stuck(Logger):
    name: ClassVar[str] = "stuck"
    every: int = 1
    def open(self, out, ids):
        (out / "stuck").touch()
        time.sleep(600)

@dataclass(frozen=True)
class Needy(Logger):
    name: ClassVar[str] = "needy"
    needs: ClassVar[str] = "a_package_that_nobody_has"
    def open(self, out, ids):
        raise AssertionError
"""
POINTS = {"away": "toy_loggers:Away", "stuck": "toy_loggers:Stuck", "needy": "toy_loggers:Needy", "csv": "toys:Csv"}


@pytest.fixture(autouse=True)
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_package(tmp_path / "site", {"elastune.loggers": POINTS}, {"toy_loggers": TOYS})
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    sys.modules.pop("toy_loggers", None)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_what_is_journaled_meanwhile_is_logged_at_the_end(out: Path) -> None:
    lines: list[str] = []
    with logging_to(["csv"], out, lines.append), JournalWriter(out / "journal.jsonl") as journal:
        for record in (STARTED, reported(10, accuracy=0.5), FINISHED):
            journal.write(record)
    assert lines == []
    assert "metrics/accuracy,0.5" in (out / "csv" / "values.csv").read_text()
    assert "finished" in (out / "csv" / "events.csv").read_text()


def test_a_tracker_that_is_away_costs_one_line(out: Path) -> None:
    lines: list[str] = []
    with logging_to(["away", "csv"], out, lines.append), JournalWriter(out / "journal.jsonl") as journal:
        for record in (STARTED, reported(10, accuracy=0.5), FINISHED):
            journal.write(record)
    (line,) = lines
    assert line == (
        "the logger away failed: ConnectionError: no route to tracker.example:5000; the rest can be logged later: "
        f"elastune report {out} --log away"
    )
    log = (out / "logs" / "logger-away.log").read_text()
    assert "this is for the log" in log
    assert "Traceback" in log
    assert "metrics/accuracy" in (out / "csv" / "values.csv").read_text(), "others go on"


def test_a_tracker_that_hangs_is_left_behind(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "LAST_S", 0.2)
    lines: list[str] = []
    with logging_to(["stuck"], out, lines.append), JournalWriter(out / "journal.jsonl") as journal:
        journal.write(STARTED)
        journal.write(FINISHED)
        deadline = time.monotonic() + 60
        while not (out / "stuck").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    (line,) = lines
    assert line.startswith("the logger stuck had not ended after 0.2 s; the rest can be logged later")


def test_a_logger_ends_after_a_command_that_was_killed(out: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from elastune.runtime.logger import Follower\n"
        "from elastune.core.journal.files import JournalWriter\n"
        "from elastune.testing.kits.logger import STARTED, reported\n"
        "out = Path(sys.argv[1]); follower = Follower('csv', out, print)\n"
        "journal = JournalWriter(out / 'journal.jsonl').__enter__()\n"
        "journal.write(STARTED); journal.write(reported(10, accuracy=0.5))\n"
        "print(follower._process.pid, flush=True); os._exit(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 9
    pid, deadline = int(done.stdout.split()[0]), time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()
    assert "metrics/accuracy,0.5" in (out / "csv" / "values.csv").read_text()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["paper"], "--log must be away or csv or mlflow or needy or stuck or tensorboard or wandb"),
        (["csv:path=x"], "the logger csv has no such option"),
        (["stuck:every=soon"], "every of the logger stuck must be a whole number"),
        (["csv", "stuck", "csv"], "a logger may be named once"),
        (["needy"], "the logger needy needs a_package_that_nobody_has"),
        ([""], "a logger is written NAME"),
    ],
)
def test_wrong_loggers_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(UserError, match="^" + message.replace("(", "\\(")):
        check_loggers(texts)


def test_another_package_cannot_replace_one_of_elastune() -> None:
    assert type(parse_logger("csv")).__module__ == "elastune.loggers.csv"


def test_damaged_progress_is_told(out: Path) -> None:
    (out / "loggers").mkdir()
    (out / "loggers" / "csv.json").write_text('{"entries": "many"}')
    lines: list[str] = []
    with logging_to(["csv"], out, lines.append), JournalWriter(out / "journal.jsonl") as journal:
        journal.write(STARTED)
        journal.write(FINISHED)
    (line,) = lines
    assert "a logger's file must be as it wrote it" in line


def test_no_command_imports_a_tracker() -> None:
    """Nor what else takes most of a second to load, where a command may not need it."""
    rooms = (
        "elastune.cli.results, elastune.report.page, elastune.tuning.study.run, elastune.tuning.frontier.find_frontier"
    )
    heavy = "{'mlflow', 'wandb', 'tensorboard', 'sklearn', 'pandas', 'scipy.stats', 'elastune.loggers'}"
    code = f"import sys, {rooms}; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "set()"
