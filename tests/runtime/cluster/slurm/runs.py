"""A controller of the command line, whose cluster is a Slurm of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.slurm import VirtualSlurm

from elastune.core.journal.files import read
from elastune.core.journal.records import MembershipEvent, Regrouped

PROGRAM = Path(__file__).parents[3] / "faults" / "programs" / "elastic.py"
SCRIPT = str(Path(__file__).parents[4] / "examples" / "slurm.sh")
ELASTUNE = [sys.executable, "-m", "elastune"]
EPOCHS = 12
TRAINING = ["--set", f"epochs={EPOCHS}", "--set", "plain=true", "--seed", "3", "--slots", "4"]
RUN = ["run", str(PROGRAM), *TRAINING, "--workers", "1:4"]
LIMIT_S = 120.0


class Controller:
    """``elastune`` and ``words`` with the cluster ``asked``, its trainings slow until ``go`` is called."""

    def __init__(
        self, slurm: VirtualSlurm, folder: Path, text: str, before: Sequence[str] = (), words: Sequence[str] = RUN
    ) -> None:
        self.slurm, self.folder, self.out = slurm, folder, folder / "run"
        slow = ["--set", "pause_s=0.4", "--set", f"until={folder / 'go'}"]
        command = [*before, *ELASTUNE, *words, *slow, "--cluster", text]
        self._command = [*command, "--json", "--out", str(self.out)]
        self.start()

    def start(self, *more: str) -> None:
        with (self.folder / "said").open("wb") as said, (self.folder / "result").open("wb") as result:
            self.process = subprocess.Popen(
                [*self._command, *more], stdout=result, stderr=said, env=self.slurm.environment
            )

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    def records(self, kind: type) -> list[Any]:
        journal = self.out / "journal.jsonl"
        return [entry.record for entry in read(journal) if isinstance(entry.record, kind)] if journal.exists() else []

    def until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < deadline, (self.said, self.slurm.told())
            assert self.process.poll() is None, (self.said, self.slurm.told())
            time.sleep(0.05)

    @property
    def on(self) -> int:
        """How many train together."""
        if views := self.records(Regrouped):
            return len(views[-1].members)
        events = [record.event for record in self.records(MembershipEvent)]
        return len({event["worker"] for event in events if event["event"] == "running"})

    def until_on(self, workers: int) -> None:
        """Until so many train together."""
        self.until(lambda: self.on == workers)

    def go(self) -> dict[str, Any]:
        """Train on at full speed, to the end; the result."""
        (self.folder / "go").touch()
        assert self.process.wait(LIMIT_S) == 0, self.said
        return json.loads((self.folder / "result").read_text())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def worker_processes(out: Path) -> dict[int, int]:
    """The processes that have the worker logs of the run in ``out`` open, by worker."""
    results = {}
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            log = Path(os.readlink(path))
        except OSError:
            continue
        if log.parent == out.resolve() / "logs" and log.stem.startswith("worker-"):
            results[int(log.stem.partition("-")[2])] = int(path.parts[2])
    return results
