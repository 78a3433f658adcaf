"""A controller that is killed between a request of the page and its act: the page says so, and a resume does it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.dashboard.server import eventually

from elastune.core.journal.files import read
from elastune.core.journal.records import ActAsked, ActDone, TrialFinished, TrialReported
from elastune.dashboard.folders import FollowedFolder, Sent
from elastune.dashboard.server import _do

SCRIPT = """
import pathlib, signal, sys, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a stop takes effect at "go", after the controller's death
for epoch in (1, 2):
    print(f'{{"epoch": {epoch}, "accuracy": {epoch / 4 + float(sys.argv[1])}}}', flush=True)
    while not pathlib.Path(sys.argv[2]).exists():
        time.sleep(0.02)
"""


def records(out: Path, kind: type[Any]) -> list[Any]:
    journal = out / "journal.jsonl"
    return [entry.record for entry in read(journal) if isinstance(entry.record, kind)] if journal.exists() else []


def test_what_was_asked_before_a_death_is_told_and_done(tmp_path: Path) -> None:
    script, space, go, out = (tmp_path / name for name in ("train.py", "space.yaml", "go", "out"))
    script.write_text(SCRIPT)
    space.write_text("lr: {low: 0.0, high: 0.1}\nepochs: 2\n")
    command = f"{sys.executable} {script} {{lr}} {go} {{epochs}}"
    tune = ["tune", "--command", command, "--space", str(space), "--objective", "accuracy:max", "--out", str(out)]
    more = ["--trials", "3", "--workers", "2"]
    controller = subprocess.Popen(
        [sys.executable, "-m", "elastune", *tune, *more], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        eventually(lambda: len(records(out, TrialReported)) == 2, 60.0)  # no further boundary comes before "go"
        folder, page = FollowedFolder("out", out), Sent()
        assert _do(folder, "stop", {"trial": 0}) == {"seen": True, "refused": ""}
    finally:
        controller.send_signal(signal.SIGKILL)
        controller.wait()
    assert records(out, ActAsked)
    assert not records(out, ActDone)
    assert _do(folder, "stop", {"trial": 1}) == {"seen": False, "refused": ""}

    folder.advance()
    shown = folder.event(page)
    assert shown["state"] == "unfinished"
    assert shown["waits"] == ["nobody works on it: elastune resume goes on", "stop of trial 0"]
    assert [(act["trial"], act["outcome"]) for act in shown["acts"]] == [(0, "")]

    go.touch()
    subprocess.run([sys.executable, "-m", "elastune", "resume", str(out)], check=True, timeout=120)
    folder.advance()
    shown = folder.event(page)
    assert shown["waits"] == []
    assert [(act["trial"], bool(act["outcome"])) for act in shown["acts"]] == [(1, True), (0, True)]
    ended = {each.trial: each for each in records(out, TrialFinished)}
    assert [ended[trial].state for trial in sorted(ended)] == ["infeasible", "infeasible", "complete"]
    assert all("the dashboard, " in ended[trial].reason for trial in (0, 1))
