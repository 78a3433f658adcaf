"""What the page shows of a study or a frontier, folded from its journal entry by entry; small, and JSON at any time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from elastune.core.formatting import cut
from elastune.core.journal.folds import TrialSummary, TrialTable
from elastune.core.journal.records import (
    ActAsked,
    ActDone,
    Entry,
    FrontierFound,
    PhasesPlanned,
    ProposalAsked,
    StudyFinished,
    StudyStarted,
    TrialFinished,
)
from elastune.tuning.search.front import default_reference, hypervolume, nondominated
from elastune.tuning.study.control.acts import BUDGETS, StudyControl

SEARCHED = ("search", "member")  # the phases whose trials may be on the front, as in a report
LONGEST = 200  # characters of a reason or a value in a table
MOST_SETTINGS = 24  # of one trial
MOST_ACTS = 50
MOST_SPANS = 3000  # the newest of them: a strip of more is a grey area
MOST_POINTS = 1500  # of the growth of the front


class FollowedStudy:
    """A study as the page shows it.

    Attributes:
        version: Counts the entries so far. ``rows`` returns what has changed since a version.
    """

    def __init__(self) -> None:
        self.version = 0
        self._table = TrialTable()
        self._control = StudyControl()
        self._started: StudyStarted | None = None
        self._started_at = 0.0
        self._last_at = 0.0
        self._finished: StudyFinished | None = None
        self._found: FrontierFound | None = None
        self._phases: PhasesPlanned | None = None
        self._asking: int | None = None  # the trial whose settings the search looks for
        self._acts: dict[str, dict[str, Any]] = {}
        self._changed: dict[int, int] = {}  # trial -> version of its last change
        self._used_by: dict[int, float] = {}  # worker-seconds, of trials
        self._used_s = 0.0
        self._growth = _Growth()

    def observe(self, entry: Entry) -> None:
        """Take the next entry of the journal."""
        self.version += 1
        record = entry.record
        self._table.observe(entry)
        self._control.observe(record)
        self._last_at = entry.at
        match record:
            case StudyStarted():
                self._started_at = self._started_at or entry.at
                self._started, self._finished = record, None
                self._growth.objectives = self.objectives
            case StudyFinished():
                self._finished = record
            case FrontierFound():
                self._found = record
            case PhasesPlanned():
                self._phases = record
            case ProposalAsked(trial=trial):
                self._asking = trial
            case ActAsked():
                self._note_act(entry.at, record)
            case ActDone(ask=ask, outcome=outcome) if ask in self._acts:
                self._acts[ask]["outcome"] = outcome
        number = getattr(record, "trial", None)
        if number in self._table.trials:
            trial = int(number)
            self._changed[trial] = self.version
            self._asking = None if self._asking == trial else self._asking
            life = self._table.trials[trial]
            self._used_s += life.worker_seconds - self._used_by.get(trial, 0.0)
            self._used_by[trial] = life.worker_seconds
            if isinstance(record, TrialFinished) and record.state == "complete" and life.started.phase in SEARCHED:
                values = {**record.metrics, **record.values}
                self._growth.add(trial, values, self._table.seconds, self._used_s)

    def _note_act(self, at: float, act: ActAsked) -> None:
        what = {name: value for name in (*BUDGETS, "workers") if (value := getattr(act, name)) is not None}
        shown = {"at": at, "act": act.act, "trial": act.trial, "what": what, "by": act.by, "refused": act.refused}
        self._acts[act.ask] = {**shown, "outcome": ""}
        while len(self._acts) > MOST_ACTS:
            del self._acts[next(iter(self._acts))]

    @property
    def objectives(self) -> dict[str, str]:
        """Name -> "max" or "min"."""
        asked = self._started.settings.get("objectives") if self._started is not None else None
        return {} if not isinstance(asked, dict) else {str(name): str(way) for name, way in asked.items()}

    @property
    def is_frontier(self) -> bool:
        """Whether it is a frontier."""
        return self._started is not None and self._started.settings.get("kind") == "frontier"

    # -- what is sent to a page --

    def head(self, running: bool) -> dict[str, Any]:
        """Return everything but the rows of trials. ``running``: whether a controller writes the journal."""
        settings = self._started.settings if self._started is not None else {}
        trials = self._table.trials.values()
        state = "running" if running else "unfinished" if self._finished is None else f"ended: {self._finished.reason}"
        return {
            "kind": "frontier" if self.is_frontier else "study",
            "program": str(settings.get("program", "")),
            "state": state,
            "running": running,
            "started_at": self._started_at,
            "last_at": self._last_at,
            "seconds": self._table.seconds,
            "objectives": self.objectives,
            "counts": _counts(trials),
            "front": self._front(),
            "budget": self._budget(settings),
            "waits": self._waits(running),
            "acts": list(reversed(self._acts.values())),
            "parked": sorted(self._control.parked),
            "phases": None if self._phases is None else self._phases_shown(self._phases),
            "by_workers": self._by_workers() if self.is_frontier else [],
            "answer": None if self._found is None else _answer(self._found),
            "best": self._best(),
        }

    def rows(self, since: int) -> list[dict[str, Any]]:
        """Return the rows of the trials that changed after ``since``, a version."""
        return [self._row(self._table.trials[n]) for n, version in self._changed.items() if version > since]

    def growth(self) -> dict[str, list[float]]:
        """Return the hypervolume of the front over time and worker-seconds; with one objective the best value."""
        return self._growth.shown()

    def spans(self) -> list[list[Any]]:
        """Return who had how many workers and when: trial, begin, end, workers, how it ended, why, pause in ms."""
        return [
            [
                each.trial,
                round(each.begin_s, 3),
                round(each.end_s, 3),
                each.workers,
                each.ended,
                cut(each.reason, LONGEST),
                round(1e3 * each.pause_s, 1),
            ]
            for each in self._table.spans[-MOST_SPANS:]
        ]

    def curves(self, trial: int) -> dict[str, Any] | None:
        """Return the reports of a trial, metric by metric, and the rest of its row; None if there is no such trial."""
        life = self._table.trials.get(trial)
        if life is None:
            return None
        metrics: dict[str, list[list[float | None]]] = {}
        for report, workers in life.reports:
            for name, value in report.metrics.items():
                metrics.setdefault(name, []).append([report.epoch, _finite(value), report.seconds, workers])
        config = {str(name): cut(str(value), LONGEST) for name, value in life.started.config.items()}
        return {"row": self._row(life), "curves": metrics, "config": config, "execution": life.started.execution}

    def _row(self, life: TrialSummary) -> dict[str, Any]:
        end, state = life.finished, life.state
        reason = end.reason if end is not None else life.pause.reason if life.pause and state == "paused" else ""
        values = {**life.metrics, **(end.metrics if end is not None else {}), **(end.values if end is not None else {})}
        if state == "running" and life.reports:
            values.setdefault("seconds", life.reports[-1][0].seconds)
        settings = life.started.params or life.started.config
        return {
            "n": life.number,
            "phase": life.started.phase,
            "state": end.state if end is not None else state,
            "settings": {str(k): _plain(v) for k, v in list(settings.items())[:MOST_SETTINGS]},
            "workers": life.workers,
            "epoch": life.epochs_done,
            "epochs": life.epochs,
            "values": {name: _finite(value) for name, value in values.items()},
            "seconds": round(life.seconds, 3),
            "worker_s": round(life.worker_seconds, 3),
            "last_s": round(life.last_s, 3),
            "reason": cut(reason, LONGEST),
            "parked": life.number in self._control.parked,
        }

    def _front(self) -> list[int]:
        return self._growth.front()

    def _best(self) -> str:
        best = self._growth.best()
        if best is None:
            return ""
        trial, name, value = best
        return f"{cut(name, 30)} {value:.6g} (trial {trial})"

    def _budget(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        asked = {name: self._control.changed.get(name, settings.get(name)) for name in (*BUDGETS, "workers")}
        used = {
            "trials": sum(life.started.phase != "member" for life in self._table.trials.values()),
            "budget_s": self._table.seconds,
            "worker_hours": sum(map(_worker_s, self._table.trials.values())) / 3600,
            "workers": sum(life.workers for life in self._table.trials.values() if life.state == "running"),
        }
        return {name: {"asked": asked[name], "used": used[name]} for name in used}

    def _waits(self, running: bool) -> list[str]:
        """What the study waits for, in words."""
        if not running:
            return [] if self._finished is not None else ["nobody works on it: elastune resume goes on"]
        waits = []
        by_phase: dict[str, list[int]] = {}
        for number in self._table.of("running"):
            by_phase.setdefault(self._table.trials[number].started.phase, []).append(number)
        for phase, numbers in by_phase.items():
            waits.append(f"{phase}: {'trial' if len(numbers) == 1 else 'trials'} {_some(numbers)} to report")
        if self._asking is not None:
            waits.append(f"the search to propose trial {self._asking}")
        cut_off = [number for number in self._table.cut_off if number not in self._control.parked]
        waits += [f"free workers for trial {_some(cut_off)}"] if cut_off else []
        waits += [f"someone to let trial {_some(sorted(self._control.parked))} go on"] if self._control.parked else []
        asked = [act for act in self._control.pending.values() if act.trial is not None]
        waits += [f"{act.act.replace('_', ' ')} of trial {act.trial}" for act in asked]
        return waits

    def _phases_shown(self, phases: PhasesPlanned) -> dict[str, Any]:
        return {"budget_s": phases.budget_s, "planned": phases.planned, "took": phases.took}

    def _by_workers(self) -> list[dict[str, Any]]:
        """The trials of a frontier by phase and number of workers: how many, and their newest metrics' means."""
        cells: dict[tuple[str, int], list[TrialSummary]] = {}
        for life in self._table.trials.values():
            workers = life.started.tags.get("for_workers", life.first_workers)
            key = life.started.phase, int(workers) if isinstance(workers, int) else life.first_workers
            cells.setdefault(key, []).append(life)
        return [
            {
                "phase": phase,
                "workers": workers,
                "trials": len(lives),
                "running": sum(life.state == "running" for life in lives),
                "values": _means(lives),
            }
            for (phase, workers), lives in sorted(cells.items(), key=lambda item: (item[0][1], item[0][0]))
        ]


class _Growth:
    """The complete trials of the search in the order they ended, their front, and how it grew."""

    def __init__(self) -> None:
        self.objectives: dict[str, str] = {}
        self._trials: list[int] = []
        self._points: list[list[float]] = []
        self._at: list[tuple[float, float]] = []
        self._shown: tuple[int, dict[str, list[float]]] = (-1, {"x": [], "worker_s": [], "y": []})
        self._front: tuple[int, list[int]] = (-1, [])

    def add(self, trial: int, values: Mapping[str, float], now_s: float, worker_s: float) -> None:
        """Add a complete trial."""
        point = [(-1.0 if way == "max" else 1.0) * values.get(name, math.nan) for name, way in self.objectives.items()]
        if point and all(map(math.isfinite, point)):
            self._trials.append(trial)
            self._points.append(point)
            self._at.append((now_s, worker_s))

    def front(self) -> list[int]:
        """The trials that no other one dominates."""
        if self._front[0] != len(self._points):
            import numpy as np

            on = nondominated(np.array(self._points)).tolist() if self._points else []
            self._front = len(self._points), [n for n, is_on in zip(self._trials, on, strict=True) if is_on]
        return self._front[1]

    def best(self) -> tuple[int, str, float] | None:
        """The best trial by the first objective: its number, the objective, and its value."""
        if not self._points:
            return None
        i = min(range(len(self._points)), key=lambda k: self._points[k][0])
        name, way = next(iter(self.objectives.items()))
        return self._trials[i], name, (-1.0 if way == "max" else 1.0) * self._points[i][0]

    def shown(self) -> dict[str, list[float]]:
        """The growth of the front, at most ``MOST_POINTS`` points: only trials that changed it, and the last one."""
        if self._shown[0] != len(self._points):
            self._shown = len(self._points), self._grown()
        return self._shown[1]

    def _grown(self) -> dict[str, list[float]]:
        steps = list(self._steps())
        every = max(1, len(steps) // MOST_POINTS)
        kept = [step for i, step in enumerate(steps) if i % every == 0 or i == len(steps) - 1]
        x, worker_s, y = (list(column) for column in zip(*kept, strict=True)) if kept else ([], [], [])
        return {"x": x, "worker_s": worker_s, "y": y}

    def _steps(self) -> Iterator[tuple[float, float, float]]:
        """Time, worker-seconds and height whenever the front changed, and at the end."""
        import numpy as np

        if not self._points:
            return
        points = np.array(self._points)
        single = points.shape[1] == 1
        sign = -1.0 if next(iter(self.objectives.values())) == "max" else 1.0
        reference = None if single else default_reference(points[nondominated(points)])
        front: list[list[float]] = []
        height = 0.0
        for point, at in zip(self._points, self._at, strict=True):
            if any(all(a <= b for a, b in zip(other, point, strict=True)) for other in front):
                continue
            front = [o for o in front if not all(a <= b for a, b in zip(point, o, strict=True))] + [point]
            height = sign * point[0] if reference is None else hypervolume(np.array(front), reference)
            yield (*at, height)
        yield (*self._at[-1], height)


def _answer(found: FrontierFound) -> dict[str, Any]:
    rows = [
        {
            "role": row.role,
            "workers": row.workers,
            "quality": _finite(row.quality),
            "ci": None if row.ci is None else [*map(_finite, row.ci)],
            "seconds": _finite(row.seconds),
            "verdict": str(row.verdict),
        }
        for row in found.rows
    ]
    answer = found.answer
    return {"sentence": answer.sentence, "command": answer.command, "pick": answer.pick, "rows": rows}


def _counts(trials: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for life in trials:
        state = life.finished.state if life.finished is not None else life.state
        counts[state] = counts.get(state, 0) + 1
    return counts


def _means(lives: list[TrialSummary]) -> dict[str, float | None]:
    values: dict[str, list[float]] = {}
    for life in lives:
        for name, value in (life.finished.metrics if life.finished is not None else life.metrics).items():
            if math.isfinite(value):
                values.setdefault(name, []).append(value)
    return {name: sum(each) / len(each) for name, each in values.items()}


def _worker_s(life: TrialSummary) -> float:
    """Its worker-seconds, with those of the present start."""
    if life.state != "running":
        return life.worker_seconds
    return life.worker_seconds + life.workers * max(0.0, life.last_at - life.last_start_at)


def _finite(value: float) -> float | None:
    """JSON of browsers has no infinities."""
    return value if math.isfinite(value) else None


def _plain(value: object) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return value if math.isfinite(value) and abs(value) < 2**53 else str(value)
    return cut(str(value), LONGEST)


def _some(numbers: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown} and {len(numbers) - most} more"
