"""Runs and studies on agents of a ``Network``'s hosts, begun by the command line as a user would."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.forked import ForkedProcess, elastune
from tests.support.hosts import Network, enter

from elastune.core.journal.files import read
from elastune.core.journal.records import Regrouped, RunFailed
from elastune.elastic.wire.contact import ask
from elastune.elastic.wire.messages import ResizeAsked
from elastune.parallel.comm.sockets import interface_with

ELASTUNE = [sys.executable, "-m", "elastune"]
PORT = 7070
LIMIT_S = 120.0
LOOK_S = 0.05
WRONG = 2  # the exit code of a command whose user can mend what was wrong


class CommandRefused(AssertionError):
    """The command has ended with exit code 2. Its text is the line that was told, which says what is to be mended."""


class AgentRun:
    """A controller at the network's own address, and agents on its hosts. Everything it writes is in ``folder``.

    ``words``: what the command line does, such as ``run program.py --workers 1:4``. ``token``: where its secret lies;
    ``said``: what the newest controller has told a person.
    """

    def __init__(self, network: Network, folder: Path, *words: str, tls: bool = False) -> None:
        self.network, self.folder = network, folder
        self.token, self.out = folder / "token", folder / "run"
        self.agents: dict[int, ForkedProcess | subprocess.Popen[bytes]] = {}
        where = ["--cluster", f"hosts:{PORT}", "--interface", interface_with(network.address)]
        where += ["--token-file", str(self.token), *(["--tls"] if tls else [])]
        self._words = [*words, *where, "--json", "--out", str(self.out)]
        self._begun = 0
        self.begin()

    def begin(self, *more: str) -> ForkedProcess:
        """Start a controller, with these options too; the one before it has ended."""
        self._begun, self._since = self._begun + 1, time.time()
        with self._file("said").open("wb") as said, self._file("result").open("wb") as result:
            self.controller = elastune(*self._words, *more, out=result, err=said)
        return self.controller

    def agent(self, at: int, workers: int = 2, *more: str) -> None:
        """Start one with so many workers, and ``more`` options, on host ``at``."""
        options = ["--join", self.join, "--token-file", str(self.token), "--workers", str(workers)]
        host = partial(enter, self.network.hosts[at].space.path)
        with (self.folder / f"agent{at}").open("ab") as said:
            words = ["agent", *options, *more, "--name", f"host{at}"]
            self.agents[at] = elastune(*words, out=said, err=said, first=host)

    @property
    def join(self) -> str:
        """Where agents go to."""
        address = f"[{self.network.address}]" if ":" in self.network.address else self.network.address
        return f"{address}:{PORT}"

    def lose(self, at: int) -> None:
        """SIGKILL to all that runs on host ``at``."""
        self.network.hosts[at].kill()
        self.agents.pop(at).wait()

    def resize(self, workers: int) -> None:
        """Ask for so many workers, as ``elastune resize`` does."""
        assert ask(self.out, ResizeAsked(workers, "asked from outside")).taken

    @property
    def said(self) -> str:
        return self._file("said").read_text()

    @property
    def result(self) -> str:
        """What the newest controller has printed for programs."""
        return self._file("result").read_text()

    def records(self, kind: type) -> list[Any]:
        """Those of a kind that the journal has, in order."""
        return [record for _, record in self.entries(kind)]

    def entries(self, kind: type) -> list[tuple[float, Any]]:
        """The same, each after when it was written: seconds since the epoch."""
        journal = self.out / "journal.jsonl"
        entries = read(journal) if journal.exists() else []
        return [(entry.at, entry.record) for entry in entries if isinstance(entry.record, kind)]

    def until(self, true: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        """Wait for it. Raises ``AssertionError`` with what the controller says where it ends, or it takes too long;
        ``CommandRefused`` where it refuses.
        """
        deadline = time.monotonic() + limit_s
        while not true():
            if self.controller.poll() == WRONG:
                failed = [record for at, record in self.entries(RunFailed) if at >= self._since]  # of the training
                why = failed[-1].detail if failed else self.said.strip().rpartition("\n")[2]
                raise CommandRefused(why) from AssertionError(self.said)
            if time.monotonic() > deadline or self.controller.poll() is not None:
                raise AssertionError(self.said)
            time.sleep(LOOK_S)

    def until_on(self, workers: int) -> None:
        """Until so many train together."""
        self.until(lambda: (views := self.records(Regrouped)) and len(views[-1].members) == workers)

    def left(self) -> list[str]:
        """The processes on the hosts."""
        return [f"{pid} {name}" for host in self.network.hosts for pid, name in host.processes.items()]

    def close(self) -> None:
        """Nothing that was started is left. Idempotent."""
        for host in self.network.hosts:
            host.kill()
        for process in (self.controller, *self.agents.values()):
            process.kill()
            process.wait()

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}{self._begun}"
