"""The page in a real browser: it follows a live study, acts on it, and survives the loss of its server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.dashboard.server import Server, eventually
from tests.dashboard.studies import begun, complete, live_study, reported

from elastune.core.journal.files import JournalWriter, read
from elastune.core.journal.records import (
    ActAsked,
    ActDone,
    Measured,
    Regrouped,
    Reported,
    RunFinished,
    RunStarted,
    TrialFinished,
    WorkerGone,
)

Serve = Callable[..., Server]
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


POINTS = """() => (document.querySelector('#chart-front').data || [])
    .filter((trace) => trace.name === 'front').map((trace) => trace.x.length)[0] || 0"""


def points(page: Any) -> int:
    """The points of the front that are drawn now."""
    return int(page.evaluate(POINTS))


def test_the_front_of_a_live_study_moves_and_a_click_stops_a_trial(serve: Serve, page: Any, tmp_path: Path) -> None:
    out = tmp_path / "study"
    first = (begun(0, lr=0.1), complete(0, 0.9, 5.0), begun(1, lr=0.2), reported(1, 3, accuracy=0.5))
    with live_study(out, *first) as study:
        server = serve(tmp_path, "--token-file", str(tmp_path / "token"))
        page.goto(server.address)
        assert page.url == f"{server.base}/", "the token does not stay in the address"
        page.get_by_role("link", name="study").click()
        page.wait_for_selector("#trial-1")
        assert page.locator("h1").inner_text() == "train.py: best accuracy 0.9 (trial 0)"
        eventually(lambda: points(page) == 1)
        study.write(begun(2, lr=0.3), complete(2, 0.95, 9.0))
        eventually(lambda: points(page) == 2)
        assert "accuracy 0.95 (trial 2)" in page.locator("h1").inner_text()

        asked = time.monotonic()
        page.get_by_role("button", name="Stop trial 1").click()
        page.locator("p.said").get_by_text("acknowledged").wait_for()
        assert time.monotonic() - asked < 2.0
        eventually(lambda: "infeasible" in page.locator("#trial-1").inner_text())
        page.get_by_text("Change the study").click()
        page.get_by_label("Trials", exact=True).fill("2")
        page.get_by_role("button", name="Change the budget").click()
        page.locator("p.said").get_by_text("a budget must not be less than what is used").wait_for()

        server.stop()
        page.get_by_text("The server is lost").wait_for()
        study.write(begun(3, lr=0.4), complete(3, 0.99, 19.0))
        serve(tmp_path, "--token-file", str(tmp_path / "token"), "--port", str(server.port))
        eventually(lambda: points(page) == 3)
        assert not page.get_by_text("The server is lost").is_visible()
    records = [entry.record for entry in read(out / "journal.jsonl")]
    stop, budget = [r for r in records if isinstance(r, ActAsked)]
    assert (stop.act, stop.trial, stop.refused) == ("stop", 1, "")
    assert stop.by.startswith("the dashboard, ")
    assert budget.trials == 2
    assert budget.refused
    assert [r.ask for r in records if isinstance(r, ActDone)] == [stop.ask]
    assert [r.reason for r in records if isinstance(r, TrialFinished) and r.trial == 1] == [f"stopped by {stop.by}"]


def test_what_is_hostile_is_text(serve: Serve, page: Any, tmp_path: Path) -> None:
    out = tmp_path / "<img src=x onerror=alert(1)>"
    with live_study(out, begun(0, **{HOSTILE: HOSTILE}), reported(0, 1, **{HOSTILE: 1.0, "accuracy": 0.5})) as study:
        study.write(TrialFinished(0, "infeasible", reason=HOSTILE))
        logs = out / "trials" / "00000" / "logs"
        logs.mkdir(parents=True)
        (logs / "worker-0.log").write_text(HOSTILE)
        (logs / "worker-1.log").symlink_to("/etc/passwd")
        server = serve(tmp_path)
        page.goto(server.address)
        page.get_by_role("link", name="<img").click()
        page.wait_for_selector("#trial-0")
        page.get_by_role("button", name="0", exact=True).click()
        page.get_by_text("Log of worker-0").click()
        assert page.locator("pre.log").inner_text() == HOSTILE
        assert page.locator("pre.log").count() == 1, "the link leads out of the folder"
        assert HOSTILE in page.locator("#trial-0 td.why").inner_text()
        time.sleep(1.0)  # for its pictures
        assert page.title() != "owned"
        assert page.locator("#page img, #page script").count() == 0


@pytest.mark.parametrize("width", [1400, 500])
def test_a_run_and_the_list_fit(serve: Serve, page: Any, tmp_path: Path, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    with JournalWriter(tmp_path / "run" / "journal.jsonl") as journal:
        journal.write(RunStarted("digits.py", {}, 0, {"workers": 2}))
        for step in range(1, 60):
            journal.write(Measured(step, 0, 32 * step, step / 10, 2, 32, 0.1, {"noise_scale": (50.0 + step, 5.0)}))
            journal.write(Reported(step, step, 32 * step, step / 10, {"accuracy": step / 60}, epochs=60))
        journal.write(WorkerGone(1, "lost", "worker 1 was ended by signal 9"))
        journal.write(Regrouped(2, [0], False, 59, 0.015, 1))
        server = serve(tmp_path)
        page.goto(server.address)
        page.get_by_role("link", name="run").click()
        page.wait_for_selector("#events")
        assert page.locator("h1").inner_text() == "digits.py: accuracy 0.983333"
        assert "pause 15 ms, 1 steps repeated" in page.locator("#events").inner_text()
        eventually(lambda: page.evaluate("document.querySelectorAll('.plot .main-svg').length") >= 4)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        journal.write(RunFinished("sha", 1, 59, 1888, 5.9, {"accuracy": 0.98}))
        eventually(lambda: "accuracy 0.983333" in page.locator("h1").inner_text())
    eventually(lambda: page.locator("header .state").inner_text() == "ended: complete")
    assert json.dumps(page.title()) == '"digits.py"'
