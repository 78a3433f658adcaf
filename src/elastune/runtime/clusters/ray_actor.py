"""The Ray actor of an agent: Ray gives it a node and the resources of its workers; it runs ``elastune agent``.

The agent is a child process of the actor, with its own signals and forks, and is killed with the actor. An actor may
outlive its controller, so no call lasts as long as the agent. One call starts the agent, and a controller asks for its
end repeatedly. An unused actor ends by itself.
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
CALLS = 16  # at a time; earlier controllers may have left calls that wait for the end
UNUSED_S = 30.0  # how long an actor waits for its first call, or for a call that asks how its agent has ended
FAILED = 1


@dataclass(frozen=True)
class AgentEnd:
    """How an agent ended: its exit ``code`` (negative: the signal), and the ``last_line`` of its output."""

    code: int
    last_line: str


class AgentActor:
    """Runs one agent in a Ray actor (``ray.remote``).

    Args:
        unused_s: How long the actor waits for a controller before it ends.
        leave: Ends the actor's process.
    """

    def __init__(self, unused_s: float = UNUSED_S, leave: Callable[[], None] = lambda: os._exit(0)) -> None:
        self._unused_s, self._leave = unused_s, leave
        self._started, self._ended, self._reported = threading.Event(), threading.Event(), threading.Event()
        self._moved = ""
        self._lock = threading.Lock()
        self._end: AgentEnd | None = None
        threading.Thread(target=self._wait_for_use, name="unused actor", daemon=True).start()

    def here(self) -> None:
        """Return at once; Ray answers only when the actor has a node."""

    def begin(self, token: bytes, options: Sequence[str]) -> None:
        """Start ``elastune agent`` with ``options``. A second call, by the next controller, does nothing.

        ``token``: the content of its token file.
        """
        with self._lock:
            if self._started.is_set():
                return
            self._started.set()
        threading.Thread(target=self._serve, args=(token, list(options)), name="agent", daemon=True).start()

    def look_at(self, address: str) -> None:
        """Let the agent and its workers look for the next controller at ``address``."""
        self._moved = address

    def end(self, limit_s: float) -> AgentEnd | None:
        """Wait up to ``limit_s`` and return how the agent has ended; None if it still runs."""
        if self._ended.wait(limit_s):
            self._reported.set()
        return self._end

    def _serve(self, token: bytes, options: Sequence[str]) -> None:
        try:
            self._end = run_agent(token, options, seconds_left, lambda: self._moved)
        except OSError as error:
            self._end = AgentEnd(FAILED, f"it could not start: {error}")
        self._ended.set()
        if not self._reported.wait(self._unused_s):
            self._leave()

    def _wait_for_use(self) -> None:
        if not self._started.wait(self._unused_s):
            self._leave()


def run_agent(
    token: bytes, options: Sequence[str], left: Callable[[], float | None], moved: Callable[[], str] = lambda: ""
) -> AgentEnd:
    """Run an agent as a child process that dies with this process.

    Args:
        token: The content of its token file.
        options: The options of ``elastune agent``.
        left: Returns the time until the node ends, as ``seconds_left`` does.
        moved: Returns the address of the next controller ("host:port"); "": it has not moved.
    """
    with tempfile.TemporaryDirectory(prefix="elastune-ray-") as name:
        folder = Path(name)
        notice, output, moves, where = folder / "drained-by-ray", folder / "output", folder / "moves", ""
        arguments = ["--token-file", "/dev/stdin", "--notice-file", str(notice), "--parent", str(os.getpid())]
        arguments += ["--moves", str(moves)]
        with output.open("wb") as log:
            agent = subprocess.Popen(
                [sys.executable, "-P", "-m", "elastune", "agent", *options, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        assert agent.stdin is not None
        with suppress(BrokenPipeError), agent.stdin:  # it has ended already; its output says why
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
        lines = output.read_bytes()[-TAIL_BYTES:].decode(errors="replace").split("\n")
        return AgentEnd(agent.returncode, next((line.strip() for line in reversed(lines) if line.strip()), ""))


def seconds_left() -> float | None:
    """Return in how many seconds Ray drains this node; 0: at an unknown time; None: Ray does not drain it."""
    import ray
    from ray._private.state import state  # no public function returns this; Ray Train calls it, too

    try:
        deadlines_ms = state.get_draining_nodes()
    except (ray.exceptions.RayError, RuntimeError):  # Ray's head does not answer: agents need it for nothing else
        return None
    deadline_ms = deadlines_ms.get(ray.get_runtime_context().get_node_id())
    if deadline_ms is None:
        return None
    return max(1.0, deadline_ms / 1000 - time.time()) if deadline_ms else 0.0
