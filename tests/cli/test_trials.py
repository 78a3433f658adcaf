"""``elastune trials``, ``budget`` and ``resize`` on studies: requests, refusals and wrong input."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cli.documented import documented, text_on, unlike

from elastune.core.journal.files import JournalWriter
from elastune.core.journal.folds import TrialTable
from elastune.core.journal.records import RunStarted, StudyStarted, TrialStarted
from elastune.tuning.study.control.acts import Situation, why_refused
from elastune.tuning.study.control.requests import FOLDER, Inbox

Command = Callable[..., Any]
STUDY = StudyStarted({"kind": "tune", "objectives": {"accuracy": "max"}, "program": "p.py"})


@contextmanager
def controlled(out: Path) -> Iterator[None]:
    """A study whose controller acknowledges requests, and does nothing else."""
    ended, table = threading.Event(), TrialTable()
    with JournalWriter(out / "journal.jsonl") as journal:
        for record in (STUDY, TrialStarted(0, {}, {"workers": 1}, 0)):
            table.observe(journal.write(record))
        inbox = Inbox(out)

        def look() -> None:
            while not ended.is_set():
                for act in inbox.take():
                    now = Situation(table.trials, room=4)
                    journal.write(replace(act, refused=why_refused(act, now)))
                    inbox.remove(act)
                time.sleep(0.05)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def test_a_running_study_answers(elastune: Command, tmp_path: Path) -> None:
    with controlled(tmp_path):
        begun = time.monotonic()
        done = elastune("trials", tmp_path, "stop", 0, "--json")
        assert time.monotonic() - begun < 2.0
        refused = elastune("trials", tmp_path, "go-on", 0)
        resized = elastune("resize", tmp_path, 3)
        wide = elastune("resize", tmp_path, 5)
        budget = elastune("budget", tmp_path, "--trials", 9, "--budget", "2h", "--worker-hours", 3, "--json")
    printed = json.loads(done.out)
    assert (printed["seen"], printed["trial"]) == (True, 0)
    assert unlike(printed, documented(text_on("trials"))) == []
    assert unlike(json.loads(budget.out), documented(text_on("budget"))) == []
    assert refused.code == 2
    assert "must be paused (got 0, running)" in refused.err
    assert resized.code == 0
    assert wide.code == 2
    assert "1 to 4 (got 5)" in wide.err


def test_a_study_that_does_not_run_keeps_the_request(elastune: Command, tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "journal.jsonl") as journal:
        journal.write(STUDY)
    done = elastune("trials", tmp_path, "stop", 0)
    assert done.code == 0
    assert "the request waits" in done.out
    assert len(list((tmp_path / FOLDER).iterdir())) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("trials", ".", "stop", "0"), "a study or a frontier has trials"),
        (("trials", "run", "stop", "0"), "a study or a frontier has trials"),
        (("trials", "study", "kill", "0"), "'stop', 'pause', 'go-on'"),
        (("trials", "study", "stop", "--", "-1"), "greater than or equal to 0"),
        (("trials", "study", "stop", str(10**30)), "trial"),
        (("budget", "study"), "needs --trials, --budget or --worker-hours"),
        (("budget", "study", "--worker-hours", "nan"), "worker_hours"),
        (("budget", "study", "--budget", "soon"), "--budget"),
    ],
)
def test_wrong_input(
    elastune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, record in (("run", RunStarted("p.py", {}, 0, {})), ("study", STUDY)):
        with JournalWriter(tmp_path / name / "journal.jsonl") as journal:
            journal.write(record)
    done = elastune(*words)
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert says in done.err
    assert not (tmp_path / "study" / FOLDER).exists()
