"""Workers as torchrun starts them, forked from a warm server: imports would take each of them longer than the run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from elastune.cli import main
from elastune.testing.worker_processes import Worker, processes


def launched(
    arguments: Sequence[str], workers: int, errors: Path, limit_s: float = 60.0, grace_s: float = 30.0
) -> list[int]:
    """The exit codes of ``workers`` processes of the command line, which write what they complain of to ``errors``.

    Once one of them has failed the others get SIGTERM, as they do from torchrun's agent, which also keeps the store;
    and SIGKILL, if they have not ended ``grace_s`` later.
    """
    with processes(workers, _command, list(arguments), str(errors)) as them:
        until = time.monotonic() + limit_s
        while running := [process for process in them.processes if process.is_alive()]:
            assert time.monotonic() < until, f"{len(running)} of {workers} workers have not ended"
            if any(process.exitcode for process in them.processes):
                for process in running:
                    process.terminate()
                for process in running:
                    process.join(grace_s)
                    process.kill()
            time.sleep(0.02)
        return [process.exitcode if process.exitcode is not None else -signal.SIGKILL for process in them.processes]


def _command(worker: Worker, arguments: list[str], errors: str) -> None:
    os.environ.update(
        RANK=str(worker.rank),
        WORLD_SIZE=str(worker.size),
        LOCAL_RANK=str(worker.rank),
        LOCAL_WORLD_SIZE=str(worker.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(worker.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    with open(errors, "ab") as file:
        os.dup2(file.fileno(), 2)
    os._exit(main(arguments))
