"""The process beside a trial's command: starts it, forwards its reports, bounds its output, and ends all of it.

The controller runs this file as a script. The file imports only the standard library, so it starts in milliseconds.
Without a controller it ends the command, and it ends with the command.

- *To this process*, lines on stdin: the request (JSON), then ``stop`` or ``kill``. The end of stdin is the end of the
  controller, and counts as ``stop``.
- *From this process*, lines of JSON on stdout: ``{"started": PID}``, ``{"line": TEXT, "from": "stdout" | "file",
  "seconds": S}`` for each line that may be a report, and last ``{"ended": CODE, "tail": TEXT, "left": N}`` or
  ``{"failed": TEXT}``.

``stop`` sends SIGTERM to the command's process group, and SIGKILL after the grace time. Processes that the command has
left behind become children of this process, wherever they have gone, and are ended, too.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

LOOK_S = 0.1  # how often the metrics file and the command are looked at
LEFT_S = 1.0  # for what the command has left behind, between SIGTERM and SIGKILL
LOCK_S = 60.0  # for the end of a command that an earlier controller has left in the same folder
MOST_LOG_BYTES = 4 << 20  # of one log file; a longer log keeps its last two files
MOST_LINE_BYTES = 64 << 10  # a longer line is no report
TAIL_BYTES = 4 << 10
CHUNK = 1 << 16
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Log:
    """A log of bounded size: a full file becomes ``NAME.1``, in place of the one before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = path.open("wb")
        self._size = 0

    def write(self, content: bytes) -> None:
        """Append ``content``. A full disk loses it: the command goes on."""
        with suppress(OSError):
            if self._size + len(content) > MOST_LOG_BYTES:
                self._file.close()
                os.replace(self._path, f"{self._path}.1")
                self._file, self._size = self._path.open("wb"), 0
            self._file.write(content)
            self._file.flush()
            self._size += len(content)


class OutputLines:
    """Cuts a stream into lines, without those that are too long."""

    def __init__(self) -> None:
        self._rest = b""
        self._skips = False

    def add(self, content: bytes) -> Iterator[str]:
        """Yield the lines that ``content`` completes."""
        *lines, rest = (self._rest + content).split(b"\n")
        for line in lines:
            if not self._skips and len(line) <= MOST_LINE_BYTES:
                yield line.decode(errors="replace")
            self._skips = False
        self._skips = self._skips or len(rest) > MOST_LINE_BYTES
        self._rest = b"" if self._skips else rest

    def end(self) -> Iterator[str]:
        """Yield the last line, if it has no end."""
        if self._rest and not self._skips:
            yield self._rest.decode(errors="replace")
        self._rest = b""


class Command:
    """The running command, its output and its metrics file.

    Args:
        request: ``words``, ``environment``, ``folder``, ``patterns`` and ``grace_s``.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self._folder = Path(request["folder"])
        self._patterns = [re.compile(text) for text in request["patterns"]]
        self._grace_s = float(request["grace_s"])
        self._kill_at: float | None = None
        self._metrics = Path(request["environment"]["ELASTUNE_METRICS"])
        self._read_bytes, self._file_lines = 0, OutputLines()
        logs = self._folder / "logs"
        self._logs = {"stdout": Log(logs / "stdout.log"), "stderr": Log(logs / "stderr.log")}
        self._lines = OutputLines()
        self._tails = {"stdout": b"", "stderr": b""}
        self._process = subprocess.Popen(
            request["words"],
            env=request["environment"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        self._began = time.monotonic()
        send({"started": self._process.pid})

    @property
    def pipes(self) -> dict[str, Any]:
        """The ends of its output to read."""
        return {"stdout": self._process.stdout, "stderr": self._process.stderr}

    @property
    def ended(self) -> bool:
        """Whether the command itself has ended; what it has left behind may run."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """Send SIGTERM to its group, and later SIGKILL."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._grace_s
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to its group now."""
        self._kill_at = time.monotonic()
        self._signal(signal.SIGKILL)

    def look(self) -> None:
        """Read its metrics file, and keep the time of a stop."""
        self._read_metrics()
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._signal(signal.SIGKILL)

    def take(self, name: str, content: bytes) -> None:
        """Log output, and forward the lines of stdout that may be reports."""
        self._logs[name].write(content)
        self._tails[name] = (self._tails[name] + content)[-TAIL_BYTES:]
        if name == "stdout":
            for line in self._lines.add(content):
                self._forward(line)

    def finish(self, left: int) -> None:
        """Forward what is left of its output, and how it ended."""
        for line in self._lines.end():
            self._forward(line)
        while self._read_metrics():
            pass
        for line in self._file_lines.end():
            self._send_line(line, "file")
        tail = self._tails["stderr"] if self._tails["stderr"].strip() else self._tails["stdout"]
        send({"ended": self._process.returncode, "tail": tail.decode(errors="replace"), "left": left})

    def _forward(self, line: str) -> None:
        if self._patterns:
            wanted = any(pattern.search(line) for pattern in self._patterns)
        else:
            wanted = line.lstrip().startswith("{")
        if wanted:
            self._send_line(line, "stdout")

    def _send_line(self, line: str, source: str) -> None:
        send({"line": line, "from": source, "seconds": time.monotonic() - self._began})

    def _read_metrics(self) -> bool:
        """Forward the next lines of the metrics file. Return whether there were any."""
        try:
            with self._metrics.open("rb") as file:
                file.seek(self._read_bytes)
                content = file.read(CHUNK)
        except OSError:  # it has none, or has removed it
            return False
        self._read_bytes += len(content)
        for line in self._file_lines.add(content):
            if line.strip():
                self._send_line(line, "file")
        return bool(content)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def _end_with_parent() -> None:
    """In the child, before the command: default signals, and the kernel ends it if this process is killed."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_DFL)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def send(message: dict[str, Any]) -> None:
    """Write a message to the controller, if there still is one."""
    with suppress(OSError):
        content = memoryview(json.dumps(message).encode() + b"\n")
        while content:
            content = content[os.write(1, content) :]


def descendants() -> list[int]:
    """Return the processes below this one, by the system's process table."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, ValueError, IndexError):
            state = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
            if state[0] != b"Z":
                parents[int(name)] = int(state[1])
    below, found = {os.getpid()}, 1
    while found:
        more = {each for each, parent in parents.items() if parent in below} - below
        below, found = below | more, len(more)
    return sorted(below - {os.getpid()})


def end_descendants() -> int:
    """End all processes that the command has left behind. Return how many there were."""
    if not os.path.isdir("/proc/self"):
        return 0
    seen: set[int] = set()
    end = time.monotonic() + LEFT_S
    while left := descendants():
        fresh = [each for each in left if each not in seen]
        late = time.monotonic() > end
        for process in left if late else fresh:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL if late else signal.SIGTERM)
        seen.update(left)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > end + 10:  # processes of another user, or in the kernel
            break
        time.sleep(0.02)
    return len(seen)


def lock(folder: Path) -> BinaryIO:
    """Wait until no command of an earlier controller runs in ``folder``. Raises ``TimeoutError``."""
    file = (folder / "command.lock").open("wb")
    end = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            if time.monotonic() > end:
                raise TimeoutError(f"another command runs in {folder}") from None
            time.sleep(LOOK_S)


def supervise(command: Command) -> None:
    """Follow the command to its end, and obey the controller."""
    with selectors.DefaultSelector() as selector:
        for name, pipe in command.pipes.items():
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ, name)
        selector.register(0, selectors.EVENT_READ, "controller")
        orders = OutputLines()
        while not command.ended:
            for key, _ in selector.select(LOOK_S):
                content = _read(key.fd)
                if content is None:
                    continue
                if key.data != "controller":
                    command.take(key.data, content) if content else selector.unregister(key.fileobj)
                elif not content:
                    selector.unregister(0)
                    command.stop()
                else:
                    for order in orders.add(content):
                        command.kill() if order == "kill" else command.stop()
            command.look()
    left = end_descendants()
    for name, pipe in command.pipes.items():  # the rest: all writers are gone
        while content := _read(pipe.fileno()):
            command.take(name, content)
    command.finish(left)


def _read(descriptor: int) -> bytes | None:
    """What can be read now; b"" at the end, and None for nothing yet."""
    try:
        return os.read(descriptor, CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def main() -> None:
    """Run the command that the first line of stdin requests."""
    for number in IGNORED:  # the controller decides
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    first = b""
    while not first.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            return
        first += byte
    request = json.loads(first)
    folder = Path(request["folder"])
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        held = lock(folder)
        Path(request["environment"]["ELASTUNE_METRICS"]).unlink(missing_ok=True)
        command = Command(request)
    except (OSError, ValueError) as error:
        send({"failed": f"{getattr(error, 'strerror', None) or error}"})
        return
    supervise(command)
    held.close()


if __name__ == "__main__":
    main()
    sys.exit(0)
