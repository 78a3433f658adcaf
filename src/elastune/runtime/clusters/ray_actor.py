"""The Ray actor of an agent: Ray gives it a node and the resources of its workers; it runs ``elastune agent``.

The agent is a child process of the actor, so that its signals and forks are its own; it is killed with the actor.
An actor may outlive the controller that asked for it, so no call lasts as long as the agent. One call begins it,
and a controller asks for its end again and again. An actor that nobody uses ends by itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastune.core.journal.files import atomic_write

LOOK_S = 1.0
TAIL_BYTES = 4096
CALLS = 16  # at a time: those that wait for the end last, and controllers that have gone may have left some
UNUSED_S = 30.0  # how long an actor stays that nobody begins with, or that nobody asks how its agent has ended
FAILED = 1


@dataclass(frozen=True)
class AgentEnd:
    """How an agent ended: its exit ``code`` (negative: the signal), and the last line that it ``last_line``."""

    code: int
    last_line: str


class AgentActor:
    """Runs one agent, for Ray (``ray.remote``). ``leave``: ends its process, once nobody has use for it; ``unused_s``:
    how long that is waited for."""

    def __init__(self, unused_s: float = UNUSED_S, leave: Callable[[], None] = lambda: os._exit(0)) -> None:
        self._unused_s, self._leave = unused_s, leave
        self._started, self._ended, self._end_read = threading.Event(), threading.Event(), threading.Event()
        self._moved = ""
        self._lock = threading.Lock()
        self._end: AgentEnd | None = None
        threading.Thread(target=self._wait_for_use, name="unused actor", daemon=True).start()

    def here(self) -> None:
        """Can be answered once the actor has a node."""

    def begin(self, token: bytes, options: Sequence[str]) -> None:
        """Run ``elastune agent`` with ``options`` from now on; ``token``: what its token file would hold. The second
        time, by a controller that does not know of the first, nothing happens."""
        with self._lock:
            if self._started.is_set():
                return
            self._started.set()
        threading.Thread(target=self._serve, args=(token, list(options)), name="agent", daemon=True).start()

    def look_at(self, address: str) -> None:
        """From now on its agent, and the workers of that, look for their next controller at ``address``."""
        self._moved = address

    def end(self, limit_s: float) -> AgentEnd | None:
        """How the agent has ended; None where it has not by ``limit_s`` from now."""
        if self._ended.wait(limit_s):
            self._end_read.set()
        return self._end

    def _serve(self, token: bytes, options: Sequence[str]) -> None:
        try:
            self._end = run_agent(token, options, seconds_left, lambda: self._moved)
        except OSError as error:
            self._end = AgentEnd(FAILED, f"it could not be run: {error}")
        self._ended.set()
        if not self._end_read.wait(self._unused_s):
            self._leave()

    def _wait_for_use(self) -> None:
        if not self._started.wait(self._unused_s):
            self._leave()


def run_agent(
    token: bytes, options: Sequence[str], left: Callable[[], float | None], moved: Callable[[], str] = lambda: ""
) -> AgentEnd:
    """Run an agent as a child that dies with this process. ``left``: as ``seconds_left``; ``moved``: where its next
    controller is ("host:port"), "" where that is not known to have moved."""
    with tempfile.TemporaryDirectory(prefix="elastune-ray-") as name:
        folder = Path(name)
        notice, last_line, moves, where = folder / "drained-by-ray", folder / "said", folder / "moves", ""
        arguments = ["--token-file", "/dev/stdin", "--notice-file", str(notice), "--parent", str(os.getpid())]
        arguments += ["--moves", str(moves)]
        with last_line.open("wb") as log:
            agent = subprocess.Popen(
                [sys.executable, "-P", "-m", "elastune", "agent", *options, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        assert agent.stdin is not None
        with suppress(BrokenPipeError), agent.stdin:  # it has ended already, and said why
            agent.stdin.write(token)
        while agent.poll() is None:
            if not notice.exists() and (seconds := left()) is not None:
                atomic_write(notice, f"{seconds:.0f}\n".encode() if seconds else b"")
            if (now := moved()) != where:
                where = now
                atomic_write(moves, json.dumps({"address": where.rpartition(":")[0].strip("[]")}).encode())
            try:
                agent.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                continue
        lines = last_line.read_bytes()[-TAIL_BYTES:].decode(errors="replace").split("\n")
        return AgentEnd(agent.returncode, next((line.strip() for line in reversed(lines) if line.strip()), ""))


def seconds_left() -> float | None:
    """In how many seconds this node's end is due that Ray drains; 0: it told no time; None: it is not drained."""
    import ray
    from ray._private.state import state  # Ray has no public way to ask this; Ray Train asks it so, too

    try:
        deadlines_ms = state.get_draining_nodes()
    except (ray.exceptions.RayError, RuntimeError):  # Ray's head is away: agents need it for nothing else
        return None
    deadline_ms = deadlines_ms.get(ray.get_runtime_context().get_node_id())
    if deadline_ms is None:
        return None
    return max(1.0, deadline_ms / 1000 - time.time()) if deadline_ms else 0.0
