"""Searches replayed out of a table of trainings that were really done: the same decisions, but a clock that is counted.

The table knows what every configuration of a discrete space reached and how long its training took. Any search over
that space can then be run on any number of nodes in milliseconds; ``Suggester`` decides as it does in a live study,
hears of each end in the order in which the nodes would have told it, and waits for a generation where a live one would.
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from elastune.core.seeds import derive
from elastune.journal.records import TrialFinished
from elastune.plan.intervals import mean_ci, wilson
from elastune.search.samplers.genetic import parse_genetics
from elastune.search.samplers.suggest import Suggester
from elastune.search.space.objective import parse_objectives

OBJECTIVES = parse_objectives({"accuracy": "max"})

Key = tuple[float, ...]


@dataclass(frozen=True)
class Training:
    """What one training reached (fractions of the validation and the test set) and the seconds it took one node."""

    accuracy: float
    test: float
    seconds: float


@dataclass(frozen=True)
class Table:
    """``genes``: name -> levels; ``trainings``: one for each combination, by its levels in the order of the genes."""

    genes: Mapping[str, Sequence[float]]
    trainings: Mapping[Key, Training]

    def key(self, values: Mapping[str, Any]) -> Key:
        """What ``trainings`` knows a configuration by."""
        return tuple(values[name] for name in self.genes)

    @property
    def keys(self) -> list[Key]:
        """All combinations."""
        return list(itertools.product(*self.genes.values()))

    def space(self, trial: Any) -> dict[str, Any]:
        """The space that was tabulated, as a user would write it."""
        return {name: trial.suggest_categorical(name, list(levels)) for name, levels in self.genes.items()}


@dataclass(frozen=True)
class Search:
    """``breeding``: settings of the genetic sampler without ``steady`` ("": random, no configuration twice).

    A generation is ``generation`` trainings: all demes' together. ``synchronous``: none starts before all of the last
    generation have ended.
    """

    breeding: str
    synchronous: bool = False

    @property
    def sampler(self) -> str:
        """As ``--sampler`` names a genetic search."""
        return f"genetic:{self.breeding},steady={0 if self.synchronous else 1}"

    @property
    def generation(self) -> int:
        """Trainings of a generation; 1 where there are none."""
        if not self.breeding:
            return 1
        genetics = parse_genetics(self.sampler)
        return genetics.demes * genetics.population


@dataclass(frozen=True)
class Found:
    """How a search went. ``runs``: trainings begun; ``seconds``: by the nodes' clock, until its end.

    ``reached``: whether it ended by reaching the threshold, not by stagnating or by running out of configurations.
    ``accuracy`` and ``test`` are those of its best training on validation data.
    """

    reached: bool
    runs: int
    generations: int
    seconds: float
    accuracy: float
    test: float


class Asker(Protocol):
    """Who decides what is trained next: a configuration's number and its key, or None if there is none left."""

    def ready(self) -> bool: ...
    def ask(self) -> tuple[int, Key] | None: ...
    def tell(self, number: int, accuracy: float) -> None: ...


class Shuffled:
    """A random search that tries no configuration twice."""

    def __init__(self, keys: Sequence[Key], seed: int) -> None:
        self._left = [(int(i), keys[i]) for i in np.random.default_rng(derive(seed, "shuffled")).permutation(len(keys))]

    def ready(self) -> bool:
        """Always."""
        return True

    def ask(self) -> tuple[int, Key] | None:
        """One of those that are left."""
        return self._left.pop() if self._left else None

    def tell(self, number: int, accuracy: float) -> None:
        """Nothing is learnt."""


class Bred:
    """elastune's genetic search, as a study has it."""

    def __init__(self, table: Table, sampler: str, seed: int) -> None:
        self._table = table
        self._suggester = Suggester(table.space, OBJECTIVES, sampler=sampler, seed=seed)

    def ready(self) -> bool:
        """Whether the generation before has ended, where that counts."""
        return self._suggester.ready()

    def ask(self) -> tuple[int, Key] | None:
        """What it proposes."""
        asked = self._suggester.ask()
        return None if asked is None else (asked.number, self._table.key(asked.values))

    def tell(self, number: int, accuracy: float) -> None:
        """A training has ended."""
        self._suggester.tell(number, TrialFinished(number, "complete", values={"accuracy": accuracy}))


def replay(table: Table, search: Search, nodes: int, seed: int, threshold: float, patience: int | None = None) -> Found:
    """Search on ``nodes`` until a training reaches ``threshold``, or nothing is left to try.

    ``patience``: generations without a better training after which it gives up (None: never).
    """
    asker: Asker = Bred(table, search.sampler, seed) if search.breeding else Shuffled(table.keys, seed)
    running: list[tuple[float, int, Training]] = []  # (when it ends, number, what it reaches)
    now, begun, ended, improved = 0.0, 0, 0, 0
    best = Training(-math.inf, math.nan, 0.0)
    while True:
        while len(running) < nodes and asker.ready():
            asked = asker.ask()
            if asked is None:
                break
            training = table.trainings[asked[1]]
            heapq.heappush(running, (now + training.seconds, asked[0], training))
            begun += 1
        if not running:
            break
        now, number, training = heapq.heappop(running)
        ended += 1
        if training.accuracy > best.accuracy:
            best, improved = training, ended
        stagnant = patience is not None and ended - improved >= patience * search.generation
        if best.accuracy >= threshold or stagnant:
            break
        asker.tell(number, training.accuracy)
    generations = math.ceil(ended / search.generation) if search.breeding else 0
    return Found(best.accuracy >= threshold, begun, generations, now, best.accuracy, best.test)


@dataclass(frozen=True)
class Effort:
    """What a success costs, over several seeds: the trainings and seconds of all searches over those that reached it.

    The expected running time of a search that is started again with another seed whenever it gives up (Hansen et
    al., COCO, 2016, section 3). ``generations``: the mean of those that reached it. ``test`` and ``worst_test``: mean
    and least accuracy of their winners on data that no search saw. ``runs_ci``: half of the 95 % interval (Student's t)
    about the mean of the trainings of a search. All but ``reached`` are infinite or NaN without any success.
    """

    reached: int
    searches: int
    runs: float
    runs_ci: float
    generations: float
    seconds: float
    test: float
    worst_test: float


def effort(found: Sequence[Found]) -> Effort:
    """Of searches that differ in their seed only."""
    won = [each for each in found if each.reached]
    if not won:
        return Effort(0, len(found), math.inf, math.nan, math.nan, math.inf, math.nan, math.nan)
    tests = [each.test for each in won]
    return Effort(
        reached=len(won),
        searches=len(found),
        runs=sum(each.runs for each in found) / len(won),
        runs_ci=mean_ci([each.runs for each in found])[1] or math.nan,
        generations=statistics.fmean(each.generations for each in won),
        seconds=sum(each.seconds for each in found) / len(won),
        test=statistics.fmean(tests),
        worst_test=min(tests),
    )


@dataclass(frozen=True)
class SpeedUp:
    """``total`` = ``fewer_runs`` x ``fewer_seconds``: how many times less a success takes than with the baseline.

    ``fewer_seconds`` compares seconds of the clock per training begun: it holds the nodes that train at once, those
    that wait, and whether the trainings themselves are shorter.
    """

    fewer_runs: float
    fewer_seconds: float

    @property
    def total(self) -> float:
        """The clock's time of the baseline over that of the search."""
        return self.fewer_runs * self.fewer_seconds


def speed_up(effort: Effort, baseline: Effort) -> SpeedUp:
    """Of ``effort`` over ``baseline``."""
    fewer_seconds = (baseline.seconds / baseline.runs) / (effort.seconds / effort.runs)
    return SpeedUp(baseline.runs / effort.runs, fewer_seconds)


def makespan(durations: Sequence[float], nodes: int, generation: int | None = None) -> float:
    """Seconds until all are done, begun in their order, each on the first node that is free.

    ``generation``: so many at a time, and none before all earlier ones have ended (None: no such barrier).
    """
    size = generation or max(1, len(durations))
    total = 0.0
    for begin in range(0, len(durations), size):
        free = [0.0] * nodes
        for duration in durations[begin : begin + size]:
            heapq.heapreplace(free, free[0] + duration)
        total += max(free)
    return total


@dataclass(frozen=True)
class Chance:
    """How often a random configuration reaches the threshold: ``low`` to ``high`` is a 95 % interval (Wilson)."""

    reached: int
    tried: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """The proportion."""
        return self.reached / self.tried

    @property
    def expected_runs(self) -> float:
        """Of the table, drawn without repetition, until the first that reaches it: (n + 1) / (k + 1)."""
        return (self.tried + 1) / (self.reached + 1) if self.reached else math.inf


def chance(accuracies: Sequence[float], threshold: float) -> Chance:
    """Of random configurations with these accuracies."""
    reached = sum(accuracy >= threshold for accuracy in accuracies)
    return Chance(reached, len(accuracies), *wilson(reached, len(accuracies)))
