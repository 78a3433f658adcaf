"""Runs at Weights & Biases: a study is the group of its trials. ``WANDB_MODE=offline`` writes them to ``OUT/wandb``.

Values are drawn over the metric ``step``, so a resumed run may repeat steps. Lines for people are in the history, too.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

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

STEP, TIME = "step", "_timestamp"
MOST_OPEN = 16
"""Runs open at once; others are opened again when they have something to log."""
EXIT_CODES = {"finished": 0, "stopped": 130, "failed": 1}


@dataclass(frozen=True)
class WandbLogger(Logger):
    """Runs of a project: ``--log wandb:project=digits``.

    Attributes:
        project: The name of the project.
        entity: The user or team; "": as W&B has it.
    """

    name: ClassVar[str] = "wandb"
    needs: ClassVar[str] = "wandb"
    project: str = "elastune"
    entity: str = ""

    def open(self, out: Path, ids: dict[str, str]) -> LogWriter:
        """Return a writer of runs in the project."""
        return WandbWriter(out, ids, {"project": self.project, "entity": self.entity or None})


class WandbWriter(LogWriter):
    """Sends each event at once; W&B's own process batches them. ``ids`` has the id of each run."""

    def __init__(self, out: Path, ids: dict[str, str], place: Mapping[str, str | None]) -> None:
        self._out, self._ids, self._place = out, ids, place
        self._open: dict[str, Any] = {}

    def write(self, event: Event) -> None:
        """Begin, update or finish the run of ``event``."""
        match event:
            case RunBegan():
                self._begin(event)
            case RunResumed():
                after = "" if event.step is None else f" after step {event.step}"
                self._log(event, event.step, {"state": f"resumed{after}"})
            case ValuesLogged():
                self._log(event, event.step, event.values)
            case LineLogged():
                self._log(event, event.step, {event.topic: event.line})
            case ArtifactLogged():
                self._run(event.run).summary[f"artifacts/{event.name}"] = event.path
            case RunEnded():
                run = self._run(event.run)
                results = {f"results/{name}": value for name, value in event.values.items()}
                run.summary.update(results | {"state": f"{event.state}: {event.line}" if event.line else event.state})
                self._open.pop(event.run).finish(exit_code=EXIT_CODES[event.state])

    def close(self) -> None:
        """End the open runs as stopped; a later command goes on with them."""
        import wandb

        while self._open:
            self._open.popitem()[1].finish(exit_code=EXIT_CODES["stopped"])
        wandb.teardown()  # all is written only when W&B's own process has ended

    def _begin(self, event: RunBegan) -> None:
        self._ids[event.run] = secrets.token_hex(4)
        parent = {} if event.parent is None else {"parent": self._ids[event.parent]}
        settings = {**event.settings, **parent}
        self._run(event.run, name=event.name, config=settings, job_type="run" if event.parent is None else "trial")

    def _run(self, run: str, **how: Any) -> Any:
        """The open W&B run of ``run``; trials are in the group of their study."""
        import wandb

        if run not in self._open:
            if len(self._open) >= MOST_OPEN:
                self._open.pop(next(iter(self._open))).finish()
            opened = wandb.init(
                id=self._ids[run],
                group=self._ids[""],
                dir=str(self._out),
                resume="allow",
                reinit="create_new",
                **self._place,
                **how,
            )
            opened.define_metric("*", step_metric=STEP)
            self._open[run] = opened
        return self._open[run]

    def _log(self, event: Event, step: int | None, values: Mapping[str, Any]) -> None:
        place = {TIME: event.at} if step is None else {TIME: event.at, STEP: step}
        self._run(event.run).log({**values, **place})
