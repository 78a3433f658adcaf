"""Which trials go on, pause or are taken up again, by what they have shown: the contract of early stopping.

A schedule decides, it starts nothing: the driver tells it what happens, in the order of the journal, and asks what to
do with free workers. It has no clock and no chance of its own beyond ``seed``: told the same again, as when a study
resumes from its journal, it says the same again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastune.core.run import Config, Means
from elastune.journal.records import Phase, TrialStarted


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
    ``told``: how its workers agree and what adapts it, as a journal holds it beside ``means``. ``parts``: for how many
    workers it speaks; None: for its own.
    """

    config: Config
    seed: int
    means: Means
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
    def reported(self, glimpse: IntermediateResult) -> str:
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

    def reported(self, glimpse: IntermediateResult) -> str:
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
