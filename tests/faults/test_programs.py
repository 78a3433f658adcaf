"""Odd programs: each run has a clear outcome, in time, with one cause told once, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.soaked import soaked

from elastune.cli import main
from elastune.core.journal.files import read
from elastune.core.journal.records import Record, WorkerGone
from elastune.runtime.clusters.local import LocalCluster

sys.path.insert(0, str(Path(__file__).parent))

from odd_programs import PROGRAMS, OddProgram

BEYOND_HEARTBEAT_S = 40.0  # of which a busy machine may need most; what hangs does so for 100 s and more
LEFT_LIMIT_S = 20.0
MARK = "ELASTUNE_ODD_PROGRAM"
LEFT_BY_A_RUN = {"journal.jsonl", "journal.jsonl.lock", "logs", "checkpoints", "report.html"}


@dataclass(frozen=True)
class Said:
    """What the command said."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def json(self) -> dict[str, Any]:
        (line,) = self.out.splitlines()
        data = json.loads(line)
        assert isinstance(data, dict)
        return data


def records(out: Path) -> list[Record]:
    return [entry.record for entry in read(out / "journal.jsonl")]


def named_children(server: int) -> dict[int, bytes]:
    """The command lines of all children but the first one, which is its guard."""
    _, *children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    results = {}
    for child in children:
        with contextlib.suppress(OSError):
            results[int(child)] = Path(f"/proc/{child}/cmdline").read_bytes()
    return results


def marked(mark: str) -> list[str]:
    """The processes that have ``mark`` in the environment that they were started with."""
    results = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes() and int(path.name) != os.getpid():
                results.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return results


def arguments_for(odd: OddProgram, folder: Path) -> list[str]:
    path = folder / "odd.py"
    path.write_text(odd.text())
    return [
        *("run", str(path), "--workers", str(odd.workers), "--slots", "2", "--heartbeat", odd.heartbeat),
        *("--out", str(folder / "out"), "--json"),
    ]


def on_the_shared_cluster(
    odd: OddProgram, folder: Path, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> Said:
    monkeypatch.setattr("elastune.runtime.job.run.LocalCluster", lambda capacity: contextlib.nullcontext(cluster))
    capfd.readouterr()
    began = time.monotonic()
    code = main(arguments_for(odd, folder))
    seconds = time.monotonic() - began
    out, err = capfd.readouterr()
    deadline = time.monotonic() + LEFT_LIMIT_S
    server = cluster.launcher.server().pid
    left = named_children(server)
    while not all(name.startswith(b"sleep") for name in left.values()):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
        left = named_children(server)
    for daemon in left:  # it would end with the cluster
        os.kill(daemon, 9)
    assert cluster.free == cluster.capacity
    return Said(code, out, err, seconds)


def in_a_process(odd: OddProgram, folder: Path) -> Said:
    mark = str(folder)
    temporary = folder / "tmp"
    temporary.mkdir()
    env = {**os.environ, MARK: mark, "TMPDIR": str(temporary)}
    began = time.monotonic()
    command = [sys.executable, "-m", "elastune", *arguments_for(odd, folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=env, cwd=folder)
    seconds = time.monotonic() - began
    deadline = time.monotonic() + LEFT_LIMIT_S
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left
    assert {path.name for path in temporary.iterdir()} <= {f"torchinductor_{getpass.getuser()}"}  # torch's own
    return Said(done.returncode, done.stdout, done.stderr, seconds)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "odd", [one for odd in PROGRAMS for one in (soaked(odd) if odd.soak else [odd])], ids=lambda odd: odd.name
)
def test_an_odd_program(
    odd: OddProgram, cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    said = (
        in_a_process(odd, tmp_path) if odd.alone else on_the_shared_cluster(odd, tmp_path, cluster, monkeypatch, capfd)
    )
    start_s = 15.0 * odd.servers if odd.alone else 0.0  # imports torch, perhaps on a busy machine
    assert "Traceback" not in said.err, said.err
    assert said.code == odd.code, said
    if odd.code == 2:
        assert said.out == ""
        (line,) = said.err.splitlines()
        cause = line
    elif odd.code:
        cause = said.json["failed"]["detail"]
        (line,) = [line for line in said.err.splitlines() if line.startswith("elastune: the run failed")]
        assert cause[:200] in line
    else:
        assert said.json["stopped"] == "complete"
        assert said.json["steps"] == 4
        cause = ""
    for part in odd.says:
        assert part.format(line=odd.line) in cause, cause
    assert len(cause) < 12_000
    out = tmp_path / "out"
    if odd.code != 2:
        lost = [record for record in records(out) if isinstance(record, WorkerGone) and record.how == "lost"]
        assert odd.lost in (None, len(lost)), lost
        assert {path.name for path in out.iterdir()} <= LEFT_BY_A_RUN
        logs = "".join(path.read_text(errors="replace") for path in sorted((out / "logs").iterdir()))
        assert odd.logged in logs
    assert said.seconds < float(odd.heartbeat.rstrip("s")) + BEYOND_HEARTBEAT_S + start_s, said.seconds
