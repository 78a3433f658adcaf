"""What is compared at equal budget: each side's own points, over seeds, chosen by validation; any may be worth most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.core.journal.folds import TrialTable
from elastune.core.journal.records import (
    Entry,
    FrontierVolumes,
    Phase,
    RunFinished,
    SideVolume,
    TrialFinished,
    TrialPaused,
    TrialStarted,
)
from elastune.core.plan.data_parallel import DataParallelStep
from elastune.core.run import Config, Program
from elastune.tuning.frontier.checked_request import check
from elastune.tuning.frontier.choice import FRESH_SEEDS, Choice
from elastune.tuning.frontier.conclusion import NAIVE, SEARCH, TUNED, Side, sides, volumes
from elastune.tuning.frontier.criteria import FrontierCriteria, Times
from elastune.tuning.frontier.trainings import FOR_WORKERS, Trainings
from elastune.tuning.search.objective import Objective
from elastune.tuning.study.request import FrontierRequest

BY = FrontierCriteria(
    Objective("accuracy", "max", low=0.0, high=1.0), None, 1.0, Times(DataParallelStep(0.01, 0.001, 0, 0, 40), {})
)
POLICY = "gns:max_batch=80"


class Made:
    """A frontier of the tiny program for 1 and 4 workers with two seeds; whatever is trained takes 2 s."""

    def __init__(self, tiny: Program, out: Path, **changes: Any) -> None:
        request = replace(FrontierRequest(tiny, out, workers=(1, 4), budget_s=1.0, seeds=2), **changes)
        self.plan = replace(check(request), quality=BY.quality)
        self.table = TrialTable()
        self.trainings = Trainings(self.table)
        self.choice = Choice(self.plan, self.trainings)

    def train(
        self,
        config: Config,
        parts: int,
        quality: float | None,
        seed: int = 0,
        phase: Phase = "search",
        *,
        test: float | None = None,
        rule: str = "linear",
        took_s: float = 2.0,
        policies: Sequence[str] = (),
    ) -> int:
        """``quality`` None: it diverged."""
        trial = len(self.table.trials)
        layout = self.plan.worker_layouts.first(parts)
        variant = replace(self.plan.variant, policies=tuple(policies))
        execution = variant.to_record(variant.trainer(layout))
        tags = {"lr_rule": rule, FOR_WORKERS: parts}
        self._observe(TrialStarted(trial, config, execution, seed, phase, tags=tags))
        if quality is None:
            self._observe(TrialFinished(trial, "infeasible", reason="diverged", seconds=took_s, worker_seconds=took_s))
            return trial
        metrics = {"accuracy": quality, "test_accuracy": quality if test is None else test}
        run = RunFinished("sha", layout.workers, 10, 200, 1.0, metrics, step_s=0.1, grad_bytes=40)
        self._observe(TrialFinished(trial, "complete", {}, metrics, run=run, seconds=took_s, worker_seconds=took_s))
        return trial

    def naive(self, one: float = 0.9, four: float = 0.8, policies: Sequence[str] = ()) -> None:
        """Its four trainings; the second seed is a little better."""
        for parts, quality in ((1, one), (4, four)):
            config = self.plan.naive(parts)
            for seed in (0, 1):
                phase: Phase = "policy" if policies else "naive"
                self.train(config, parts, quality + 0.01 * seed, seed, phase, policies=policies)

    def search(self, quality: float | None, lr: float = 0.2, parts: int = 4, **more: Any) -> Config:
        config = {**self.plan.naive(parts), "lr": lr}
        self.train(config, parts, quality, **more)
        return config

    def confirm(self, config: Config, qualities: Sequence[float | None], parts: int = 4) -> None:
        for nth, quality in enumerate(qualities):
            self.train(config, parts, quality, FRESH_SEEDS + nth, "confirm")

    def pause(self, took_s: float) -> None:
        trial, config = len(self.table.trials), {**self.plan.naive(4), "lr": 0.7}
        self._observe(TrialStarted(trial, config, {"workers": 1, "num_slots": 4}, 0, "search"))
        self._observe(TrialPaused(trial, 1, took_s, worker_seconds=took_s))

    @property
    def compared(self) -> list[Side]:
        return sides(self.plan, self.choice, self.trainings.searched, BY)

    @property
    def found(self) -> FrontierVolumes:
        return volumes(self.compared, self.choice, BY)

    def of(self, name: str) -> SideVolume:
        return next(side for side in self.found.sides if side.side == name)

    def _observe(self, record: Any) -> None:
        self.table.observe(Entry(float(len(self.table.trials)), record))


@pytest.fixture
def made(tmp_path: Path, tiny: Program) -> Made:
    return Made(tiny, tmp_path / "out")


def test_every_side_has_its_own_points_and_any_may_be_worth_more(made: Made) -> None:
    """The naive rows were once among the tuned ones: then a search could not be worth less."""
    made.naive()
    made.search(0.5)
    assert made.of(SEARCH).volume < made.of(NAIVE).volume
    made.search(0.99, lr=0.3)
    assert made.of(SEARCH).volume > made.of(NAIVE).volume


def test_each_seed_has_a_volume_and_all_of_them_an_interval(made: Made) -> None:
    made.naive()
    found = made.of(NAIVE)
    assert (found.seeds, found.points, found.trainings, found.of) == (2, 2, 4, 4)
    assert found.ci is not None
    assert found.ci[0] < found.volume < found.ci[1]
    assert found.equal
    assert found.spent_s == made.found.budget_s == 8.0
    assert found.scoring_s == 0.0


def test_what_was_chosen_after_one_seed_is_worth_what_fresh_ones_say(made: Made) -> None:
    made.naive()
    config = made.search(0.99)
    lucky = made.of(SEARCH)
    assert (lucky.seeds, lucky.ci, lucky.scoring_s) == (1, None, 0.0)
    (side,) = [side for side in made.compared if side.name == SEARCH]
    assert [(recipe.config, parts) for recipe, parts in side.cells] == [(config, 4)]
    made.confirm(config, [0.7, 0.72])
    honest = made.of(SEARCH)
    assert (honest.seeds, honest.scoring_s) == (2, 4.0)
    assert honest.volume < lucky.volume
    assert honest.ci is not None


def test_a_seed_counts_once_all_points_have_it(made: Made) -> None:
    made.naive()
    first, second = made.search(0.95, parts=1), made.search(0.9)
    made.confirm(first, [0.94, 0.95], parts=1)
    assert made.of(SEARCH).seeds == 1
    made.confirm(second, [0.9])
    assert (made.of(SEARCH).seeds, made.of(SEARCH).points) == (1, 2)
    assert made.of(SEARCH).scoring_s == 4.0, "of the one fresh seed that both have"


def test_a_seed_that_diverges_covers_nothing(tmp_path: Path, tiny: Program) -> None:
    told = []
    for nth, second in enumerate((0.95, None)):
        made = Made(tiny, tmp_path / f"out{nth}")
        made.naive()
        made.confirm(made.search(0.95), [0.95, second])
        told.append(made.of(SEARCH))
    assert [each.seeds for each in told] == [2, 2]
    assert told[1].volume == pytest.approx(told[0].volume / 2)


def test_only_what_the_naive_budget_pays_for_counts(made: Made) -> None:
    made.naive()
    made.search(0.5, took_s=7.0)
    made.search(0.99, lr=0.3, took_s=1.5)
    found = made.of(SEARCH)
    assert (found.trainings, found.of, found.spent_s, found.equal) == (1, 2, 7.0, True)
    assert found.volume < made.of(NAIVE).volume


def test_less_than_the_budget_is_told_as_such(made: Made) -> None:
    made.naive()
    made.search(0.99)
    assert not made.of(SEARCH).equal
    made.search(0.4, lr=0.3, took_s=7.0)
    assert made.of(SEARCH).equal, "8 s would not have been enough for it"
    assert made.of(SEARCH).trainings == 1


def test_what_paused_was_paid_for_too(made: Made) -> None:
    made.naive()
    made.pause(7.5)
    made.search(0.99)
    assert (made.of(SEARCH).volume, made.of(SEARCH).seeds) == (0.0, 0)


def test_without_a_search_there_is_the_naive_rule_alone(made: Made) -> None:
    made.naive()
    assert made.of(SEARCH).volume == made.of(TUNED).volume == 0.0
    assert 0 < made.of(NAIVE).volume < 1
    made.search(None)
    assert made.of(SEARCH).volume == 0.0
    assert (made.of(SEARCH).trainings, made.of(SEARCH).points) == (1, 0)


def test_it_is_chosen_by_validation_and_scored_on_held_out_data(tmp_path: Path, tiny: Program) -> None:
    told = []
    for nth, validation in enumerate((0.99, 0.5)):
        made = Made(tiny, tmp_path / f"out{nth}")
        made.naive()
        made.search(validation, test=0.5)
        told.append(made.of(SEARCH).volume)
    assert told[0] == pytest.approx(told[1])


@pytest.mark.parametrize(
    ("parts", "batch", "rule", "follows"),
    [(4, 80, "linear", True), (4, 80, "sqrt", False), (4, 90, "linear", False), (1, 20, "sqrt", True)],
)
def test_the_rule_tuned_is_what_follows_its_batch_and_its_learning_rate(
    made: Made, parts: int, batch: int, rule: str, follows: bool
) -> None:
    """With one part both rules leave the learning rate as it is."""
    made.naive()
    config = {**made.plan.naive(parts), "lr": 0.25, "batch_size": batch}
    made.train(config, parts, 0.95, rule=rule)
    assert made.of(SEARCH).points == 1
    assert made.of(TUNED).points == int(follows)


def test_a_policy_is_a_side_of_its_own(tmp_path: Path, tiny: Program) -> None:
    made = Made(tiny, tmp_path / "out", policies=(POLICY,))
    made.naive()
    made.naive(0.95, 0.9, policies=(POLICY,))
    made.search(0.99, policies=(POLICY,))
    assert [side.side for side in made.found.sides] == [NAIVE, f"{NAIVE}, policy {POLICY}", TUNED, SEARCH]
    adapted = made.of(f"{NAIVE}, policy {POLICY}")
    assert (adapted.seeds, adapted.points, adapted.spent_s, adapted.equal) == (2, 2, 8.0, True)
    assert adapted.volume > made.of(NAIVE).volume
    assert (made.of(TUNED).of, made.of(SEARCH).of) == (0, 1), "another way than was asked for is the search's alone"


def test_the_reference_is_a_tenth_beyond_the_worst_of_all(made: Made) -> None:
    made.naive(0.9, 0.5)
    made.search(0.99)
    (side, *_), told = made.compared, made.found.reference
    times = {BY.seconds(*spot)[0] for spots in side.spots.values() for spot in spots}
    assert told is not None
    assert told.quality == pytest.approx(0.5 - 0.1 * (0.99 - 0.5))
    assert told.seconds == pytest.approx(math.exp(math.log(max(times)) + 0.1 * math.log(max(times) / min(times))))
