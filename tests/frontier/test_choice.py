"""Which trainings speak for a worker count."""

from __future__ import annotations

from pathlib import Path

from elastune.core.run import Config, Means, Program
from elastune.frontier.choice import FRESH_SEEDS, Choice
from elastune.frontier.plan import check
from elastune.frontier.rows import FrontierCriteria, Times
from elastune.frontier.trainings import Trainings
from elastune.journal.entry import Entry
from elastune.journal.records import RunFinished, TrialFinished, TrialStarted
from elastune.journal.trials import TrialTable
from elastune.plan.step_time import StepTime
from elastune.search.space.objective import Objective
from elastune.study.request import FrontierRequest

BY = FrontierCriteria(Objective("loss", "min"), None, 1.0, Times(StepTime(0.01, 0.001, 0.0, 0.0, 40), {}))


class Told:
    """A frontier of the tiny program for 1 and 4 workers, and what was trained of it."""

    def __init__(self, tiny: Program, out: Path) -> None:
        self.plan = check(FrontierRequest(tiny, out, (1, 4), budget_s=1.0, seeds=2))
        self.table = TrialTable()
        self.choice = Choice(self.plan, Trainings(self.table))

    def train(self, config: Config, seeds: range, slots: int, loss: float) -> list[int]:
        trials = []
        for seed in seeds:
            trial, means = len(self.table.trials), {"workers": 1, "num_slots": slots}
            run = RunFinished("sha", 1, 10, 200, 1.0, {"loss": loss}, step_s=0.1, grad_bytes=40)
            end = TrialFinished(trial, "complete", {"loss": loss}, {"loss": loss}, run=run)
            for record in (TrialStarted(trial, config, means, seed, "confirm"), end):
                self.table.hear(Entry(0.0, record))
            trials.append(trial)
        return trials


def test_a_count_is_spoken_for_by_its_own_slots(tmp_path: Path, tiny: Program) -> None:
    told = Told(tiny, tmp_path / "out")
    good = {**told.plan.config, "lr": 0.1}
    of_one = told.train(good, told.choice.seeds(FRESH_SEEDS), 1, 0.2)
    assert [t.trial for t in told.choice.tried(good, 4)] == of_one, "better than nothing, for what to confirm"
    assert told.choice.best(4, BY) == good
    assert told.choice.best(4, BY, confirmed_only=True) is None, "but not for what is told"
    assert told.choice.unconfirmed(BY) == [(good, 4)]
    assert told.choice.missing("confirm", [(good, 1)], FRESH_SEEDS) == []
    assert told.choice.missing("confirm", [(good, 4)], FRESH_SEEDS) == [(good, 4, 1000), (good, 4, 1001)]

    of_four = told.train(good, told.choice.seeds(FRESH_SEEDS), 4, 0.3)
    assert [t.trial for t in told.choice.tried(good, 4)] == of_four
    assert [t.trial for t in told.choice.tried(good, 1)] == of_one
    assert told.choice.best(4, BY, confirmed_only=True) == good
    assert told.choice.unconfirmed(BY) == []


def test_a_training_has_a_slot_for_each_worker_it_speaks_for(tmp_path: Path, tiny: Program) -> None:
    plan = Told(tiny, tmp_path / "out").plan
    assert plan.means(4) == Means(workers=1, num_slots=4, mode="exact")
    assert [plan.searched_for(batch) for batch in (10, 20, 79, 80, 1000)] == [1, 1, 1, 4, 4]
