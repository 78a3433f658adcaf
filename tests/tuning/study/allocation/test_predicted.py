"""What a plan says of a study's trials: it bounds their workers, is what allocation begins with, and stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.files import JournalWriter, read
from elastune.core.journal.records import PlanMade, Record, ScalingPredicted, TrialReallocated, TrialStarted
from elastune.core.mesh import Mesh
from elastune.core.plan.step_time import CONSTANTS
from elastune.core.run import ExecutionSettings, Program
from elastune.train.program.load import load
from elastune.tuning.simulate.run import SurrogateModel, simulate
from elastune.tuning.study.rebalancer import Broker, WaitingTrial
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.throughput import (
    BatchTable,
    ThroughputTable,
    bounded,
    plan_if_readable,
    predict_scaling,
    predicted_in,
    scaling_prior,
)
from elastune.tuning.study.trial_progress import TrialProgress

SIZE = {"batch_size": 16, "layers": 4, "flops": 1e6, "kept_bytes": 0.0, "gradient_bytes": 1e3}
COST = {**dict.fromkeys(CONSTANTS, 1e-12), "flop_s": 1e-9, "gradient_hop_s": 2e-3}
FAST = ExecutionSettings(mode="fast")
# On 1 to 4 workers: 16, 8 + 4, 6 + 8 and 4 + 12 ms; of 64 samples 64, 36, 30 and 28 ms.
TRAIN = """
config = {"lr": 0.1, "batch_size": 16}
objectives = {"error": "min"}

def space(trial):
    return {"lr": trial.suggest_float("lr", 0.001, 1.0)}

def surrogate(config, workers):
    return [(12.0 / workers, {"error": config["lr"]})] * 12
"""


def made(path: Path) -> PlanMade:
    return PlanMade(str(path), {"workers_per_node": 4}, {"size": SIZE}, COST)


def told(
    batches: tuple[int, ...] = (16,), bounds: tuple[int, int] = (1, 4), execution: ExecutionSettings = FAST
) -> ScalingPredicted:
    return predict_scaling(made(Path("train.py")), Path("plan"), Path("train.py"), execution, batches, bounds)


def records(out: Path) -> list[Record]:
    return [entry.record for entry in read(out / "journal.jsonl")]


def test_workers_beyond_the_shortest_step_are_not_given() -> None:
    found = told()
    assert found.most == 2
    assert [round(step_s * 1e3) for _, _, step_s in found.steps] == [16, 12, 14, 16]
    assert found.why.startswith("a step of 16 samples takes 12 ms on 2 workers, and 1.33 times as long on 4")
    assert told((16, 64)).most == 4, "of any batch that a trial may have, whoever gains most"
    assert told(bounds=(1, 2)).why.startswith("each worker up to 2 brings something")
    assert len({batch for batch, _, _ in told(tuple(range(16, 1000)), (1, 2)).steps}) == 16


def test_what_it_may_be_asked_of() -> None:
    assert told(execution=replace(FAST, mesh=Mesh(data=2, tensor=2), mechanism="tensor"), bounds=(2, 4)).most in (2, 4)
    with pytest.raises(UserError, match="of the program that ran"):
        predict_scaling(made(Path("other.py")), Path("plan"), Path("train.py"), FAST, [16], (1, 4))
    with pytest.raises(UserError, match="own mechanisms"):
        told(execution=replace(FAST, mechanism="fsdp2"))


def test_in_exact_mode_the_largest_share_of_slots_decides() -> None:
    found = told((64,), execution=ExecutionSettings(mode="exact", num_slots=4))
    step_s = {workers: seconds for _, workers, seconds in found.steps}
    assert step_s[3] == step_s[2], "4 slots on 3 workers: 2 of them on one"


@pytest.mark.parametrize("table", [ThroughputTable, BatchTable])
def test_what_was_predicted_counts_until_trials_have_shown_it(table: Any) -> None:
    known = table(scaling_prior(told()))
    rates = dict(known.of(0).points)
    assert rates[2] / rates[1] == pytest.approx(16 / 12)
    assert rates[4] / rates[1] == pytest.approx(16 / 16)
    known.add(0, 1, 10, 10.0)
    assert dict(known.of(0).points) == pytest.approx({1: 1.0, 2: 16 / 12, 3: 16 / 14, 4: 1.0})
    known.add(0, 2, 19, 10.0)
    assert dict(known.of(0).points)[2] == pytest.approx(1.9), "its own"
    assert dict(known.of(0).points)[4] == pytest.approx(1.9 * 12 / 16)


def test_like_batches_gain_alike() -> None:
    prior = scaling_prior(told((16, 64)))
    assert prior is not None
    assert prior(20.0)[4] / prior(20.0)[1] == pytest.approx(1.0)
    assert prior(90.0)[4] / prior(90.0)[1] == pytest.approx(64 / 28)
    assert scaling_prior(None) is None


@pytest.mark.parametrize(("prior", "given"), [(None, 2), (scaling_prior(told((64,))), 4)])
def test_a_new_trial_is_as_wide_as_it_is_predicted_to_gain(prior: Any, given: int) -> None:
    """Where nothing is known it gets twice the fewest workers."""
    broker = Broker(4, courses=TrialProgress(ThroughputTable(prior)))
    (grant,) = broker.grants(0.0, [WaitingTrial(0, 1, 4, 0.0)])
    assert grant.after == given


def test_a_study_keeps_what_its_plan_said_and_goes_on_with_it(tmp_path: Path, program: Any) -> None:
    """Its trials would go four times as fast on four workers; the plan says that two are enough."""
    mine: Program = program(TRAIN)
    with JournalWriter(tmp_path / "plan" / "journal.jsonl") as journal:
        journal.write(made(mine.path))
    asked = StudyRequest(mine, tmp_path / "with", sampler="random", trials=1, workers=4, trial_workers=(1, 4))
    surrogate = load(mine).surrogate
    assert surrogate is not None
    simulate(replace(asked, out=tmp_path / "without"), SurrogateModel(surrogate))
    simulate(replace(asked, plan=tmp_path / "plan"), SurrogateModel(surrogate))
    assert most_workers(tmp_path / "without") == 4
    assert most_workers(tmp_path / "with") <= 2
    for began, plan in (("with", "another"), ("without", "plan")):
        again = replace(asked, out=tmp_path / began, trials=2, resume=True, plan=tmp_path / plan)
        with pytest.raises(UserError, match=r"resumes with the plan it was begun with .* leave out --plan"):
            simulate(again, SurrogateModel(surrogate))
    (tmp_path / "plan").rename(tmp_path / "gone")
    simulate(replace(asked, trials=2, resume=True), SurrogateModel(surrogate))
    assert most_workers(tmp_path / "with") <= 2
    assert predicted_in(list(read(tmp_path / "with" / "journal.jsonl"))) is not None
    assert sum(isinstance(each, ScalingPredicted) for each in records(tmp_path / "with")) == 1


def test_a_plan_that_is_none_is_refused_before_anything_is_begun(tmp_path: Path, program: Any) -> None:
    mine: Program = program(TRAIN)
    with JournalWriter(tmp_path / "other" / "journal.jsonl") as journal:
        journal.write(made(tmp_path / "another.py"))
    asked = StudyRequest(mine, tmp_path / "out", trials=1, workers=4, trial_workers=(1, 4))
    for folder, said in (("gone", "a journal must exist"), ("other", "of the program that ran")):
        with pytest.raises(UserError, match=said):
            simulate(replace(asked, plan=tmp_path / folder), SurrogateModel(lambda config, workers: []))
        assert not (tmp_path / "out").exists(), "else the same command would be refused, mended"


def test_batches_that_are_none_are_left_out(tmp_path: Path, program: Any) -> None:
    """Whatever the program means by them: "all", or 0."""
    chosen = 'trial.suggest_categorical("batch_size", [0, "all", 64])'
    mine: Program = program(TRAIN.replace('return {"lr"', f'return {{"batch_size": {chosen}, "lr"'))
    with JournalWriter(tmp_path / "plan" / "journal.jsonl") as journal:
        journal.write(made(mine.path))
    asked = StudyRequest(mine, tmp_path / "out", sampler="random", trials=1, workers=4, trial_workers=(1, 4))
    surrogate = load(mine).surrogate
    assert surrogate is not None
    simulate(replace(asked, plan=tmp_path / "plan"), SurrogateModel(surrogate))
    found = predicted_in(list(read(tmp_path / "out" / "journal.jsonl")))
    assert found is not None
    assert {batch for batch, _, _ in found.steps} == {64}


def test_what_was_not_looked_at_is_not_bounded() -> None:
    """A study may go on with more workers a trial than it was begun with."""
    assert bounded(told(), (1, 8)) == (1, 2)
    assert bounded(told(), (3, 8)) == (3, 3)
    assert bounded(told((64,)), (1, 8)) == (1, 8), "all that were asked about bring something"
    assert bounded(None, (1, 8)) == (1, 8)


def test_the_plan_is_told_of_while_it_is_there(tmp_path: Path) -> None:
    program, folder = tmp_path / "train.py", tmp_path / "plan"
    found = predict_scaling(made(program), folder, program, FAST, [16], (1, 4))
    assert plan_if_readable(found, str(program)) is None
    for name in ("other.py", "train.py"):
        with JournalWriter(folder / "journal.jsonl") as journal:
            journal.write(made(tmp_path / name))
        assert (plan_if_readable(found, str(program)) is None) is (name == "other.py")


def test_a_plan_without_workers_to_share_is_refused(tmp_path: Path, program: Any) -> None:
    asked = StudyRequest(program(TRAIN), tmp_path / "out", trials=1, plan=tmp_path)
    with pytest.raises(UserError, match="trial-workers"):
        simulate(asked, SurrogateModel(lambda config, workers: []))


def most_workers(out: Path) -> int:
    begun = [int(each.execution["workers"]) for each in records(out) if isinstance(each, TrialStarted)]
    return max([*begun, *(each.after for each in records(out) if isinstance(each, TrialReallocated))])
