"""The main job, whole, on a program whose trainings take milliseconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import (
    FrontierFound,
    FrontierRow,
    Record,
    StudyFinished,
    TimesFitted,
    TrialFinished,
    TrialStarted,
)
from elastune.core.mesh import Mesh
from elastune.core.plan.data_parallel import DataParallelStep
from elastune.core.run import ExecutionSettings, Program
from elastune.report.overviews import gather_study
from elastune.runtime.clusters.local import LocalCluster
from elastune.train.machine import cores
from elastune.tuning.frontier.find_frontier import FRESH_SEEDS, frontier
from elastune.tuning.study.request import FrontierRequest

COUNTS = (1, 2, 4)
TINY = Path(__file__).parents[2] / "programs" / "tiny.py"
ONE = "{'lr': trial.suggest_categorical('lr', [0.02]), 'batch_size': 20}"
FEW = "{'lr': trial.suggest_categorical('lr', [0.02, 0.1]), 'batch_size': 20}"


def searching(folder: Path, space: str) -> Program:
    """The tiny program with a space of a few settings: these are all trained long before the budget's end."""
    text = TINY.read_text()
    first, last = text.index("def space"), text.index("def data")
    path = folder / "few.py"
    path.write_text(text[:first] + f"def space(trial):\n    return {space}\n\n\n" + text[last:])
    return Program(path)


@pytest.fixture
def one(tmp_path: Path) -> Program:
    """The tiny program with one setting to search."""
    return searching(tmp_path, ONE)


def request(tiny: Program, out: Path, **changes: Any) -> FrontierRequest:
    return replace(FrontierRequest(tiny, out, workers=COUNTS, budget_s=120.0, seeds=2, sampler="random"), **changes)


def records(out: Path) -> list[Record]:
    return [entry.record for entry in read(out / "journal.jsonl")]


def identity(started: TrialStarted) -> str:
    """All that decides a training's result."""
    return str((started.config, started.execution["num_slots"], started.seed))


def of_kind(records: list[Record], kind: type) -> list[Any]:
    return [record for record in records if isinstance(record, kind)]


@pytest.fixture(scope="module")
def found(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[FrontierFound, Path]:
    folder = tmp_path_factory.mktemp("frontier")
    out = folder / "out"
    return frontier(request(searching(folder, FEW), out, target=1.5), cluster=cluster), out


def test_every_count_has_a_row_of_each_role(found: tuple[FrontierFound, Path]) -> None:
    answer, out = found
    assert [r.workers for r in answer.rows if r.role == "naive"] == list(COUNTS)
    tuned = [r for r in answer.rows if r.role == "tuned"]
    assert {r.workers for r in tuned} <= set(COUNTS)
    naive = {(r.workers, r.settings) for r in answer.rows if r.role == "naive"}
    assert not any((r.workers, r.settings) in naive for r in tuned), "what the rule gives is not called tuned"
    assert of_kind(records(out), FrontierFound) == [answer]
    for r in answer.rows:
        if r.role == "naive":
            assert (r.batch_size, r.lr, r.seeds) == (20 * r.workers, pytest.approx(0.05 * r.workers), 2)
        if r.seconds_label == "measured":
            assert r.workers <= cores()
        if r.role == "naive" and r.workers <= cores():
            assert r.seconds_label == "measured"
    (end,) = of_kind(records(out), StudyFinished)
    assert end.reason == "the space is exhausted"
    assert end.seconds < 120


def steps_measured(kept: list[Record]) -> dict[tuple[int, int], float]:
    begun = {record.trial: record for record in of_kind(kept, TrialStarted)}
    return {
        (begun[r.trial].config["batch_size"], begun[r.trial].execution["workers"]): r.run.step_s
        for r in of_kind(kept, TrialFinished)
        if begun[r.trial].phase == "calibrate"
    }


def test_numbers_are_those_of_the_journal(found: tuple[FrontierFound, Path]) -> None:
    answer, out = found
    kept = records(out)
    results = {record.trial: record for record in of_kind(kept, TrialFinished)}
    begun = {record.trial: record for record in of_kind(kept, TrialStarted)}
    model = DataParallelStep.from_record(of_kind(kept, TimesFitted)[-1])
    measured = steps_measured(kept)
    for r in answer.rows:
        runs = [results[trial] for trial in r.trials]
        assert {begun[trial].config["lr"] for trial in r.trials} == {r.lr}
        assert {begun[trial].config["batch_size"] for trial in r.trials} == {r.batch_size}
        assert r.validation == pytest.approx(fmean(x.metrics["loss"] for x in runs))
        assert (r.held_out, r.quality) == (True, 1.0)
        mean_batch = min(r.batch_size, -(-runs[0].run.samples // runs[0].run.steps))  # the last of an epoch is smaller
        step_s = measured.get((r.batch_size, r.workers), model.step_s(mean_batch, r.workers))
        assert r.seconds_label == ("measured" if (r.batch_size, r.workers) in measured else "modelled")
        assert r.seconds == pytest.approx(fmean(x.run.steps for x in runs) * step_s)
        assert r.cost == pytest.approx(r.workers * r.seconds / 3600)


def test_tuned_rows_are_confirmed_on_seeds_no_search_saw(found: tuple[FrontierFound, Path]) -> None:
    answer, out = found
    begun = {record.trial: record for record in of_kind(records(out), TrialStarted)}
    for r in answer.rows:
        seeds = sorted(begun[trial].seed for trial in r.trials)
        assert seeds == [0, 1] if r.role == "naive" else seeds in ([0, 1], [FRESH_SEEDS, FRESH_SEEDS + 1])
        assert {begun[trial].execution["num_slots"] for trial in r.trials} == {r.workers} == {r.num_slots}
        assert r.quality_label == ("measured" if r.workers == 1 else "emulated")
    trained = Counter(identity(t) for t in begun.values() if t.phase in ("naive", "confirm"))
    assert max(trained.values()) == 1


def test_monitoring_does_not_show_in_what_is_told(found: tuple[FrontierFound, Path]) -> None:
    """A batch of one slot has nothing to compare without being trained in two."""
    for r in found[0].rows:
        assert (r.noise_scale is None) is (r.workers == 1)


def test_tables_tell_for_how_many_workers_a_training_speaks(found: tuple[FrontierFound, Path]) -> None:
    story = gather_study(read(found[1] / "journal.jsonl"))
    assert story is not None
    told = {trial.workers for trial in story.trials if trial.phase == "naive"}
    assert told == {"1", "1 for 2", "1 for 4"}


def test_the_front_and_the_pick(found: tuple[FrontierFound, Path]) -> None:
    answer, _ = found

    def point(r: FrontierRow) -> tuple[float, float, float]:
        return (r.validation, r.seconds, r.cost)

    for r in answer.rows:
        beaten = any(
            point(o) != point(r) and all(a <= b for a, b in zip(point(o), point(r), strict=True))
            for o in answer.rows
            if o.verdict != "falls"
        )
        assert r.on_front is (not beaten and r.verdict != "falls")
    naive, tuned, searched = answer.volumes.sides
    assert [each.side for each in answer.volumes.sides] == ["naive rule", "naive rule, tuned", "search"]
    assert (naive.trainings, naive.seeds, naive.points, naive.spent_s) == (6, 2, 3, answer.volumes.budget_s)
    assert all(0 <= each.volume <= 1 and each.spent_s <= answer.volumes.budget_s for each in answer.volumes.sides)
    assert searched.of >= tuned.of
    assert (searched.ci is None) is (searched.seeds < 2), "as far as there was time for fresh seeds"
    reaching = [r for r in answer.rows if r.verdict == "holds"]
    assert all(r.ci is not None and r.ci[1] <= 1.5 for r in reaching)
    assert answer.pick is not None
    chosen = answer.rows[answer.pick]
    best = min(reaching, key=lambda r: r.seconds * r.cost)
    factor = max(f for r in (chosen, best) if (f := r.seconds_factor) is not None)
    assert chosen == best or (chosen.workers < best.workers and chosen.seconds <= factor * best.seconds)
    told = answer.answer
    assert (told.workers is None) is (chosen.workers == 1)
    assert told.this_machine is not None
    assert told.this_machine.cores == cores()
    assert f"--workers {chosen.workers}" in answer.command
    assert f"lr={chosen.lr}" in answer.command


def test_an_interrupted_frontier_does_not_train_anything_twice(
    cluster: LocalCluster, tmp_path: Path, one: Program
) -> None:
    class Pulled(Exception):
        pass

    out, finished = tmp_path / "out", 0

    def observe(record: Record) -> None:
        nonlocal finished
        finished += isinstance(record, TrialFinished)
        if finished == 11:
            raise Pulled

    with pytest.raises(Pulled):
        frontier(request(one, out), cluster=cluster, observe=observe)
    before = records(out)
    frontier(request(one, out, resume=True), cluster=cluster)
    after = records(out)
    assert after[: len(before)] == before
    begun = {record.trial: record for record in of_kind(after, TrialStarted)}
    ended = [record.trial for record in of_kind(after, TrialFinished)]
    assert len(ended) == len(set(ended))
    trained = Counter(identity(begun[t]) for t in ended if begun[t].phase in ("naive", "confirm"))
    assert max(trained.values()) == 1
    assert len([t for t in ended if begun[t].phase == "naive"]) == 6


@pytest.mark.soak
def test_naive_rows_that_diverge_are_told_as_such(cluster: LocalCluster, tmp_path: Path, one: Program) -> None:
    """At four times lr 0.4 the regression diverges; its base, and what the search finds, do not."""
    asked = request(one, tmp_path / "out", config={"lr": 0.4, "batch_size": 10, "epochs": 12})
    answer = frontier(asked, cluster=cluster)
    naive = [r.workers for r in answer.rows if r.role == "naive"]
    assert 1 in naive
    assert 4 not in naive
    assert "diverges" in answer.answer.naive_rule
    kept = records(tmp_path / "out")
    begun = {record.trial: record for record in of_kind(kept, TrialStarted)}
    lost = [r for r in of_kind(kept, TrialFinished) if begun[r.trial].config["lr"] == pytest.approx(1.6)]
    assert [r.reason.partition(":")[0] for r in lost] == ["diverged"] * 2


def test_a_small_space_ends_the_search(cluster: LocalCluster, tmp_path: Path, one: Program) -> None:
    """Once all of it was trained there is no reason to wait for the budget's end."""
    asked = request(one, tmp_path / "out", workers=(1, 2))
    *_, searched = frontier(asked, cluster=cluster).volumes.sides
    (end,) = of_kind(records(tmp_path / "out"), StudyFinished)
    assert end.seconds < 30
    assert (searched.side, searched.seeds) == ("search", 2), "its own seed is none of these"
    assert searched.ci is not None
    assert searched.scoring_s > 0


@pytest.mark.soak
def test_in_fast_mode_as_many_workers_train_as_are_told_of(tmp_path: Path, one: Program) -> None:
    asked = request(one, tmp_path / "out", workers=(1, 3), execution=ExecutionSettings(mode="fast"))
    answer = frontier(asked)
    assert {r.quality_label for r in answer.rows} == {"measured"}
    kept = records(tmp_path / "out")
    slots = {r.trial: r.execution["num_slots"] for r in of_kind(kept, TrialStarted) if r.phase != "calibrate"}
    trained = {r.trial: r.run.workers for r in of_kind(kept, TrialFinished) if r.trial in slots}
    assert trained == {trial: slots[trial] for trial in trained}
    assert set(trained.values()) == {1, 3}
    with LocalCluster(capacity=1) as small, pytest.raises(UserError, match="room for 1"):
        frontier(request(one, tmp_path / "other", execution=ExecutionSettings(mode="fast")), cluster=small)


@pytest.mark.soak
def test_meshes_of_as_many_parts_share_quality_and_differ_in_time(
    cluster: LocalCluster, tmp_path: Path, one: Program
) -> None:
    asked = request(one, tmp_path / "out", workers=(1,), meshes=(Mesh(data=2), Mesh(shard=2)))
    answer = frontier(asked, cluster=cluster)
    naive = {r.mesh: r for r in answer.rows if r.role == "naive"}
    told = {mesh: r.mechanism for mesh, r in naive.items()}
    assert told == {"data=1": "replicated", "data=2": "replicated", "shard=2": "zero"}
    data, shard = naive["data=2"], naive["shard=2"]
    assert (data.quality, data.trials, data.workers) == (shard.quality, shard.trials, shard.workers)
    if cores() > 1:
        assert {data.seconds_label, shard.seconds_label} == {"measured"}
        assert data.seconds != shard.seconds, "each was timed"
    kept = records(tmp_path / "out")
    timed = {str(r.execution.get("mesh")) for r in of_kind(kept, TrialStarted) if r.phase == "calibrate"}
    assert "shard=2" in timed or cores() == 1
    trained = [r for r in of_kind(kept, TrialStarted) if r.phase == "naive"]
    assert len(trained) == 4, "two seeds for one part and two for two"
    assert {str(r.execution["mechanism"]) for r in trained} == {"replicated"}, "one worker has it all"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"workers": ()}, "worker counts must ascend"),
    ({"workers": (2, 1)}, "worker counts must ascend"),
    ({"workers": (0, 1)}, "worker counts must ascend"),
    ({"budget_s": 0.0}, "a budget must be positive"),
    ({"price_per_worker_hour": 0.0}, "a price of a worker-hour must be above 0"),
    ({"divergence": 0.5}, "a factor above 1"),
    ({"seeds": 1}, "at least 2 seeds"),
    ({"quality": "accuracy"}, "one of the program's objectives"),
    ({"config": {"lr": -1.0}}, "must be positive numbers"),
    ({"config": {"batch_size": "many"}}, "batch_size must be a number"),
    ({"stopping": "pbt:every=2"}, "their own settings decide"),
    ({"stopping": "sometimes"}, "one that is known"),
    ({"trial_workers": (3, 2)}, "between a low and a high"),
    ({"trial_workers": (1, 5)}, "within the counts asked about, up to 4"),
    ({"trial_workers": (1, 2), "execution": ExecutionSettings(mode="fast")}, "do not show in the result"),
    ({"meshes": (Mesh(data=2),)}, "each mesh once"),
    ({"meshes": (Mesh(pipeline=2),)}, "stages need more"),
    ({"meshes": (Mesh(tensor=cores() + 1),)}, "measured here, not modelled"),
    (
        {"meshes": (Mesh(shard=2),), "execution": ExecutionSettings(mechanism="tensor")},
        "a mechanism that divides a replica along it",
    ),
    ({"meshes": (Mesh(shard=2),), "execution": ExecutionSettings(mode="fast")}, "only one may cut a batch"),
    ({"execution": ExecutionSettings(mechanism="tensor+zero")}, "needs a mesh"),
    ({"constraints": ("lr > 9",)}, "must be satisfiable|must satisfy"),
]


@pytest.mark.parametrize(("wrong", "said"), REFUSED)
def test_what_is_wrong_is_said_before_anything_is_made(
    tmp_path: Path, tiny: Program, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        frontier(request(tiny, tmp_path / "out", **wrong))
    assert not (tmp_path / "out").exists()
