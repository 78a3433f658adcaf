"""A stream in parts: no sample twice and none lost, the same bits on any workers, whoever dies, joins or resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.soaked import soaked
from tests.support.elastic_runs import Ran, Runs, together

from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job

PROGRAM = Program(Path(__file__).parent / "programs" / "divided.py")
EPOCHS = [282, 283]


@pytest.fixture(scope="module")
def alone(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Runs(cluster, tmp_path_factory.mktemp("alone"), PROGRAM)(1)


def check(ran: Ran, alone: Ran) -> None:
    assert ran.sha256 == alone.sha256
    assert ran.ledger.exact
    assert [epoch.once for epoch in ran.ledger.epochs] == EPOCHS


def test_one_worker_takes_each_sample_once(alone: Ran) -> None:
    check(alone, alone)
    assert [epoch.length for epoch in alone.ledger.epochs] == EPOCHS


@pytest.mark.parametrize(
    ("faults", "options"),
    [
        (["kill 0 5 before", "kill 2 11 after"], {}),  # in mid-epoch, and in the epoch's last step
        *soaked((["kill 1 9 after"], {"seeks": False}), (["kill 1 9 after"], {"loaders": 2})),
    ],
)
def test_deaths_do_not_show(
    cluster: LocalCluster, tmp_path: Path, alone: Ran, faults: list[str], options: dict[str, object]
) -> None:
    three = Runs(cluster, tmp_path, PROGRAM)(3, faults=faults, **options)
    assert len(three.lost) == len(faults)
    check(three, alone)


def test_slots_move_with_their_parts(cluster: LocalCluster, tmp_path: Path, alone: Ran) -> None:
    changed = Runs(cluster, tmp_path, PROGRAM)(1, resize=["2 3", "20 2"], slow_until=together(3))
    assert max(len(r.members) for r in changed.regrouped) == 3
    check(changed, alone)


def test_a_worker_that_joins_behind_a_death_knows_what_the_others_know(
    cluster: LocalCluster, tmp_path: Path, alone: Ran
) -> None:
    changed = Runs(cluster, tmp_path, PROGRAM)(2, faults=["kill 1 2 after"], resize=["6 3"], slow_until=together(3))
    assert changed.lost == [1]
    assert max(len(r.members) for r in changed.regrouped) == 3
    check(changed, alone)


def test_a_resumed_run_goes_on_where_it_was(cluster: LocalCluster, tmp_path: Path, alone: Ran) -> None:
    spec = RunSpec(
        PROGRAM, tmp_path / "halted", execution=ExecutionSettings(workers=2, num_slots=4), max_steps=7, seed=3
    )
    run_job(spec, cluster=cluster)
    resumed = run_job(replace(spec, resume=True, max_steps=None), cluster=cluster)
    assert (resumed.sha256, resumed.samples) == (alone.sha256, sum(EPOCHS))


def test_whole_batches_alone_count_under_drop_last(cluster: LocalCluster, tmp_path: Path) -> None:
    runs = Runs(cluster, tmp_path, PROGRAM)
    one, two = (runs(workers, drop_last=True, epochs=1) for workers in (1, 2))
    assert (one.sha256, one.ledger.epochs[0].once) == (two.sha256, 264)
    assert two.ledger.exact
