"""Which trainings speak for a worker count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.folds import TrialTable
from elastune.core.journal.records import Entry, RunFinished, TrialFinished, TrialStarted
from elastune.core.mesh import Mesh
from elastune.core.plan.data_parallel import DataParallelStep
from elastune.core.run import Config, Elastic, ExecutionSettings, Program
from elastune.runtime.clusters.base import LocalFiles
from elastune.tuning.frontier.checked_request import check
from elastune.tuning.frontier.choice import FRESH_SEEDS, Choice
from elastune.tuning.frontier.criteria import FrontierCriteria, Times
from elastune.tuning.frontier.experiment import FrontierExperiment
from elastune.tuning.frontier.short_runs import STEPS
from elastune.tuning.frontier.trainings import Recipe, Trainings
from elastune.tuning.search.objective import Objective
from elastune.tuning.search.suggester import Suggestion
from elastune.tuning.study.experiment import PreparedTrial
from elastune.tuning.study.request import FrontierRequest

BY = FrontierCriteria(Objective("loss", "min"), None, 1.0, Times(DataParallelStep(0.01, 0.001, 0.0, 0.0, 40), {}))


class Told:
    """A frontier of the tiny program for 1 and 4 workers, and what was trained of it."""

    def __init__(self, tiny: Program, out: Path, counts: tuple[int, ...] = (1, 4)) -> None:
        self.plan = check(FrontierRequest(tiny, out, workers=counts, budget_s=1.0, seeds=2))
        self.table = TrialTable()
        self.choice = Choice(self.plan, Trainings(self.table))

    def train(self, config: Config, seeds: range, slots: int, loss: float) -> list[int]:
        trials = []
        for seed in seeds:
            trial, execution = len(self.table.trials), {"workers": 1, "num_slots": slots}
            run = RunFinished("sha", 1, 10, 200, 1.0, {"loss": loss}, step_s=0.1, grad_bytes=40)
            end = TrialFinished(trial, "complete", {"loss": loss}, {"loss": loss}, run=run)
            for record in (TrialStarted(trial, config, execution, seed, "confirm"), end):
                self.table.observe(Entry(0.0, record))
            trials.append(trial)
        return trials


def test_a_count_is_spoken_for_by_its_own_slots(tmp_path: Path, tiny: Program) -> None:
    told = Told(tiny, tmp_path / "out")
    good = {**told.plan.config, "lr": 0.1}
    recipe = Recipe(good)
    of_one = told.train(good, told.choice.seeds(FRESH_SEEDS), 1, 0.2)
    assert [t.trial for t in told.choice.tried(recipe, 4)] == of_one, "better than nothing, for what to confirm"
    assert told.choice.best(4, BY) == recipe
    assert told.choice.best(4, BY, confirmed_only=True) is None, "but not for what is told"
    baseline = (Recipe(told.plan.config), 1)  # without a target it is what others are held against, by the same seeds
    assert told.choice.unconfirmed(BY) == [baseline, (recipe, 4)]
    assert told.choice.missing("confirm", [(recipe, 1)], FRESH_SEEDS) == []
    assert told.choice.missing("confirm", [(recipe, 4)], FRESH_SEEDS) == [(recipe, 4, 1000), (recipe, 4, 1001)]

    of_four = told.train(good, told.choice.seeds(FRESH_SEEDS), 4, 0.3)
    assert [t.trial for t in told.choice.tried(recipe, 4)] == of_four
    assert [t.trial for t in told.choice.tried(recipe, 1)] == of_one
    assert told.choice.best(4, BY, confirmed_only=True) == recipe
    assert told.choice.unconfirmed(BY) == []


def test_the_largest_count_and_then_the_smallest_are_confirmed_first(tmp_path: Path, tiny: Program) -> None:
    """Without the same settings on one worker nobody knows what the others are worth."""
    told = Told(tiny, tmp_path / "out", (1, 2, 4))
    told.train({**told.plan.config, "lr": 0.1}, range(5, 6), 2, 0.2)
    (_, baseline), *others = told.choice.unconfirmed(BY)
    assert (baseline, [parts for _, parts in others]) == (1, [4, 1, 2])


def test_a_training_has_a_slot_for_each_worker_it_speaks_for(tmp_path: Path, tiny: Program) -> None:
    plan = Told(tiny, tmp_path / "out").plan
    assert plan.execution(4) == ExecutionSettings(workers=1, num_slots=4, mode="exact")
    fast = check(replace(plan.request, execution=ExecutionSettings(mode="fast")))
    assert fast.execution(4) == ExecutionSettings(workers=4, num_slots=4, mode="fast")


def test_meshes_of_as_many_parts_share_their_trainings(tmp_path: Path, tiny: Program) -> None:
    meshes = (Mesh(data=2), Mesh(data=2, shard=2), Mesh(shard=4), Mesh(tensor=2))
    plan = check(replace(Told(tiny, tmp_path / "out").plan.request, workers=(1,), meshes=meshes))
    told = [(str(layout.first_mesh), layout.mechanism, layout.num_slots) for layout in plan.layouts]
    assert told == [
        *(("data=1", "tensor", 1), ("data=2", "tensor", 2), ("tensor=2", "tensor", 1)),
        *(("data=2,shard=2", "tensor+zero", 4), ("shard=4", "tensor+zero", 4)),
    ], "where one divides layers all do: virtual blocks show in the result"
    assert plan.parts == (1, 2, 4)
    assert plan.execution(4) == ExecutionSettings(workers=1, num_slots=4, mechanism="tensor")
    assert plan.naive(1)["batch_size"] == 20, "who divides layers has no more samples"


def test_the_search_fills_the_workers_it_trains_for(tmp_path: Path, tiny: Program) -> None:
    plan = Told(tiny, tmp_path / "out").plan
    assert [plan.searched_for(batch) for batch in (10, 20, 79, 80, 1000)] == [1, 1, 1, 4, 4]
    shared = check(replace(plan.request, trial_workers=(1, 2)))
    for which, workers, slots in ((plan, 1, [1, 4]), (shared, 1, [4, 4])):
        for batch, expected in zip((20, 80), slots, strict=True):
            values = {**plan.config, "batch_size": batch, "lr_rule": "none"}
            ready = FrontierExperiment(which, LocalFiles()).new(Suggestion(0, {}, {}, values, "random"), None)
            assert isinstance(ready, PreparedTrial)
            assert (ready.spec.execution.workers, ready.spec.execution.num_slots) == (workers, expected)
            assert ready.spec.adapt.monitors == (() if expected == 1 else ("noise_scale",)), "it would train in two"


def test_all_trainings_wait_for_each_other_as_long_as_was_asked(tmp_path: Path, tiny: Program) -> None:
    plan = Told(tiny, tmp_path / "out").plan
    told: tuple[dict[str, Any], ...] = ({}, {"trial_workers": (1, 2)})
    for changes in told:
        asked = check(replace(plan.request, collective_timeout_s=90.0, **changes))
        values = {**plan.config, "batch_size": 80, "lr_rule": "none"}
        ready = FrontierExperiment(asked, LocalFiles()).new(Suggestion(0, {}, {}, values, "random"), None)
        assert isinstance(ready, PreparedTrial)
        assert ready.spec.elastic == Elastic(*changes.get("trial_workers", ()), collective_timeout_s=90.0)
    with pytest.raises(UserError, match="wait for each other"):
        check(replace(plan.request, collective_timeout_s=0.01))


def test_constraints_of_the_programs_file_count_beside_those_that_are_added(tmp_path, tiny):
    path = tmp_path / "bounded.py"
    path.write_text(f"{tiny.path.read_text()}\n\nconstraints = ['lr <= 0.5', 'seconds <= 60']\n")
    asked = FrontierRequest(
        Program(path), tmp_path / "out", workers=(1,), budget_s=1.0, constraints=("seconds <= 60", "lr > 0")
    )
    plan = check(asked)
    assert [each.text for each in plan.constraints] == ["lr <= 0.5", "seconds <= 60", "lr > 0"]
    assert plan.settings["constraints"] == ["lr <= 0.5", "seconds <= 60", "lr > 0"]


def test_of_what_was_cut_off_steps_are_timed_for_a_moment_only(tmp_path: Path, tiny: Program) -> None:
    plan, table = Told(tiny, tmp_path / "out").plan, TrialTable()
    for trial, phase in enumerate(("calibrate", "naive")):
        execution = ExecutionSettings(workers=1, num_slots=4).to_json()
        table.observe(Entry(0.0, TrialStarted(trial, plan.config, execution, 0, phase)))  # type: ignore[arg-type]
    again = [FrontierExperiment(plan, LocalFiles()).again(life, "cut off") for life in table.trials.values()]
    assert [ready.spec.max_steps for ready in again] == [STEPS, None]
