"""How workers agree as a parameter of a search: what follows from what, what is refused, and all on one front."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import FixedTrial

import elastune
from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import StudyStarted, TrialStarted
from elastune.core.run import ExecutionSettings, Program
from elastune.core.sync_plan import SETTINGS, SyncChoice, SyncPlan
from elastune.report.explain import explain
from elastune.report.export import to_csv
from elastune.report.overviews import gather_study
from elastune.report.study import front_table
from elastune.runtime.clusters.base import LocalFiles
from elastune.runtime.clusters.local import LocalCluster
from elastune.train.program.space import Sample, probe
from elastune.tuning.frontier.checked_request import check as check_frontier
from elastune.tuning.search.suggester import Suggestion
from elastune.tuning.simulate.run import SurrogateModel, simulate
from elastune.tuning.study.experiment import PreparedTrial, Tuning
from elastune.tuning.study.request import FrontierRequest, StudyRequest
from elastune.tuning.study.results import Study
from elastune.tuning.study.run import tune
from elastune.tuning.study.run_command import run_command
from elastune.tuning.study.validate import check, check_same_study

LOCAL = "local:learners=4,every=3"
APART = "sync_by_size:above=1,strategy=local,learners=4,every=3"
DIGITS = f"""
import torch

import elastune

config = {{"lr": 0.3}}
objectives = {{"accuracy": "max", "seconds": "min"}}
WAYS = {{"static": ("local", "none"), "adaptive": ("allreduce", {APART!r}), "steps": ("allreduce", "none")}}


def space(trial):
    sync, policy = WAYS[trial.suggest_categorical("way", list(WAYS))]
    apart = {{"learners": 4, "every": 3}} if sync == "local" else {{}}
    return {{"workers": 2, "sync": sync, "policy": policy, **apart}}


def train(session):
    data = elastune.datasets.digits()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=session.config["lr"]))
    meetings = 0
    for _ in session.epochs(1):
        for x, y in session.batches(data.train, batch_size=128):
            session.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            meetings += session.ends_step
        right = 0.0
        for x, y in session.batches(data.validation, batch_size=512, train=False):
            right += float((model(x).argmax(1) == y).sum())
        session.report(accuracy=session.sum(right) / len(data.validation), meetings=session.sum(float(meetings)))
"""


def asked(program: Program, out: Path, **changes: Any) -> StudyRequest:
    return StudyRequest(program, out, **{"objectives": {"loss": "min"}, "trials": 8, "workers": 4, **changes})


def prepared(request: StudyRequest, **chosen: Any) -> PreparedTrial:
    """A trial whose space returns ``chosen``."""
    plan = check(request, lambda trial: chosen)
    (sample,) = probe(plan.space, 1, 0)
    return begun(Tuning(plan, LocalFiles(), checkpoints=False), sample)


def begun(tuning: Tuning, sample: Sample) -> PreparedTrial:
    new = tuning.new(Suggestion(0, sample.params, {}, sample.values, "random"), None)
    assert isinstance(new, PreparedTrial)
    return new


def test_a_trial_agrees_as_its_space_says_and_has_slots_for_its_learners(tiny: Program, tmp_path: Path) -> None:
    request = asked(tiny, tmp_path / "out")
    new = prepared(request, workers=2, sync="local", learners=6, every=16)
    assert (new.refused, new.spec.sync) == ("", SyncPlan("local", 6, 16))
    assert new.spec.execution.num_slots == 6
    assert isinstance(new.record, TrialStarted)
    told = new.record.execution
    assert (told["sync"], told["sync_schedule"], told["num_slots"]) == ("local:learners=6,every=16", "", 6)
    assert "--sync local:learners=6,every=16" in run_command("p.py", {}, told)
    later = prepared(request, sync_schedule="5=local:learners=3; 9=diloco:learners=2")
    assert (later.spec.sync, later.spec.execution.num_slots) == (SyncPlan(), 6)
    assert "'5=local:learners=3,every=1; 9=" in run_command("p.py", {}, later.record.execution)  # type: ignore[union-attr]
    plain = prepared(request, workers=2)
    assert isinstance(plain.record, TrialStarted)
    assert "sync" not in plain.record.execution
    assert "--sync" not in run_command("p.py", {}, {**plain.record.execution, "sync": "allreduce", "sync_schedule": ""})


def test_a_study_of_one_strategy_searches_its_settings(tiny: Program, tmp_path: Path) -> None:
    execution = ExecutionSettings(mode="fast", num_slots=4)
    base = asked(tiny, tmp_path / "out", sync=SyncChoice.parse(LOCAL, ""), execution=execution)
    assert prepared(base, every=5).spec.sync == SyncPlan("local", 4, 5)
    assert prepared(base).spec.sync == SyncPlan("local", 4, 3)
    back = prepared(base, sync="allreduce")
    assert back.spec.sync == SyncPlan()
    assert isinstance(back.record, TrialStarted)
    assert back.record.execution["sync"] == "allreduce"  # a resumed study must not take it for the study's own


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"workers": 4, "sync": "local:learners=2"}, "there must be a learner for every worker"),
        ({"workers": 4, "sync_schedule": "5=local:learners=2"}, "there must be a learner for every worker"),
        ({"workers": 2, "mechanism": "zero", "sync": LOCAL}, "a worker must hold its learners whole"),
        ({"mode": "fast", "compress": "int8", "sync": LOCAL}, "learners exchange parameters"),
        ({"policy": "gns", "sync": LOCAL}, "nothing is measured"),
    ],
)
def test_what_cannot_be_had_together_is_refused_with_its_reason(
    tiny: Program, tmp_path: Path, chosen: dict[str, Any], words: str
) -> None:
    def space(trial: Any) -> dict[str, Any]:
        return chosen if trial.suggest_categorical("such", [True, False]) else {"workers": 1}

    tuning = Tuning(plan := check(asked(tiny, tmp_path / "out"), space), LocalFiles(), checkpoints=False)
    for sample in probe(plan.space, 8, 0):
        refused = begun(tuning, sample).refused
        assert (words in refused) if sample.params["such"] else refused == ""


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"sync": "locl"}, "strategy must be known"),
        ({"sync": 3}, "a trial's sync must be a text"),
        ({"sync_schedule": ["5=local"]}, "a trial's sync_schedule must be a text"),
        ({"sync": "allreduce", "learners": 4}, "allreduce has no setting learners"),
        ({"sync": "local", "learners": "4,every=9"}, "learners must be a whole number"),
        ({"sync": "diloco", "learners": 4, "outer_lr": 11.0}, "outer_lr must be a number"),
        ({"learners": 4}, "one of the program's config"),
    ],
)
def test_rubbish_is_refused_before_anything_runs_and_is_no_crash_where_it_comes_late(
    tiny: Program, tmp_path: Path, chosen: dict[str, Any], words: str
) -> None:
    request = asked(tiny, tmp_path / "out")
    with pytest.raises(UserError, match=words):
        check(request, lambda trial: chosen)
    if "sync" in chosen or "sync_schedule" in chosen:
        plan = check(request, lambda trial: {})
        values = {**plan.config, "policy": "none", **chosen}
        late = begun(Tuning(plan, LocalFiles(), checkpoints=False), Sample({}, {}, values))
        assert words in late.refused
        assert isinstance(late.record, TrialStarted)
        assert all(isinstance(late.record.execution[name], str) for name in ("sync", "sync_schedule") if name in chosen)


def test_names_that_the_program_has_are_its_own() -> None:
    values = {"sync": LOCAL, "every": 7, "mix": None}
    assert SyncChoice.of(values).sync == SyncPlan("local", 4, 7)
    assert SyncChoice.of(values, program_names={"every"}).sync == SyncPlan("local", 4, 3)
    assert SyncChoice.of({"every": 7, "mix": 0.2}) == SyncChoice()


def test_whatever_is_suggested_can_be_written_and_read(tiny: Program, tmp_path: Path) -> None:
    def space(trial: Any) -> dict[str, Any]:
        return elastune.suggest_sync(
            trial,
            strategies=list(SETTINGS),
            learners=(2, 4),
            moments=("mean", "fresh"),
            mix=(1, 4),
            pull=(1e-5, 1.0),
            outer_lr=(0.1, 1.0),
            outer_momentum=(0.0, 0.99),
            staleness=(1, 3),
        )

    plan, seen = check(asked(tiny, tmp_path / "out", constraints=("learners * every <= 64",)), space), set()
    for sample in probe(plan.space, 60, 0):
        try:
            found = SyncChoice.of(sample.values).sync
        except UserError:  # a mix that comes too late: such a trial is infeasible
            assert sample.values["every"] <= (sample.values["mix"] or sample.values["staleness"] + 1)
            continue
        seen.add(found.strategy)
        assert SyncPlan.parse(str(found)) == found
        assert set(sample.params) - {"sync"} <= set(SETTINGS[found.strategy])
        assert sample.values["learners"] == found.learners
    assert seen == set(SETTINGS)
    for wrong in ({"strategies": ("locl",)}, {"learners": (0,)}, {"pull": (0.0, 2.0)}, {"every": (0, 4)}):
        with pytest.raises(UserError):
            elastune.suggest_sync(FixedTrial({}), **wrong)


def test_rounds_without_a_mix_are_infeasible(tiny: Program, tmp_path: Path) -> None:
    """A trial of them; a study of nothing else is refused."""

    def space_of(*mixes: int) -> Any:
        return lambda trial: {
            "sync": "gossip",
            "learners": 2,
            "every": 4,
            "mix": trial.suggest_categorical("mix", mixes),
        }

    check(asked(tiny, tmp_path / "out"), space_of(3, 4))
    with pytest.raises(UserError, match="every=4, mix=4"):
        check(asked(tiny, tmp_path / "out"), space_of(4))


def test_fragments_are_suggested() -> None:
    trial = FixedTrial({"every": 24, "fragments": 3})
    found = elastune.suggest_sync(
        trial, strategies=("diloco",), learners=(4,), every=(12, 64), fragments=(2, 4), cycles=2
    )
    assert str(SyncChoice.of(found).sync) == "diloco:learners=4,every=24,fragments=3,cycles=2"


def test_no_strategy_is_simulated(program: Any, tmp_path: Path) -> None:
    space = 'def space(trial):\n    return {"sync": "local:learners=4"}\n\n\n'
    file = program(f"{space}def surrogate(config, workers):\n    return []\n")
    model = SurrogateModel(lambda config, workers: [(1.0, {"loss": 1.0})])
    with pytest.raises(UserError, match="not simulated"):
        simulate(asked(file, tmp_path / "out", trials=1), model)


def test_a_frontier_takes_strategies_and_no_schedule_of_them(program: Any, tmp_path: Path) -> None:
    def asked_for(choices: str) -> FrontierRequest:
        file = program(
            'config = {"lr": 0.1, "batch_size": 8}\nobjectives = {"accuracy": "max"}\n\n\n'
            f"def space(trial):\n    return {choices}\n\n\n"
            "def train(session):\n    pass\n"
        )
        return FrontierRequest(file, tmp_path / "out", workers=(1, 2), budget_s=60.0)

    plan = check_frontier(asked_for('{"sync": trial.suggest_categorical("sync", ["allreduce", "local:learners=2"])}'))
    assert {way.agreed.sync.strategy for _, way in plan.named} == {"allreduce", "local"}
    schedule = '["5=local:learners=2,every=2"]'
    with pytest.raises(UserError, match="one strategy"):
        check_frontier(asked_for(f'{{"sync_schedule": trial.suggest_categorical("sync_schedule", {schedule})}}'))


@pytest.mark.soak
def test_static_and_adaptive_strategies_stand_on_one_front_and_a_resume_keeps_them(
    program: Any, tmp_path: Path
) -> None:
    execution = ExecutionSettings(mode="fast", num_slots=4)
    request = StudyRequest(program(DIGITS), tmp_path / "out", sampler="grid", trials=2, workers=2, execution=execution)
    tune(request, cluster=LocalCluster(2))
    tune(replace(request, trials=3, resume=True), cluster=LocalCluster(2))
    study = Study.load(request.out)
    by = {trial.params["way"]: trial for trial in study.complete}
    assert set(by) == {"static", "adaptive", "steps"}, [trial.reason for trial in study.trials]
    assert by["static"].execution["sync"] == LOCAL
    assert (by["adaptive"].execution["sync"], by["adaptive"].execution["policy"]) == ("allreduce", APART)
    meetings = {way: trial.metrics["meetings"] for way, trial in by.items()}
    assert max(meetings["static"], meetings["adaptive"]) < meetings["steps"]  # they trained apart, not in name alone
    story = gather_study(read(request.out / "journal.jsonl"))
    assert story is not None
    table = front_table(story, [trial.number for trial in by.values()])
    settings = "; ".join(row[-1] for row in table.rows)
    assert f"sync={LOCAL}" in settings
    assert "execution.sync" in to_csv(study).splitlines()[0]
    assert explain(study).parts
    entries = read(request.out / "journal.jsonl")
    settled = next(e.record for e in entries if isinstance(e.record, StudyStarted)).settings
    assert (settled["sync"], settled["sync_schedule"]) == ("allreduce", "")
    with pytest.raises(UserError, match="resumes with the sync it was begun with"):
        check_same_study({**settled, "sync": LOCAL}, entries, request.out)
