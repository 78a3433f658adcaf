"""What the page shows of a run, folded from its journal entry by entry; small, and JSON at any time."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import Any

from elastune.core.formatting import cut
from elastune.core.journal.records import (
    Adopted,
    Checkpointed,
    Decided,
    Entry,
    FaultInjected,
    LearnerLeftOut,
    Measured,
    PolicyFailed,
    Regrouped,
    Reported,
    Restarted,
    RunFailed,
    RunFinished,
    RunStarted,
    StepsCompleted,
    StepsPlanned,
    StragglerDetected,
    SyncChanged,
    TopologyChanged,
    VerificationEnded,
    WorkerGone,
    WorkerWrong,
)
from elastune.report.lines import verification_line

LONGEST = 300
MOST_EVENTS = 200  # the newest
MOST_POINTS = 1000  # of one curve
MOST_CLAIMS = 2000  # of workers: a ledger of more takes seconds
MOST_EPOCHS = 50  # the newest, in a ledger
LEDGER = (RunStarted, StepsCompleted, LearnerLeftOut, Restarted, RunFinished)


class ThinnedCurve:
    """Points of a curve. Beyond twice ``most`` every second one is dropped, so it stays small for any run.

    The first and the newest point are always there.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self.points: list[list[float | None]] = []
        self.count = 0
        self._most, self._every, self._thinned_at = most, 1, 0

    def add(self, *point: float | None) -> None:
        """Add a point."""
        if self._is_extra:
            self.points.pop()
        self.count += 1
        self.points.append([each if each is not None and math.isfinite(each) else None for each in point])
        if len(self.points) > 2 * self._most:
            self.points = self.points[::2]
            self._every *= 2
            self._thinned_at = self.count

    def after(self, seen: int) -> tuple[int, list[list[float | None]]]:
        """Return what a page lacks that knows the curve of the first ``seen`` points: how many of its own stay, and the
        points that follow them.
        """
        stay = 0 if seen == 0 or seen < self._thinned_at else (seen - 1) // self._every + 1
        return stay, self.points[stay:]

    @property
    def _is_extra(self) -> bool:
        """Whether the newest point stands only until the next one comes."""
        return self.count > 0 and (self.count - 1) % self._every != 0


class FollowedRun:
    """A run as the page shows it.

    Attributes:
        version: Counts the entries so far.
    """

    def __init__(self) -> None:
        self.version = 0
        self._started: RunStarted | None = None
        self._started_at = 0.0
        self._last_at = 0.0
        self._first_at = 0.0
        self._metrics: dict[str, ThinnedCurve] = {}
        self._signals: dict[str, ThinnedCurve] = {}
        self._batch, self._lr, self._workers = ThinnedCurve(), ThinnedCurve(), ThinnedCurve()
        self._events: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)
        self._ledger: dict[int, list[int]] = {}  # worker -> steps and samples that it claimed
        self._claims: list[Entry] = []  # what a ledger of samples is made of
        self._claims_left_out = False
        self._last: dict[str, Any] = {"step": 0, "epoch": 0, "epochs": 0, "samples": 0, "seconds": 0.0}
        self._planned = 0
        self._checkpoint: int | None = None
        self._now_workers = 0
        self._finished: RunFinished | None = None
        self._failed: RunFailed | None = None

    def observe(self, entry: Entry) -> None:
        """Take the next entry of the journal."""
        self.version += 1
        self._last_at = entry.at
        self._first_at = self._first_at or entry.at
        record = entry.record
        if isinstance(record, LEDGER):
            self._claims_left_out = len(self._claims) >= MOST_CLAIMS
            self._claims += [] if self._claims_left_out else [entry]
        match record:
            case RunStarted():
                self._begin(record, entry.at)
            case Reported():
                self._reported(record)
            case Measured():
                self._measured(record)
            case Decided(cause=cause):
                self._measured(cause)
                changes = ", ".join(f"{k} {v}" for k, v in record.decision.items() if v is not None)
                read = ", ".join(f"{k} {v[0]:.4g}" for k, v in cause.signals.items())
                self._event(
                    entry.at, record.step, f"{record.policy}: {changes} ({record.outcome})", record.detail or read
                )
            case Regrouped():
                self._regrouped(entry.at, record)
            case WorkerGone():
                self._event(entry.at, self._last["step"], f"worker {record.worker} {record.how}", record.why)
            case StepsCompleted():
                claimed = self._ledger.setdefault(record.worker, [0, 0])
                claimed[0] += record.last_step - record.first_step + 1
                claimed[1] += record.stop - record.start
                self._last["step"] = max(self._last["step"], record.last_step)
            case StepsPlanned(steps=steps):
                self._planned = steps
            case RunFinished():
                self._finished = record
            case RunFailed():
                self._failed = record
                self._event(entry.at, self._last["step"], f"failed: {record.reason}", record.detail)
            case _:
                self._other(entry)

    def _other(self, entry: Entry) -> None:
        step = self._last["step"]
        match entry.record:
            case Adopted(workers=workers):
                self._event(entry.at, step, f"a new controller took over {len(workers)} workers", "")
            case Checkpointed(step=at):
                self._checkpoint = at
            case StragglerDetected(line=line):
                self._event(entry.at, step, "straggler", line)
            case SyncChanged(step=at, sync=sync, why=why):
                self._event(entry.at, at, f"sync strategy {sync}", why)
            case TopologyChanged(step=at, topology=topology, cause=cause):
                self._event(entry.at, at, f"topology {topology}", cause)
            case PolicyFailed(step=at, policy=policy, detail=detail):
                self._event(entry.at, at, f"policy {policy} failed", detail)
            case Restarted(step=at):
                self._event(entry.at, at, "went on from the checkpoint", "")
            case WorkerWrong(step=at) | VerificationEnded(step=at):
                self._event(entry.at, at, "verification", verification_line(entry.record))
            case FaultInjected(fault=fault, worker=worker):
                self._event(entry.at, step, f"fault {fault}", "" if worker is None else f"worker {worker}")
            case LearnerLeftOut(learner=learner, last_step=at):
                self._event(entry.at, at, f"learner {learner} was left out of a round", "")

    def _begin(self, record: RunStarted, at: float) -> None:
        self._started, self._finished, self._failed = record, None, None
        self._started_at = self._started_at or at
        workers = record.execution.get("workers", 1)
        self._have_workers(at, workers if isinstance(workers, int) else 1)

    def _reported(self, report: Reported) -> None:
        self._last |= {"epoch": report.epoch, "epochs": report.epochs, "samples": report.samples}
        self._last |= {"seconds": report.seconds, "step": max(self._last["step"], report.step)}
        for name, value in report.metrics.items():
            self._metrics.setdefault(name, ThinnedCurve()).add(report.step, value)

    def _measured(self, at: Measured) -> None:
        self._last |= {"step": max(self._last["step"], at.step), "seconds": at.seconds, "samples": at.samples}
        self._batch.add(at.step, at.batch_size)
        self._lr.add(at.step, at.lr)
        for name, (value, error) in at.signals.items():
            self._signals.setdefault(name, ThinnedCurve()).add(at.step, value, error)

    def _regrouped(self, at: float, change: Regrouped) -> None:
        before = self._now_workers
        self._have_workers(at, len(change.members))
        verb = "joined" if len(change.members) > before else "left" if change.planned else "lost"
        what = f"{abs(len(change.members) - before)} {verb}: {len(change.members)} workers"
        detail = f"pause {1e3 * change.pause_s:.0f} ms, {change.discarded} steps repeated"
        self._event(at, change.step, what, detail)

    def _have_workers(self, at: float, workers: int) -> None:
        now_s = at - self._first_at
        self._now_workers = workers
        self._workers.add(now_s, workers)

    def _event(self, at: float, step: int, what: str, why: str) -> None:
        self._events.append({"at": at, "step": step, "what": cut(what, LONGEST), "why": cut(why, LONGEST)})

    # -- what is sent to a page --

    def head(self, running: bool) -> dict[str, Any]:
        """Return all that is shown. ``running``: whether a process writes the journal."""
        end = self._finished
        state = "running" if running else "unfinished"
        if not running and end is not None:
            state = f"ended: {end.stopped}"
        elif not running and self._failed is not None:
            state = f"failed: {self._failed.reason}"
        started = self._started
        return {
            "kind": "run",
            "program": "" if started is None else started.program,
            "state": state,
            "running": running,
            "started_at": self._started_at,
            "last_at": self._last_at,
            "seconds": self._last_at - self._first_at,
            "now": {
                **self._last,
                "workers": self._now_workers,
                "planned": self._planned,
                "checkpoint": self._checkpoint,
            },
            "events": list(reversed(self._events)),
            "ledger": [[worker, *claimed] for worker, claimed in sorted(self._ledger.items())],
            "step_s": None if end is None else end.step_s,
            "wait_s": None if end is None else end.wait_s,
            "worker_steps": [] if end is None else [[w.rank, w.step_s, w.busy_s] for w in end.worker_steps],
            "memory": [] if end is None else [[m.rank, m.parameters, m.optimizer, m.peak] for m in end.memory],
            "best": self._best(),
        }

    def curves(self) -> dict[str, ThinnedCurve]:
        """All curves by name: ``metric accuracy``, ``signal loss``, ``batch``, ``lr``, ``workers``."""
        named = {f"metric {name}": curve for name, curve in self._metrics.items()}
        named |= {f"signal {name}": curve for name, curve in self._signals.items()}
        return named | {"batch": self._batch, "lr": self._lr, "workers": self._workers}

    def ledger(self) -> dict[str, Any]:
        """Return the ledger of samples so far: what each epoch used, missed and repeated, and the verdict in words."""
        from elastune.report.sample_ledger import ledger, lines

        if self._claims_left_out:
            return {"epochs": [], "verdict": "too many records to check while it runs: elastune report DIR --ledger"}
        so_far = ledger(self._claims)
        epochs = [
            [
                seen.epoch + 1,
                seen.once,
                seen.length,
                sum(stop - start for start, stop in seen.missed),
                sum(stop - start for start, stop in seen.repeated),
                seen.left_out,
            ]
            for seen in so_far.epochs[-MOST_EPOCHS:]
        ]
        return {"epochs": epochs, "verdict": lines(so_far, all_epochs=False)[-1].removeprefix("ledger: ")}

    def _best(self) -> str:
        last = [(name, curve.points[-1][1]) for name, curve in self._metrics.items() if curve.points]
        return ", ".join(f"{cut(name, 30)} {value:.6g}" for name, value in last[:1] if value is not None)


TAIL_BYTES = 16 << 10
MOST_LOGS = 16


def log_tails(out: Path) -> list[dict[str, str]]:
    """Return the last lines of the workers' logs in ``out``. Links that lead out of the folder are left out."""
    root = out.resolve()
    tails = []
    for path in sorted(out.glob("logs/*.log"))[:MOST_LOGS]:
        if path.is_symlink() or not path.is_file() or not path.resolve().is_relative_to(root):
            continue
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - TAIL_BYTES))
                text = file.read(TAIL_BYTES).decode(errors="replace")
        except OSError:
            continue
        tails.append({"name": path.stem, "text": "\n".join(text.splitlines()[-60:])})
    return tails
