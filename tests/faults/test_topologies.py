"""Sums that travel by routes: their bits are those of one worker, whoever dies, and however often routes change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.soaked import soaked
from tests.support.elastic_runs import Ran, Runs

from elastune.core.journal.records import Decided, PolicyFailed, RunFailed, TopologyChanged
from elastune.core.run import Adapt, Elastic, Program
from elastune.core.sync_plan import SyncPlan

PROGRAM = Program(Path(__file__).parent / "programs" / "routed.py")
REROUTING = {"adapt": Adapt(policies=("Rerouting",))}


def laid(ran: Ran) -> list[tuple[int, str, int, str]]:
    return [(r.step, r.topology, r.workers, r.cause) for r in ran.records if isinstance(r, TopologyChanged)]


def same(ran: Ran, undisturbed: Ran) -> None:
    assert ran.sha256 == undisturbed.sha256
    assert ran.ledger.exact, ran.ledger


@pytest.mark.parametrize("topology", ["ring:chunk_kib=1", "parents=[2,0,2]", *soaked("star")])
def test_workers_do_not_show_and_the_death_of_one_neither(runs: Runs, undisturbed: Ran, topology: str) -> None:
    ran = runs(3, execution={"topology": topology}, faults=["kill 1 20 relaying"], elastic=Elastic(low=1, high=3))
    same(ran, undisturbed)
    assert ran.lost == [1]
    assert laid(ran)[0] == (0, topology, 3, "the run's settings")


def test_another_topology_after_every_step_with_deaths_and_resizes(runs: Runs, undisturbed: Ran) -> None:
    more: dict[str, Any] = {"resize": ["5 4", "30 2"], "pause_s": 0.1, "faults": ["kill 0 17 relaying"]}
    ran = runs(3, spec=REROUTING, elastic=Elastic(low=1, high=4), **more)
    same(ran, undisturbed)
    assert ran.lost == [0]
    result = laid(ran)
    assert len({topology for _, topology, _, _ in result}) > 12
    assert {workers for *_, workers, _ in result} >= {2, 3, 4}
    assert not [r for r in ran.records if isinstance(r, PolicyFailed)]


def test_a_worker_with_stale_parents_ends_the_run_before_anything_is_summed(cluster: Any, tmp_path: Path) -> None:
    """And says who knows other routes than who."""
    program = Program(PROGRAM.path.with_name("stale.py"))
    how: dict[str, Any] = {"execution": {"topology": "parents=[0,0,1]"}}
    stale = Runs(cluster, tmp_path, program)(3, change=["4 tree 1,1,1"], **how)
    assert isinstance(stale.outcome, RunFailed)
    assert re.search(
        r"same routes \(after step 6, view 1, parents=\[1,1,1\]\): ranks 0, 2 of 3 with routes [0-9a-f]{12}; "
        r"rank 1 of 3 with routes [0-9a-f]{12}",
        stale.outcome.detail,
    )
    # Whoever is left when the first has ended lays the backend's own, and ends as well.
    assert [topology for _, topology, *_ in laid(stale)][:2] == ["parents=[0,0,1]", "parents=[1,1,1]"]


@pytest.mark.soak
def test_in_fast_mode_sums_are_equal_up_to_rounding(runs: Runs) -> None:
    ways = [{"execution": {"topology": topology}} for topology in ("native", "tree", "ring")] + [{"spec": REROUTING}]
    reports = [runs(4, mode="fast", plain=True, **way).reports[-1]["loss"] for way in ways]
    assert reports == pytest.approx([reports[0]] * len(ways), rel=1e-4)


def test_learners_meet_on_routes_too(runs: Runs) -> None:
    rounds = {"sync": SyncPlan("local", learners=4, every=3)}
    hashes = {
        runs(workers, spec=rounds, execution={"topology": topology}).sha256
        for workers, topology in ((1, "auto"), (4, "binary_tree"), (3, "ring"))
    }
    assert len(hashes) == 1


def test_parents_that_do_not_fit_rest_until_they_do(runs: Runs, undisturbed: Ran) -> None:
    ran = runs(2, execution={"topology": "parents=[1,1]"}, resize=["5 3", "25 2"], pause_s=0.1, elastic=Elastic(1, 3))
    same(ran, undisturbed)
    results = [(topology, workers, cause) for _, topology, workers, cause in laid(ran)]
    assert results[0] == ("parents=[1,1]", 2, "the run's settings")
    assert results[1] == ("native", 3, "the run's settings: parents=[1,1]; 2 parents, 3 workers")
    assert results[2] == ("parents=[1,1]", 2, "the run's settings")


def test_the_program_asks_and_what_cannot_be_is_refused(runs: Runs, undisturbed: Ran) -> None:
    ran = runs(2, change=["4 topology star:chunk_kib=2", "9 tree 1,1,1", "14 tree 1,1"])
    same(ran, undisturbed)
    results = [(r.decision, r.outcome, r.detail) for r in ran.records if isinstance(r, Decided)]
    assert results == [
        ({"topology": "star:chunk_kib=2"}, "applied", ""),
        ({"topology": "parents=[1,1,1]"}, "refused", results[1][2]),
        ({"topology": "parents=[1,1]"}, "applied", ""),
    ]
    assert "3 parents, 2 workers" in results[1][2]
    assert [(step, topology) for step, topology, *_ in laid(ran)] == [(6, "star:chunk_kib=2"), (16, "parents=[1,1]")]


def test_a_policy_that_asks_for_a_circle_is_told_so(runs: Runs, undisturbed: Ran) -> None:
    ran = runs(2, spec={"adapt": Adapt(policies=("Circling",))})
    same(ran, undisturbed)
    assert "a tree has one root" in next(r.detail for r in ran.records if isinstance(r, PolicyFailed))
    assert laid(ran) == []
