"""What the page shows of journals: small, JSON, and the same however the records come."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.dashboard.studies import STUDY, begun, complete, reported

from elastune.core.journal.files import JournalWriter
from elastune.core.journal.records import (
    ActAsked,
    ActDone,
    Entry,
    Measured,
    ProposalAsked,
    Record,
    Reported,
    RunFinished,
    RunStarted,
    StepsCompleted,
    StudyFinished,
    TrialFinished,
    TrialPaused,
)
from elastune.dashboard.folders import Folders, FollowedFolder, Sent
from elastune.dashboard.run_view import MOST_POINTS, FollowedRun, ThinnedCurve
from elastune.dashboard.study_view import FollowedStudy


def seen(*records: Record) -> FollowedStudy:
    view = FollowedStudy()
    for at, record in enumerate((STUDY, *records)):
        view.observe(Entry(1000.0 + at, record))
    return view


def test_the_front_and_how_it_grew() -> None:
    ends = [complete(0, 0.9, 5.0), complete(1, 0.8, 9.0), complete(2, 0.95, 9.0), complete(3, math.nan, 1.0)]
    view = seen(*(begun(n, lr=0.1) for n in range(4)), *ends)
    head = view.head(running=True)
    assert head["front"] == [0, 2]
    assert head["best"] == "accuracy 0.95 (trial 2)"
    assert head["counts"] == {"complete": 4}
    grown = view.news(0)["growth"]
    assert grown["x"] == [5.0, 7.0]
    assert grown["y"] == sorted(grown["y"])
    assert grown["worker_s"] == [5.0, 23.0]
    assert json.loads(json.dumps([head, view.news(0)], allow_nan=False))
    newest = view.news(view.version - 2)
    assert [row["n"] for row in newest["rows"]] == [2, 3]
    assert [span[0] for span in newest["spans"]] == [2, 3]
    assert "growth" in newest
    assert "growth" not in view.news(view.version - 1), "the last trial is not on the front"


def test_what_it_waits_for_and_what_was_asked() -> None:
    stop = ActAsked("stop", "0123456789abcdef", "someone", trial=1)
    more = ActAsked("budget", "0123456789abcdee", "someone", trials=200)
    view = seen(
        begun(0), begun(1), begun(2), TrialPaused(0, 1, 1.0, 1.0, "no room", True), ProposalAsked(3), stop, more
    )
    head = view.head(running=True)
    assert head["waits"] == [
        "search: trials 1, 2 to report",
        "the search to propose trial 3",
        "free workers for trial 0",
        "stop of trial 1",
    ]
    assert head["budget"]["trials"] == {"asked": 200, "used": 3}
    assert [act["outcome"] for act in head["acts"]] == ["", ""]
    view.observe(Entry(2000.0, TrialFinished(1, "infeasible", reason="stopped")))
    view.observe(Entry(2000.0, ActDone(stop.ask, "stopped")))
    view.observe(Entry(2001.0, StudyFinished("100 trials", 9.0)))
    head = view.head(running=False)
    assert head["waits"] == []
    assert head["state"] == "ended: 100 trials"
    assert [act["outcome"] for act in head["acts"]] == ["", "stopped"]
    assert {row["n"]: row["reason"] for row in view.news(0)["rows"]}[1] == "stopped"


def test_the_front_has_intervals_where_an_error_is_known() -> None:
    run = RunFinished("sha", 1, 10, 100, 5.0, {"accuracy": 0.9}, evaluated_on={"accuracy": 100})
    alone = replace(complete(2, 0.9, 1.0), run=run)
    twice = [begun(0, lr=0.1), begun(1, lr=0.1), complete(0, 0.94, 2.0), complete(1, 0.96, 3.0)]
    view = seen(*twice, begun(2, lr=0.2), alone, begun(3, lr=0.3), complete(3, 0.5, 0.5))
    head = view.head(running=True)
    assert head["front"] == [0, 1, 2, 3]
    low, high = head["intervals"][2]["accuracy"]
    assert (round(low, 3), round(high, 3)) == (0.826, 0.945), "Wilson's interval of 90 of 100"
    assert head["intervals"][0] == head["intervals"][1], "of the mean of both"
    assert head["intervals"][0]["accuracy"][0] < 0.95 < head["intervals"][0]["accuracy"][1]
    assert 3 not in head["intervals"], "nothing is known of its error"


def test_the_same_settings_are_on_the_front_whatever_the_order() -> None:
    rng = random.Random(0)
    points = [(rng.randrange(20) / 20, float(rng.randrange(20))) for _ in range(200)]
    view = seen(*(begun(n) for n in range(200)), *(complete(n, *points[n]) for n in range(200)))
    dominated = {n for n, (a, s) in enumerate(points) if any(b >= a and t <= s and (b, t) != (a, s) for b, t in points)}
    assert view.head(running=True)["front"] == [n for n in range(200) if n not in dominated]
    assert view.news(0)["growth"]["y"] == sorted(view.news(0)["growth"]["y"])


def test_a_run_has_its_ledger_so_far() -> None:
    view = FollowedRun()
    steps = [StepsCompleted(w, 1, 2, 0, 32 * at, 32 * at + 32, 100, at + 1, at + 1) for at in range(3) for w in (0, 1)]
    for record in (RunStarted("p.py", {}, 0, {"workers": 2}), *steps):
        view.observe(Entry(1.0, record))
    assert view.ledger() == {
        "epochs": [[1, 96, 100, 0, 0, 0]],
        "verdict": "96 samples in 3 steps, each seen once",
    }


def test_a_trial_has_its_curves() -> None:
    view = seen(begun(0, lr=0.1), reported(0, 1, accuracy=0.5), reported(0, 2, accuracy=math.inf))
    found = view.curves(0)
    assert found is not None
    assert [point[:2] for point in found["curves"]["accuracy"]] == [[1, 0.5], [2, None]]
    assert view.curves(7) is None


def test_a_long_run_stays_small() -> None:
    view = FollowedRun()
    view.observe(Entry(1.0, RunStarted("p.py", {}, 0, {"workers": 2})))
    for step in range(1, 20_001):
        view.observe(Entry(1.0 + step, Measured(step, 0, step, 1.0 * step, 2, 32, 0.1, {"loss": (1.0 / step, None)})))
    view.observe(Entry(30_000.0, Reported(3, 20_000, 9, 1.0, {"accuracy": 0.5}, epochs=4)))
    head = view.head(running=True)
    points = view.curves()["signal loss"].points
    assert MOST_POINTS / 2 <= len(points) <= 2 * MOST_POINTS
    assert points[0][0] == 1
    assert points[-1][0] == 20_000, "the newest is always there"
    assert [point[0] for point in points] == sorted(point[0] for point in points)
    assert head["now"]["step"] == 20_000
    curves = {name: curve.after(0) for name, curve in view.curves().items()}
    assert len(json.dumps([head, curves], allow_nan=False)) < 300_000


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 100])
def test_a_thinned_curve_keeps_its_ends(count: int) -> None:
    curve = ThinnedCurve(most=4)
    for x in range(count):
        curve.add(x, math.nan)
    assert curve.points[0] == [0, None]
    assert curve.points[-1] == [count - 1, None]
    assert len(curve.points) <= 8
    assert [p[0] for p in curve.points] == sorted({p[0] for p in curve.points})


@pytest.mark.parametrize("often", [1, 2, 3, 5, 13])
def test_a_page_that_gets_differences_of_a_curve_has_the_curve(often: int) -> None:
    curve, seen = ThinnedCurve(most=4), 0
    page: list[list[float | None]] = []
    for x in range(200):
        curve.add(x)
        if x % often == 0:
            stay, points = curve.after(seen)
            page, seen = [*page[:stay], *points], curve.count
            assert page == curve.points
    assert curve.after(curve.count)[1] in ([], curve.points[-1:])


def test_a_folder_is_followed_and_a_journal_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    folder = FollowedFolder("study", tmp_path)
    assert not folder.look()
    path = tmp_path / "journal.jsonl"
    with JournalWriter(path) as journal:
        for record in (STUDY, begun(0), begun(1)):
            journal.write(record)
        assert folder.look()
        folder.advance()
        sent = Sent()
        event = folder.event(sent)
        assert (sent.version, event["running"], event["fresh"], len(event["rows"])) == (3, True, True, 2)
        assert not folder.look(), "nothing is new"
        journal.write(complete(0, 0.5, 1.0))
        folder.advance()
        event = folder.event(sent)
        assert [row["n"] for row in event["rows"]] == [0]
        assert event["counts"] == {"complete": 1, "running": 1}
        assert not event["fresh"]
        assert "program" not in event, "what has not changed is not sent again"
    path.unlink()
    with JournalWriter(path) as journal:
        journal.write(RunStarted("p.py", {}, 0, {"workers": 2}))
    folder.advance()
    event = folder.event(sent)
    assert (event["kind"], event["fresh"]) == ("run", True)
    assert [each.name for each in Folders([tmp_path]).all()] == [tmp_path.name]


def test_neither_torch_nor_optuna_is_imported(tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "journal.jsonl") as journal:
        for record in (STUDY, begun(0), complete(0, 0.5, 1.0)):
            journal.write(record)
    program = (
        "import sys; from pathlib import Path; import elastune.dashboard.server, elastune.dashboard.serve;"
        "from elastune.dashboard.folders import FollowedFolder, Sent; from elastune.dashboard.server import _do;"
        f"f = FollowedFolder('x', Path({str(tmp_path)!r})); f.advance(); f.event(Sent()); f.curves(0);"
        "_do(f, 'stop', {'trial': 0}); print([m for m in ('torch', 'optuna', 'plotly', 'pandas') if m in sys.modules])"
    )
    done: Any = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
