"""A journal as events for loggers: metrics, settings, decisions, workers over time, the paths of artifacts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elastune.core.formatting import count, duration, plain
from elastune.core.journal.records import (
    ArtifactKept,
    ArtifactRemoved,
    ChangesAccepted,
    Checkpointed,
    Decided,
    Entry,
    FrontierFound,
    HostsHeld,
    Measured,
    PolicyFailed,
    PredictionsKept,
    Proved,
    Regrouped,
    Reported,
    Restarted,
    RunFailed,
    RunFinished,
    RunStarted,
    StudyFinished,
    StudyStarted,
    SyncChanged,
    TopologyChanged,
    TrialFinished,
    TrialPaused,
    TrialReallocated,
    TrialRegrouped,
    TrialReported,
    TrialResumed,
    TrialStarted,
    WarmStarted,
    WorkerGone,
)
from elastune.report.lines import decided_line, failed_line, restart_line, since_line, what_text
from elastune.runtime.logger import (
    ArtifactLogged,
    Event,
    LineLogged,
    RunBegan,
    RunEnded,
    RunResumed,
    State,
    ValuesLogged,
)

OPENINGS = (RunStarted, StudyStarted, WarmStarted, ChangesAccepted, HostsHeld, Proved)
"""Records that may precede the refusal of a command, which leaves no trace."""
ITSELF = ""
"""The ``run`` of what the journal is of: a run, a study or a frontier."""


class JournalEvents:
    """Turns the entries of the journal in ``out``, in their order, into events.

    A step of a study's own events is the number of a trial.

    Example:
        >>> events = JournalEvents(out)
        >>> for entry in read(out / "journal.jsonl"):
        ...     for event in events.of(entry):
        ...         writer.write(event)
    """

    def __init__(self, out: Path) -> None:
        self._out = out.absolute()
        self._step = 0  # of the run: some of its records have no step of their own
        self._trial_steps: dict[int, int] = {}
        self._begun: set[str] = set()
        self._ending: RunEnded | None = None  # of a trial whose checkpoint may be kept next
        self._defaults: dict[str, Any] = {}  # the settings of a study's program

    def of(self, entry: Entry) -> Iterator[Event]:
        """The events of ``entry``; most records have none."""
        for event in self._events(entry.record, entry.at):
            if event.run not in self._begun:
                self._begun.add(event.run)
                if not isinstance(event, RunBegan):  # a trial that was refused before its start
                    parent = None if event.run == ITSELF else ITSELF
                    yield RunBegan(run=event.run, at=event.at, name=event.run or self._out.name, parent=parent)
            yield event

    def _events(self, record: Any, at: float) -> Iterator[Event]:
        trial = getattr(record, "trial", None)
        if self._ending is not None and not (
            isinstance(record, ArtifactKept) and self._ending.run == _name(record.trial)
        ):
            yield self._ending
            self._ending = None
        if isinstance(record, RunStarted | StudyStarted):
            yield from self._start(record, at)
        elif trial is not None:
            yield from self._of_trial(record, trial, at)
        else:
            yield from self._of_run(record, at)

    def _start(self, record: RunStarted | StudyStarted, at: float) -> Iterator[Event]:
        if isinstance(record, RunStarted):
            self._step = record.resumed_step or 0
        if ITSELF in self._begun:
            yield RunResumed(at=at, step=self._step if isinstance(record, RunStarted) else None)
        else:
            settings = _run_settings(record) if isinstance(record, RunStarted) else record.settings
            self._defaults = dict(settings.get("defaults", {}))
            yield RunBegan(at=at, name=self._out.name, settings={**settings, "out": str(self._out)})
        if isinstance(record, RunStarted) and (workers := record.execution.get("workers")):
            yield ValuesLogged(at=at, step=self._step, values={"run/workers": workers})

    def _of_run(self, record: Any, at: float) -> Iterator[Event]:
        self._step = getattr(record, "step", self._step)
        step = self._step
        match record:
            case Restarted():
                yield RunResumed(at=at, step=step)
                yield LineLogged(at=at, step=step, topic="workers", line=restart_line(record))
            case Measured():
                values = {f"signals/{name}": value for name, (value, _) in record.signals.items()}
                errors = {name: error for name, (_, error) in record.signals.items() if error is not None}
                values |= {f"standard_errors/{name}": error for name, error in errors.items()}
                values |= {f"run/{name}": getattr(record, name) for name in ("batch_size", "lr", "workers")}
                yield ValuesLogged(at=at, step=step, values=values)
            case Reported():
                yield ValuesLogged(at=at, step=step, values={f"metrics/{n}": v for n, v in record.metrics.items()})
            case Regrouped():
                workers = len(record.members)
                yield ValuesLogged(at=at, step=step, values={"run/workers": workers})
                line = f"step {step}: on {count(workers, 'worker')} from here on, after {duration(record.pause_s)}"
                yield LineLogged(at=at, step=step, topic="workers", line=line)
            case WorkerGone():
                line = f"step {step}: worker {record.worker} {_GONE[record.how]}: {plain(record.why, 300)}"
                yield LineLogged(at=at, step=step, topic="workers", line=line)
            case Decided():
                yield LineLogged(at=at, step=step, topic=f"decisions/{record.policy}", line=decided_line(record))
            case PolicyFailed():
                yield LineLogged(at=at, step=step, topic=f"failures/{record.policy}", line=failed_line(record))
            case SyncChanged():
                yield LineLogged(at=at, step=step, topic="sync/strategy", line=since_line(record))
            case TopologyChanged():
                yield LineLogged(at=at, step=step, topic="sync/topology", line=since_line(record))
            case ChangesAccepted():
                yield LineLogged(at=at, step=step, topic="changes", line=what_text(record))
            case Checkpointed():
                yield ArtifactLogged(at=at, step=step, name="checkpoint", path=record.path)
            case PredictionsKept():
                path = str(self._out / "predictions" / record.name)
                yield ArtifactLogged(at=at, step=step, name=f"predictions/{record.name}", path=path)
            case FrontierFound() if record.answer.sentence:
                yield LineLogged(at=at, step=step, topic="answer", line=plain(record.answer.sentence, 600))
            case RunFinished():
                yield from self._finished(record, at)
            case RunFailed():
                line = f"{record.reason.replace('_', ' ')}: {plain(record.detail, 600)}"
                yield RunEnded(at=at, state="stopped" if record.reason == "interrupted" else "failed", line=line)
            case StudyFinished():
                state: State = "stopped" if record.reason == "interrupted" else "finished"
                yield RunEnded(at=at, state=state, values={"seconds": record.seconds}, line=plain(record.reason, 300))

    def _finished(self, record: RunFinished, at: float) -> Iterator[Event]:
        yield ArtifactLogged(at=at, step=record.steps, name="report", path=str(self._out / "report.html"))
        state: State = "stopped" if record.stopped in ("requested", "notice") else "finished"
        values = {**record.metrics, "seconds": record.seconds, "steps": record.steps, "workers": record.workers}
        line = record.stopped.replace("_", " ") + (f": {plain(record.stop_why, 300)}" if record.stop_why else "")
        yield RunEnded(at=at, state=state, values=values, line=line)

    def _of_trial(self, record: Any, trial: int, at: float) -> Iterator[Event]:
        run = _name(trial)
        step = self._trial_steps.get(trial, 0)
        match record:
            case TrialStarted() if run in self._begun:
                yield RunResumed(run=run, at=at, step=0)
            case TrialStarted():
                config = changed_config(self._defaults, record.config)
                settings = {"config": config, "execution": record.execution, "seed": record.seed}
                settings |= {"phase": record.phase, "trial": trial, "parent_trial": record.parent}
                yield RunBegan(run=run, at=at, name=f"trial {trial}", parent=ITSELF, settings=settings)
                if workers := record.execution.get("workers"):
                    yield ValuesLogged(run=run, at=at, step=0, values={"run/workers": workers})
            case TrialReported():
                step = self._trial_steps[trial] = record.report.step
                values = {f"metrics/{name}": value for name, value in record.report.metrics.items()}
                values |= {} if record.workers is None else {"run/workers": record.workers}
                yield ValuesLogged(run=run, at=at, step=step, values=values)
            case TrialRegrouped():
                step = self._trial_steps[trial] = record.change.step
                values = {"run/workers": float(len(record.change.members))}
                yield ValuesLogged(run=run, at=at, step=step, values=values)
            case TrialReallocated():
                why = f" ({plain(record.reason, 300)})" if record.reason else ""
                line = f"{record.before} -> {count(record.after, 'worker')}{why}"
                yield LineLogged(run=run, at=at, step=step, topic="workers", line=line)
            case TrialPaused():
                why = f": {plain(record.reason, 300)}" if record.reason else ""
                line = f"paused after epoch {record.epoch}{why}"
                yield LineLogged(run=run, at=at, step=step, topic="decisions/search", line=line)
            case TrialResumed():
                line = f"goes on with {count(record.workers, 'worker')}"
                yield LineLogged(run=run, at=at, step=step, topic="decisions/search", line=line)
            case ArtifactKept():
                path, at_end = str(self._out / record.path), self._ending is not None
                name = "checkpoint" if at_end else f"{run}/checkpoint"  # an ended run gets nothing more
                yield ArtifactLogged(run=run if at_end else ITSELF, at=at, step=record.step, name=name, path=path)
            case ArtifactRemoved():
                line = f"the checkpoint of trial {trial} is removed"
                yield LineLogged(at=at, step=trial, topic="artifacts", line=line)
            case TrialFinished():
                if record.state == "complete":
                    values = {f"trials/{name}": value for name, value in record.values.items()}
                    yield ValuesLogged(at=at, step=trial, values=values)
                self._ending = _trial_end(record, run, at)


_GONE: Mapping[str, str] = {"lost": "is lost", "left": "has left"}


def _name(trial: int) -> str:
    return f"trial-{trial}"


def _trial_end(record: TrialFinished, run: str, at: float) -> RunEnded:
    results = {**record.metrics, **record.values, "seconds": record.seconds}
    results |= {} if record.worker_seconds is None else {"worker_seconds": record.worker_seconds}
    results |= {} if record.cost is None else {"cost": record.cost}
    line = " ".join(filter(None, (record.state, plain(record.reason, 300))))
    state: State = "finished" if record.state == "complete" else "failed"
    return RunEnded(run=run, at=at, state=state, values=results, line=line)


def changed_config(defaults: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A program's config with ``changes``, each value by its whole name: "optim.lr"."""
    return {**_flat(defaults), **_flat(changes)}


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in config.items():
        values |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return values


def flat_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings as texts, by names such as "config.lr". Lists are JSON."""
    flat = _flat(settings).items()
    return {name: value if isinstance(value, str) else json.dumps(value, default=str) for name, value in flat}


def _run_settings(record: RunStarted) -> dict[str, Any]:
    config = changed_config(record.defaults, record.config)
    settings: dict[str, Any] = {"program": record.program, "config": config, "seed": record.seed}
    settings |= {"execution": record.execution, "sync": record.sync, "adapt": record.adapt, "epochs": record.epochs}
    optional = {"sync_schedule": record.sync_schedule, "max_steps": record.max_steps, "arguments": record.arguments}
    return settings | {name: value for name, value in optional.items() if value}
