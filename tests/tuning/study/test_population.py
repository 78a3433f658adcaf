"""A study trained as a population: children begin with their parents' checkpoints, and a controller may die."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.core.journal.files import read
from elastune.core.journal.records import Record, TrialFinished, TrialPaused, TrialReported, TrialResumed, TrialStarted
from elastune.core.run import ExecutionSettings, Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

EPOCHS = 3


def space(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 0.001, 0.3, log=True)}


def request(program: Program, out: Path, **changes: Any) -> StudyRequest:
    asked = StudyRequest(
        program,
        out,
        objectives={"loss": "min"},
        sampler="random",
        stopping="pbt:population=4,every=1,quantile=0.5",
        trials=6,
        workers=2,
        execution=ExecutionSettings(mode="exact", num_slots=4),
        epochs=EPOCHS,
        seed=3,
    )
    return replace(asked, **changes)


def records(out: Path) -> list[Record]:
    return [entry.record for entry in read(out / "journal.jsonl")]


def losses(found: list[Record]) -> dict[tuple[int, int], float]:
    return {(r.trial, r.report.epoch): r.report.metrics["loss"] for r in found if isinstance(r, TrialReported)}


def test_children_go_on_from_their_parents(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    study = tune(request(tiny, tmp_path / "out"), space=space, cluster=cluster)
    found = records(tmp_path / "out")
    started = {r.trial: r for r in found if isinstance(r, TrialStarted)}
    children = {number: r.parent for number, r in started.items() if r.parent is not None}
    paused = {r.trial for r in found if isinstance(r, TrialPaused)}
    ended = {r.trial: r for r in found if isinstance(r, TrialFinished)}
    assert len(started) == 6
    assert children
    assert len([number for number in started if number not in children]) >= 4
    shown = losses(found)
    for child, parent in children.items():
        first = min(epoch for trial, epoch in shown if trial == child)
        assert first > 1, "its parent's passes count"
        assert shown[child, first] < max(loss for (_, epoch), loss in shown.items() if epoch == 1)
        factor = started[child].config["lr"] / started[parent].config["lr"]
        assert 0.001 <= started[child].config["lr"] <= 0.3
        assert factor != 1.0
    resumed = {r.trial for r in found if isinstance(r, TrialResumed)}
    assert paused - set(ended) - resumed, "those whose places were taken never went on"
    assert {r.state for r in ended.values()} == {"complete"}
    assert {r.run.steps for r in ended.values() if r.run is not None} == {10 * EPOCHS}
    assert study.front()[0].values["loss"] == min(r.values["loss"] for r in ended.values())


def test_a_study_that_was_cut_off_goes_on_with_its_population(
    cluster: LocalCluster, tmp_path: Path, tiny: Program
) -> None:
    """The journal ends in the middle of some line, as with a controller that was killed."""
    out = tmp_path / "out"

    class Cut(Exception):
        pass

    heard: list[Record] = []

    def observe(record: Record) -> None:
        heard.append(record)
        if sum(isinstance(r, TrialStarted) and r.parent is not None for r in heard) == 1:
            raise Cut

    with pytest.raises(Cut):
        tune(request(tiny, out), space=space, cluster=cluster, observe=observe)
    tune(request(tiny, out, resume=True), space=space, cluster=cluster)
    found = records(out)
    started = [r for r in found if isinstance(r, TrialStarted)]
    ended = {r.trial: r for r in found if isinstance(r, TrialFinished)}
    assert len({r.trial for r in started}) == 6
    assert {r.state for r in ended.values()} == {"complete"}
    assert {r.run.steps for r in ended.values() if r.run is not None} == {10 * EPOCHS}
    assert len(ended) >= 4
