"""Single trials, soups and ensembles on one front, and what is picked from it."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import elastune
from elastune.cli.results import PickOptions, result_of
from elastune.core.errors import UserError
from elastune.core.journal.files import JournalWriter
from elastune.core.journal.folds import fold
from elastune.core.journal.records import (
    AssetMade,
    AssetMember,
    Entry,
    SingleScore,
    StudyFinished,
    TrialFinished,
    TrialStarted,
)
from elastune.tuning.reuse.kept_models import library
from elastune.tuning.study.results import assets_of


@pytest.fixture
def study(kept_study: Path, tmp_path: Path) -> Path:
    """A copy that may be written to."""
    return Path(shutil.copytree(kept_study, tmp_path / "study"))


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``made`` tells of."""
    monkeypatch.chdir(tmp_path)
    for name in ("e", "s", "worse", "old"):
        Path(name).write_text(name)


def made(form: str, trials: list[int], score: float, parameters: int, file: str, **more: Any) -> AssetMade:
    """Of trials 0 to 2, which score 0.7, 0.8 and 0.75."""
    members = [AssetMember(trial, 1 / len(trials)) for trial in trials]
    singles = [SingleScore(trial, alone, 10) for trial, alone in enumerate((0.7, 0.8, 0.75))]
    results = {"data": "validation", "objective": "accuracy", "direction": "max", "test": None, **more}
    results |= {
        "score": score,
        "parameters": parameters,
        "singles": singles,
        "file": file,
        "sha256": hashlib.sha256(file.encode()).hexdigest(),
    }
    return AssetMade(form=form, method="greedy", members=members, **results)


def entries(*assets: AssetMade) -> list[Entry]:
    """Three trials of 1, 2 and 4 worker-seconds, and what was made of them."""
    results: list[Any] = []
    for number in range(3):
        results += [TrialStarted(number, {}, {}, seed=0), TrialFinished(number, "complete", seconds=2.0**number)]
    return [Entry(0.0, record) for record in [*results, StudyFinished("complete", 9.0), *assets]]


def test_the_front_has_what_nothing_else_beats() -> None:
    both = made("ensemble", [1, 2], 0.85, 20, "e"), made("soup", [1, 2], 0.82, 10, "s")
    worse = made("ensemble", [0, 2], 0.8, 20, "worse")
    journal_entries = entries(*both, worse)
    assets = assets_of(journal_entries, fold(journal_entries))
    assert assets is not None
    assert len(assets.points) == 6
    values = [(p.form, p.trials, tuple(p.values.values())) for p in assets.front()]
    assert values == [
        ("ensemble", (1, 2), (0.85, 6.0, 20.0)),
        ("soup", (1, 2), (0.82, 6.0, 10.0)),
        ("trial", (1,), (0.8, 2.0, 10.0)),
        ("trial", (0,), (0.7, 1.0, 10.0)),
    ]
    assert assets.pick(accuracy=0.81, weights={"parameters": 1}).point.form == "soup"
    assert assets.pick(accuracy=0.84).point.file == "e"
    assert assets.pick(training_s=2.0).point.trials == (1,)
    assert assets.pick(weights={"parameters": 1}).point.form == "soup", "of equally small ones the best"
    for wrong in ({"accuracy": 0.9}, {"size": 3.0}):
        with pytest.raises(UserError):
            assets.pick(**wrong)


def test_a_file_that_is_not_what_was_written_is_no_choice(tmp_path: Path) -> None:
    both = made("ensemble", [1, 2], 0.85, 20, "e"), made("soup", [1, 2], 0.82, 10, "s")
    journal_entries = entries(*both)

    def front() -> list[str]:
        assets = assets_of(journal_entries, fold(journal_entries))
        assert assets is not None
        assert len(assets.points) == 5
        return [point.form for point in assets.front()]

    assert front() == ["ensemble", "soup", "trial", "trial"]
    Path("e").write_text("another")
    assert front() == ["soup", "trial", "trial"]
    Path("s").unlink()
    assert front() == ["trial", "trial"]
    assets = assets_of(journal_entries, fold(journal_entries))
    assert assets is not None
    assert [point.trouble for point in assets.points if point.file] == ["changed", "gone"]
    assert assets.pick(weights={"accuracy": 1}).point.form == "trial"


def test_weights_that_are_not_those_that_were_kept_are_not_used(study: Path, tmp_path: Path) -> None:
    """Whole in themselves, and of another trial."""
    (one, other), checkpoint = library(study).candidates[:2], "state.json"
    assert one.artifact.seal == hashlib.sha256((one.checkpoint / checkpoint).read_bytes()).hexdigest()
    shutil.rmtree(one.checkpoint)
    shutil.copytree(other.checkpoint, one.checkpoint)
    with pytest.raises(UserError, match="trial 0 are those that the study has kept"):
        one.weights()
    with pytest.raises(UserError, match="trial 0 are those"):
        elastune.ensemble(study)
    shutil.rmtree(one.checkpoint)
    with pytest.raises(UserError):
        one.weights()


def test_what_was_judged_otherwise_is_no_point_beside_them() -> None:
    journal_entries = entries(
        made("ensemble", [1], 0.1, 1, "old", objective="log_loss"), made("soup", [1, 2], 0.82, 10, "s")
    )
    assets = assets_of(journal_entries, fold(journal_entries))
    assert assets is not None
    assert [point.file for point in assets.points if point.file] == ["s"]
    assert assets_of(entries(), fold(entries())) is None


def test_a_file_that_is_written_again_is_one_point() -> None:
    journal_entries = entries(made("ensemble", [1, 2], 0.85, 20, "e"), made("ensemble", [0, 1], 0.83, 20, "e"))
    assets = assets_of(journal_entries, fold(journal_entries))
    assert assets is not None
    assert [point.trials for point in assets.points if point.file] == [(0, 1)]


def test_the_report_and_picks_know_what_was_written(
    study: Path, tmp_path: Path, command_here: Callable[..., Any]
) -> None:
    with pytest.raises(UserError, match="none in the journal"):
        result_of(study, PickOptions({"training_s": 3.0}))
    file = tmp_path / "e.safetensors"
    seconds = elastune.Study.load(study).seconds
    assert command_here("ensemble", study, "--members", "3", "--method", "uniform", "--out", file).code == 0
    loaded = elastune.Study.load(study)
    assert loaded.seconds == seconds
    assert loaded.assets is not None
    said = command_here("report", study, "--pick", "parameters=100000", "--json").json["assets"]
    assert [point["form"] for point in said["points"]] == ["trial"] * 6 + ["ensemble"]
    assert said["points"][-1]["file"] == str(file)
    assert said["points"][-1]["values"]["parameters"] == 3 * said["points"][0]["values"]["parameters"]
    best = max(point["values"]["accuracy"] for point in said["points"])
    assert said["pick"]["values"]["accuracy"] == best
    cheap = command_here("report", study, "--weights", "parameters=1")
    assert "use     trial of trial " in cheap.out
    assert "ensemble uniform" in cheap.out
    assert "What can be used" in (study / "report.html").read_text()
    assert "training_s" in command_here("report", study, "--pick", "training_s=1e-9").line


def test_nothing_is_written_that_could_not_be_told(
    study: Path, tmp_path: Path, command_here: Callable[..., Any]
) -> None:
    file = tmp_path / "e.safetensors"
    with JournalWriter(study / "journal.jsonl"):
        assert "one writer" in command_here("ensemble", study, "--out", file).line
    assert not file.exists()
    with pytest.raises(UserError, match="was written before"):
        elastune.record_asset(elastune.ensemble(study), file)
