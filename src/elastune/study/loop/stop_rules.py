"""When a study has found enough, or finds nothing better any more: the rules of ``--until`` and ``--patience``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastune.core.errors import UserError
from elastune.journal.records import Record, TrialFinished, TrialPaused, TrialStarted
from elastune.journal.trials import TrialLife
from elastune.search.space.constraint import Constraint, fulfilled
from elastune.search.space.objective import Floats, Objective, oriented
from elastune.study.trial_results import known, visible


class StopRules:
    """Told of everything that happens to a study's trials, in the order of its journal; says why it is to end.

    Trials belong to generations of ``generation`` by the order in which they were begun (1: each is one of its own). A
    trial is better where, at its end, no earlier one is at least as good in every objective: with one objective a new
    best, with several a new point of the front. A generation is over once its trials, and all begun before, have ended
    or were paused by the search.

    Args:
        until: What one complete trial must reach, by its settings and metrics, for the study to end.
        patience: Generations in a row without a better trial, after which no further trial begins; None: any number.
        generation: How many trials one has.
        objectives: Those of the search.
    """

    def __init__(
        self,
        until: Sequence[Constraint] = (),
        patience: int | None = None,
        generation: int = 1,
        objectives: Sequence[Objective] = (),
    ) -> None:
        self._until = tuple(until)
        self._patience = patience
        self._size = generation
        self._objectives = tuple(objectives)
        self._met = ""
        self._reported: set[str] = set()
        self._order: dict[int, int] = {}
        self._over: set[int] = set()  # of the order
        self._prefix = 0  # so many of those begun first are over
        self._better_by = 0  # generations, at the end of which something was better
        self._front: Floats = np.empty((0, len(self._objectives)))

    @property
    def met(self) -> str:
        """Why what runs is to be paused and the study is to end; empty while it is not."""
        return self._met

    @property
    def stale(self) -> str:
        """Why no further trial is to begin; empty while some may."""
        if self._patience is None or self._prefix // self._size - self._better_by < self._patience:
            return ""
        what = "no better trial" if len(self._objectives) == 1 else "no trial joined the front"
        if self._size == 1:
            return f"{what} in {self._patience} trials"
        return f"{what} in {self._patience} generations of {self._size} trials"

    def hear(self, record: Record, life: TrialLife) -> None:
        """Take in what happened to the trial of ``life``. Raises ``UserError`` where no trial can tell its rules."""
        if life.started.phase != "search":
            return
        order = self._order.setdefault(life.number, len(self._order))
        match record:
            case TrialStarted():
                self._over.discard(order)
            case TrialPaused(cut_off=False):
                self._ended(order)
            case TrialFinished():
                better = record.state == "complete" and self._joins(record)
                self._ended(order)
                if better:
                    self._better_by = max(self._better_by, order // self._size + 1, self._prefix // self._size)
                if record.state == "complete":
                    self._look(record, life)

    def _ended(self, order: int) -> None:
        self._over.add(order)
        while self._prefix in self._over:
            self._prefix += 1

    def _joins(self, record: TrialFinished) -> bool:
        """Whether a complete trial is on the front of those that have ended; keep that front."""
        point = oriented(record.values, self._objectives)
        if (self._front <= point).all(axis=1).any():
            return False
        beaten = (point <= self._front).all(axis=1)
        self._front = np.vstack([self._front[~beaten], point])
        return True

    def _look(self, record: TrialFinished, life: TrialLife) -> None:
        """Whether a complete trial has reached what the study is to end by."""
        names = {**known(life.started), **visible(record.metrics)}
        self._reported |= names.keys()
        for rule in self._until:
            if missing := sorted(rule.names - self._reported):
                known_names = ", ".join(sorted(self._reported))
                raise UserError("--until may name settings and reported metrics", missing[0], f"known: {known_names}")
        if self._until and not self._met and fulfilled(self._until, names):
            shown = sorted(name for rule in self._until for name in rule.names if name in record.metrics)
            values = ", ".join(f"{name} {record.metrics[name]:.6g}" for name in dict.fromkeys(shown))
            rules = " and ".join(rule.text for rule in self._until)
            self._met = f"trial {life.number} reached {rules}" + (f" ({values})" if values else "")
