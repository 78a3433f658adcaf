"""``elastune ls``, ``stop`` and ``logs`` on folders that hold something, nothing, rubbish, and a run that runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastune.core.journal.files import JournalWriter, writer_of
from elastune.core.journal.records import RunFailed, RunFinished, RunStarted, StudyFinished, StudyStarted
from elastune.report.folders import output_folders

Command = Callable[..., Any]
START = RunStarted("p.py", {}, 0, {"workers": 1})
END = RunFinished("sha", 1, 30, 300, 1.0, {"accuracy": 0.5})
STUDY = StudyStarted({"kind": "tune", "objectives": {"accuracy": "max"}, "program": "p.py"})

SLOW = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset

def train(session):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = session.prepare(model, optimizer)
    points = torch.linspace(-1, 1, 64).reshape(64, 1)
    print("begins")
    for _ in session.epochs(10_000):
        for x, y in session.batches(TensorDataset(points, points), batch_size=16):
            session.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
"""


def put(folder: Path, *records: Any) -> Path:
    with JournalWriter(folder / "journal.jsonl") as journal:
        for record in records:
            journal.write(record)
    return folder


@pytest.mark.parametrize(
    ("records", "kind", "state", "best"),
    [
        ((START, END), "run", "finished", "accuracy 0.5"),
        ((START,), "run", "unfinished", ""),
        ((START, RunFailed("exception", "no", 0, 1)), "run", "failed", ""),
        ((START, RunFinished("sha", 1, 3, 30, 1.0, {}, stopped="requested")), "run", "stopped", ""),
        ((STUDY,), "tune", "unfinished", ""),
        ((STUDY, StudyFinished("3 trials", 1.0)), "tune", "finished", ""),
        ((STUDY, StudyFinished("interrupted", 1.0)), "tune", "stopped", ""),
        ((), "other", "unfinished", ""),
    ],
)
def test_a_folder_has_a_state(tmp_path: Path, records: Any, kind: str, state: str, best: str) -> None:
    put(tmp_path / "one", *records)
    (folder,) = output_folders(tmp_path, time.time() + 5)
    assert (folder.kind, folder.state, folder.best) == (kind, state, best)
    assert folder.age_s >= 5
    assert folder.pid is None


def test_ls_lists_the_newest_first(tmp_path: Path, elastune: Command, finished_study: Path) -> None:
    first = put(tmp_path / "all" / "first", START, END)
    put(tmp_path / "all" / "second", START)
    (tmp_path / "all" / "rubbish").mkdir()
    (tmp_path / "all" / "rubbish" / "journal.jsonl").write_text("no\n" * 2)
    os.utime(first / "journal.jsonl", (1.0, 1.0))
    os.utime(tmp_path / "all" / "rubbish" / "journal.jsonl", (2.0, 2.0))
    (tmp_path / "all" / "empty").mkdir()
    data = elastune("ls", tmp_path / "all", "--json").json
    assert data["kind"] == "ls"
    assert {Path(each["out"]).name: each["state"] for each in data["folders"]} == {
        "second": "unfinished",
        "rubbish": "unreadable",
        "first": "finished",
    }
    assert data["folders"][-1]["out"] == str(first)
    lines = [line.split() for line in elastune("ls", "all").out.splitlines() if line.strip().startswith("all/")]
    assert [line[:3] for line in lines] == [
        ["all/second", "run", "unfinished"],
        ["all/rubbish", "other", "unreadable"],
        ["all/first", "run", "finished"],
    ]
    (study,) = elastune("ls", finished_study, "--json").json["folders"]
    assert (study["kind"], study["state"]) == ("tune", "finished")
    assert study["best"].startswith("loss ")
    empty = tmp_path / "all" / "empty"
    assert elastune("ls", empty).out.split() == ["no", "output", "folder", "in", str(empty)], "in 100 columns"
    assert "elastune ls lists a folder" in elastune("ls").line, "nothing was run here"


def test_what_does_not_run_cannot_be_stopped(tmp_path: Path, elastune: Command) -> None:
    out = put(tmp_path / "out", START)
    assert "must run on this machine" in elastune("stop", out).line
    assert "needs an output folder" in elastune("stop", tmp_path).line
    assert "--wait must be a duration" in elastune("stop", out, "--wait", "soon").line
    assert "needs an output folder" in elastune("logs", tmp_path).line
    nothing = elastune("logs", out)
    assert (nothing.code, nothing.out) == (0, "")


def test_the_writer_of_a_journal_is_known(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert writer_of(path) is None
    with JournalWriter(path):
        assert writer_of(path) == os.getpid()
        imports = "from pathlib import Path; from elastune.core.journal.files import writer_of"
        code = f"{imports}; print(writer_of(Path({str(path)!r})))"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert other.stdout.strip() == str(os.getpid()), other.stderr
    assert writer_of(path) is None
    with JournalWriter(path):
        path.with_name("journal.jsonl.lock").write_text("rubbish")
    assert writer_of(path) is None


def test_logs_show_the_last_lines_of_each_worker(tmp_path: Path, elastune: Command) -> None:
    out = put(tmp_path / "out", START, END)
    for folder, name in ((out / "logs", "worker-0"), (out / "trials" / "3" / "logs", "worker-1")):
        folder.mkdir(parents=True)
        (folder / f"{name}.log").write_text("".join(f"line {i} \x1b[31m\n" for i in range(30)))
    shown = elastune("logs", out, "--lines", "2").out.splitlines()
    assert shown == [
        *(f"worker-0 | line {i} \\x1b[31m" for i in (28, 29)),
        *(f"trials/3 worker-1 | line {i} \\x1b[31m" for i in (28, 29)),
    ]
    assert len(elastune("logs", out).out.splitlines()) == 40
    followed = elastune("logs", out, "--lines", "0", "-f")
    assert (followed.code, followed.out) == (0, ""), "it has ended, so nothing follows"


def test_a_run_is_listed_followed_and_stopped(here: Path, elastune: Command) -> None:
    (here / "slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "elastune"]
    run = subprocess.Popen(
        [*command, "run", "slow.py", "--out", "out"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        until = time.monotonic() + 60
        journal = here / "out" / "journal.jsonl"
        while not (journal.is_file() and b'"measured"' in journal.read_bytes()) and time.monotonic() < until:
            time.sleep(0.1)
        (listed,) = elastune("ls", "out", "--json").json["folders"]
        assert (listed["state"], listed["pid"]) == ("running", run.pid)
        follows = subprocess.Popen([*command, "logs", "out", "-f"], stdout=subprocess.PIPE, text=True)
        stopped = elastune("stop", "out", "--json")
        assert json.loads(stopped.out) == {"kind": "stop", "pid": run.pid, "ended": True, "out": "out"}
        assert run.wait(30) == 130
        assert "worker-0 | begins" in follows.communicate(timeout=60)[0], "it ends with the run"
        assert follows.returncode == 0
    finally:
        run.kill()
        run.communicate()
    (listed,) = elastune("ls", "out", "--json").json["folders"]
    assert listed["state"] == "stopped"
    assert list((here / "out" / "checkpoints").iterdir())
