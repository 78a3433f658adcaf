"""Trials whose training is a command of the user's (``--command``), each in processes of its own on this machine.

A ``CommandCluster`` gives a study the same events as workers do: reports, and how a training ended. Beside each command
runs one small process (``runtime.command_process``), which ends with its controller.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from elastune.core.command import MetricLine, TrainingCommand, match_line, provided_values, read_line
from elastune.core.errors import UserError
from elastune.core.journal.records import Reported, RunFailed, RunFinished
from elastune.core.run import RunSpec
from elastune.runtime import command_process
from elastune.runtime.clusters.base import Cluster, Event, Exited, Handle, Message, NoRoomError, how_it_ended

if TYPE_CHECKING:
    from elastune.train.data.sample_log import SampleSpans

GRACE_S = 8.0
"""Seconds between SIGTERM and SIGKILL. A study that is interrupted waits for 10 s."""
KILL_S = 15.0  # for the process beside the command, to end all that the command has started
PROGRESS = "progress.jsonl"
CHUNK = 1 << 16
LONGEST = 300  # characters of a line in a reason
Stopped = Literal["complete", "until_epoch", "requested"]


class CommandFiles:
    """The files of a command's trial. They are the user's: nothing is removed, and nothing counts as a checkpoint."""

    def checkpoints(self, run: Path) -> list[int]:
        """See ``RunFiles``."""
        return []

    def spans(self, run: Path, step: int) -> SampleSpans:
        """See ``RunFiles``."""
        return []

    def back_to_epoch(self, run: Path) -> None:
        """See ``RunFiles``."""

    def damaged(self, run: Path) -> dict[int, str]:
        """See ``RunFiles``."""
        return {}

    def set_aside(self, run: Path, steps: Iterable[int]) -> None:
        """See ``RunFiles``."""

    def size_bytes(self, run: Path) -> int:
        """See ``RunFiles``."""
        return 0

    def seal(self, run: Path, step: int) -> str:
        """See ``RunFiles``."""
        return ""

    def predictions(self, run: Path) -> dict[str, str]:
        """See ``RunFiles``."""
        return {}

    def remove(self, run: Path) -> None:
        """See ``RunFiles``."""


def values_of(spec: RunSpec) -> dict[str, Any]:
    """Return what the placeholders of a trial's command stand for.

    Args:
        spec: The trial. Its own settings come first, then those that every trial has (``core.command.PROVIDED``).

    Example:
        >>> values_of(RunSpec(program, Path("study/trials/00000"), {"lr": 0.1}))["workers"]
        1
    """
    length = {} if spec.epochs is None else {"epochs": spec.epochs}
    provided = provided_values(spec.config, spec.execution.workers, spec.seed, str(spec.out.absolute()))
    return {**provided, **spec.config, **length}


class CommandCluster(Cluster):
    """Room for the processes of commands on this machine. They end with the process that made the cluster.

    Args:
        capacity: The number of processes, as ``{workers}`` counts them.
        grace_s: The seconds that a command has to end after SIGTERM.

    Example:
        >>> with CommandCluster(capacity=2) as cluster:
        ...     handle = cluster.start(spec)
    """

    files = CommandFiles()

    def __init__(self, capacity: int, *, grace_s: float = GRACE_S) -> None:
        self._capacity = capacity
        self._grace_s = grace_s
        self._running: list[CommandHandle] = []

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def free(self) -> int:
        self._running = [handle for handle in self._running if handle.alive]
        return self._capacity - sum(handle.spec.execution.workers for handle in self._running)

    def held(self, handle: Handle) -> Mapping[str, int]:
        workers = handle.spec.execution.workers if handle.alive else 0
        return dict.fromkeys(self.rooms, workers)

    def start(self, spec: RunSpec) -> CommandHandle:
        if (room := self.free) < spec.execution.workers:
            rule = "a cluster must have room for the processes of a command"
            raise NoRoomError(rule, f"{spec.execution.workers}, room for {room}", "use more --workers")
        handle = CommandHandle(spec, self._grace_s)
        self._running.append(handle)
        return handle

    def wait(self, timeout_s: float) -> None:
        handles = [handle for handle in self._running if handle.alive]
        if not handles or any(handle.has_news for handle in handles):
            if not handles:
                time.sleep(min(timeout_s, self.patience_s))
            return
        with selectors.DefaultSelector() as selector:
            for handle in handles:
                selector.register(handle.pipe, selectors.EVENT_READ)
            selector.select(max(0.0, min(timeout_s, *(handle.patience_s for handle in handles))))

    def news(self) -> Collection[Handle] | None:
        return None

    def close(self) -> None:
        for handle in self._running:
            handle.kill()
        while any(handle.alive for handle in self._running):
            self.wait(0.5)
            for handle in self._running:
                handle.poll()
        self._running.clear()


class CommandHandle(Handle):
    """The running command of one trial.

    Args:
        spec: The trial. ``spec.program.command`` is its command.
        grace_s: The seconds that it has to end after SIGTERM.
    """

    def __init__(self, spec: RunSpec, grace_s: float) -> None:
        assert spec.program.command is not None
        self.spec = spec
        self._command: TrainingCommand = spec.program.command
        self._values = values_of(spec)
        words = self._command.filled(self._values)
        self._reports = Reports(spec, self._values.get("epochs"))
        self._patterns = self._command.patterns
        self._stopped: Stopped | None = None
        self._kill_at: float | None = None
        self._pid = 0  # of the command, which leads its process group
        self._rubbish = ""
        self._buffer = b""
        self._over = False
        folder = spec.out.absolute()
        request = {
            "words": words,
            "environment": self._environment(folder),
            "folder": str(folder),
            "patterns": [pattern.pattern for pattern in self._patterns.values()],
            "grace_s": grace_s,
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", command_process.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            rule = "a command's folder must be writable, and a process must start"
            raise UserError(rule, f"{folder}: {error.strerror}", "choose another folder") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._order(json.dumps(request))

    def _environment(self, folder: Path) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONUNBUFFERED": "1",  # or a report would wait in the command until its output is long enough
            "ELASTUNE_METRICS": str(folder / "metrics.jsonl"),
            "ELASTUNE_FOLDER": str(folder),
            "ELASTUNE_WORKERS": str(self.spec.execution.workers),
            "ELASTUNE_SEED": str(self.spec.seed),
        }

    # -- what the cluster waits for --

    @property
    def pipe(self) -> int:
        """The descriptor from which messages come."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    @property
    def has_news(self) -> bool:
        """Whether a message was read, and not returned yet."""
        return b"\n" in self._buffer

    @property
    def patience_s(self) -> float:
        """Seconds until something is due; infinite while the command may run on."""
        return float("inf") if self._kill_at is None else self._kill_at - time.monotonic()

    # -- the contract of a handle --

    @property
    def alive(self) -> int:
        return 0 if self._over else 1

    def stop(self) -> None:
        if self._stopped is None:
            self._stopped = "requested"
            self._order("stop")

    def kill(self) -> None:
        if not self._over and self._kill_at is None:
            self._kill_at = time.monotonic() + KILL_S
            self._order("kill")

    def poll(self) -> list[Event]:
        if self._over:
            return []
        events: list[Event] = []
        ended = self._fill()
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            events += self._on_message(json.loads(line))
        if self._kill_at is not None and time.monotonic() > self._kill_at and not self._over:
            self._end_by_force()
            ended = True
        if ended and not self._over:
            events += self._fail("the process beside the command ended", "worker_lost", self._process.wait() or -9, "")
        return events

    def _fill(self) -> bool:
        """Read what has come. Return whether nothing more can come."""
        for _ in range(64):  # others wait, too
            try:
                content = os.read(self.pipe, CHUNK)
            except BlockingIOError:
                return False
            if not content:
                return True
            self._buffer += content
        return False

    def _on_message(self, message: dict[str, Any]) -> list[Event]:
        if "started" in message:
            self._pid = int(message["started"])
        elif "line" in message:
            return self._on_line(message["line"], message["from"], float(message["seconds"]))
        elif "failed" in message:
            return self._fail(f"the command did not start: {message['failed']}", "exception", 127, "")
        elif "ended" in message:
            return self._on_end(int(message["ended"]), message["tail"], int(message["left"]))
        return []

    def _on_line(self, text: str, source: str, seconds: float) -> list[Event]:
        if self._rubbish or self._stopped is not None:
            return []
        by_patterns = bool(self._patterns) and source == "stdout"
        line = match_line(text, self._patterns) if by_patterns else read_line(text)
        if line is None:
            if source == "file":
                self._rubbish = f"a line of ELASTUNE_METRICS must be a JSON object with a number (got {_short(text)})"
                self._order("stop")
            return []
        report = self._reports.add(line, seconds)
        if report is None:
            return []
        until = self.spec.until_epoch
        if until is not None and until <= report.epoch < report.epochs:
            self._stopped = "until_epoch"
            self._order("stop")
        return [Message(0, report)]

    def _on_end(self, code: int, tail: str, left: int) -> list[Event]:
        if self._rubbish:
            return self._fail(self._rubbish, "exception", code or 1, tail)
        if self._stopped is None and code != 0:
            last = _last_line(tail)
            detail = f"the command {how_it_ended(code)}" + (f": {last}" if last else "")
            return self._fail(detail, "exception" if code > 0 else "worker_lost", code, tail)
        if self._stopped is None and self._reports.count == 0:
            last = _last_line(tail)
            detail = "the command reported nothing: let it print a line such as " + json.dumps({"accuracy": 0.9})
            return self._fail(detail + (f" (its last line: {last})" if last else ""), "exception", 1, tail)
        if left:
            with suppress(OSError), (self.spec.out / "logs" / "stderr.log").open("a") as log:
                log.write(f"elastune: ended {left} processes that the command had left behind\n")
        self._close()
        stopped = "complete" if code == 0 and self._reports.whole else self._stopped or "complete"
        return [Message(0, self._reports.finished(stopped)), Exited(0, 0, "")]

    def _fail(self, detail: str, reason: Literal["exception", "worker_lost"], code: int, tail: str) -> list[Event]:
        self._close()
        killed = self._kill_at is not None
        failure = RunFailed(reason, detail, 0, code, tail[-2000:])
        # JobSupervisor knows why it has ended a command, and needs no other reason.
        return (
            [Exited(0, -signal.SIGKILL if killed else code, tail)]
            if killed
            else [
                Message(0, failure),
                Exited(0, code, tail),
            ]
        )

    def _order(self, text: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # the process has ended: its messages say how
            self._process.stdin.write(text.encode() + b"\n")
            self._process.stdin.flush()

    def _end_by_force(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            if self._pid:
                os.killpg(self._pid, signal.SIGKILL)
        self._process.kill()

    def _close(self) -> None:
        self._over = True
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError, ValueError):
                if stream is not None:
                    stream.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)


class Reports:
    """Makes reports of a command's lines.

    A command that a stop has cut off may go on from a checkpoint of its own: its first report then has a later epoch
    than 1. The time of the epochs before it is that of the earlier start, which a file in its folder has.

    Args:
        spec: The trial.
        epochs: The epochs of a whole training, where a setting says it.
    """

    def __init__(self, spec: RunSpec, epochs: object) -> None:
        self.count = 0
        self._workers = spec.execution.workers
        self._epochs = epochs if isinstance(epochs, int) and not isinstance(epochs, bool) and epochs > 0 else 0
        self._path = spec.out / PROGRESS
        self._earlier = _read_progress(self._path) if spec.resume else []
        self._kept: list[tuple[int, float]] = []
        self._offset_s = 0.0
        self._newest: Reported | None = None
        self._position = {"epoch": 0, "epochs": 0, "step": 0, "samples": 0}
        self._has_epochs = self._has_steps = False
        self._metrics: dict[str, float] = {}

    def add(self, line: MetricLine, seconds: float) -> Reported | None:
        """Return the report of a line; None if the line has a position only, which the next reports share."""
        self._has_epochs = self._has_epochs or "epoch" in line.position
        self._has_steps = self._has_steps or "step" in line.position
        self._position |= line.position
        if not line.metrics:
            return None
        if not self._has_epochs:
            self._position["epoch"] += 1  # one report an epoch, where no line says otherwise
        if not self._has_steps:
            self._position["step"] = self.count + 1
        epoch, step = self._position["epoch"], self._position["step"]
        if self.count == 0 and epoch > 1:
            self._kept = [each for each in self._earlier if each[0] < epoch]
            self._offset_s = self._kept[-1][1] if self._kept else 0.0
        newest, self.count = self._newest, self.count + 1
        epochs = self._position["epochs"] or self._epochs
        again = newest is not None and (newest.epoch, newest.step) == (epoch, step)
        self._newest = Reported(
            epoch=epoch,
            step=step,
            samples=self._position["samples"],
            seconds=self._offset_s + seconds,
            metrics=line.metrics,
            nth=newest.nth + 1 if newest is not None and again else 0,
            epochs=max(epochs, epoch) if epochs else 0,
        )
        self._metrics |= line.metrics
        self._kept.append((epoch, self._newest.seconds))
        self._keep()
        return self._newest

    @property
    def whole(self) -> bool:
        """Whether the last epoch was reported."""
        return self._newest is not None and 0 < self._newest.epochs <= self._newest.epoch

    def finished(self, stopped: Stopped) -> RunFinished:
        """Return the record of a good end."""
        return RunFinished(
            sha256="",
            workers=self._workers,
            steps=self._position["step"],
            samples=self._position["samples"],
            seconds=0.0 if self._newest is None else self._newest.seconds,
            metrics=dict(self._metrics),
            stopped=stopped,
            epoch=self._position["epoch"],
        )

    def _keep(self) -> None:
        with suppress(OSError):  # a full disk: times after a stop are then too short
            mode = "w" if self.count == 1 else "a"
            with self._path.open(mode) as file:
                fresh = self._kept if self.count == 1 else self._kept[-1:]
                file.writelines(f"{json.dumps(each)}\n" for each in fresh)


def _read_progress(path: Path) -> list[tuple[int, float]]:
    """The epochs and seconds of earlier reports; a line that was cut off is left out."""
    kept: list[tuple[int, float]] = []
    with suppress(OSError):
        for line in path.read_text().splitlines():
            with suppress(ValueError, TypeError):
                epoch, seconds = json.loads(line)
                kept.append((int(epoch), float(seconds)))
    return kept


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _short(lines[-1]) if lines else ""


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
