"""A Ray on which a run is submitted as a job, and a node that comes to it: in namespaces with which all ends.

``submitted.py FOLDER PROGRAM`` prints what it saw as JSON. The head takes the job (that is a part of its dashboard) and
has room for no worker.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S = 120.0
STORE_BYTES = 80 << 20
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
PORT = 8265
NODE = [f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats"]
FOUR = re.compile(r'"members":\[\d+(,\d+){3}\]')  # a view of so many, in whatever order they came
HEAD = ["--head", "--num-cpus=0", "--include-dashboard=true", f"--dashboard-port={PORT}", *NODE]


def start(folder: Path, *options: str) -> None:
    """A node of the Ray here; the first one is the head.

    Each node unpacks the job's working directory over what lies there. As nodes of one machine have one folder for
    that, the directory of the job is removed while it runs.
    """
    command = [*RAY, "start", *options]
    with (folder / "ray").open("ab") as said:
        subprocess.run(command, check=True, stdout=said, stderr=said)


def left() -> list[str]:
    """The agents, workers and controllers that run here."""
    results = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if any(word.startswith("elastune") or "AgentActor" in word for word in words):
            results.append(" ".join(words))
    return results


def main(folder: Path, program: Path) -> None:
    """Submit a run that waits for room, add a node, let it grow and end."""
    seen: dict[str, Any] = {}
    start(folder, *HEAD)
    work, out, go = folder / "work", folder / "run", folder / "go"
    work.mkdir()
    shutil.copy(program, work / "mine.py")
    training = ["--set", "epochs=12", "--set", "plain=true", "--set", "pause_s=0.3", "--set", f"until={go}"]
    training += ["--seed", "3", "--workers", "1:4", "--json", "--out", str(out)]
    run = ["python", "-m", "elastune", "run", "mine.py", *training, "--cluster", "ray:workers_per_node=2"]
    address = ["--address", f"http://127.0.0.1:{PORT}", "--submission-id", "the-run", "--working-dir", str(work)]
    with (folder / "said").open("wb") as said:
        job = subprocess.Popen([*RAY, "job", "submit", *address, "--", *run], stdout=said, stderr=said)

    def until(true: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < deadline, (folder / "said").read_text()
            assert job.poll() is None, (folder / "said").read_text()
            time.sleep(0.1)

    def heard(text: str, least: int = 1) -> bool:
        return (folder / "said").read_text().count(text) >= least

    until(lambda: heard("wait for Ray nodes") or heard("waiting for actors"))
    seen["waits"] = not (out / "journal.jsonl").exists()
    start(folder, "--address=127.0.0.1:6379", "--num-cpus=2", *NODE)
    until(lambda: heard("has come"))
    journal = out / "journal.jsonl"
    until(lambda: journal.exists() and '"kind":"reported"' in journal.read_text())
    start(folder, "--address=127.0.0.1:6379", "--num-cpus=2", *NODE)
    until(lambda: heard("has come", 2))
    until(lambda: FOUR.search(journal.read_text()))
    go.touch()
    seen["code"] = job.wait(LIMIT_S)
    status = [*RAY, "job", "status", "--address", f"http://127.0.0.1:{PORT}", "the-run"]
    seen["succeeded"] = "succeeded" in subprocess.run(status, capture_output=True, text=True, check=True).stdout
    deadline = time.monotonic() + LIMIT_S
    while left() and time.monotonic() < deadline:  # Ray ends actors when it comes to it
        time.sleep(0.1)
    seen["left"] = left()
    print(json.dumps(seen))


if __name__ == "__main__":
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of the job's "python", too
    main(Path(sys.argv[1]), Path(sys.argv[2]))
