"""A run as event files for TensorBoard: signals, metrics, batch size, learning rate, workers, decisions.

The files are written from a journal at any time, or as records arrive. Importing TensorBoard takes a second, so
only commands that use it import this file.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter

from elastune.core.errors import UserError
from elastune.core.journal.records import (
    Decided,
    Entry,
    Measured,
    PolicyFailed,
    Record,
    Reported,
    Restarted,
    RunStarted,
    SyncChanged,
    TopologyChanged,
)
from elastune.report.adaptation import gather_adaptation, gather_sync
from elastune.report.lines import decided_line, failed_line, since_line
from elastune.report.overviews import gather_run

FOLDER = "tensorboard"


class EventFiles:
    """Writes the records that ``observe`` gets as event files into ``out/tensorboard``. A context manager.

    When a run goes on from an earlier step, TensorBoard hides the events of later steps.
    """

    def __init__(self, out: Path) -> None:
        self._folder = str(out / FOLDER)
        self._writer: SummaryWriter | None = None

    def observe(self, record: Record, at: float | None = None) -> None:
        """Write the events of ``record``, dated ``at`` seconds since the epoch (None: now)."""
        at = time.time() if at is None else at
        match record:
            case RunStarted(resumed_step=step) | Restarted(step=step) if step is not None:
                self._begin(purge_step=step + 1)
            case Measured():
                for name, (value, error) in record.signals.items():
                    self._scalar(f"signals/{name}", value, record.step, at)
                    self._scalar(f"standard_errors/{name}", error, record.step, at)
                for name in ("batch_size", "lr", "workers"):
                    self._scalar(f"run/{name}", getattr(record, name), record.step, at)
            case Reported():
                for name, value in record.metrics.items():
                    self._scalar(f"metrics/{name}", value, record.step, at)
            case Decided():
                self._text(f"decisions/{record.policy}", decided_line(record), record.step, at)
            case SyncChanged():
                self._text("sync/strategy", since_line(record), record.step, at)
            case TopologyChanged():
                self._text("sync/topology", since_line(record), record.step, at)
            case PolicyFailed():
                self._text(f"failures/{record.policy}", failed_line(record), record.step, at)

    def close(self) -> None:
        """Write all pending events. Idempotent."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _begin(self, purge_step: int | None = None) -> SummaryWriter:
        self.close()
        self._writer = SummaryWriter(self._folder, purge_step=purge_step)
        return self._writer

    def _scalar(self, tag: str, value: float | None, step: int, at: float) -> None:
        if value is not None and math.isfinite(value):
            (self._writer or self._begin()).add_scalar(tag, value, step, walltime=at, new_style=False)

    def _text(self, tag: str, line: str, step: int, at: float) -> None:
        (self._writer or self._begin()).add_text(tag, line, step, walltime=at)

    def __enter__(self) -> EventFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def write_events(entries: Sequence[Entry], out: Path) -> Path:
    """Write the event files of the run in ``entries``, instead of any in ``out/tensorboard``.

    Steps that a resumed run took back are left out.

    Returns:
        The folder of the event files.

    Raises:
        UserError: If the journal has no run, or the folder cannot be written. Also if the run has not ended, because
            it may still write event files of its own.
    """
    run = gather_run(entries)
    if run is None:
        raise UserError("event files need a run", out, "give the output folder of elastune run")
    folder = out / FOLDER
    if folder.exists() and run.finished is None and run.failed is None:
        fix = f"look at those in {folder}, or remove them"
        raise UserError("event files of a run that has not ended are its own", out, fix)
    kept = {id(record) for record in run.reports}
    adaptation = gather_adaptation(entries)
    kept |= {id(record) for record in (*adaptation.measured, *adaptation.decided, *adaptation.failed)}
    kept |= {id(each.record) for each in gather_sync(entries).all if each.record is not None}
    try:
        with tempfile.TemporaryDirectory(dir=out, prefix=f".{FOLDER}.") as temporary:
            with EventFiles(Path(temporary)) as events:
                for entry in entries:
                    if id(entry.record) in kept:
                        events.observe(entry.record, entry.at)
            made = Path(temporary) / FOLDER
            made.mkdir(exist_ok=True)  # no events
            if folder.exists():
                shutil.rmtree(folder)
            made.rename(folder)
    except OSError as error:
        rule = "the folder of event files must be writable"
        raise UserError(rule, f"{folder}: {error.strerror}", "free space or choose another folder") from None
    return folder
