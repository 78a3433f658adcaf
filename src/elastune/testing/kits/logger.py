"""Tests that every logger must pass, for inheritance.

class TestMine(LoggerKit):
    def make(self, folder: Path) -> Logger: ...
    def read(self, out: Path, folder: Path) -> dict[str, LoggedRun]: ...
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elastune.core.journal.files import JournalWriter
from elastune.core.journal.records import (
    ArtifactKept,
    Checkpointed,
    Decided,
    HostsHeld,
    Measured,
    Record,
    Regrouped,
    Reported,
    RunFailed,
    RunFinished,
    RunStarted,
    StudyFinished,
    StudyStarted,
    TrialFinished,
    TrialPaused,
    TrialRegrouped,
    TrialReported,
    TrialResumed,
    TrialStarted,
)
from elastune.loggers.follow import follow
from elastune.runtime.job.output import JOURNAL
from elastune.runtime.logger import Logger


@dataclass
class LoggedRun:
    """A run, as it is read back from where it was logged.

    Attributes:
        parent: The key of the study of a trial; None for others.
        settings: Texts by name, such as "config.lr".
        values: The last value for each name and step.
        lines: All lines for people, in order; others may stand around the text.
        artifacts: Paths by name.
        ended: Whether the tracker counts the run as over.
    """

    parent: str | None = None
    settings: dict[str, str] = field(default_factory=dict)
    values: dict[tuple[str, int], float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    artifacts: dict[str, str] = field(default_factory=dict)
    ended: bool = False

    def says(self, text: str) -> int:
        """How many lines have ``text``."""
        return sum(text in line for line in self.lines)


EXECUTION = {"workers": 2, "mode": "exact"}
STARTED = RunStarted("digits.py", {"lr": 0.5}, 7, EXECUTION, epochs=3, defaults={"lr": 0.1, "net": {"width": 8}})
FINISHED = RunFinished("sha", 3, 40, 1280, 4.5, {"accuracy": 0.9})
STUDY = StudyStarted({"kind": "tune", "program": "digits.py", "seed": 0, "defaults": {"lr": 0.1, "width": 8}})


def measured(step: int, **signals: float) -> Measured:
    """Return what monitors measured after ``step`` steps."""
    values: dict[str, tuple[float, float | None]] = {name: (value, None) for name, value in signals.items()}
    return Measured(step, 0, 32 * step, 0.1 * step, 2, 32, 0.5, values)


def reported(step: int, **metrics: float) -> Reported:
    """Return a program's report after ``step`` steps."""
    return Reported(step // 10, step, 32 * step, 0.1 * step, metrics)


def decided(step: int) -> Decided:
    """Return a decision of the policy gns."""
    return Decided("gns", step, {"batch_size": 64}, measured(step, noise_scale=412.0), "applied")


class LoggerKit(ABC):
    """What a logger has to do. Each test logs a journal and reads it back."""

    @abstractmethod
    def make(self, folder: Path) -> Logger:
        """Return the logger; ``folder``: for what a tracker would keep elsewhere than in the output folder."""

    @abstractmethod
    def read(self, out: Path, folder: Path) -> dict[str, LoggedRun]:
        """Return all runs that were logged of ``out``, by ``run`` of their events: "", "trial-3"."""

    @pytest.fixture(autouse=True)
    def places(self, tmp_path: Path) -> None:
        """Give each test an output folder and a folder for the tracker."""
        self.out, self.folder = tmp_path / "out", tmp_path / "tracker"
        self.out.mkdir()
        self.folder.mkdir()

    def log(self, *records: Record) -> None:
        """Add ``records`` to the journal, and log what is new as a command does."""
        with JournalWriter(self.out / JOURNAL) as journal:
            for record in records:
                journal.write(record)
        over = threading.Event()
        over.set()
        follow(self.out, self.make(self.folder), over)

    def logged(self) -> dict[str, LoggedRun]:
        """What was logged."""
        return self.read(self.out, self.folder)

    def test_all_of_a_run_is_there(self) -> None:
        """Metrics, settings, decisions, workers over time and artifacts."""
        grown = Regrouped(2, [0, 1, 2], True, 20, 0.5, 0)
        saved = Checkpointed(20, str(self.out / "checkpoints" / "step-20"))
        records = (STARTED, HostsHeld({}, {}), measured(1, loss=2.5), decided(10), reported(20, accuracy=0.75), grown)
        self.log(*records, saved, FINISHED)
        run = self.logged()[""]
        assert run.parent is None
        assert run.settings["config.lr"] == "0.5", "the command's value"
        assert run.settings["config.net.width"] == "8", "the program's own"
        assert (run.settings["seed"], run.settings["execution.mode"]) == ("7", "exact")
        assert run.values["signals/loss", 1] == pytest.approx(2.5)
        assert run.values["metrics/accuracy", 20] == pytest.approx(0.75)
        assert (run.values["run/workers", 0], run.values["run/workers", 20]) == (2, 3)
        assert run.says("step 10: gns: batch 32 -> 64") == 1
        assert run.artifacts["checkpoint"] == saved.path
        assert run.ended

    def test_trials_are_children_of_their_study(self) -> None:
        """Each trial is a run of its own, with settings, metrics, workers and result."""
        of_trials: list[Record] = []
        for trial, width in ((0, 8), (1, 16)):
            of_trials += [
                TrialStarted(trial, {"width": width}, EXECUTION, trial),
                TrialReported(trial, reported(10, accuracy=0.5 + trial / 4), workers=2.0),
                TrialPaused(trial, 1, 1.0, 2.0, "not among the best"),
                TrialResumed(trial, 2),
                TrialRegrouped(trial, Regrouped(2, [0, 1, 2, 3], True, 15, 0.1, 0)),
                TrialFinished(trial, "complete", {"accuracy": 0.75}, {"accuracy": 0.75}, seconds=3.0),
                ArtifactKept(trial, 20, f"trials/{trial}/checkpoint", "sha"),
            ]
        crashed = TrialFinished(2, "infeasible", reason="out of memory")
        refused = TrialFinished(3, "rejected", reason="workers * micro_batch == 64")
        rest = [TrialStarted(2, {"width": 99}, EXECUTION, 2), crashed, refused, StudyFinished("4 trials", 9.0)]
        self.log(STUDY, *of_trials, *rest)
        runs = self.logged()
        assert runs.keys() == {"", "trial-0", "trial-1", "trial-2", "trial-3"}
        assert {run.parent for name, run in runs.items() if name} == {""}
        trial = runs["trial-1"]
        assert (trial.settings["config.width"], trial.settings["config.lr"]) == ("16", "0.1")
        assert trial.values["metrics/accuracy", 10] == pytest.approx(0.75)
        assert (trial.values["run/workers", 0], trial.values["run/workers", 15]) == (2, 4)
        assert trial.says("paused after epoch 1: not among the best") == 1
        assert trial.artifacts["checkpoint"] == str(self.out / "trials/1/checkpoint")
        assert runs[""].values["trials/accuracy", 1] == pytest.approx(0.75)
        assert all(run.ended for run in runs.values())

    def test_what_was_logged_is_not_logged_again(self) -> None:
        """A command that resumes logs its own part, and that of a logger that died."""
        self.log(STARTED, reported(10, accuracy=0.5), decided(10))
        self.log(RunStarted("digits.py", {}, 7, EXECUTION, resumed_step=10), reported(20, accuracy=0.75), FINISHED)
        self.log()
        runs = self.logged()
        assert runs.keys() == {""}, "it is the same run"
        assert runs[""].says("gns: batch 32 -> 64") == 1
        assert runs[""].values["metrics/accuracy", 10] == pytest.approx(0.5)
        assert runs[""].values["metrics/accuracy", 20] == pytest.approx(0.75)
        assert runs[""].settings["config.lr"] == "0.5"
        assert runs[""].ended

    def test_repeated_steps_count_once(self) -> None:
        """A run that goes on from an earlier step replaces what was logged of later ones."""
        self.log(STARTED, reported(10, accuracy=0.5), reported(20, accuracy=0.25))
        again = RunStarted("digits.py", {}, 7, EXECUTION, resumed_step=10)
        self.log(again, reported(20, accuracy=0.75), FINISHED)
        assert self.logged()[""].values["metrics/accuracy", 20] == pytest.approx(0.75)

    def test_any_number_and_any_name_is_taken(self) -> None:
        """Values that are not finite, and names from a program that nobody checks, end no logger."""
        hostile = {"=1+1": 1.0, "a/b c\n\x1b[31m": 2.0, "größe": 3.0, "nan": math.nan, "inf": math.inf}
        self.log(STARTED, reported(10, **hostile), reported(20, accuracy=0.75), FINISHED)
        assert self.logged()[""].values["metrics/accuracy", 20] == pytest.approx(0.75)

    def test_a_refused_command_leaves_no_trace(self) -> None:
        """Neither does a logger that has nothing to log."""
        self.log(STARTED, HostsHeld({}, {}), RunFailed("user_error", "a wrong value", 0))
        assert self.logged() == {}

    def test_a_failed_run_has_ended(self) -> None:
        """With the reason."""
        self.log(STARTED, reported(10, accuracy=0.5), RunFailed("exception", "ZeroDivisionError: division", 1))
        run = self.logged()[""]
        assert run.ended
        assert run.says("ZeroDivisionError: division") == 1
