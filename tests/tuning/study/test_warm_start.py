"""Studies that begin with what earlier ones found: what is taken from their journals, and what is believed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from elastune.cli.progress import warm_line
from elastune.core.clock import SystemClock
from elastune.core.errors import UserError
from elastune.core.journal.files import JournalWriter, read
from elastune.core.journal.records import (
    DataContext,
    Record,
    RunContext,
    RunStarted,
    StudyStarted,
    TrialFinished,
    TrialStarted,
    WarmStarted,
)
from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.train.program.space import Space
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune
from elastune.tuning.study.validate import check
from elastune.tuning.study.warm_start import earlier_studies, take_over

TINY = Program(Path(__file__).parents[2] / "programs" / "tiny.py")
Edit = Callable[[Record], Record | None]


def request(out: Path, *earlier: Path, **changes: Any) -> StudyRequest:
    asked = StudyRequest(
        TINY, out, objectives={"loss": "min"}, sampler="random", trials=6, workers=2, warm_start=earlier
    )
    return replace(asked, **changes)


def wider(trial: Any) -> dict[str, Any]:
    """The program's space, and more."""
    return {"lr": trial.suggest_float("lr", 0.001, 0.9, log=True), "epochs": trial.suggest_int("epochs", 1, 6)}


@pytest.fixture(scope="module")
def old(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study of six trials."""
    out = tmp_path_factory.mktemp("old") / "out"
    tune(request(out), cluster=cluster)
    return out


def records(out: Path) -> list[Record]:
    return [entry.record for entry in read(out / "journal.jsonl")]


def taken_by(out: Path) -> list[WarmStarted]:
    return [record for record in records(out) if isinstance(record, WarmStarted)]


def edited(source: Path, out: Path, edit: Edit) -> Path:
    """A copy of a study's journal with other records."""
    with JournalWriter(out / "journal.jsonl") as journal:
        for record in records(source):
            if (changed := edit(record)) is not None:
                journal.write(changed)
    return out


def taken(asked: StudyRequest, cluster: LocalCluster, space: Space | None = None) -> list[WarmStarted]:
    """What ``asked`` would begin with, with room for many trials."""
    asked = replace(asked, trials=100)
    return list(take_over(check(asked, space), earlier_studies(asked, []), cluster, SystemClock(), lambda: 0))


def in_context(**changes: Any) -> Edit:
    def edit(record: Record) -> Record:
        if not isinstance(record, TrialFinished) or record.run is None or record.run.context is None:
            return record
        of_data = {name: changes[name] for name in changes if hasattr(DataContext(), name)}
        of_run = {name: changes[name] for name in changes if name not in of_data}
        context = replace(record.run.context, data=replace(record.run.context.data, **of_data), **of_run)
        return replace(record, run=replace(record.run, context=context))

    return edit


def with_settings(**changes: Any) -> Edit:
    def edit(record: Record) -> Record:
        return replace(record, settings=record.settings | changes) if isinstance(record, StudyStarted) else record

    return edit


def test_every_finished_trial_tells_of_its_context(old: Path) -> None:
    runs = [record.run for record in records(old) if isinstance(record, TrialFinished)]
    contexts = [run.context for run in runs if run is not None and run.context is not None]
    assert len(contexts) == 6
    for context in contexts:
        assert isinstance(context, RunContext)
        assert (context.data.samples, context.data.sample) == (200, "float32[4], float32[1]")
        assert (context.parameters, context.device, context.link) == (5, "cpu", "lo")
        assert context.processor
        assert context.cores >= 1
        assert set(context.software) == {"python", "torch", "elastune"}


def test_a_study_in_the_same_context_begins_with_the_results_and_the_best(
    cluster: LocalCluster, old: Path, tmp_path: Path
) -> None:
    lent = tmp_path / "lent"
    shutil.copytree(old, lent)
    heard: list[Record] = []
    out = tmp_path / "out"
    study = tune(request(out, lent, lent, trials=7), space=wider, cluster=cluster, observe=heard.append)
    (found,) = taken_by(out)
    assert (found.taken, found.of, found.similarity, found.left_out) == (6, 6, 1.0, {})
    before = {(r.params["lr"], r.params["epochs"]) for r in records(old) if isinstance(r, TrialStarted)}
    assert {(past.params["lr"], past.params["epochs"]) for past in found.results} == before
    trials = sorted(study.trials, key=lambda trial: trial.number)
    assert [t.number for t in trials] == list(range(7)), "those told are no trials of this study"
    assert [t.params for t in trials[:1]] == found.proposed, "a fifth of them"
    told = {past.params["lr"]: past.metrics["loss"] for past in found.results}
    assert trials[0].values["loss"] == pytest.approx(told[trials[0].params["lr"]])
    assert trials[0].values["loss"] == pytest.approx(min(told.values()))
    (line,) = [warm_line(record) for record in heard if isinstance(record, WarmStarted)]
    assert "6 of 6 trials taken; context 1 alike: 6 count as results, 1 are tried first" in line
    assert not (out / "warm").exists()

    shutil.rmtree(lent)  # it is not needed again
    more = tune(request(out, lent, trials=9, resume=True), space=wider, cluster=cluster)
    assert taken_by(out) == [found]
    assert len(more.trials) == 9
    assert sorted(t.number for t in more.trials) == list(range(9))


def test_an_interrupted_beginning_takes_nothing_yet(cluster: LocalCluster, old: Path, tmp_path: Path) -> None:
    asked = request(tmp_path / "out", old)
    found = take_over(check(asked), earlier_studies(asked, []), cluster, SystemClock(), lambda: 1)
    assert list(found) == []
    assert cluster.free == cluster.capacity


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("edit", "objectives", "similarity", "told"),
    [
        (in_context(), ("loss", "seconds"), 1.0, 6),
        (in_context(samples=20), ("loss",), 0.5, 0),
        (in_context(digest="another"), ("loss",), 0.5, 0),
        (in_context(digest=""), ("loss",), 0.5, 0),
        (in_context(sample="float32[3], float32[1]"), ("loss",), 0.5, 0),
        (in_context(link="eth0, 1000 Mbit/s"), ("loss", "seconds"), 0.5, 0),
        (in_context(cores=999), ("loss", "seconds"), 0.5, 0),
        (in_context(link="eth0, 1000 Mbit/s", cores=999), ("loss",), 1.0, 6),
        (in_context(parameters=500), ("loss",), 1 / 3, 0),
        (in_context(processor="another"), ("loss", "seconds"), 0.5, 0),
        (in_context(processor="another"), ("loss",), 1.0, 6),
        (with_settings(program_digest="another program"), ("loss",), 0.5, 0),
        (with_settings(epochs=2), ("loss",), 1.0, 0),
        (with_settings(trial_workers=[1, 2]), ("loss", "cost"), 1.0, 0),
        (with_settings(trial_workers=[1, 2]), ("loss",), 1.0, 6),
    ],
)
def test_results_are_believed_in_the_same_context_only(
    cluster: LocalCluster,
    old: Path,
    tmp_path: Path,
    edit: Edit,
    objectives: tuple[str, ...],
    similarity: float,
    told: int,
) -> None:
    lent = edited(old, tmp_path / "lent", edit)
    (found,) = taken(request(tmp_path / "out", lent, objectives=dict.fromkeys(objectives, "min")), cluster)
    assert found.similarity == pytest.approx(similarity)
    assert (found.taken, len(found.results), len(found.proposed)) == (6, told, round(5 * similarity + 0.01))


def test_trials_with_other_settings_are_only_proposed(cluster: LocalCluster, old: Path, tmp_path: Path) -> None:
    (found,) = taken(request(tmp_path / "out", old, config={"batch_size": 10}), cluster)
    assert (found.similarity, found.results, len(found.proposed)) == (1.0, [], 5)


def test_only_trials_that_fit_are_taken(cluster: LocalCluster, old: Path, tmp_path: Path) -> None:
    def narrow(trial: Any) -> dict[str, Any]:
        return {"lr": trial.suggest_float("lr", 0.01, 0.3, log=True), "epochs": trial.suggest_int("epochs", 3, 4)}

    def other(trial: Any) -> dict[str, Any]:
        return {**narrow(trial), "batch_size": trial.suggest_int("batch_size", 10, 20)}

    inside = sum(isinstance(r, TrialStarted) and r.params["epochs"] >= 3 for r in records(old))
    assert 0 < inside < 6
    (found,) = taken(request(tmp_path / "out", old), cluster, narrow)
    assert (found.taken, len(found.results)) == (inside, inside)
    assert found.left_out == {"epochs is out of range": 6 - inside}
    (found,) = taken(request(tmp_path / "out", old), cluster, other)
    assert (found.taken, found.results, found.proposed, found.similarity) == (0, [], [], 0.0)
    assert sum(found.left_out.values()) == 6
    (found,) = taken(request(tmp_path / "out", old, constraints=("latency <= 3",)), cluster)
    assert (found.taken, found.left_out) == (0, {"latency is missing": 6})


def test_failed_trials_and_children_are_left_out(cluster: LocalCluster, old: Path, tmp_path: Path) -> None:
    def edit(record: Record) -> Record:
        if isinstance(record, TrialFinished) and record.trial == 1:
            return TrialFinished(1, "infeasible", reason="diverged: loss is nan")
        return replace(record, parent=0) if isinstance(record, TrialStarted) and record.trial == 2 else record

    (found,) = taken(request(tmp_path / "out", edited(old, tmp_path / "lent", edit)), cluster)
    assert (found.taken, found.of) == (4, 6)
    assert found.left_out == {"it failed": 1, "it began with another's weights": 1}


def test_costs_are_told_in_the_prices_of_today(cluster: LocalCluster, old: Path, tmp_path: Path) -> None:
    asked = request(tmp_path / "out", old, objectives={"loss": "min", "cost": "min"}, price_per_worker_hour=3.0)
    (found,) = taken(asked, cluster)
    costs = sorted(r.metrics["cost"] for r in records(old) if isinstance(r, TrialFinished))
    assert sorted(past.metrics["cost"] for past in found.results) == pytest.approx([3 * cost for cost in costs])


DATA_IN_A_FILE = """
from pathlib import Path
import torch
from torch.utils.data import TensorDataset

config = {"lr": 0.05, "epochs": 1}
objectives = {"loss": "min"}

def space(trial):
    return {"lr": trial.suggest_float("lr", 0.01, 0.3, log=True)}

def train(session):
    scale = float(Path(__file__).with_name("scale.txt").read_text())
    x = torch.linspace(-1, 1, 64).reshape(64, 1)
    model = torch.nn.Linear(1, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=session.config["lr"]))
    for _ in session.epochs(session.config["epochs"]):
        for a, b in session.batches(TensorDataset(x, scale * x), batch_size=16):
            loss = torch.nn.functional.mse_loss(model(a), b)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        session.report(loss=loss.detach())
"""


def test_losses_of_other_data_of_equal_size_are_not_believed(cluster: LocalCluster, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(DATA_IN_A_FILE)
    (tmp_path / "scale.txt").write_text("100")
    asked = request(tmp_path / "old", program=Program(program), objectives={}, trials=3)
    tune(asked, cluster=cluster)
    again = replace(asked, out=tmp_path / "new", warm_start=(tmp_path / "old",))
    (found,) = taken(again, cluster)
    assert (found.similarity, len(found.results), found.differs) == (1.0, 3, []), "the same data"
    (tmp_path / "scale.txt").write_text("1")
    (found,) = taken(again, cluster)
    assert (found.similarity, found.results, found.differs) == (0.5, [], ["other data"])
    assert len(found.proposed) == 3, "its settings are still a good beginning"
    assert "context 0.5 alike (other data): 0 count as results, 3 are tried first" in warm_line(found)


def test_the_most_similar_study_comes_first(cluster: LocalCluster, old: Path, tmp_path: Path) -> None:
    far = edited(old, tmp_path / "far", in_context(samples=20_000))
    near = edited(old, tmp_path / "near", in_context(samples=100))
    found = taken(request(tmp_path / "out", far, near, old), cluster)
    assert [record.source for record in found] == [str(old.resolve()), str(near), str(far)]


def test_proposals_are_a_share_of_what_the_time_is_enough_for(cluster: LocalCluster, old: Path, tmp_path: Path) -> None:
    """Of ten trials that take as long as the earlier ones in the median: two."""
    took = [r.worker_seconds for r in records(old) if isinstance(r, TrialFinished) and r.worker_seconds]
    asked = request(tmp_path / "out", old, trials=None, worker_hours=10.01 * median(took) / 3600)
    (found,) = take_over(check(asked), earlier_studies(asked, []), cluster, SystemClock(), lambda: 0)
    assert (found.similarity, len(found.proposed)) == (1.0, 2)


def test_an_unfinished_study_gives_what_it_has(cluster: LocalCluster, old: Path, tmp_path: Path) -> None:
    lent = tmp_path / "lent"
    lent.mkdir()
    lines = (old / "journal.jsonl").read_bytes().splitlines(keepends=True)
    ends = [i for i, line in enumerate(lines) if b'"kind":"trial_finished"' in line]
    (lent / "journal.jsonl").write_bytes(b"".join(lines[: ends[3]]) + lines[ends[3]][:20])
    (found,) = taken(request(tmp_path / "out", lent), cluster)
    assert (found.taken, found.of) == (3, 3)


def test_a_frontier_gives_settings_but_no_results(cluster: LocalCluster, old: Path, tmp_path: Path) -> None:
    def edit(record: Record) -> Record | None:
        if isinstance(record, StudyStarted):
            return StudyStarted({"kind": "frontier", "objectives": {"loss": "min"}, "workers": [1, 2]})
        calibrates = isinstance(record, TrialStarted) and record.trial == 0
        return replace(record, phase="calibrate", params={}, distributions={}) if calibrates else record

    (found,) = taken(request(tmp_path / "out", edited(old, tmp_path / "lent", edit)), cluster)
    assert (found.taken, found.left_out, found.results) == (5, {"lr is missing": 1}, [])
    assert found.similarity == 0.5
    assert len(found.proposed) == 3


def test_what_is_no_study_is_refused_before_anything_is_written(old: Path, tmp_path: Path) -> None:
    for name, text in (("rubbish", b"so it goes\n" * 2), ("empty", b"")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "journal.jsonl").write_bytes(text)
    with JournalWriter(tmp_path / "run" / "journal.jsonl") as journal:
        journal.write(RunStarted("mine.py", {}, 0, {}))
    out = tmp_path / "out"
    refused = {
        "rubbish": "every line of a journal must be a record",
        "empty": "needs the folder of a study",
        "run": "needs the folder of a study",
        "nowhere": "a journal must exist",
        "out": "cannot begin with itself",
    }
    for name, rule in refused.items():
        with pytest.raises(UserError, match=rule):
            tune(request(out, old, tmp_path / name))
    assert not (out / "journal.jsonl").exists()
