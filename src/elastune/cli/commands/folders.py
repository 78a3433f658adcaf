"""``elastune ls``, ``stop`` and ``logs``: what output folders hold, how to end what runs, and what workers printed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from elastune.cli import options
from elastune.cli.output import FAILED, OK, print_error, print_json, print_lines, print_result
from elastune.core import notation
from elastune.core.clock import SystemClock
from elastune.core.errors import UserError
from elastune.core.formatting import duration, printable

LOOK_S = 0.2  # between two looks at what is written
TAIL_BYTES = 1 << 16  # of each log: its last lines are within them
DEFAULT_WAIT = "60s"


# --- elastune ls ---


def ls(
    folder: Annotated[Path, typer.Argument(help="The folder that holds output folders.", show_default=True)] = Path(
        "elastune-out"
    ),
    json: options.Json = False,
) -> int:
    """List output folders: what each holds, its state, its age and its best result.

    A folder is running if a process of this machine writes its journal. It is unfinished if its journal has no end and
    nobody writes it: elastune resume goes on with it.
    """
    from elastune.cli.results import Result
    from elastune.report.folders import folders_table, output_folders

    folders = output_folders(folder, SystemClock().wall())
    data = {
        "kind": "ls",
        "folder": str(folder),
        "folders": [{**asdict(each), "out": str(each.out)} for each in folders],
    }
    lines = () if folders else (f"no output folder in {folder}",)
    print_result(Result(data, (folders_table(folders),) if folders else (), lines), as_json=json)
    return OK


# --- elastune stop ---


def stop(
    out: Annotated[Path, typer.Argument(help="The output folder of what is running.")],
    wait: Annotated[str, typer.Option(metavar="TIME", help="How long to wait for its end.")] = DEFAULT_WAIT,
    json: options.Json = False,
) -> int:
    """End a run, a study or a frontier in good order, as Ctrl-C in its terminal does.

    A run writes a checkpoint and ends at its next step boundary. A study lets no further trial begin, and its results
    so far count. elastune resume goes on with either. What runs on another machine is stopped there.

    Exit code 1: it has not ended within --wait; it still will.
    """
    from elastune.core.journal.files import writer_of
    from elastune.runtime.job.output import JOURNAL

    wait_s = notation.duration(wait, "--wait")
    journal = out / JOURNAL
    if not journal.is_file():
        raise UserError("elastune stop needs an output folder", out, "elastune ls lists them")
    pid = writer_of(journal)
    if pid is None:
        raise UserError("what is to be stopped must run on this machine", out, "elastune ls shows what runs")
    try:
        os.kill(pid, signal.SIGINT)
    except ProcessLookupError:
        pass  # it has just ended
    except PermissionError:
        raise UserError("only its owner can stop it", f"{out}, process {pid}", "ask as that user") from None
    began = time.monotonic()
    while writer_of(journal) == pid and time.monotonic() - began < wait_s:
        time.sleep(LOOK_S)
    ended = writer_of(journal) != pid
    if json:
        print_json({"kind": "stop", "pid": pid, "ended": ended, "out": str(out)})
    elif ended:
        print_lines(f"stopped after {duration(time.monotonic() - began)}; go on with: elastune resume {out}")
    else:
        print_lines(f"asked process {pid} to stop; it ends at its next boundary")
    if not ended:
        print_error(f"{out} has not ended within {wait}; a second elastune stop ends it at once")
        return FAILED
    return OK


# --- elastune logs ---


def logs(
    out: Annotated[Path, typer.Argument(help="The output folder of a run, a study or a frontier.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is written, until it ends or Ctrl-C.")
    ] = False,
    lines: Annotated[int, typer.Option(min=0, help="Number of last lines of each log to begin with.")] = 20,
) -> int:
    """Print the logs of workers: the last lines of each, with the worker's name before each line.

    Workers of a run that was started by torchrun, srun or mpirun have their logs there.
    """
    from elastune.core.journal.files import writer_of
    from elastune.runtime.job.output import JOURNAL

    journal = out / JOURNAL
    if not journal.is_file():
        raise UserError("elastune logs needs an output folder", out, "elastune ls lists them")
    read: dict[Path, _Log] = {}
    for name, path in _log_files(out):
        read[path] = log = _Log(name, path)
        log.show_last(lines)
    if not follow:
        if not read:
            print_error(f"{out} holds no logs")
        return OK
    while True:
        runs = writer_of(journal) is not None
        for name, path in _log_files(out):
            read.setdefault(path, _Log(name, path)).show_new()
        if not runs:
            return OK
        time.sleep(LOOK_S)


def _log_files(out: Path) -> Iterator[tuple[str, Path]]:
    """The logs in ``out`` with their names: "worker-0" of a run, "trials/3 worker-0" of a trial."""
    for path in sorted(out.glob("**/logs/*.log")):
        inside = path.parent.parent.relative_to(out)
        yield (path.stem if inside == Path() else f"{inside} {path.stem}"), path


@dataclass
class _Log:
    """A log and how far it was printed."""

    name: str
    path: Path
    at: int = 0

    def show_last(self, lines: int) -> None:
        """Print its last ``lines``."""
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = file.seek(max(0, size - TAIL_BYTES))
            content = file.read(size - begin)
        whole = content.splitlines()[1 if begin else 0 :]
        self.at = size
        self._print(whole[-lines:] if lines else [])

    def show_new(self) -> None:
        """Print the whole lines that were written since."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self.at:
                    self.at = 0  # it was begun anew
                file.seek(self.at)
                content = file.read()
        except FileNotFoundError:
            return
        end = content.rfind(b"\n") + 1
        self.at += end
        self._print(content[:end].splitlines())

    def _print(self, lines: list[bytes]) -> None:
        for line in lines:
            print(printable(f"{self.name} | {line.decode(errors='replace')}"), flush=True)
