"""Which trials go on, pause or resume: the contract of early stopping, its simplest schedules, and its rungs.

A schedule decides and starts nothing. The study loop passes it every event in the order of the journal, and asks it
what to do with free workers. It has no clock, and no randomness beyond its seed: for the same events it decides the
same again, as when a study resumes from its journal. A rung is a number of passes after
which trials are compared, by constrained domination.
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
from elastune.tuning.search.front import best_first, on_scales
from elastune.tuning.search.objective import Floats


@dataclass(frozen=True)
class IntermediateResult:
    """One report of a running trial, after ``epoch`` of ``epochs`` planned training passes.

    Attributes:
        values: One number per objective, in the user's units; time and cost are those so far.
        violation: The largest violation so far of the constraints on measured values; 0 or less where all hold.
    """

    trial: int
    epoch: int
    epochs: int
    values: tuple[float, ...]
    violation: float = 0.0


@dataclass(frozen=True)
class Resume:
    """Let a paused trial go on until it has completed ``epoch`` passes; None: to its end, or to the next pause."""

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
    """Start a trial with fixed settings: no sampler proposes it, and no search learns from it.

    Attributes:
        phase: The purpose of the trial, such as a confirmation.
        max_steps: The trial ends after so many steps; None: it trains to its end.
        spread: Place its workers on as many hosts as possible.
        like: The trial whose policies and strategy this one has; None: it has none.
        source: The trial whose weights it begins with; None: a fresh start.
        fresh: Weights that do not come from ``source`` (see ``core.start_from``).
        sync_and_policies: Its strategy and policies, as a journal holds them beside ``execution``.
        parts: The number of workers for which its result counts; None: its own workers.
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
    sync_and_policies: Mapping[str, Any] = field(default_factory=dict)
    parts: int | None = None


Next = Resume | ForkTrial | NewTrial | FixedTrial | None


class Schedule(ABC):
    """The contract of early stopping: receives all events of a study's trials, and decides which trials train.

    Attributes:
        pauses: Whether trials may pause, so that they keep checkpoints.
        parents: Whether trials begin with checkpoints of others, which must then outlive the ends of these trials.
        phase: The purpose of its trials.
        proposes: Whether a sampler proposes its new trials; others are ``FixedTrial``s.
        shares: Whether a study with ``trial_workers`` moves workers between its trials.
    """

    pauses = True
    parents = False
    phase: Phase = "search"
    proposes = True
    shares = True

    @property
    def supplies(self) -> bool:
        """Whether it may have further new trials to begin."""
        return True

    @abstractmethod
    def started(self, trial: int, params: Mapping[str, Any], parent: int | None = None) -> None:
        """A trial began."""

    @abstractmethod
    def reported(self, intermediate: IntermediateResult) -> str:
        """A trial reported. Returns the reason to pause it now; "": it goes on."""

    @abstractmethod
    def paused(self, trial: int, epoch: int) -> None:
        """A trial paused after ``epoch`` completed passes, and can be resumed."""

    @abstractmethod
    def resumed(self, trial: int) -> None:
        """A paused trial goes on."""

    @abstractmethod
    def ended(self, trial: int, values: tuple[float, ...] | None, violation: float = 0.0) -> None:
        """A trial ended, with its values or (None) without valid ones."""

    @abstractmethod
    def next(self, fresh: bool) -> Next:
        """Return what to do with free workers; None: nothing, until the next event.

        A second call without an event in between returns the same.

        Args:
            fresh: Whether new trials may begin. If not, only paused trials that could still reach the front go on.
        """

    @abstractmethod
    def estimates(self) -> Mapping[int, tuple[float, ...]]:
        """Return, for each running or paused trial that has reported, the values that it is expected to end with."""


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


class FixedTrials(Schedule):
    """Starts trials with fixed settings in their order, each to its end.

    Args:
        phase: The purpose of the trials.
        trials: The trials; ``todo`` takes further ones later.
        at_once: How many train at a time; None: as many as fit.
        shares: See ``Schedule``; without it each trial keeps the workers that it was given.
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


# --- rungs of successive halving ---


@dataclass(frozen=True)
class RungEntry:
    """A trial at a rung: its values at that time, smaller is better, and its largest violation (0: feasible)."""

    trial: int
    values: tuple[float, ...]
    violation: float = 0.0

    @property
    def feasible(self) -> bool:
        return self.violation <= 0 and all(map(math.isfinite, self.values))


def levels(min_resource: int, eta: int, epochs: int) -> list[int]:
    """Return the passes after which trials are compared: min_resource, min_resource x eta, ..., below ``epochs``."""
    passes = []
    level = min_resource
    while level < epochs:
        passes.append(level)
        level *= eta
    return passes


def ranked(entrants: Sequence[RungEntry], k: int) -> list[int]:
    """Return the ``k`` best trials, best first, by constrained domination (Deb et al. 2002, VI).

    Feasible trials come first, by front and by crowding on the scales that samplers see. Infeasible trials follow, by
    their violation. Of equal trials the earlier comes first.
    """
    feasible = [e for e in reversed(entrants) if e.feasible]  # best_first prefers the later of equals
    best = [feasible[i].trial for i in best_first(_points(feasible), k)] if feasible else []
    broken = sorted((e for e in entrants if not e.feasible), key=_brokenness)
    return best + [e.trial for e in broken[: k - len(best)]]


def _brokenness(entrant: RungEntry) -> float:
    return entrant.violation if all(map(math.isfinite, (*entrant.values, entrant.violation))) else math.inf


def _points(entrants: Sequence[RungEntry]) -> Floats:
    return on_scales(np.array([e.values for e in entrants]))


class Rung:
    """The trials that reached a rung, in order, and those promoted from it. The best 1 of ``eta`` may go on.

    ``least`` is how many may go on where fewer than ``eta`` trials have come.

    Ranking many trials by several objectives takes long. From the hundredth trial on, a ranking therefore waits until
    the rung has grown by 2 %.
    """

    def __init__(self, eta: int, least: int = 0) -> None:
        self.promoted: set[int] = set()
        self._eta = eta
        self._least = least
        self._entrants: list[RungEntry] = []
        self._compared = 0
        self._best: frozenset[int] | None = None

    def __len__(self) -> int:
        return len(self._entrants)

    def enter(self, entrant: RungEntry) -> bool:
        """Add a trial that reached the rung. Returns whether all trials are compared again."""
        self._entrants.append(entrant)
        again = len(entrant.values) == 1 or len(self) >= int(1.02 * self._compared)
        if again:
            self._compared, self._best = len(self), None
        return again

    @property
    def best(self) -> frozenset[int]:
        """The best 1/eta of the compared trials."""
        if self._best is None:
            count = max(self._least, self._compared // self._eta)
            self._best = frozenset(ranked(self._entrants[: self._compared], count))
        return self._best
