"""Runs at MLflow: a study is the parent of its trials.

Values are metrics, settings are params, and lines for people are the artifact ``events.txt``. MLflow keeps what was
logged: steps that a resumed run repeats are there twice, and a line in ``events.txt`` says from where on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlparse

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

EVENTS = "events.txt"
LONGEST_PARAM = 6000  # characters that MLflow takes
MOST_METRICS, MOST_PARAMS = 1000, 100  # of one request
STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
OTHERS = re.compile(r"[^\w\-. :/]")
"""What no name at MLflow may have."""


@dataclass(frozen=True)
class MlflowLogger(Logger):
    """Runs at a tracking server, or in a folder: ``--log mlflow:experiment=digits``.

    Attributes:
        experiment: The name of the experiment; it is made if there is none.
        uri: The tracking server, or a folder; "": as MLflow has it, by ``MLFLOW_TRACKING_URI``.
    """

    name: ClassVar[str] = "mlflow"
    needs: ClassVar[str] = "mlflow"
    experiment: str = "elastune"
    uri: str = ""

    def open(self, out: Path, ids: dict[str, str]) -> LogWriter:
        """Return a writer of runs in the experiment. Raises what MLflow raises if it cannot be reached."""
        import mlflow

        uri = self.uri or mlflow.get_tracking_uri()
        if urlparse(uri).scheme in ("", "file"):  # MLflow develops its folders no further, and asks for this consent
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        client = mlflow.MlflowClient(tracking_uri=uri)
        known = client.get_experiment_by_name(self.experiment)
        experiment = client.create_experiment(self.experiment) if known is None else known.experiment_id
        return MlflowWriter(client, experiment, ids)


@dataclass
class Pending:
    """What a run has got since the last flush."""

    metrics: list[Any] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


class MlflowWriter(LogWriter):
    """Collects metrics and lines, and sends them when they are flushed. ``ids`` has the id of each run."""

    def __init__(self, client: Any, experiment: str, ids: dict[str, str]) -> None:
        self._client, self._experiment, self._ids = client, experiment, ids
        self._known = set(ids)  # runs of an earlier command
        self._texts: dict[str, str] = {}
        self._pending: dict[str, Pending] = {}

    def write(self, event: Event) -> None:
        """Make, update or end the run of ``event``."""
        match event:
            case RunBegan():
                self._begin(event)
            case RunResumed():
                self._client.update_run(self._ids[event.run], status="RUNNING")
                what = "goes on" if event.step is None else f"goes on after step {event.step}; what follows replaces"
                self._lines(event, what if event.step is None else f"{what} what was logged of later steps")
            case ValuesLogged():
                self._metrics(event, event.step, event.values.items())
            case LineLogged():
                self._lines(event, f"{event.topic}: {event.line}")
            case ArtifactLogged():
                self._client.set_tag(self._ids[event.run], f"artifacts/{_name(event.name)}", event.path)
            case RunEnded():
                self._metrics(event, 0, ((f"results/{name}", value) for name, value in event.values.items()))
                self._lines(event, f"{event.state}: {event.line}" if event.line else event.state)
                self._send(event.run)
                self._texts.pop(event.run, None)
                self._client.set_terminated(self._ids[event.run], STATES[event.state], int(event.at * 1000))

    def flush(self) -> None:
        """Send what was collected."""
        for run in list(self._pending):
            self._send(run)

    def _begin(self, event: RunBegan) -> None:
        from mlflow.entities import Param

        tags = {} if event.parent is None else {"mlflow.parentRunId": self._ids[event.parent]}
        made = self._client.create_run(
            self._experiment, start_time=int(event.at * 1000), tags=tags, run_name=event.name
        )
        self._ids[event.run] = made.info.run_id
        settings = flat_settings(event.settings).items()
        params = [Param(_name(name), value[:LONGEST_PARAM]) for name, value in settings]
        for some in batches(params, MOST_PARAMS):
            self._client.log_batch(made.info.run_id, params=some)

    def _metrics(self, event: Event, step: int, values: Iterable[tuple[str, float]]) -> None:
        from mlflow.entities import Metric

        at = int(event.at * 1000)
        pending = self._pending.setdefault(event.run, Pending())
        pending.metrics += [Metric(_name(name), float(value), at, step) for name, value in values]

    def _lines(self, event: Event, line: str) -> None:
        self._pending.setdefault(event.run, Pending()).lines.append(line)

    def _send(self, run: str) -> None:
        pending, id_ = self._pending.pop(run, Pending()), self._ids[run]
        for some in batches(pending.metrics, MOST_METRICS):
            self._client.log_batch(id_, metrics=some)
        if pending.lines:
            text = self._texts.get(run) or self._earlier(run)
            self._texts[run] = text + "".join(f"{line}\n" for line in pending.lines)
            self._client.log_text(id_, self._texts[run], EVENTS)

    def _earlier(self, run: str) -> str:
        """The lines that an earlier command has logged."""
        id_ = self._ids[run]
        if run not in self._known or not any(each.path == EVENTS for each in self._client.list_artifacts(id_)):
            return ""
        return Path(self._client.download_artifacts(id_, EVENTS)).read_text(encoding="utf-8")


def batches(items: list[Any], most: int) -> Iterator[list[Any]]:
    """Lists of at most ``most`` of ``items``, in their order."""
    return (items[begin : begin + most] for begin in range(0, len(items), most))


def _name(name: str) -> str:
    return OTHERS.sub("_", name)
