"""What a study does with requests: which it refuses, and what it has promised to do and not done yet. Pure.

``StudyControl`` folds the records of requests, so a resumed study goes on with what was asked and not yet done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from elastune.core.errors import UserError
from elastune.core.journal.act_records import OF_TRIALS
from elastune.core.journal.folds import TrialSummary
from elastune.core.journal.records import ActAsked, ActDone, Record, StudyStarted, TrialResumed
from elastune.tuning.study.control.requests import LOOK_S, Inbox

if TYPE_CHECKING:  # a page that shows what was asked needs no torch
    from elastune.tuning.study.budget import Bounds

BUDGETS = ("trials", "budget_s", "worker_hours")


# --- decide on a request ---


@dataclass(frozen=True)
class Situation:
    """What decides whether a study can do what is asked.

    Attributes:
        trials: All trials.
        phase: The phase of the trials that may be chosen now.
        divided: Whether the study divides its budget and workers among phases, as a frontier does.
        fewest: The fewest workers of a trial.
        room: The most workers that the cluster has for the study.
        tried: The trials that have begun.
        elapsed_s: Seconds that controllers have worked on the study.
        worker_s: Worker-seconds of all trials.
    """

    trials: Mapping[int, TrialSummary]
    phase: str = "search"
    divided: bool = False
    fewest: int = 1
    room: int = 1
    tried: int = 0
    elapsed_s: float = 0.0
    worker_s: float = 0.0


def why_refused(act: ActAsked, now: Situation) -> str:
    """Return why the study cannot do ``act``: rule, value and fix; "" if it can. Pure."""
    refusal: tuple[str, object, str] | None = None
    if act.act in OF_TRIALS:
        refusal = _why_trial_refused(act, now)
    elif act.act != "end" and now.divided:
        rule = "a frontier divides its budget and its workers among its phases when it begins"
        refusal = rule, act.act, "end it, and begin another with other values"
    elif act.act == "workers" and act.workers is not None and not now.fewest <= act.workers <= now.room:
        rule = f"a study's workers must be enough for one trial and fit into its cluster: {now.fewest} to {now.room}"
        refusal = rule, act.workers, "name a number within these bounds"
    elif act.act == "budget":
        used = {"trials": now.tried, "budget_s": now.elapsed_s, "worker_hours": now.worker_s / 3600}
        for name in BUDGETS:
            wanted = getattr(act, name)
            if wanted is not None and wanted < used[name]:
                rule = f"a budget must not be less than what is used: {name} {used[name]:.6g}"
                refusal = rule, wanted, "name more, or end the study"
    return "" if refusal is None else str(UserError(*refusal, page=""))


def _why_trial_refused(act: ActAsked, now: Situation) -> tuple[str, object, str] | None:
    life = now.trials.get(-1 if act.trial is None else act.trial)
    if life is None:
        known = f"its trials are 0 to {max(now.trials)}" if now.trials else "it has no trial yet"
        return "a trial must be one of the study", act.trial, known
    if life.started.phase != now.phase:
        fix = "only trials of the phase that runs can be stopped, paused or resumed"
        return f"a trial must be one of the phase {now.phase!r}", f"{act.trial}, {life.started.phase!r}", fix
    if life.state == "over":
        ended = life.finished.state if life.finished is not None else "over"
        return "a trial must not be over", f"{act.trial}, {ended}", "choose one that runs or is paused"
    if act.act == "pause" and life.state != "running":
        return "a trial that is to pause must run", f"{act.trial}, {life.state}", "stop it, if it must not go on"
    if act.act == "go_on" and life.state != "paused":
        return "a trial that is to go on must be paused", f"{act.trial}, {life.state}", "pause it first"
    return None


# --- what was asked and is not done ---


@dataclass
class StudyControl:
    """What was asked of a study, folded from its journal, and the requests that are new.

    Attributes:
        inbox: The requests from outside; None: the study takes none, as a simulated one.
        pending: What is to be done, by the names of the requests, in the order of asking.
        parked: Trials that were paused on request: they go on on request only.
        wanted: Trials that are to go on -> who asked.
        changed: The newest budget and workers that were asked for, by the names of the fields.
        ends: Whether the study is to end in good order.
        divided, fewest: See ``Situation``.
    """

    inbox: Inbox | None = None
    divided: bool = False
    fewest: int = 1
    pending: dict[str, ActAsked] = field(default_factory=dict)
    parked: set[int] = field(default_factory=set)
    wanted: dict[int, str] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)
    ends: bool = False
    _known: set[str] = field(default_factory=set)
    _settings: dict[str, Any] | None = None

    @property
    def patience_s(self) -> float:
        """Seconds until the next look for requests."""
        return math.inf if self.inbox is None else LOOK_S

    def take(self) -> list[ActAsked]:
        """Return new requests. Those that the journal has already, because a controller died, are removed."""
        if self.inbox is None:
            return []
        new = []
        for act in self.inbox.take():
            if act.ask in self._known:
                self.inbox.remove(act)
            else:
                new.append(act)
        return new

    def acknowledged(self, act: ActAsked) -> None:
        """Remove the file of a request that is in the journal."""
        if self.inbox is not None:
            self.inbox.remove(act)

    def of(self, trial: int) -> ActAsked | None:
        """Return what is to be done with a trial that runs: the newest of its pending requests."""
        return next((act for act in reversed(self.pending.values()) if act.trial == trial), None)

    def bounds(self, own: Bounds) -> Bounds:
        """Return the budget: ``own``, with what was asked for instead."""
        return replace(own, **{name: self.changed[name] for name in BUDGETS if name in self.changed})

    def observe(self, record: Record) -> None:
        """Record an entry of the journal, new or replayed."""
        match record:
            case StudyStarted(settings=settings):
                self._new_command(settings)
            case ActAsked():
                self._known.add(record.ask)
                if not record.refused:
                    self._asked(record)
            case ActDone(ask=ask) if ask in self.pending:
                act = self.pending.pop(ask)
                if act.act == "pause" and act.trial is not None:
                    self.parked.add(act.trial)
            case TrialResumed(trial=trial):
                self.wanted.pop(trial, None)

    def _asked(self, act: ActAsked) -> None:
        self.pending[act.ask] = act
        if act.act == "go_on" and act.trial is not None:
            self.parked.discard(act.trial)
            self.wanted[act.trial] = act.by
        elif act.act == "end":
            self.ends = True
        for name in (*BUDGETS, "workers"):
            if (value := getattr(act, name)) is not None:
                self.changed[name] = value

    def _new_command(self, settings: Mapping[str, Any]) -> None:
        """A controller begins. Budgets and workers of its own command come before those asked for earlier."""
        before, self._settings = self._settings, dict(settings)
        self.ends = False
        for ask in [ask for ask, act in self.pending.items() if act.act == "end"]:
            del self.pending[ask]
        for name in [name for name in self.changed if before is not None and before.get(name) != settings.get(name)]:
            del self.changed[name]
