"""What stays of trials that are over: the policies, and what they do on the disk and in the journal."""

from __future__ import annotations

from pathlib import Path

from elastune.cluster.run_files import LocalFiles
from elastune.journal.entry import Entry
from elastune.journal.records import ArtifactKept, ArtifactRemoved, RunFinished, TrialFinished, TrialStarted
from elastune.journal.trials import TrialTable
from elastune.study.loop.retention import Keeper, KeepFront, KeepNothing, KeepState, Retention


def ended(table: TrialTable, number: int, out: Path) -> Path:
    """A trial of ten steps is over; the folder that it leaves behind."""
    run = RunFinished(f"sha-{number}", 1, 10, 320, 1.0, {})
    for record in (TrialStarted(number, {}, {}, seed=0), TrialFinished(number, "complete", run=run)):
        table.hear(Entry(0.0, record))
    folder = out / "trials" / f"{number:05d}"
    for step in (5, 10):
        checkpoint = folder / "checkpoints" / f"step-{step:010d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text("{}")
    return folder


def after(policy: Retention, out: Path, standings: list[dict[int, tuple[float, ...]]]) -> tuple[TrialTable, list[str]]:
    """Trials 0, 1, ... end one after another, at these standings: the table, and the folders that are left."""
    table, keeper = TrialTable(), Keeper(policy, LocalFiles(), out)
    for number, standing in enumerate(standings):
        for record in keeper.ended(number, ended(table, number, out), table, standing):
            table.hear(Entry(0.0, record))
    return table, sorted(path.name for path in (out / "trials").iterdir())


def test_by_default_results_are_all_that_stays(tmp_path: Path) -> None:
    table, left = after(KeepNothing(), tmp_path, [{0: (1.0,)}, {0: (1.0,), 1: (2.0,)}])
    assert (table.artifacts, left) == ({}, [])


def test_states_that_later_trials_begin_with_stay_and_can_be_found(tmp_path: Path) -> None:
    table, left = after(KeepState(), tmp_path, [{}, {}])
    assert left == ["00000", "00001"]
    kept = table.artifacts[1]
    assert kept == ArtifactKept(1, 10, "trials/00001/checkpoints/step-0000000010", "sha-1")
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
    for record in keeper.ended(0, ended(table, 0, tmp_path), table, {0: (2.0,)}):
        table.hear(Entry(0.0, record))
    told = keeper.ended(1, ended(table, 1, tmp_path), table, {0: (2.0,), 1: (1.0,)})
    assert [type(record) for record in told] == [ArtifactKept, ArtifactRemoved]
    assert told[1].trial == 0
