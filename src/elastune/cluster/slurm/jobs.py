"""Agents as batch jobs of one node each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from elastune.cluster.agents.fleet import Never, NotStarted, Phase, Starter
from elastune.cluster.agents.remembered import forget
from elastune.cluster.slurm.commands import ask, last_line
from elastune.cluster.slurm.launch import (
    QUEUE_FORMAT,
    JobShape,
    QueueEntry,
    batch_script,
    log_of,
    never_starts,
    read_queue,
    read_submitted,
    sbatch_arguments,
    waits_for,
)

END_LIMIT_S = 5.0  # for jobs whose agents have been told to end
CLOSE_LIMIT_S = 40.0  # Slurm gives a cancelled job up to its KillWait, usually 30 s
LOOK_S = 0.2
NODE_LOGS = Path("/tmp")  # of nodes that share no folder; where Slurm gives a job one of its own, that


class Jobs(Starter):
    """Submits jobs that run ``command`` in ``shape``. Labels are the jobs' numbers.

    The jobs have a ``name`` of their own: nobody else's are seen or ended. ``folder``: where the next controller looks
    for this one's, and nodes write their logs; with a ``token`` they do not see it: they read that, and have their logs
    themselves.
    """

    def __init__(
        self, command: Sequence[str], shape: JobShape, folder: Path, name: str, token: str | None = None
    ) -> None:
        self.name = name
        self._shape, self._folder = shape, folder
        self._logs, self._sees_logs = (folder, True) if token is None else (NODE_LOGS, False)
        self._script = batch_script(command, shape.notice_s, token)
        self._queue: dict[str, QueueEntry] = {}
        self._never: Never | None = None
        self._closed = False

    def start(self, count: int) -> None:
        for _ in range(count):
            said = ask("sbatch", *sbatch_arguments(self._shape, self.name, self._logs), text=self._script)
            try:
                read_submitted(said)
            except ValueError as error:
                raise NotStarted(f"sbatch: {error}") from None

    def look(self) -> dict[str, Phase]:
        said = ask("squeue", "--noheader", f"--name={self.name}", f"--format={QUEUE_FORMAT}")
        try:
            queue = read_queue(said)
        except ValueError as error:
            raise NotStarted(f"squeue: {error}") from None
        self._never, self._queue = never_starts(self._queue, queue), queue
        return {number: entry.phase for number, entry in queue.items()}

    def cancel(self, labels: Sequence[str]) -> None:
        ask("scancel", *labels)

    def why(self, label: str) -> str:
        log = log_of(self._logs, label)
        return last_line(log) if self._sees_logs else f"its node's {log} tells why"

    def waits(self) -> str:
        return waits_for(self._queue)

    def never(self) -> Never | None:
        return self._never

    def close(self) -> None:
        """Those that have not ended by themselves are cancelled; the queue then has none."""
        if self._closed:
            return
        self._closed = True
        ask("scancel", "--state=PENDING", f"--name={self.name}")
        begun = time.monotonic()
        cancelled = False
        while left := self.look():
            waited_s = time.monotonic() - begun
            if waited_s >= CLOSE_LIMIT_S:
                raise NotStarted(f"jobs {', '.join(left)} are still in the queue: scancel --name={self.name}")
            if waited_s >= END_LIMIT_S and not cancelled:
                ask("scancel", f"--name={self.name}")
                cancelled = True
            time.sleep(LOOK_S)
        forget(self._folder)
