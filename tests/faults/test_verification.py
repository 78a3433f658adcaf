"""Workers compute wrong on purpose: the right one is named and leaves, and weights and ledger do not show it.

``python -m benchmarks.elastic.verify`` has many more errors, and how many steps pass until each is found.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.soaked import soaked
from tests.support.elastic_runs import Act, Ran, Runs, check_same

from elastune.core.journal.records import Record, StepsVerified, VerificationEnded, WorkerWrong
from elastune.core.run import Program
from elastune.core.slots import VerifyPlan
from elastune.runtime.clusters.local import LocalCluster

PROGRAM = Program(Path(__file__).parent / "programs" / "elastic.py")
SPEC = {"verify": VerifyPlan(4), "checkpoint_every_steps": 10}


@pytest.fixture
def runs(tmp_path: Path):
    """On a cluster of its own: the place of a worker that is wrong stays empty."""
    with LocalCluster(capacity=4) as cluster:
        yield Runs(cluster, tmp_path, PROGRAM)


def wrong(what: str, worker: int, step: int, *, once: bool, grow: int = 0) -> Act:
    """From ``step`` on ``worker`` makes the error ``what``."""
    asked: list[int] = []

    def act(handle, records: list[Record]) -> None:
        if not asked and handle.members and handle.step >= step:
            asked.append(worker)
            handle.corrupt(worker, what, once=once, seed=5)
            if grow:
                handle.resize(grow)

    return act


def named(ran: Ran) -> list[WorkerWrong]:
    return [record for record in ran.records if isinstance(record, WorkerWrong)]


@pytest.mark.parametrize(("workers", "worker"), [(2, 1), *soaked((3, 0), (4, 2))])
def test_wrong_gradients(runs: Runs, undisturbed: Ran, workers: int, worker: int) -> None:
    ran = runs(workers, act=wrong("gradient", worker, 9, once=False), spec=SPEC, pause_s=0.02)
    check_same(ran, undisturbed)
    (found,) = named(ran)
    assert (found.worker, found.always) == (worker, True)
    assert found.leaf in ("0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias")
    assert len({digest for _, digest in found.digests}) > 1
    assert ran.lost == [worker]


@pytest.mark.parametrize("what", ["weights", *soaked("optimizer")])
def test_a_wrong_state(runs: Runs, undisturbed: Ran, what: str) -> None:
    """Three workers: the two others agree."""
    ran = runs(3, act=wrong(what, 1, 9, once=True), spec=SPEC, pause_s=0.02)
    check_same(ran, undisturbed)
    assert [record.worker for record in named(ran)] == [1]


@pytest.mark.soak
def test_a_wrong_transfer(runs: Runs, undisturbed: Ran) -> None:
    """The joiner has a wrong state, so it is the one that leaves. In CI: ``test_a_wrong_state``."""
    ran = runs(2, act=wrong("transfer", 0, 9, once=True, grow=3), spec=SPEC, pause_s=0.03)
    check_same(ran, undisturbed)
    assert [record.worker for record in named(ran)] == [2]


def test_nothing_is_wrong(runs: Runs, undisturbed: Ran) -> None:
    ran = runs(2, spec=SPEC)
    check_same(ran, undisturbed)
    assert [record.slots for record in ran.records if isinstance(record, StepsVerified)] == [12]
    assert not [record for record in ran.records if isinstance(record, WorkerWrong | VerificationEnded)]
