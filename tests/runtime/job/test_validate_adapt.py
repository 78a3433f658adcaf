"""What adapts a run, from its texts to its journal: checked before it starts, told once, a parameter of a study."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.adapt.policies.library.registry import build, policies_of
from elastune.core.errors import UserError
from elastune.core.journal.records import Decided, Measured, PolicyFailed, Record, Restarted
from elastune.core.run import Adapt, Elastic, ExecutionSettings, Program, RunSpec
from elastune.core.sync_plan import SyncPlan
from elastune.runtime.elastic_run import RecordFilter
from elastune.runtime.job.validation import check_adapt, check_run
from elastune.train.program.load import load
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import check
from elastune.tuning.study.trial_results import settings, system_defaults

SEEN = Measured(10, 0, 640, 1.0, 2, 64, 0.05)
DECIDED = Decided("gns", 10, {"batch_size": 128}, SEEN, "applied")


def kept(said: RecordFilter, *told: Record) -> list[Record]:
    return [record for record in told if said.is_new(record)]


def test_what_every_member_tells_is_kept_once() -> None:
    said, other, later = RecordFilter(), replace(DECIDED, policy="warmup"), replace(DECIDED, step=11)
    assert kept(said, DECIDED, DECIDED, other, other, later, later) == [DECIDED, other, later]
    refused = replace(DECIDED, outcome="refused")  # something else that the policy had asked for in this step
    assert kept(said, refused, refused, DECIDED) == [refused]


def test_a_failure_of_a_policy_is_kept_once_a_hook_and_step() -> None:
    said, failed = RecordFilter(), PolicyFailed("gns", "after_step", 10, 0, "ValueError: no")
    hook = replace(failed, hook="before_step", worker=1)
    found = kept(said, failed, replace(failed, worker=1), hook, DECIDED)
    assert found == [failed, hook, DECIDED]
    assert kept(said, SEEN, SEEN) == [SEEN, SEEN], "only rank 0 tells what it measured"


def test_what_is_decided_again_after_a_restart_counts() -> None:
    said, later = RecordFilter(), replace(DECIDED, step=20)
    kept(said, DECIDED, later, Restarted(10))
    assert kept(said, DECIDED, later, later) == [later]


def test_a_space_names_policies_as_text_or_texts() -> None:
    assert policies_of("none") == ()
    assert policies_of(" gns:max_batch=64 ") == ("gns:max_batch=64",)
    assert policies_of(["warmup", "gns"]) == ("warmup", "gns")
    assert policies_of([]) == ()
    for wrong in (None, 3, ["gns", 3], "", [""], {"gns": 1}, ["none", "gns"]):
        with pytest.raises(UserError, match="policy|none"):
            policies_of(wrong)


def test_texts_are_checked_before_a_run(tiny: Program) -> None:
    program = load(tiny)
    check_adapt(Adapt(("gns:max_batch=64", "warmup:steps=10"), ("noise_scale:every=10",)), program)
    for wrong in (Adapt(("wizard",)), Adapt(("gns:luck=7",)), Adapt(monitors=("wizard",))):
        with pytest.raises(UserError, match="wizard|luck"):
            check_adapt(wrong, program)


@pytest.mark.parametrize("policy", ["sync_by_size", "sync_by_link"])
@pytest.mark.parametrize(("high", "slots"), [(16, 16), (16, 64), (6, 6), (8, 24), (3, 4)])
def test_a_policy_has_as_many_learners_as_fit(
    tiny: Program, tmp_path: Path, policy: str, high: int, slots: int
) -> None:
    execution, elastic = ExecutionSettings(workers=1, num_slots=slots), Elastic(low=1, high=high)
    spec = RunSpec(tiny, tmp_path, execution=execution, elastic=elastic, adapt=Adapt((f"{policy}:strategy=local",)))
    check_run(spec)
    (text,) = build(f"{policy}:above=2" if policy == "sync_by_size" else policy).policy.strategies(slots, high)
    SyncPlan.parse(text).check(slots, high, "replicated", "exact")
    assert SyncPlan.parse(text).learners == {(16, 16): 16, (16, 64): 16, (6, 6): 6, (8, 24): 8, (3, 4): 4}[high, slots]


@pytest.mark.parametrize(
    ("policy", "changed", "words"),
    [
        ("sync_by_size:learners=8", {}, "there must be a learner for every worker .*up to 16 .*sync_by_size"),
        ("sync_by_link:learners=8", {}, "there must be a learner for every worker .*up to 16 .*sync_by_link"),
        ("sync_by_size:learners=24", {}, "each learner must have as many slots .*--slots"),
        ("sync_by_size:every=99", {"max_steps": 98}, "a round must not be longer than the run .*98 steps"),
        ("sync_by_size", {"execution": {"mechanism": "zero"}}, "a worker must hold its learners whole"),
        ("sync_by_size", {"execution": {"mode": "fast", "compress": "int8"}}, "learners exchange parameters"),
    ],
)
def test_what_a_policy_would_switch_to_is_checked_before_a_run(
    tiny: Program, tmp_path: Path, policy: str, changed: dict[str, Any], words: str
) -> None:
    execution = ExecutionSettings(workers=1, num_slots=16, **changed.pop("execution", {}))
    elastic = Elastic(low=1, high=16)
    spec = RunSpec(tiny, tmp_path, execution=execution, elastic=elastic, adapt=Adapt((policy,)), **changed)
    with pytest.raises(UserError, match=words):
        check_run(spec)
    name, _, options = policy.partition(":")
    if name == "sync_by_size":  # with so few workers it never switches
        check_run(replace(spec, adapt=Adapt((f"{name}:above=16,{options}".rstrip(","),))))


def test_a_journal_holds_what_adapts_a_run() -> None:
    assert Adapt().to_json() == {}
    assert Adapt(("gns",)).to_json() == {"policies": ["gns"], "monitors": []}


def test_the_policy_of_a_trial_is_no_setting() -> None:
    execution = ExecutionSettings(workers=1)
    config, found, adapt = settings({"lr": 0.1, "policy": "gns", "workers": 2}, {"lr": 1.0}, execution, 4)
    assert (config, found.workers, adapt) == ({"lr": 0.1}, 2, Adapt(("gns",)))
    assert settings({"lr": 0.1}, {"lr": 1.0}, execution, 4)[2] == Adapt()
    assert system_defaults(execution)["policy"] == "none"


def test_a_study_refuses_a_policy_that_cannot_be_made(tiny: Program, tmp_path: Path) -> None:
    def space(trial: Any) -> dict[str, Any]:
        return {"policy": trial.suggest_categorical("policy", ["none", "gns:max_batch=64", "wizard:might=9"])}

    asked = StudyRequest(tiny, tmp_path / "out", objectives={"loss": "min"}, trials=2)
    with pytest.raises(UserError, match="wizard"):
        check(asked, space)
    check(asked, lambda trial: {"policy": trial.suggest_categorical("policy", ["none", "gns:max_batch=64"])})
    assert not (tmp_path / "out").exists()


def test_a_constraint_on_a_policy_is_told_to_be_none(tiny: Program, tmp_path: Path) -> None:
    asked = StudyRequest(tiny, tmp_path / "out", objectives={"loss": "min"}, trials=2, constraints=("policy <= 3",))
    with pytest.raises(UserError, match="policy must be a number"):
        check(asked, lambda trial: {"lr": trial.suggest_float("lr", 0.1, 1.0)})
