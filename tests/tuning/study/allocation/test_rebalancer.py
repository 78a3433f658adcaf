"""A study that shares its workers out: trials are resized while they run, and end with the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import (
    Record,
    TrialFinished,
    TrialPaused,
    TrialReallocated,
    TrialRegrouped,
    TrialResumed,
    TrialStarted,
)
from elastune.core.run import ExecutionSettings, Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.study import trial_progress as hold
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune


def space(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_categorical("lr", [0.01, 0.02, 0.05]), "epochs": 10}


def request(program: Program, out: Path, **changes: Any) -> StudyRequest:
    asked = StudyRequest(
        program,
        out,
        objectives={"loss": "min"},
        sampler="grid",
        trials=3,
        workers=4,
        execution=ExecutionSettings(mode="exact", num_slots=4),
        config={"pause_s": 0.05},  # they grow before they end
    )
    return replace(asked, **changes)


def records(out: Path) -> list[Record]:
    return [entry.record for entry in read(out / "journal.jsonl")]


def hashes(out: Path) -> dict[float, str]:
    started = {r.trial: r.config["lr"] for r in records(out) if isinstance(r, TrialStarted)}
    ended = [r for r in records(out) if isinstance(r, TrialFinished)]
    return {started[r.trial]: r.run.sha256 for r in ended if r.run is not None}


def test_freed_workers_flow_to_running_trials(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    shared, fixed = tmp_path / "shared", tmp_path / "fixed"
    tune(request(tiny, shared, trial_workers=(1, 4)), space=space, cluster=cluster)
    tune(request(tiny, fixed, config={}), space=space, cluster=cluster)
    moved = [r for r in records(shared) if isinstance(r, TrialReallocated)]
    done = [r for r in records(shared) if isinstance(r, TrialRegrouped)]
    assert any(r.after > r.before for r in moved)
    assert done, "asked for, and done"
    assert all(1 <= r.after <= 4 and r.reason for r in moved)
    assert len(hashes(shared)) == 3
    assert hashes(shared) == hashes(fixed)
    assert cluster.free == cluster.capacity
    ended = [r for r in records(shared) if isinstance(r, TrialFinished)]
    assert any(r.worker_seconds > 1.2 * r.seconds for r in ended)
    for r in ended:
        assert r.metrics["cost"] == pytest.approx(r.metrics["seconds"] * r.worker_seconds / r.seconds / 3600)


@pytest.mark.soak
def test_a_long_trial_waits_for_idle_workers_and_ends_with_the_same_weights(
    cluster: LocalCluster, tmp_path: Path, tiny: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first trial is slow; four others report before its first epoch ends. It is held, and goes on in the end."""
    monkeypatch.setattr(hold, "SHORT_S", 1.0)  # its training is short, so that the test is

    def one_is_long(trial: Any) -> dict[str, Any]:
        lr = trial.suggest_categorical("lr", [0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08])
        return {"lr": lr, "epochs": 3, "pause_s": 0.5 if lr == 0.01 else 0.02}

    held, fixed = tmp_path / "held", tmp_path / "fixed"
    asked = request(tiny, held, trials=8, config={}, trial_workers=(1, 2), allocation="short_first")
    tune(asked, space=one_is_long, cluster=cluster)
    tune(request(tiny, fixed, trials=8, config={"pause_s": 0.0}), space=space_of_eight, cluster=cluster)
    long = next(r.trial for r in records(held) if isinstance(r, TrialStarted) and r.config["lr"] == 0.01)
    paused = [r for r in records(held) if isinstance(r, TrialPaused) and r.held]
    assert [r.trial for r in paused] == [long]
    assert paused[0].epoch == 1
    resumed = [r for r in records(held) if isinstance(r, TrialResumed)]
    assert [(r.trial, r.cut_off) for r in resumed] == [(long, True)]
    assert len(hashes(held)) == 8
    assert hashes(held) == hashes(fixed)
    assert cluster.free == cluster.capacity


def space_of_eight(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_categorical("lr", [0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08]), "epochs": 3}


def test_bounds_are_checked(tmp_path: Path, tiny: Program) -> None:
    for bounds in ((0, 2), (3, 2), (1, 5)):
        with pytest.raises(UserError, match="a trial's workers must lie within"):
            tune(request(tiny, tmp_path / "out", trial_workers=bounds), space=space)

    def searched(trial: Any) -> dict[str, Any]:
        return {"workers": trial.suggest_int("workers", 1, 2)}

    with pytest.raises(UserError, match="an allocation says how workers are shared out"):
        tune(request(tiny, tmp_path / "out", allocation="steepest"), space=space)
    with pytest.raises(UserError, match="an allocation must be one that is known"):
        tune(request(tiny, tmp_path / "out", trial_workers=(1, 2), allocation="widest"), space=space)
    with pytest.raises(UserError, match="either a parameter of the space or shared out"):
        tune(request(tiny, tmp_path / "out", trial_workers=(1, 2)), space=searched)
    assert not (tmp_path / "out").exists()
