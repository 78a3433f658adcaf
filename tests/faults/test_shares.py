"""Workers that hold a part of the state each die at every place of a step; weights and the ledger must not show it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastune.cluster.local import LocalCluster
from elastune.core.run import Program
from elastune.journal.records import Restarted, StateLost
from elastune.testing.elastic_runs import Ran, Runs

PROGRAM = Program(Path(__file__).parent / "programs" / "shares.py")
SAMPLES = 640


@pytest.fixture(scope="module")
def undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """What every history must come to: replicas on one worker each."""
    ran = Runs(cluster, tmp_path_factory.mktemp("undisturbed"), PROGRAM)(1)
    assert ran.ledger.exact
    return ran


@pytest.fixture
def runs(cluster: LocalCluster, tmp_path: Path) -> Runs:
    return Runs(cluster, tmp_path, PROGRAM)


def same(ran: Ran, undisturbed: Ran) -> None:
    """The verdict."""
    assert ran.sha256 == undisturbed.sha256
    assert ran.ledger.exact, ran.ledger
    assert [seen.once for seen in ran.ledger.epochs] == [SAMPLES] * 2
    assert [r["loss"] for r in ran.reports if "loss" in r] == [r["loss"] for r in undisturbed.reports if "loss" in r]


def kept_on(ran: Ran, undisturbed: Ran) -> None:
    """And nobody went back to a checkpoint."""
    same(ran, undisturbed)
    assert not [r for r in ran.records if isinstance(r, Restarted | StateLost)]


ZERO = {"mechanism": "zero"}


def test_nothing_happens(runs: Runs, undisturbed: Ran) -> None:
    kept_on(runs(4, means=ZERO), undisturbed)


@pytest.mark.parametrize(
    "place",
    ["backward", "launched", "added", "gate", "gated", "applied", "spreading", "stepped"],
)
def test_killed_at_every_place_of_a_step(runs: Runs, undisturbed: Ran, place: str) -> None:
    """In a slot's backward pass, in either half of the reduction, at the gate, before and while values spread."""
    ran = runs(4, means=ZERO, faults=[f"kill 1 5 {place}"])
    kept_on(ran, undisturbed)
    assert ran.lost == [1]
