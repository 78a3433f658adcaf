"""What stays of trials that are over: the rules, and what they do on the disk and in the journal."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from elastune.core.errors import UserError
from elastune.core.journal.folds import TrialTable
from elastune.core.journal.records import ArtifactKept, ArtifactRemoved, Entry, RunFinished, TrialFinished, TrialStarted
from elastune.runtime.clusters.base import LocalFiles
from elastune.train.checkpoints.out_folder import OutFolder
from elastune.train.predictions import keep
from elastune.tuning.study.retention import (
    KeepAll,
    Keeper,
    KeepFront,
    KeepNothing,
    Retention,
    by_rank,
    parse_retention,
    retention_of,
    trial_folder,
)

SIZE = 4  # bytes that the folder of a trial has here


def ended(table: TrialTable, number: int, out: Path) -> Path:
    """A trial of ten steps is over; the folder that it leaves behind."""
    run = RunFinished(f"sha-{number}", 1, 10, 320, 1.0, {})
    for record in (TrialStarted(number, {}, {}, seed=0), TrialFinished(number, "complete", run=run)):
        table.observe(Entry(0.0, record))
    folder = out / "trials" / f"{number:05d}"
    for step in (5, 10):
        checkpoint = folder / "checkpoints" / f"step-{step:010d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text("{}")
    return folder


def decided(
    keeper: Keeper, table: TrialTable, number: int, folder: Path, standing: dict[int, tuple[float, ...]]
) -> list[ArtifactKept | ArtifactRemoved]:
    kept = keeper.ended(number, folder, table, standing)
    for record in kept.records:
        table.observe(Entry(0.0, record))
    assert all(gone.is_dir() for gone in kept.folders), "first the journal, then the disk"
    keeper.remove(kept.folders)
    return list(kept.records)


def after(
    policy: Retention, out: Path, standings: list[dict[int, tuple[float, ...]]], most_bytes: int | None = None
) -> tuple[TrialTable, list[str]]:
    """Trials 0, 1, ... end one after another, at these standings: the table, and the folders that are left."""
    table, keeper = TrialTable(), Keeper(policy, LocalFiles(), out, most_bytes)
    for number, standing in enumerate(standings):
        decided(keeper, table, number, ended(table, number, out), standing)
    return table, sorted(path.name for path in (out / "trials").iterdir())


def growing(values: list[tuple[float, ...]]) -> list[dict[int, tuple[float, ...]]]:
    return [dict(enumerate(values[: count + 1])) for count in range(len(values))]


def test_by_default_results_are_all_that_stays(tmp_path: Path) -> None:
    table, left = after(KeepNothing(), tmp_path, [{0: (1.0,)}, {0: (1.0,), 1: (2.0,)}])
    assert (table.artifacts, left) == ({}, [])


def test_states_that_later_trials_begin_with_stay_and_can_be_found(tmp_path: Path) -> None:
    table, left = after(KeepAll(), tmp_path, [{}, {}])
    assert left == ["00000", "00001"]
    kept = table.artifacts[1]
    path = "trials/00001/checkpoints/step-0000000010"
    seal = hashlib.sha256((tmp_path / path / "state.json").read_bytes()).hexdigest()
    assert kept == ArtifactKept(1, 10, path, "sha-1", size=SIZE, seal=seal)
    assert (tmp_path / kept.path / "state.json").is_file()


def test_the_front_stays_until_it_is_overtaken(tmp_path: Path) -> None:
    first, second = (1.0, 5.0), (2.0, 4.0)
    standings = [{0: first}, {0: first, 1: second}, {0: first, 1: second, 2: (3.0, 9.0)}]
    table, left = after(KeepFront(), tmp_path / "both", standings)
    assert (sorted(table.artifacts), left) == ([0, 1], ["00000", "00001"])
    better = [*standings, {**standings[-1], 3: (0.5, 4.5)}]
    table, left = after(KeepFront(), tmp_path / "overtaken", better)
    assert (sorted(table.artifacts), left) == ([1, 3], ["00001", "00003"])


def test_what_broke_a_constraint_is_not_on_the_front(tmp_path: Path) -> None:
    table, left = after(KeepFront(), tmp_path, [{}])
    assert (table.artifacts, left) == ({}, [])


def test_removals_are_told(tmp_path: Path) -> None:
    table, keeper = TrialTable(), Keeper(KeepFront(), LocalFiles(), tmp_path)
    decided(keeper, table, 0, ended(table, 0, tmp_path), {0: (2.0,)})
    told = decided(keeper, table, 1, ended(table, 1, tmp_path), {0: (2.0,), 1: (1.0,)})
    assert [type(record) for record in told] == [ArtifactKept, ArtifactRemoved]
    assert told[1].trial == 0


@pytest.mark.parametrize(
    ("rule", "stays"),
    [
        ("all", [0, 1, 2, 3]),
        ("best", [0, 2]),
        ("best:2", [0, 1, 2]),
        ("last:2", [2, 3]),
        ("front", [0, 2]),
        ("front+last:1", [0, 2, 3]),
    ],
)
def test_rules_keep_what_they_say(tmp_path: Path, rule: str, stays: list[int]) -> None:
    _, left = after(parse_retention(rule), tmp_path, growing([(1.0, 9.0), (2.0, 9.5), (3.0, 1.0), (4.0, 99.0)]))
    assert left == [f"{number:05d}" for number in stays]


def told(out: Path, number: int, outputs: list[int] | list[float], name: str = "validation") -> None:
    """What trial ``number`` predicts: one class or value a sample."""
    said = torch.tensor(outputs)
    outputs_of = said if said.is_floating_point() else F.one_hot(said, 4).float()
    whole = {"outputs": outputs_of, "targets": torch.zeros(len(said), dtype=said.dtype)}
    folder = trial_folder(out, number)
    keep(folder, OutFolder.at(folder), name, whole, 10)


def diverse(out: Path, outputs: list[Any], standing: list[float], rule: str = "diverse:2") -> list[int]:
    """Who is left once all have ended, the first first."""
    table, keeper = TrialTable(), Keeper(parse_retention(rule), LocalFiles(), out)
    for number, said in enumerate(outputs):
        folder = ended(table, number, out)
        if said:
            told(out, number, said)
        told(out, number, [number % 4] * 4, "test")
        decided(keeper, table, number, folder, {at: (standing[at],) for at in range(number + 1)})
    return sorted(table.artifacts)


BEST, NEAR, FAR, WILD = [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1], [2, 2, 2, 2]


def test_those_that_differ_most_stay_of_the_better_half(tmp_path: Path) -> None:
    assert diverse(tmp_path / "a", [BEST, NEAR, FAR, WILD], [1.0, 2.0, 3.0, 4.0]) == [0, 1], "too few to choose"
    standing = [1.0, 2.0, 3.0, 9.0, 8.0, 9.5, 9.6]
    assert diverse(tmp_path / "b", [BEST, NEAR, WILD, WILD, WILD, NEAR, NEAR], standing) == [0, 1], "it went too early"
    standing = [1.0, 9.0, 8.0, 9.5, 2.0, 9.6, 9.7, 3.0]
    assert diverse(tmp_path / "c", [BEST, NEAR, NEAR, WILD, NEAR, NEAR, NEAR, FAR], standing) == [0, 7]


def test_values_differ_by_their_distance(tmp_path: Path) -> None:
    outputs = [[0.0, 1.0], [0.1, 1.0], *[[9.0, 9.0]] * 3, [3.0, -1.0]]
    assert diverse(tmp_path / "far", outputs, [1.0, 2.0, 8.0, 9.0, 9.9, 3.0]) == [0, 5]
    outputs[-1] = [0.0, 1.05]
    assert diverse(tmp_path / "near", outputs, [1.0, 2.0, 8.0, 9.0, 9.9, 3.0]) == [0, 1]


def test_who_has_no_predictions_differs_from_nobody(tmp_path: Path) -> None:
    assert diverse(tmp_path / "none", [None] * 5, [5.0, 4.0, 3.0, 2.0, 1.0]) == [4]
    assert diverse(tmp_path / "last", [None, NEAR, FAR], [1.0, 2.0, 3.0], "diverse:3+last:1") == [0, 2]


def test_damaged_predictions_end_no_study(tmp_path: Path) -> None:
    table, keeper = TrialTable(), Keeper(parse_retention("diverse:2"), LocalFiles(), tmp_path)
    for number, said in enumerate((BEST, NEAR)):
        folder = ended(table, number, tmp_path)
        told(tmp_path, number, said)
        decided(keeper, table, number, folder, {at: (float(at),) for at in range(number + 1)})
        if number == 0:
            (folder / "predictions" / "validation.safetensors").write_bytes(b"rubbish")
    assert sorted(table.artifacts) == [0]


def test_where_not_all_fits_the_best_stay(tmp_path: Path) -> None:
    table, left = after(KeepAll(), tmp_path, growing([(3.0,), (1.0,), (2.0,)]), most_bytes=2 * SIZE)
    assert left == ["00001", "00002"]
    assert sum(kept.size for kept in table.artifacts.values()) <= 2 * SIZE


def test_fronts_come_one_after_another() -> None:
    assert by_rank({0: (3.0, 3.0), 1: (1.0, 2.0), 2: (2.0, 1.0), 3: (9.0, 9.0)}) == [1, 2, 0, 3]


def test_a_controller_that_died_before_it_decided_leaves_that_to_the_next(tmp_path: Path) -> None:
    table, keeper = TrialTable(), Keeper(KeepFront(), LocalFiles(), tmp_path)
    decided(keeper, table, 0, ended(table, 0, tmp_path), {0: (2.0,)})
    ended(table, 1, tmp_path)
    assert keeper.undecided(table) == [1]
    decided(keeper, table, 1, keeper.folder(1), {0: (2.0,), 1: (1.0,)})
    assert (list(table.artifacts), keeper.undecided(table)) == ([1], [])


NO_RULES = ["", "most", "best:0", "best:x", "last", "last:-1", "none+all", "front:2", "best:²"]


@pytest.mark.parametrize("rule", [*NO_RULES, "diverse:1", "diverse:x"])
def test_what_is_no_rule_is_refused(rule: str) -> None:
    with pytest.raises(UserError, match="what is kept is"):
        parse_retention(rule)


@pytest.mark.parametrize(("rule", "most"), [("none", 10), ("all", 0), ("all", -1)])
def test_a_bound_is_for_what_is_kept(rule: str, most: int) -> None:
    with pytest.raises(UserError, match="a bound is for"):
        retention_of(rule, most, population=False)


def test_a_population_keeps_all() -> None:
    assert retention_of("none", None, population=True) == retention_of("all", None, population=True) == KeepAll()
    for rule, most in (("front", None), ("all", 100)):
        with pytest.raises(UserError, match="members of a population"):
            retention_of(rule, most, population=True)


def test_a_journal_names_no_folder_elsewhere_that_is_removed(tmp_path: Path) -> None:
    out, other = tmp_path / "study", tmp_path / "other" / "checkpoints" / "step-0000000010"
    other.mkdir(parents=True)
    table, keeper = TrialTable(), Keeper(KeepFront(), LocalFiles(), out)
    decided(keeper, table, 0, ended(table, 0, out), {0: (2.0,)})
    table.observe(Entry(0.0, ArtifactKept(0, 10, "../other/checkpoints/step-0000000010", "sha-0")))
    decided(keeper, table, 1, ended(table, 1, out), {0: (2.0,), 1: (1.0,)})
    assert other.is_dir()
    assert [path.name for path in (out / "trials").iterdir()] == ["00001"]


def test_a_trial_that_failed_takes_no_place_among_the_last(tmp_path: Path) -> None:
    table, keeper = TrialTable(), Keeper(parse_retention("last:2"), LocalFiles(), tmp_path)
    for number in (0, 2):
        decided(keeper, table, number, ended(table, number, tmp_path), {})
        for record in (TrialStarted(number + 1, {}, {}, seed=0), TrialFinished(number + 1, "rejected")):
            table.observe(Entry(0.0, record))
    assert sorted(table.artifacts) == [0, 2]


def test_what_a_killed_controller_has_half_removed_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has become small enough to fit, and is no trial any more."""
    table, keeper = TrialTable(), Keeper(KeepAll(), LocalFiles(), tmp_path, SIZE)
    worse = ended(table, 0, tmp_path)
    (worse / "predictions").write_text("too much")

    def killed(run: Path, ignore_errors: bool) -> None:
        (run / "predictions").unlink()

    monkeypatch.setattr("elastune.runtime.clusters.base.shutil.rmtree", killed)
    decided(keeper, table, 0, worse, {0: (2.0,)})
    monkeypatch.undo()
    assert keeper.undecided(table) == [0]
    decided(keeper, table, 0, worse, {0: (2.0,)})
    assert (table.artifacts, worse.exists()) == ({}, False)
