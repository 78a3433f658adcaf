"""Which trials go on, pause or resume: the contract of early stopping, its simplest schedules, and its rungs.

A schedule decides and starts nothing. The study loop tells it every event in the order of the journal, and asks it what
to do with free workers. It has no clock, and no randomness beyond its seed: told the same events again, it decides
the same again. A rung is a number of passes after which trials are compared, by constrained domination.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elastune.core.journal.records import Phase, TrialStarted
from elastune.core.run import Config, ExecutionSettings
from elastune.tune.search.front import best_first
from elastune.tune.search.objective import Floats, on_scales

# [schedule] Which trials go on, pause or are taken up again, by what they have shown: the contract of early stopping.
#
# A schedule decides, it starts nothing: the driver tells it what happens, in the order of the journal, and asks what to
# do with free workers. It has no clock and no chance of its own beyond ``seed``: told the same again, as when a study
# resumes from its journal, it says the same again.


@dataclass(frozen=True)
class IntermediateResult:
    """What a trial has shown by one of its reports, after ``epoch`` of ``epochs`` planned training passes.

    ``values``: one number per objective, as the user counts them; time and cost are those so far. ``violation``: the
    largest violation of the constraints on what is measured, by now; 0 or less where all hold.
    """

    trial: int
    epoch: int
    epochs: int
    values: tuple[float, ...]
    violation: float = 0.0


@dataclass(frozen=True)
class Resume:
    """Let a paused trial go on, until it has completed ``epoch`` passes (None: to its end, or until told to pause)."""

    trial: int
    reason: str
    epoch: int | None = None


@dataclass(frozen=True)
class ForkTrial:
    """Start a new trial from the checkpoint of ``parent``, with ``params`` instead of the parent's."""

    parent: int
    params: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    epoch: int | None = None


@dataclass(frozen=True)
class NewTrial:
    """Start a new trial that the sampler proposes."""

    epoch: int | None = None


@dataclass(frozen=True)
class FixedTrial:
    """Start a trial whose settings are given: no sampler proposes it, and no search learns from it.

    ``phase``: what it is for. ``max_steps``: it ends after so many; None: it is trained to its end. ``spread``: on as
    many hosts as there are. ``like``: the trial whose policies and strategy it has; None: there are none. ``source``:
    the trial with whose weights it begins, but for those that are ``fresh`` (see ``core.start_from``); None: as all do.
    ``told``: how its workers agree and what adapts it, as a journal holds it beside ``execution``. ``parts``: for how many
    workers it speaks; None: for its own.
    """

    config: Config
    seed: int
    execution: ExecutionSettings
    phase: Phase
    max_steps: int | None = None
    spread: bool = False
    like: TrialStarted | None = None
    source: int | None = None
    fresh: tuple[str, ...] = ()
    told: Mapping[str, Any] = field(default_factory=dict)
    parts: int | None = None


Next = Resume | ForkTrial | NewTrial | FixedTrial | None


class Schedule(ABC):
    """Told of everything that happens to a study's trials; asked for verdicts.

    ``pauses``: whether trials may pause, so that they keep checkpoints. ``parents``: whether trials begin with those of
    others, which must then outlive their ends. ``phase``: what its trials are for. ``proposes``: whether its new trials
    are proposed by a sampler; others are ``FixedTrial``s. ``shares``: whether a study that shares its workers out does
    so among its trials.
    """

    pauses = True
    parents = False
    phase: Phase = "search"
    proposes = True
    shares = True

    @property
    def supplies(self) -> bool:
        """Whether it has new trials to begin, as far as it knows."""
        return True

    @abstractmethod
    def started(self, trial: int, params: Mapping[str, Any], parent: int | None = None) -> None:
        """A trial began."""

    @abstractmethod
    def reported(self, intermediate: IntermediateResult) -> str:
        """A trial reported: why it is to be paused now; empty: it goes on."""

    @abstractmethod
    def paused(self, trial: int, epoch: int) -> None:
        """A trial has stopped, with ``epoch`` completed passes, and can be resumed."""

    @abstractmethod
    def resumed(self, trial: int) -> None:
        """A paused trial goes on."""

    @abstractmethod
    def ended(self, trial: int, values: tuple[float, ...] | None, violation: float = 0.0) -> None:
        """A trial is over, with its values or (None) without valid ones."""

    @abstractmethod
    def next(self, fresh: bool) -> Next:
        """What to do with free workers; None: nothing, until something else happens.

        ``fresh``: whether new trials may begin. Without it, what was promised is brought to an end: paused trials that
        could still be on the front go on. Asked again before anything happened, the answer is the same.
        """

    @abstractmethod
    def estimates(self) -> Mapping[int, tuple[float, ...]]:
        """Trial -> the values that it would end with, for those that have reported and are not over."""


class ToTheEnd(Schedule):
    """Every trial runs to its end."""

    pauses = False

    def started(self, trial: int, params: Mapping[str, Any], parent: int | None = None) -> None:
        pass

    def reported(self, intermediate: IntermediateResult) -> str:
        return ""

    def paused(self, trial: int, epoch: int) -> None:
        pass

    def resumed(self, trial: int) -> None:
        pass

    def ended(self, trial: int, values: tuple[float, ...] | None, violation: float = 0.0) -> None:
        pass

    def next(self, fresh: bool) -> Resume | ForkTrial | NewTrial | None:
        return NewTrial() if fresh else None

    def estimates(self) -> Mapping[int, tuple[float, ...]]:
        return {}


# [fixed trials] A schedule of trials whose settings are given: some at once, each to its end.


class FixedTrials(Schedule):
    """Starts ``trials`` in their order, ``at_once`` at a time (None: as many as there is room for).

    ``shares``: as of any schedule; else each has the workers that it was given.
    """

    proposes = False

    def __init__(
        self, phase: Phase, trials: Iterable[FixedTrial] = (), *, at_once: int | None = None, shares: bool = False
    ) -> None:
        self.phase = phase
        self.shares = shares
        self.todo = list(trials)
        self.running: set[int] = set()
        self._at_once = at_once
        self._offered: FixedTrial | None = None

    @property
    def supplies(self) -> bool:
        return bool(self.todo) or self._offered is not None

    def next(self, fresh: bool) -> Next:
        if not fresh or (self._at_once is not None and len(self.running) >= self._at_once):
            return None
        if self._offered is None and self.todo:
            self._offered = self.todo.pop(0)
        return self._offered

    def started(self, trial: int, params: Mapping[str, Any], parent: int | None = None) -> None:
        self.running.add(trial)
        self._offered = None

    def reported(self, intermediate: IntermediateResult) -> str:
        return ""

    def paused(self, trial: int, epoch: int) -> None:
        self.running.discard(trial)

    def resumed(self, trial: int) -> None:
        self.running.add(trial)

    def ended(self, trial: int, values: tuple[float, ...] | None, violation: float = 0.0) -> None:
        self.running.discard(trial)

    def estimates(self) -> Mapping[int, tuple[float, ...]]:
        return {}


# [rungs] Rungs of successive halving: after how many passes trials are compared, and who of them ranks first.


@dataclass(frozen=True)
class RungEntry:
    """A trial at a rung: its values there, smaller is better, and its largest violation (0 or less: feasible)."""

    trial: int
    values: tuple[float, ...]
    violation: float = 0.0

    @property
    def feasible(self) -> bool:
        return self.violation <= 0 and all(map(math.isfinite, self.values))


def levels(min_resource: int, eta: int, epochs: int) -> list[int]:
    """Passes after which trials of ``epochs`` are compared: min_resource, min_resource x eta, ..., below ``epochs``."""
    found = []
    level = min_resource
    while level < epochs:
        found.append(level)
        level *= eta
    return found


def ranked(entrants: Sequence[RungEntry], k: int) -> list[int]:
    """The ``k`` best trials, best first, by constrained domination (Deb et al. 2002, VI).

    The feasible come first, by front and by crowding on the scales that samplers see; then the infeasible, by their
    violation. The earlier of equals.
    """
    feasible = [e for e in reversed(entrants) if e.feasible]  # best_first prefers the later of equals
    found = [feasible[i].trial for i in best_first(_points(feasible), k)] if feasible else []
    broken = sorted((e for e in entrants if not e.feasible), key=_brokenness)
    return found + [e.trial for e in broken[: k - len(found)]]


def _brokenness(entrant: RungEntry) -> float:
    return entrant.violation if all(map(math.isfinite, (*entrant.values, entrant.violation))) else math.inf


def _points(entrants: Sequence[RungEntry]) -> Floats:
    return on_scales(np.array([e.values for e in entrants]))


class Rung:
    """Who came to a rung, in order, and who went on from it. 1 of ``eta`` is among its best.

    Ranking many by several objectives takes long: from the hundredth on it is done for each fiftieth part more.
    """

    def __init__(self, eta: int) -> None:
        self.promoted: set[int] = set()
        self._eta = eta
        self._entrants: list[RungEntry] = []
        self._compared = 0
        self._best: frozenset[int] | None = None

    def __len__(self) -> int:
        return len(self._entrants)

    def enter(self, entrant: RungEntry) -> bool:
        """A trial has come; whether all are compared again."""
        self._entrants.append(entrant)
        again = len(entrant.values) == 1 or len(self) >= int(1.02 * self._compared)
        if again:
            self._compared, self._best = len(self), None
        return again

    @property
    def best(self) -> frozenset[int]:
        """The best 1/eta of those that are compared."""
        if self._best is None:
            self._best = frozenset(ranked(self._entrants[: self._compared], self._compared // self._eta))
        return self._best
