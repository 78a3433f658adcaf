"""A frontier whose search chooses means, and policies beside static settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.frontiers import MODEL, TARGETED, training

from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import Record, TrialFinished, TrialStarted
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, Program
from elastune.core.sync_plan import SyncChoice
from elastune.runtime.clusters.local import LocalCluster
from elastune.train.machine import cores
from elastune.tuning.frontier.checked_request import check
from elastune.tuning.frontier.criteria import Times
from elastune.tuning.frontier.find_frontier import frontier
from elastune.tuning.frontier.trainings import StepKind, Variant, key, read_variant, shown
from elastune.tuning.study.request import FrontierRequest

TINY = Path(__file__).parents[2] / "programs" / "tiny.py"
SPACE = """
def space(trial):
    chosen = {"sync": trial.suggest_categorical("sync", ["allreduce", "local"])}
    if chosen["sync"] == "local":
        chosen |= {"learners": 4, "every": 2}
    return {
        "lr": 0.05,
        "workers": trial.suggest_categorical("workers", [1, 2, 3]),
        "batch_size": 60,
        **chosen,
    }


"""


@pytest.fixture
def searching(program: Callable[..., Program], tiny: Program) -> Callable[[str], Program]:
    """The tiny program with another space."""

    def write(space: str) -> Program:
        text = tiny.path.read_text()
        first, last = text.index("def space"), text.index("def data")
        return program(text[:first] + space + text[last:])

    return write


def asked(program: Program, out: Path, **changes: Any) -> FrontierRequest:
    """Spaces are small: they are all trained long before the budget's end."""
    return replace(FrontierRequest(program, out, workers=(1, 4), budget_s=200.0, seeds=2, sampler="grid"), **changes)


def records(out: Path) -> list[Record]:
    return [entry.record for entry in read(out / "journal.jsonl")]


def begun(out: Path) -> list[TrialStarted]:
    return [record for record in records(out) if isinstance(record, TrialStarted)]


def test_the_search_chooses_who_trains_and_how_they_agree(
    cluster: LocalCluster, tmp_path: Path, searching: Callable[[str], Program]
) -> None:
    answer = frontier(asked(searching(SPACE), tmp_path / "out"), cluster=cluster)
    trials = begun(tmp_path / "out")
    searched = [trial for trial in trials if trial.phase == "search"]
    assert {trial.execution.get("sync", "allreduce").partition(":")[0] for trial in searched} == {"allreduce", "local"}
    assert {trial.tags["layout"]["workers"] for trial in searched} == {1, 2, 3}
    assert {trial.execution["workers"] for trial in searched} == {1}, "one worker does it all, bit for bit"
    assert {trial.execution["num_slots"] for trial in searched if "sync" in trial.execution} == {4}, (
        "one for each learner"
    )
    again = [trial for trial in trials if trial.phase in ("naive", "confirm")]
    assert max(Counter(key(trial.config, trial.seed, trial.execution) for trial in again).values()) == 1
    naive = [row for row in answer.rows if row.role == "naive"]
    assert [(row.workers, row.differences) for row in naive] == [(1, ""), (4, "")]
    assert {row.workers for row in answer.rows} <= {1, 2, 3, 4}
    for row in answer.rows:
        _, variant = read_variant(row.execution)
        assert ("local:learners=4,every=2" in row.differences) is (variant.agreed != SyncChoice())
        if variant.agreed != SyncChoice():
            assert (row.seconds_label, row.seconds_factor, row.num_slots) == ("modelled", None, 4)


@pytest.mark.soak
def test_a_policy_stands_beside_static_settings(
    cluster: LocalCluster, tmp_path: Path, searching: Callable[[str], Program]
) -> None:
    policy = "warmup:steps=6"
    space = "def space(trial):\n    return {'lr': 0.02, 'batch_size': 20, 'policy': 'none'}\n\n\n"
    request = asked(searching(space), tmp_path / "out", workers=(1, 2), policies=(policy,))
    answer = frontier(request, cluster=cluster)
    told = Counter((row.role, row.workers, row.differences) for row in answer.rows)
    under = [("tuned", 1, f"policy {policy}"), ("tuned", 2, f"policy {policy}")]
    assert told >= Counter([("naive", 1, ""), ("naive", 2, ""), *under])
    naive = {(row.workers, row.settings) for row in answer.rows if row.role == "naive"}
    static = {(row.workers, row.settings) for row in answer.rows if row.role == "tuned" and not row.differences}
    assert not naive & static, "no copy of the naive rule is called tuned"
    given = [trial for trial in begun(tmp_path / "out") if trial.phase == "policy"]
    assert Counter(trial.execution["workers"] for trial in given) == {1: 2, 2: 2}, "its own workers train: it might ask"
    assert {trial.execution["policy"] for trial in given} == {policy}
    for row in answer.rows:
        if row.differences:
            assert row.quality_label == "measured"
            assert row.seconds_label == ("measured" if row.workers <= cores() else "modelled"), "warmup leaves batches"
            runs = [r.run for r in records(tmp_path / "out") if isinstance(r, TrialFinished) and r.trial in row.trials]
            assert {run.workers for run in runs if run is not None} == {row.workers}


@pytest.mark.soak
def test_the_command_of_a_policys_row_has_it(
    cluster: LocalCluster, tmp_path: Path, searching: Callable[[str], Program]
) -> None:
    """A twentieth of the steps of the naive row: the pick is what the search found under its policy."""
    space = 'def space(trial):\n    return {"lr": 0.1, "epochs": 1, "policy": "warmup:steps=2"}\n\n\n'
    naive = searching(space)
    naive.path.write_text(naive.path.read_text().replace('"epochs": 3', '"epochs": 20'))
    answer = frontier(asked(naive, tmp_path / "out", workers=(2,), target=99.0), cluster=cluster)
    assert answer.pick is not None
    assert answer.rows[answer.pick].differences == "policy warmup:steps=2"
    assert "--workers 2:2 --mode exact" in answer.command
    assert "--policy warmup:steps=2" in answer.command
    assert "2 workers (policy warmup:steps=2)" in answer.answer.sentence


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("'mesh': 'pipeline=2'", {}, "stages need more"),
    ("'workers': 8", {}, "up to as many workers as are asked about, 4"),
    ("'mesh': 'tensor=2'", {}, "blocks of divided layers show"),
    ("'mode': 'fast', 'mesh': 'shard=4'", {}, "workers show in the result"),
    ("'policy': 'warmup:steps=2'", {"trial_workers": (1, 2)}, "workers show in the result"),
    ("'policy': 'no_such'", {}, "a policy must be known"),
    ("'policy': 'sync_by_size:above=2'", {}, "those of one strategy"),
    ("'policy': 'spot:deadline_h=1,prices=prices.csv'", {}, "a deadline is for one run"),
    ("'workers': '2', 'mechanism': 'tensor'", {}, "workers must be a whole number"),
    ("'batch_size': 'all'", {}, "both must be positive numbers"),
    ("'lr': None", {}, "both must be positive numbers"),
    ("'compress': 'int8'", {}, "do not add up to the same bits"),
    ("'sync': 'local', 'learners': 2, 'every': 2, 'sync_schedule': '9=allreduce'", {}, "those of one strategy"),
    ("'topology': 'tree', 'mesh': 'shard=4'", {}, "a topology needs workers that hold whole replicas"),
]


@pytest.mark.parametrize("policies", [("none",), ("warmup:steps=2", "warmup:steps=2")])
def test_each_policy_is_compared_once(tmp_path: Path, tiny: Program, policies: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="each policy is compared with none, once"):
        check(asked(tiny, tmp_path / "out", policies=policies))


def test_a_space_chooses_no_divided_layers_that_cannot_be_timed(
    tmp_path: Path, searching: Callable[[str], Program]
) -> None:
    """Their saving is measured: the model knows nothing of it."""
    space = "def space(trial):\n    return {'mesh': 'tensor=2,data=2'}\n\n\n"
    meshes = (Mesh(tensor=2), Mesh(data=4))
    request = asked(searching(space), tmp_path / "out", workers=(), meshes=meshes)
    assert [layout.workers for layout, _ in check(request, timeable=4).named] == [4]
    with pytest.raises(UserError, match="measured here, not modelled"):
        check(request, timeable=2)


def test_what_was_trained_for_others_is_judged_on_the_widest(tmp_path: Path, tiny: Program) -> None:
    """A frontier may go on with fewer workers than it was begun with."""
    plan = check(asked(tiny, tmp_path / "out", workers=(1, 2)))
    assert plan.kind_of(replace(training(0.9, slots=1), variant=plan.variant)).mesh == Mesh()
    assert plan.kind_of(replace(training(0.9, slots=8), variant=plan.variant)).mesh == Mesh(data=2)


@pytest.mark.parametrize(("chosen", "changes", "said"), REFUSED)
def test_a_space_of_which_nothing_can_run_is_refused(
    tmp_path: Path, searching: Callable[[str], Program], chosen: str, changes: dict[str, Any], said: str
) -> None:
    space = f"def space(trial):\n    return {{'batch_size': 80, {chosen}}}\n\n\n"
    with pytest.raises(UserError, match=said):
        frontier(asked(searching(space), tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_what_shows_in_a_result_belongs_to_a_training(tmp_path: Path, tiny: Program) -> None:
    plan = check(asked(tiny, tmp_path / "out"))
    layout = plan.layouts[-1]
    local = Variant(agreed=SyncChoice.parse("local:learners=4,every=2", ""))
    ways = [Variant(), Variant(mode="fast"), Variant(micro_batch=5), Variant(policies=("warmup",)), local]
    names = {str(shown(variant.to_record(variant.trainer(layout)))) for variant in ways}
    assert len(names) == len(ways)
    divided = replace(layout, mesh=Mesh(shard=4), mechanism="zero")
    alone = Variant()
    assert shown(alone.to_record(alone.trainer(divided))) == shown(alone.to_record(alone.trainer(layout)))
    fast = Variant(mode="fast")
    assert shown(fast.to_record(fast.trainer(divided))) != shown(fast.to_record(fast.trainer(layout)))
    for variant in ways:
        assert read_variant(variant.to_record(variant.on(layout))) == (variant.on(layout), variant)


def test_times_of_other_means_are_the_models_times_what_was_measured() -> None:
    two, four = Mesh(data=2), Mesh(data=4)
    times = Times(MODEL, {(20, StepKind(two, "fast")): 0.02}, {}, {StepKind(two, "fast"): 0.5}, {"fast": 0.5})
    assert times.expected_s(20, StepKind(two, "fast")) == 0.02
    assert times.expected_s(40, StepKind(two, "fast")) == pytest.approx(0.5 * MODEL.step_s(40, 2))
    assert times.expected_s(40, StepKind(four, "fast")) == pytest.approx(0.5 * MODEL.step_s(40, 4))
    assert times.factor_of(StepKind(four, "fast")) is None
    rounds = times.expected_s(40, StepKind(four, "local:learners=4,every=8", 8))
    assert rounds == pytest.approx(MODEL.gradient_s(40, 4) + MODEL.reduction_s(4) / 8)
    alone = times.expected_s(40, StepKind(Mesh(), "local:learners=4,every=8", 8, 4))
    assert alone == pytest.approx(MODEL.gradient_s(40, 1) + 3 * MODEL.base_s), "four learners, one after the other"


def test_steps_under_a_policy_count_as_measured_while_it_leaves_the_batch_alone() -> None:
    one = StepKind(Mesh())
    static = training(0.9)  # 30 steps of 10 samples
    assert static.run is not None
    run = replace(static.run, epoch=3)
    kept = replace(static, variant=Variant(policies=("warmup",)), result=replace(static.result, run=run))
    assert TARGETED.seconds(kept, one) == (30 * 0.5, True)
    grown = replace(kept, result=replace(static.result, run=replace(run, steps=15)))
    seconds, measured = TARGETED.seconds(grown, one)
    correction = 0.5 / MODEL.step_s(10, 1)
    assert (seconds, measured) == (pytest.approx(15 * MODEL.step_s(20, 1) * correction), False)


def test_means_are_told_apart_from_those_that_were_asked_for(tmp_path: Path, tiny: Program) -> None:
    worker_layouts = check(asked(tiny, tmp_path / "out")).worker_layouts
    layout = worker_layouts.widest
    assert worker_layouts.differences(layout, Variant()) == ""
    variant = Variant("fast", "int8", 8, SyncChoice.parse("local:learners=4,every=2", ""), ("warmup",))
    expected = "fast, int8, micro-batch 8, local:learners=4,every=2, policy warmup"
    assert worker_layouts.differences(layout, variant) == expected
    divided = ExecutionSettings(mesh=Mesh(shard=4), mechanism="sharded")
    assert worker_layouts.kind_of(divided).apart == "sharded"
    assert worker_layouts.kind_of(replace(divided, mechanism="zero")).apart == "", "the least that the mesh needs"
    worker_layouts.speed_up(layout, replace(layout, threads=2))
    assert (worker_layouts.differences(layout, Variant()), worker_layouts.differences(layout, Variant("fast"))) == (
        "2 threads",
        "fast",
    )


def test_throughput_is_told_in_the_journal_and_the_answer(
    cluster: LocalCluster, tmp_path: Path, searching: Callable[[str], Program]
) -> None:
    space = "def space(trial):\n    return {'lr': 0.02, 'batch_size': 20}\n\n\n"
    answer = frontier(asked(searching(space), tmp_path / "out", workers=(1, 2), throughput=True), cluster=cluster)
    tuned = [record for record in records(tmp_path / "out") if record.kind == "throughput_tuned"]
    assert [each.tried[0].execution["workers"] for each in tuned] == [1, 2][: cores()]
    for each in tuned:
        chosen = each.tried[each.chosen]
        assert chosen.same, "no other bits are taken"
        rows = [row for row in answer.rows if row.workers == chosen.execution["workers"]]
        assert {row.execution["threads"] for row in rows} == {chosen.execution["threads"]}
    assert any(reason.text.startswith("throughput: of ") for reason in answer.reasons)
    trials = begun(tmp_path / "out")
    assert {trial.execution["threads"] for trial in trials if trial.phase == "naive"} == {1}


def test_what_cannot_be_timed_in_the_end_is_modelled(cluster: LocalCluster, tmp_path: Path, program: Any) -> None:
    """One worker trains for two, whose own steps are the first to fail."""
    text = TINY.read_text()
    first, last = text.index("def space"), text.index("def data")
    space = "def space(trial):\n    return {'batch_size': 60, 'epochs': 1}\n\n\n"
    begins = "    config = session.config\n"
    fails = "    if config['batch_size'] == 60 and session.rank == 1:\n        raise ArithmeticError('too wide')\n"
    mine = program((text[:first] + space + text[last:]).replace(begins, begins + fails, 1))
    answer = frontier(asked(mine, tmp_path / "out", workers=(1, 2), target=99.0), cluster=cluster)
    failed = [r for r in records(tmp_path / "out") if isinstance(r, TrialFinished) and "too wide" in r.reason]
    assert failed, "this machine has two cores"
    (row,) = [row for row in answer.rows if row.workers == 2 and row.batch_size == 60]
    assert row.seconds_label == "modelled"
    (told,) = [reason for reason in answer.reasons if "no step could be timed of data=2" in reason.text]
    assert "too wide" in told.text
