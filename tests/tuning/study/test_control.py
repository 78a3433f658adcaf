"""Requests to a study from outside: what is refused, what is done, and what outlives a controller."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.core.journal.files import JournalWriter, read
from elastune.core.journal.folds import TrialTable
from elastune.core.journal.follow import JournalFollower
from elastune.core.journal.records import (
    ActAsked,
    ActDone,
    Record,
    StudyFinished,
    StudyStarted,
    TrialFinished,
    TrialPaused,
    TrialResumed,
    TrialStarted,
)
from elastune.core.run import ExecutionSettings, Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.study.budget import Bounds
from elastune.tuning.study.control.acts import Situation, StudyControl, why_refused
from elastune.tuning.study.control.requests import FOLDER, Inbox, ask_study, request
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune


def space(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_categorical("lr", [0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2]), "epochs": 2}


def studied(program: Program, out: Path, **changes: Any) -> StudyRequest:
    execution = ExecutionSettings(mode="exact", num_slots=2)
    asked = StudyRequest(
        program,
        out,
        objectives={"loss": "min"},
        sampler="grid",
        trials=2,
        workers=1,
        execution=execution,
        config={"pause_s": 0.05},
    )
    return replace(asked, **changes)


def records(out: Path) -> list[Record]:
    return [entry.record for entry in read(out / "journal.jsonl")]


class User:
    """Does ``acts`` one after another while a study runs: each once its condition holds for the journal."""

    def __init__(self, out: Path, *acts: tuple[Callable[[list[Record]], bool], Callable[[], Any]]) -> None:
        self._out, self._acts = out, acts
        self.answers: list[Any] = []
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        follower, seen = JournalFollower(self._out / "journal.jsonl"), list[Record]()
        deadline = time.monotonic() + 60
        for condition, act in self._acts:
            while not condition(seen) and time.monotonic() < deadline:
                time.sleep(0.02)
                seen += [entry.record for entry in follower.read_block()]
            self.answers.append(act())

    def join(self) -> list[Any]:
        self._thread.join(60)
        return self.answers


def begun(trial: int) -> Callable[[list[Record]], bool]:
    return lambda seen: any(isinstance(r, TrialStarted) and r.trial == trial for r in seen)


def paused(trial: int) -> Callable[[list[Record]], bool]:
    return lambda seen: any(isinstance(r, TrialPaused) and r.trial == trial for r in seen)


def test_a_trial_pauses_goes_on_and_another_is_stopped(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    out = tmp_path / "out"
    user = User(
        out,
        (begun(0), lambda: ask_study(out, request("pause", "a test", trial=0))),
        (paused(0), lambda: ask_study(out, request("pause", "a test", trial=0))),
        (begun(1), lambda: ask_study(out, request("stop", "a test", trial=1))),
        (begun(1), lambda: ask_study(out, request("budget", "a test", trials=3))),
        (begun(2), lambda: ask_study(out, request("go_on", "a test", trial=0))),
    )
    tune(studied(tiny, out), space=space, cluster=cluster)
    answers = user.join()
    assert [answer.seen for answer in answers] == [True] * 5
    assert [bool(answer.refused) for answer in answers] == [False, True, False, False, False]
    assert "must run (got 0, paused)" in answers[1].refused
    found = records(out)
    (pause,) = [r for r in found if isinstance(r, TrialPaused)]
    assert pause.trial == 0
    assert pause.reason.startswith("paused by a test, ")
    (resumed,) = [r for r in found if isinstance(r, TrialResumed)]
    assert resumed.trial == 0
    ended = {r.trial: r for r in found if isinstance(r, TrialFinished)}
    assert {number: r.state for number, r in ended.items()} == {0: "complete", 1: "infeasible", 2: "complete"}
    assert ended[1].reason.startswith("stopped by a test, ")
    assert ended[1].seconds > 0
    done = [r.ask for r in found if isinstance(r, ActDone)]
    asked = [r for r in found if isinstance(r, ActAsked)]
    assert sorted(done) == sorted(r.ask for r in asked if not r.refused)
    (stop,) = [r.ask for r in asked if r.act == "stop"]
    assert [r.outcome for r in found if isinstance(r, ActDone) and r.ask == stop] == ["stopped"]
    assert not list((out / FOLDER).iterdir())


def test_a_request_waits_for_the_next_controller(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    out = tmp_path / "out"
    user = User(
        out,
        (begun(0), lambda: ask_study(out, request("pause", "a test", trial=0))),
        (paused(0), lambda: ask_study(out, request("end", "a test"))),
    )
    tune(studied(tiny, out), space=space, cluster=cluster)
    user.join()
    assert isinstance(end := records(out)[-1], StudyFinished)
    assert end.reason == "interrupted"
    assert not ask_study(out, request("stop", "a test", trial=0), wait_s=0.0).seen
    tune(studied(tiny, out, resume=True), space=space, cluster=cluster)
    found = records(out)
    ended = {r.trial: r.state for r in found if isinstance(r, TrialFinished)}
    assert ended == {0: "infeasible", 1: "complete"}


STARTED = StudyStarted({"trials": 5})


def table(*found: Record) -> TrialTable:
    from elastune.core.journal.records import Entry

    trials = TrialTable()
    for record in (STARTED, TrialStarted(0, {}, {"workers": 1}, 0), TrialStarted(1, {}, {"workers": 1}, 0), *found):
        trials.observe(Entry(1.0, record))
    return trials


PAUSED = TrialPaused(0, 1, 1.0, 1.0)


@pytest.mark.parametrize(
    ("act", "refused"),
    [
        (request("stop", "t", trial=0), ""),
        (request("go_on", "t", trial=0), ""),
        (request("pause", "t", trial=1), ""),
        (request("pause", "t", trial=0), "a trial that is to pause must run (got 0, paused)"),
        (request("go_on", "t", trial=1), "a trial that is to go on must be paused (got 1, running)"),
        (request("stop", "t", trial=2), "a trial must be one of the study (got 2): its trials are 0 to 1"),
        (request("workers", "t", workers=3), ""),
        (request("workers", "t", workers=4), "1 to 3 (got 4)"),
        (request("budget", "t", trials=2, budget_s=10.0), ""),
        (request("budget", "t", trials=1), "trials 2 (got 1)"),
        (request("budget", "t", worker_hours=0.5), "worker_hours 1 (got 0.5)"),
        (request("end", "t"), ""),
    ],
)
def test_what_is_refused(act: ActAsked, refused: str) -> None:
    now = Situation(table(PAUSED).trials, fewest=1, room=3, tried=2, elapsed_s=5.0, worker_s=3600.0)
    why = why_refused(act, now)
    assert why == "" if not refused else refused in why


def test_a_frontier_keeps_its_budget_and_its_other_phases() -> None:
    now = Situation(table().trials, "confirm", divided=True)
    assert "divides its budget" in why_refused(request("budget", "t", trials=9), now)
    assert "one of the phase 'confirm'" in why_refused(request("stop", "t", trial=0), now)
    assert not why_refused(request("end", "t"), now)


def test_what_was_asked_and_not_done_outlives_its_controller() -> None:
    stop, more, end = request("stop", "t", trial=1), request("budget", "t", trials=9), request("end", "t")
    control = StudyControl()
    for record in (STARTED, stop, more, end, ActDone(more.ask, "done"), STARTED):
        control.observe(record)
    assert list(control.pending.values()) == [stop], "an end is for one controller"
    assert not control.ends
    assert control.bounds(Bounds(trials=5)) == Bounds(trials=9)
    control.observe(StudyStarted({"trials": 7}))
    assert control.bounds(Bounds(trials=7)) == Bounds(trials=7), "a new command's own budget comes first"


def test_only_requests_of_the_owner_are_taken(tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "journal.jsonl") as journal:
        journal.write(STARTED)
    good = request("end", "t")
    ask_study(tmp_path, good, wait_s=0.0)
    folder = tmp_path / FOLDER
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "1.json").write_text('{"kind":"act_asked","act":"stop"}')
    (folder / "2.json").write_text("[" * 5000)
    (folder / "3.json").symlink_to("/etc/hostname")
    os.mkfifo(folder / "4.json")
    inbox = Inbox(tmp_path)
    assert inbox.take() == [good]
    inbox.remove(good)
    assert not list(folder.iterdir())
    folder.chmod(0o777)
    (folder / "5.json").write_text("{}")
    assert Inbox(tmp_path).take() == [], "others could write there"


def test_a_follower_reads_each_record_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    follower = JournalFollower(path)
    assert follower.read_block() == []
    with JournalWriter(path) as journal:
        journal.write(STARTED)
        assert [entry.record for entry in follower.read_block()] == [STARTED]
        assert follower.read_block() == []
        with path.open("ab") as file:
            file.write(b'{"at":1.0,"ask"')
        assert follower.read_block() == []
        with path.open("ab") as file:
            file.write(b':"ab","outcome":"x","kind":"act_done"}\nno record\n')
        assert [entry.record for entry in follower.read_block()] == [ActDone("ab", "x")]
        assert follower.broken == 1
    path.unlink()
    with JournalWriter(path) as journal:
        journal.write(STARTED)
    assert [entry.record for entry in follower.read_block()] == [STARTED]
    assert follower.generation == 1
