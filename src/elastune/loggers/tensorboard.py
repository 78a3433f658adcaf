"""Event files for TensorBoard in ``OUT/tensorboard``; those of each trial in a folder of their own.

Of a run that goes on from an earlier step, TensorBoard hides the events of later steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch.utils.tensorboard import SummaryWriter

from elastune.loggers.events import flat_settings
from elastune.runtime.logger import (
    ArtifactLogged,
    Event,
    LineLogged,
    Logger,
    LogWriter,
    RunBegan,
    RunEnded,
    RunResumed,
    ValuesLogged,
)

FOLDER = "tensorboard"
MOST_OPEN = 16
"""Files open at once: each has a thread."""


@dataclass(frozen=True)
class TensorBoardLogger(Logger):
    """Event files: ``--log tensorboard``, then ``tensorboard --logdir OUT/tensorboard``."""

    name: ClassVar[str] = "tensorboard"
    needs: ClassVar[str] = "tensorboard"

    def open(self, out: Path, ids: dict[str, str]) -> LogWriter:
        """Return a writer of event files in ``out``."""
        return EventFiles(out / FOLDER)


class EventFiles(LogWriter):
    """Writes event files into ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, SummaryWriter] = {}
        self._steps: dict[str, int] = {}

    def write(self, event: Event) -> None:
        """Write the events of ``event``, at its own time."""
        match event:
            case RunBegan():
                lines = [f"    {name}: {value}" for name, value in flat_settings(event.settings).items()]
                self._text(event, 0, "settings", "\n".join(lines))  # an indented block, as it stands
            case RunResumed():
                if event.step is not None:
                    self._writer(event.run, purge_step=event.step + 1)
            case ValuesLogged():
                self._scalars(event, event.step, event.values)
            case LineLogged():
                self._text(event, event.step, event.topic, event.line)
            case ArtifactLogged():
                self._text(event, event.step, f"artifacts/{event.name}", event.path)
            case RunEnded():
                step = self._steps.pop(event.run, 0)
                self._scalars(event, step, {f"results/{name}": value for name, value in event.values.items()})
                self._text(event, step, "state", f"{event.state}: {event.line}" if event.line else event.state)
                self._open.pop(event.run).close()

    def flush(self) -> None:
        """Write all pending events."""
        for writer in self._open.values():
            writer.flush()

    def close(self) -> None:
        """Write all pending events and close the files."""
        while self._open:
            self._open.popitem()[1].close()

    def _writer(self, run: str, purge_step: int | None = None) -> SummaryWriter:
        if purge_step is not None and run in self._open:
            self._open.pop(run).close()
        if run not in self._open:
            if len(self._open) >= MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[run] = SummaryWriter(str(self._folder / run), purge_step=purge_step)
        return self._open[run]

    def _scalars(self, event: Event, step: int, values: Mapping[str, float]) -> None:
        self._steps[event.run] = step
        for name, value in values.items():
            if math.isfinite(value):
                self._writer(event.run).add_scalar(name, value, step, walltime=event.at, new_style=False)

    def _text(self, event: Event, step: int, topic: str, line: str) -> None:
        self._writer(event.run).add_text(topic, line, step, walltime=event.at)
