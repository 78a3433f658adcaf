"""Searches replayed out of a table of trainings that were really done, by ``elastune simulate``'s loop.

The table knows what every configuration of a discrete space reached and how long its training took. Any search over
that space can then be run on any number of nodes in a moment: it is the study that ``elastune tune`` would run, with
its rules ``--until`` and ``--patience``, on a virtual clock, and its trials go as the table says.
"""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastune.core.plan.confidence_intervals import mean_ci, wilson
from elastune.core.run import Program
from elastune.tuning.search.registry import generation_size
from elastune.tuning.simulate.run import SurrogateModel, simulate
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.results import Study

PROGRAM = Program(Path(__file__).parents[1] / "programs" / "genetic_train.py")

Key = tuple[float, ...]
MOST = 10  # trainings of a search that never gives up, over the number of configurations


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

    def surrogate(self, config: Mapping[str, Any], workers: int) -> list[tuple[float, dict[str, float]]]:
        """How a training goes: one pass, of so many seconds, and what it reaches."""
        training = self.trainings[self.key(config)]
        return [(training.seconds, {"accuracy": training.accuracy, "test_accuracy": training.test})]

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
        """As ``--sampler`` names it; a grid is gone through in a random order, nothing twice."""
        return "grid" if not self.breeding else f"genetic:{self.breeding},steady={0 if self.synchronous else 1}"

    @property
    def generation(self) -> int:
        """Trainings of a generation; 1 where there are none."""
        return generation_size(self.sampler)


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


def rules(search: Search, threshold: float, patience: int | None) -> dict[str, Any]:
    """The part of a study's request that says how it searches, and when it ends."""
    return {"sampler": search.sampler, "until": (f"accuracy >= {threshold}",), "patience": patience}


def replay(
    table: Table,
    search: Search,
    nodes: int,
    seed: int,
    threshold: float,
    patience: int | None = None,
    program: Program = PROGRAM,
) -> Found:
    """Search on ``nodes`` until a training of ``program`` reaches ``threshold``, or nothing is left to try.

    ``patience``: generations without a better training after which it gives up (None: never).
    """
    with tempfile.TemporaryDirectory() as folder:
        asked = StudyRequest(
            program,
            Path(folder) / "out",
            objectives={"accuracy": "max"},
            workers=nodes,
            seed=seed,
            trials=MOST * len(table.keys),
            **rules(search, threshold, patience),
        )
        return found_by(simulate(asked, SurrogateModel(table.surrogate), space=table.space).study, search, threshold)


def found_by(study: Study, search: Search, threshold: float) -> Found:
    """How a study went, simulated or not."""
    best = max(study.complete, key=lambda trial: (trial.values["accuracy"], -trial.ended_s))
    generations = math.ceil(len(study.complete) / search.generation) if search.breeding else 0
    return Found(
        reached=best.values["accuracy"] >= threshold,
        runs=len(study.trials),
        generations=generations,
        seconds=study.seconds,
        accuracy=best.values["accuracy"],
        test=best.metrics["test_accuracy"],
    )


@dataclass(frozen=True)
class Effort:
    """What a success costs, over several seeds: the trainings and seconds of all searches over those that reached it.

    The expected running time of a search that is started again with another seed whenever it gives up (Hansen et
    al., COCO, 2016, section 3). ``generations``: the mean of those that reached it; ``accuracy``: of their winners on
    validation data. ``test`` and ``worst_test``: mean and least accuracy of their winners on data that no search saw.
    ``runs_ci``: half of the 95 % interval (Student's t) about the mean of the trainings of a search. All but
    ``reached`` are infinite or NaN without any success.
    """

    reached: int
    searches: int
    runs: float
    runs_ci: float
    generations: float
    seconds: float
    accuracy: float
    test: float
    worst_test: float


def effort(found: Sequence[Found]) -> Effort:
    """Of searches that differ in their seed only."""
    won = [each for each in found if each.reached]
    if not won:
        return Effort(0, len(found), math.inf, math.nan, math.nan, math.inf, math.nan, math.nan, math.nan)
    tests = [each.test for each in won]
    return Effort(
        reached=len(won),
        searches=len(found),
        runs=sum(each.runs for each in found) / len(won),
        runs_ci=mean_ci([each.runs for each in found])[1] or math.nan,
        generations=statistics.fmean(each.generations for each in won),
        seconds=sum(each.seconds for each in found) / len(won),
        accuracy=statistics.fmean(each.accuracy for each in won),
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
