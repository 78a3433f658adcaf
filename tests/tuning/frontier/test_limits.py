"""What a frontier refuses, cuts and leaves out, since it cannot be: targets, batches, epochs, a search without time."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import PhasesPlanned, SideVolume, StudyFinished, TrialStarted
from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.frontier import budget as phase_budget
from elastune.tuning.frontier.checked_request import check, check_target
from elastune.tuning.frontier.conclusion import against
from elastune.tuning.frontier.find_frontier import frontier
from elastune.tuning.search.objective import parse_objectives
from elastune.tuning.study.request import FrontierRequest


def asked(program: Program, out: Path, **changes: Any) -> FrontierRequest:
    return replace(
        FrontierRequest(program, out, workers=(1, 2, 16), budget_s=120.0, seeds=2, sampler="random"), **changes
    )


@pytest.mark.parametrize(
    ("name", "target", "said"),
    [
        ("accuracy:max", 95.0, "between 0 and 1 .*use --target 0.95"),
        ("test_f1:max", 1.01, "between 0 and 1"),
        ("auc:max", -0.1, "between 0 and 1"),
        ("error_rate:min", 5.0, "between 0 and 1 .*use --target 0.05"),
        ("loss:min", -1.0, "at least 0"),
        ("score:max", float("nan"), "finite"),
    ],
)
def test_a_target_out_of_bounds_is_refused(name: str, target: float, said: str) -> None:
    (quality,) = parse_objectives([name])
    with pytest.raises(UserError, match=f"a target must be a value that .* can have, {said}"):
        check_target(target, quality)


def test_a_target_in_percent_of_an_unknown_metric_is_refused_by_its_first_value() -> None:
    (score,) = parse_objectives(["score:max"])
    check_target(95.0, score)
    with pytest.raises(UserError, match=r"95, where the first value is 0\.7\): use --target 0.95, or declare bounds"):
        check_target(95.0, score, 0.7)
    for seen, target in ((12.0, 95.0), (0.7, 1.0), (0.7, 1e4), (-0.2, 95.0)):
        check_target(target, score, seen)
    (declared,) = parse_objectives({"score": "max 0..100"})
    check_target(95.0, declared, 0.7)


def test_a_target_that_cannot_be_is_refused_before_anything_is_made(
    tmp_path: Path, program: Any, tiny: Program
) -> None:
    mine = program(tiny.path.read_text().replace('{"loss": "min"}', '{"accuracy": "max"}'))
    with pytest.raises(UserError, match="accuracy can have"):
        frontier(asked(mine, tmp_path / "out", target=95.0))
    assert not (tmp_path / "out").exists()


def test_batches_end_at_the_training_set_and_rates_follow_the_real_batch(tmp_path: Path, tiny: Program) -> None:
    plan = replace(check(asked(tiny, tmp_path / "out")), samples=200)
    assert [(plan.naive(n)["batch_size"], plan.naive(n)["lr"]) for n in (1, 2, 16)] == [
        (20, pytest.approx(0.05)),
        (40, pytest.approx(0.1)),
        (200, pytest.approx(0.5)),
    ]
    assert plan.cut == (
        "batch 320 of 16 workers is cut to the 200 samples of the training set, and its learning rate to 0.5",
    )
    config, _ = plan.resolve({"batch_size": 640, "lr": 0.01, "lr_rule": "sqrt"})
    assert (config["batch_size"], config["lr"]) == (200, pytest.approx(0.01 * 10**0.5))
    assert replace(plan, samples=None).naive(16)["batch_size"] == 320
    own = replace(check(asked(tiny, tmp_path / "out", config={"batch_size": 500})), samples=200)
    assert own.naive(1)["lr"] == own.naive(16)["lr"] == pytest.approx(0.05), "one step has as many samples in all"


def test_configurations_name_the_epochs_that_are_trained(tmp_path: Path, tiny: Program) -> None:
    plan = check(asked(tiny, tmp_path / "out", epochs=1))
    assert plan.naive(2)["epochs"] == 1
    config, _ = plan.resolve({"lr": 0.02, "epochs": 4, "batch_size": 20, "lr_rule": "none"})
    assert config["epochs"] == 1
    assert check(asked(tiny, tmp_path / "out")).naive(2)["epochs"] == 3


def side(volume: float, half: float | None, **changes: Any) -> SideVolume:
    ci = None if half is None else (volume - half, volume + half)
    return replace(SideVolume("search", volume, ci, 3, 4, 12, 12, 60.0, True), **changes)


@pytest.mark.parametrize(
    ("searched", "says"),
    [
        (side(0.9, 0.05), "shown to be better"),
        (side(0.7, 0.05), "not shown to be better"),
        (side(0.2, 0.05), "shown to be worse"),
        (side(0.9, 0.05, equal=False, spent_s=30.0), "no claim: it had 30 s of 1.0 min"),
        (side(0.9, None, seeds=1), "no claim: 1 seed, where the rule has 3"),
        (side(0.9, 0.05, seeds=2), "no claim: 2 seeds, where the rule has 3"),
    ],
)
def test_a_claim_needs_equal_budget_and_intervals_that_do_not_overlap(searched: SideVolume, says: str) -> None:
    assert against(searched, side(0.65, 0.05)) == says


def test_without_time_for_a_search_it_is_refused_or_left_out(
    cluster: LocalCluster, tmp_path: Path, tiny: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phase_budget, "SEARCH_SHARE", 0.999)  # of two minutes: nothing else has time
    out = tmp_path / "out"
    with pytest.raises(UserError, match="of a budget are for the search.*use --budget .* or --short"):
        frontier(asked(tiny, out), cluster=cluster)
    assert {r.phase for e in read(out / "journal.jsonl") if isinstance(r := e.record, TrialStarted)} == {"calibrate"}
    shutil.rmtree(out)
    answer = frontier(asked(tiny, out, workers=(1, 2), short=True), cluster=cluster)
    assert {row.role for row in answer.rows} == {"naive"}
    assert [each.side for each in answer.volumes.sides] == ["naive rule"]
    records = [entry.record for entry in read(out / "journal.jsonl")]
    assert {r.phase for r in records if isinstance(r, TrialStarted)} <= {"calibrate", "naive", "throughput"}
    (end,) = [r for r in records if isinstance(r, StudyFinished)]
    assert end.reason == "no time for a search in a budget of 120 s"
    planned, over = [r for r in records if isinstance(r, PhasesPlanned)]
    assert planned.left_out[0].startswith("the search: a budget of 2.0 min has no time for it")
    assert set(over.took) == set(planned.planned)
    assert any(each.startswith("the search: ") for each in answer.answer.not_done)


def test_what_would_not_end_in_time_is_not_begun(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    """Its first steps tell that one training takes hours."""
    slow = asked(tiny, tmp_path / "out", config={"epochs": 1_000_000}, short=True)
    with pytest.raises(UserError, match="a budget must have time for one training with the program's own settings"):
        frontier(slow, cluster=cluster)
    phases = {r.phase for e in read(tmp_path / "out" / "journal.jsonl") if isinstance(r := e.record, TrialStarted)}
    assert phases == {"calibrate"}
