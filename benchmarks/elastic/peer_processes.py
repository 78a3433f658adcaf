"""The processes of a peer of elastic.py: started, watched by the steps that they note, and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks.common.pauses import Ticks, reached
from benchmarks.programs.workload import OWNER

SETTLED_STEPS = 40  # between two events
LIMIT_S = 300.0  # for any event to show its effect


def peer_python(folder: Path, name: str, requirement: str) -> Path:
    """The interpreter of a virtual environment below ``folder`` that has ``requirement``, and sees this one's torch."""
    home = folder / name
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        print(f"installing {requirement} into {home}", flush=True)
        venv.create(home, with_pip=True, clear=True)
        tag = f"python{sys.version_info.major}.{sys.version_info.minor}"
        path = home / "lib" / tag / "site-packages" / "torch_of_the_benchmark.pth"
        path.write_text(f"{Path(torch.__file__).parents[1]}\n")
        subprocess.run([python, "-m", "pip", "install", "-q", requirement], check=True)
        (home / "installed").touch()
    return python


class Stalled(Exception):
    """What had to happen did not within its limit."""


class Processes:
    """The processes of one job; none outlives the ``with`` block."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self.folder = folder
        self.ticks = Ticks(folder)
        self.environment = {**os.environ, OWNER: str(os.getpid()), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

    def start(self, name: str, *command: object, **options: Any) -> subprocess.Popen[str]:
        log = self._stack.enter_context((self.folder / f"{name}.log").open("a"))
        process = subprocess.Popen(
            [str(part) for part in command],
            **{"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL, "text": True, **options},
            env=self.environment,
            start_new_session=True,
        )
        self._stack.callback(end, process)
        return process

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """``condition()`` once it is neither None nor False, looked at a hundred times a second."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            self.ticks.refresh()
            if (result := condition()) is not None and result is not False:
                return result
            time.sleep(0.01)
        tails = [f"{log.name}: {log.read_text()[-300:]}" for log in self.folder.glob("*.log")]
        raise Stalled(f"{what} did not come within {LIMIT_S:g} s; {' | '.join(tails)}")

    def until_steps(self, steps: int) -> None:
        newest = self.ticks.newest()
        target = (newest.step if newest else 0) + steps
        self.until(lambda: (t := self.ticks.newest()) is not None and t.step >= target, f"step {target}")

    def until_world(self, world: int, since: float, what: str, steps: int = SETTLED_STEPS) -> float:
        return float(
            self.until(lambda: reached(self.ticks, since, lambda tick: tick.world == world, steps), f"{what}: {world}")
        )


def end(process: subprocess.Popen[str]) -> None:
    """Kill ``process`` and its session: torchrun's workers are in sessions of their own, and end with their agent."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.stdin:
        process.stdin.close()


@contextmanager
def job() -> Iterator[Processes]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        yield Processes(stack, Path(folder))
