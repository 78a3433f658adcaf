"""What adapts a run, from its texts to its journal: checked before it starts, told once, a parameter of a study."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.cluster.base import Message
from elastune.cluster.elastic_run import ElasticRun
from elastune.cluster.launcher import Launcher, ProcessEvent
from elastune.core.errors import UserError
from elastune.core.run import Adapt, Elastic, Means, Place, Program, RunSpec
from elastune.core.sync_plan import SyncPlan
from elastune.elastic.protocol.worker_spec import WorkerSpec
from elastune.job.validate_adapt import check_adapt, policies_of
from elastune.job.validate_run import check_run
from elastune.journal.records import Decided, Measured, PolicyFailed, Record, Restarted
from elastune.policies.library.registry import build
from elastune.study.request import StudyRequest
from elastune.study.run import check
from elastune.study.trial_results import settings, system_defaults
from elastune.train.program.load import load

SEEN = Measured(10, 0, 640, 1.0, 2, 64, 0.05)
DECIDED = Decided("gns", 10, {"batch_size": 128}, SEEN, "applied")


@pytest.fixture
def elastic(tiny: Program, tmp_path: Path) -> Iterator[ElasticRun]:
    spec = RunSpec(tiny, tmp_path, means=Means(workers=2))
    run = ElasticRun(WorkerSpec("", spec, Place(), {}, "", []), NoLauncher())
    yield run
    run.close()


class NoLauncher(Launcher):
    """Has no room."""

    capacity = free = 0

    def start(self, workers: Any, needs: Any) -> None: ...

    def end(self, workers: Any, why: str = "") -> None: ...

    def poll(self) -> list[ProcessEvent]:
        return []

    def fileno(self) -> None: ...

    def close(self) -> None: ...


def kept(run: ElasticRun, *told: tuple[int, Record]) -> list[Record]:
    events = [event for worker, record in told for event in run.judge(worker, record)]
    return [event.record for event in events if isinstance(event, Message)]


def test_what_every_member_tells_is_kept_once(elastic: ElasticRun) -> None:
    other, later = replace(DECIDED, policy="warmup"), replace(DECIDED, step=11)
    told = [(worker, record) for record in (DECIDED, other, later) for worker in (0, 1)]
    assert kept(elastic, *told) == [DECIDED, other, later]
    refused = replace(DECIDED, outcome="refused")  # something else that the policy had asked for in this step
    assert kept(elastic, (1, refused), (0, refused), (0, DECIDED)) == [refused]


def test_a_failure_of_a_policy_is_kept_once_a_hook_and_step(elastic: ElasticRun) -> None:
    failed = PolicyFailed("gns", "after_step", 10, 0, "ValueError: no")
    hook = replace(failed, hook="before_step", worker=1)
    found = kept(elastic, (0, failed), (1, replace(failed, worker=1)), (1, hook), (0, DECIDED))
    assert found == [failed, hook, DECIDED]
    assert kept(elastic, (0, SEEN), (0, SEEN)) == [SEEN, SEEN], "only rank 0 tells what it measured"


def test_what_is_decided_again_after_a_restart_counts(elastic: ElasticRun) -> None:
    later = replace(DECIDED, step=20)
    kept(elastic, (0, DECIDED), (0, later), (0, Restarted(10)))
    assert kept(elastic, (1, DECIDED), (1, later), (0, later)) == [later]


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
    means, elastic = Means(workers=1, num_slots=slots), Elastic(low=1, high=high)
    spec = RunSpec(tiny, tmp_path, means=means, elastic=elastic, adapt=Adapt((f"{policy}:strategy=local",)))
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
        ("sync_by_size", {"means": {"mechanism": "zero"}}, "a learner lies whole on its worker"),
        ("sync_by_size", {"means": {"mode": "fast", "compress": "int8"}}, "learners exchange parameters"),
    ],
)
def test_what_a_policy_would_switch_to_is_checked_before_a_run(
    tiny: Program, tmp_path: Path, policy: str, changed: dict[str, Any], words: str
) -> None:
    means = Means(workers=1, num_slots=16, **changed.pop("means", {}))
    elastic = Elastic(low=1, high=16)
    spec = RunSpec(tiny, tmp_path, means=means, elastic=elastic, adapt=Adapt((policy,)), **changed)
    with pytest.raises(UserError, match=words):
        check_run(spec)
    name, _, options = policy.partition(":")
    if name == "sync_by_size":  # with so few workers it never switches
        check_run(replace(spec, adapt=Adapt((f"{name}:above=16,{options}".rstrip(","),))))


def test_a_journal_holds_what_adapts_a_run() -> None:
    assert Adapt().to_json() == {}
    assert Adapt(("gns",)).to_json() == {"policies": ["gns"], "monitors": []}


def test_the_policy_of_a_trial_is_no_setting() -> None:
    means = Means(workers=1)
    config, found, adapt = settings({"lr": 0.1, "policy": "gns", "workers": 2}, {"lr": 1.0}, means, 4)
    assert (config, found.workers, adapt) == ({"lr": 0.1}, 2, Adapt(("gns",)))
    assert settings({"lr": 0.1}, {"lr": 1.0}, means, 4)[2] == Adapt()
    assert system_defaults(means)["policy"] == "none"


def test_a_study_refuses_a_policy_that_cannot_be_made(tiny: Program, tmp_path: Path) -> None:
    def space(trial: Any) -> dict[str, Any]:
        return {"policy": trial.suggest_categorical("policy", ["none", "gns:max_batch=64", "wizard:might=9"])}

    asked = StudyRequest(tiny, tmp_path / "out", {"loss": "min"}, trials=2)
    with pytest.raises(UserError, match="wizard"):
        check(asked, space)
    check(asked, lambda trial: {"policy": trial.suggest_categorical("policy", ["none", "gns:max_batch=64"])})
    assert not (tmp_path / "out").exists()


def test_a_constraint_on_a_policy_is_told_to_be_none(tiny: Program, tmp_path: Path) -> None:
    asked = StudyRequest(tiny, tmp_path / "out", {"loss": "min"}, trials=2, constraints=("policy <= 3",))
    with pytest.raises(UserError, match="policy must be a number"):
        check(asked, lambda trial: {"lr": trial.suggest_float("lr", 0.1, 1.0)})
