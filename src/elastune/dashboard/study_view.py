"""What the page shows of a study or a frontier, folded from its journal entry by entry; small, and JSON at any time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Mapping
from itertools import takewhile
from typing import Any

from elastune.core.errors import UserError
from elastune.core.formatting import cut
from elastune.core.journal.folds import AllocationSpan, TrialSummary, TrialTable
from elastune.core.journal.records import (
    ActAsked,
    ActDone,
    Entry,
    FrontierFound,
    PhasesPlanned,
    ProposalAsked,
    Record,
    StudyFinished,
    StudyStarted,
    TrialFinished,
    TrialReported,
)
from elastune.dashboard.forming import FormingFront, interval
from elastune.tuning.search.objective import Objective, parse_objectives
from elastune.tuning.study.control.acts import BUDGETS, StudyControl

SEARCHED = ("search", "member")  # the phases whose trials may be on the front, as in a report
LONGEST = 200  # characters of a reason or a value in a table
MOST_SETTINGS = 24  # of one trial
MOST_ACTS = 50
MOST_SPANS = 3000  # the newest of them: a strip of more is a grey area


class FollowedStudy:
    """A study as the page shows it. A record costs the same however many came before it.

    Attributes:
        version: Counts the entries so far. ``news`` returns what has changed since a version.
    """

    def __init__(self) -> None:
        self.version = 0
        self.objectives: tuple[Objective, ...] = ()
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
        self._changed: dict[int, int] = {}  # trial -> version of its last change, in the order of these versions
        self._states: dict[int, str] = {}
        self._counts: Counter[str] = Counter()
        self._running: dict[int, None] = {}
        self._used_by: dict[int, float] = {}  # worker-seconds, of trials
        self._used_s = 0.0
        self._members = 0
        self._front = FormingFront()
        self._alike: dict[Hashable, dict[int, None]] = {}  # settings -> complete trials
        self._intervals: tuple[int, dict[int, dict[str, list[float]]]] = (-1, {})
        self._span_at: list[int] = []  # by span that has ended: the version then
        self._growth_at = 0  # the version of the newest change of the front

    def observe(self, entry: Entry) -> None:
        """Take the next entry of the journal."""
        self.version += 1
        record = entry.record
        self._table.observe(entry)
        self._control.observe(record)
        self._last_at = entry.at
        match record:
            case TrialReported():
                pass  # most records are reports
            case StudyStarted():
                self._started_at = self._started_at or entry.at
                self._started, self._finished = record, None
                self.objectives = self._front.objectives = _objectives(record)
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
            self._note_trial(int(number), record)
        self._span_at += [self.version] * (self._table.spans_ended - len(self._span_at))

    def _note_trial(self, trial: int, record: Record) -> None:
        self._changed.pop(trial, None)
        self._changed[trial] = self.version
        self._asking = None if self._asking == trial else self._asking
        if isinstance(record, TrialReported):
            return
        life = self._table.trials[trial]
        if trial not in self._states:
            self._members += life.started.phase == "member"
        else:
            self._counts[self._states[trial]] -= 1
        self._states[trial] = life.finished.state if life.finished is not None else life.state
        self._counts[self._states[trial]] += 1
        if life.state == "running":
            self._running[trial] = None
        else:
            self._running.pop(trial, None)
        self._used_s += life.worker_seconds - self._used_by.get(trial, 0.0)
        self._used_by[trial] = life.worker_seconds
        if isinstance(record, TrialFinished) and record.state == "complete":
            self._alike.setdefault(_settings_of(life), {})[trial] = None
            if life.started.phase in SEARCHED:
                before = self._front.version
                self._front.add(trial, {**record.metrics, **record.values}, self._table.seconds, self._used_s)
                self._growth_at = self.version if self._front.version != before else self._growth_at

    def _note_act(self, at: float, act: ActAsked) -> None:
        what = {name: value for name in (*BUDGETS, "workers") if (value := getattr(act, name)) is not None}
        shown = {"at": at, "act": act.act, "trial": act.trial, "what": what, "by": act.by, "refused": act.refused}
        self._acts[act.ask] = {**shown, "outcome": ""}
        while len(self._acts) > MOST_ACTS:
            del self._acts[next(iter(self._acts))]

    @property
    def is_frontier(self) -> bool:
        """Whether it is a frontier."""
        return self._started is not None and self._started.settings.get("kind") == "frontier"

    # -- what is sent to a page --

    def head(self, running: bool) -> dict[str, Any]:
        """Return the small part of what is shown. ``running``: whether a controller writes the journal."""
        settings = self._started.settings if self._started is not None else {}
        state = "running" if running else "unfinished" if self._finished is None else f"ended: {self._finished.reason}"
        return {
            "kind": "frontier" if self.is_frontier else "study",
            "program": str(settings.get("program", "")),
            "state": state,
            "running": running,
            "started_at": self._started_at,
            "last_at": self._last_at,
            "seconds": self._table.seconds,
            "worker_s": self._used_s,
            "objectives": {each.name: each.direction for each in self.objectives},
            "counts": {state: count for state, count in self._counts.items() if count},
            "front": self._front.trials,
            "intervals": self._front_intervals(),
            "budget": self._budget(settings),
            "waits": self._waits(running),
            "acts": [dict(act) for act in reversed(self._acts.values())],
            "parked": sorted(self._control.parked),
            "phases": None if self._phases is None else self._phases_shown(self._phases),
            "by_workers": self._by_workers() if self.is_frontier else [],
            "answer": None if self._found is None else _answer(self._found),
            "best": self._best(),
        }

    def news(self, since: int) -> dict[str, Any]:
        """Return what grows with the study, as far as it changed after version ``since``."""
        first = bisect_right(self._span_at, since)
        ended, going_on = self._table.spans_from(max(first, len(self._span_at) - MOST_SPANS))
        news: dict[str, Any] = {
            "rows": [self._row(self._table.trials[trial]) for trial in self._changed_after(since)],
            "spans": [*map(_span, ended)],
            "open_spans": [*map(_span, going_on)],
        }
        if self._growth_at > since:
            news["growth"] = self._front.growth()
        return news

    def _changed_after(self, since: int) -> list[int]:
        newest = takewhile(lambda trial: self._changed[trial] > since, reversed(self._changed))
        return sorted(newest)

    def importance(self) -> list[dict[str, Any]]:
        """Return how much each parameter decides each objective, by the complete trials of the search.

        It brings Optuna along, so the server computes it on request only.
        """
        from elastune.tuning.search.importance import EvaluatedTrial, importance

        tried = [
            EvaluatedTrial(life.started.params, life.started.distributions, {**end.metrics, **end.values})
            for life in list(self._table.trials.values())
            if (end := life.finished) is not None and end.state == "complete" and life.started.phase in SEARCHED
        ]
        return [
            {
                "objective": each.objective,
                "trials": each.trials,
                "why_not": each.why_not,
                "shares": [[share.name, share.share, share.trials] for share in each.parameters],
            }
            for each in importance(tried, self.objectives)
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

    def _front_intervals(self) -> dict[int, dict[str, list[float]]]:
        """By trial on the front and objective: the 95 % interval of its value, where its error is known."""
        complete = self._counts["complete"]
        if self._intervals[0] != complete:
            found: dict[int, dict[str, list[float]]] = {}
            for trial in self._front.trials:
                alike = [self._table.trials[n] for n in self._alike[_settings_of(self._table.trials[trial])]]
                ends = {each.name: interval(each, alike) for each in self.objectives}
                if known := {name: [*end] for name, end in ends.items() if end is not None}:
                    found[trial] = known
            self._intervals = complete, found
        return self._intervals[1]

    def _best(self) -> str:
        best = self._front.best
        if best is None:
            return ""
        trial, objective, value = best
        return f"{cut(objective.name, 30)} {value:.6g} (trial {trial})"

    def _budget(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        asked = {name: self._control.changed.get(name, settings.get(name)) for name in (*BUDGETS, "workers")}
        running = [self._table.trials[trial] for trial in self._running]
        used = {
            "trials": len(self._table.trials) - self._members,
            "budget_s": self._table.seconds,
            "worker_hours": (self._used_s + sum(map(_present_s, running))) / 3600,
            "workers": sum(life.workers for life in running),
        }
        return {name: {"asked": asked[name], "used": used[name]} for name in used}

    def _waits(self, running: bool) -> list[str]:
        """What the study waits for, in words."""
        asked = [
            f"{act.act.replace('_', ' ')} of trial {act.trial}"
            for act in self._control.pending.values()
            if act.trial is not None
        ]
        if not running:
            return [] if self._finished is not None else ["nobody works on it: elastune resume goes on", *asked]
        waits = []
        by_phase: dict[str, list[int]] = {}
        for number in sorted(self._running):
            by_phase.setdefault(self._table.trials[number].started.phase, []).append(number)
        for phase, numbers in by_phase.items():
            waits.append(f"{phase}: {'trial' if len(numbers) == 1 else 'trials'} {_some(numbers)} to report")
        if self._asking is not None:
            waits.append(f"the search to propose trial {self._asking}")
        cut_off = [number for number in self._table.cut_off if number not in self._control.parked]
        waits += [f"free workers for trial {_some(cut_off)}"] if cut_off else []
        waits += [f"someone to let trial {_some(sorted(self._control.parked))} go on"] if self._control.parked else []
        return [*waits, *asked]

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
                "intervals": self._intervals_of_mean(lives),
            }
            for (phase, workers), lives in sorted(cells.items(), key=lambda item: (item[0][1], item[0][0]))
        ]

    def _intervals_of_mean(self, lives: list[TrialSummary]) -> dict[str, list[float]]:
        """By objective, the 95 % interval of the mean of trials that differ by seed alone."""
        if len({_settings_of(life) for life in lives}) > 1:
            return {}
        ends = {each.name: interval(each, lives) for each in self.objectives}
        return {name: [*end] for name, end in ends.items() if end is not None}


def _objectives(record: StudyStarted) -> tuple[Objective, ...]:
    asked = record.settings.get("objectives")
    try:
        return parse_objectives(asked) if isinstance(asked, dict) else ()
    except UserError:  # a journal that something else wrote
        return ()


def _settings_of(life: TrialSummary) -> Hashable:
    """Equal for trials that differ by seed alone."""
    config = life.started.config
    return life.started.phase, life.first_workers, life.epochs, repr(sorted(config.items()))


def _span(each: AllocationSpan) -> list[Any]:
    """Who had how many workers and when: trial, begin, end, workers, how it ended, why, pause in ms."""
    times = round(each.begin_s, 3), round(each.end_s, 3)
    return [each.trial, *times, each.workers, each.ended, cut(each.reason, LONGEST), round(1e3 * each.pause_s, 1)]


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


def _means(lives: list[TrialSummary]) -> dict[str, float | None]:
    values: dict[str, list[float]] = {}
    for life in lives:
        for name, value in (life.finished.metrics if life.finished is not None else life.metrics).items():
            if math.isfinite(value):
                values.setdefault(name, []).append(value)
    return {name: sum(each) / len(each) for name, each in values.items()}


def _present_s(life: TrialSummary) -> float:
    """The worker-seconds of the present start of a trial that runs."""
    return life.workers * max(0.0, life.last_at - life.last_start_at)


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
