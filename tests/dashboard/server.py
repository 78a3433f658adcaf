"""A server of the dashboard as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


class Server:
    """A server of ``root``: ``address`` has its token."""

    def __init__(self, root: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "elastune", "dashboard", str(root), *options],
            stderr=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        assert "dashboard: http://" in line, line + self.process.stderr.read()
        self.address = line.partition("dashboard: ")[2].strip()
        self.base, _, self.token = self.address.partition("/?token=")
        self.port = int(self.base.rpartition(":")[2])

    def stop(self) -> None:
        """End it as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


def eventually(holds: Callable[[], bool], within_s: float = 15.0) -> None:
    """Wait until ``holds()``."""
    until = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until, "it did not become true"
        time.sleep(0.05)
