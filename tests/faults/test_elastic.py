"""Workers die, freeze, come and go at named steps and places; weights and the ledger must not show it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.soaked import soaked
from tests.support.elastic_runs import Ran, Runs, check_same, gone, together

from elastune.core.journal.records import ChangeTimed, Checkpointed, Decided, Record, RunFinished, StepsCompleted
from elastune.core.run import Elastic, Program
from elastune.runtime.clusters.local import LocalCluster

PROGRAM = Program(Path(__file__).parent / "programs" / "elastic.py")
SAMPLES = 1000


def same(ran: Ran, undisturbed: Ran) -> None:
    """The verdict."""
    check_same(ran, undisturbed)
    assert [seen.once for seen in ran.ledger.epochs] == [SAMPLES] * 3


def test_nothing_happens(runs: Runs, undisturbed: Ran) -> None:
    ran = runs(3)
    same(ran, undisturbed)
    assert not ran.lost


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("worker", "place"),
    [
        *((0, "before"), (2, "scatter"), (0, "gather"), (2, "reduced"), (0, "after"), (2, "inner")),
        *soaked((2, "before"), (0, "scatter"), (2, "gather"), (0, "reduced"), (2, "after"), (0, "inner")),
    ],
)
def test_killed_in_a_step(runs: Runs, undisturbed: Ran, worker: int, place: str) -> None:
    """Rank 0 too; before, in both halves of, right after the reduction, and before a report inside of the loop."""
    ran = runs(3, faults=[f"kill {worker} 9 {place}"])
    same(ran, undisturbed)
    assert ran.lost == [worker]
    loss = next(record for record in ran.regrouped if not record.planned)
    timed = {r.worker: r.parts_ms for r in ran.records if isinstance(r, ChangeTimed) and r.version == loss.version}
    assert set(timed) == {0, 1, 2} - {worker}, "each survivor says where its time went"
    for parts_ms in timed.values():
        assert list(parts_ms)[:2] == ["noticed", "view known"]
        assert list(parts_ms)[-4:] == ["connected", "compared", "state in place", "first step"]
        assert min(parts_ms.values()) >= 0
    assert sum(timed[loss.members[0]].values()) >= 999 * loss.pause_s


@pytest.mark.parametrize("place", ["evaluation", "summing", *soaked("tail")])
def test_killed_with_results_of_an_evaluation(runs: Runs, undisturbed: Ran, place: str) -> None:
    """Its part of the evaluation is lost: the survivors evaluate again."""
    ran = runs(3, faults=[f"kill 1 16 {place}"])
    same(ran, undisturbed)
    assert ran.lost == [1]


def test_rank_0_dies_when_it_is_to_write_a_checkpoint(runs: Runs, undisturbed: Ran, tmp_path: Path) -> None:
    """That one is lost with the copy that rank 0 had of the state; whoever is rank 0 then writes the next one."""
    ran = runs(3, faults=["kill 0 10 saving"], out=tmp_path / "out", spec={"checkpoint_every_steps": 10})
    same(ran, undisturbed)
    written = [r.step for r in ran.records if isinstance(r, Checkpointed)]
    assert 10 not in written
    assert {16, 20, 30} <= set(written)


def test_several_at_once(runs: Runs, undisturbed: Ran) -> None:
    same(runs(4, faults=["kill 0 7 before", "kill 2 7 scatter", "kill 3 7 after"]), undisturbed)


def test_all_but_one_one_after_the_other(runs: Runs, undisturbed: Ran) -> None:
    same(runs(4, faults=["kill 3 5 gather", "kill 0 6 scatter", "kill 1 20 before"]), undisturbed)


def test_killed_while_survivors_form(runs: Runs, undisturbed: Ran) -> None:
    """Worker 2 dies; worker 0 dies in forming the group without it."""
    ran = runs(4, faults=["kill 2 9 gather", "kill 0 2 forming"])
    same(ran, undisturbed)
    assert sorted(ran.lost) == [0, 2]


@pytest.mark.parametrize("worker", [0, *soaked(1)])
def test_completed_here_and_failed_there(runs: Runs, undisturbed: Ran, worker: int) -> None:
    """One worker takes its reduction for broken though others have completed it: they have the result for it."""
    ran = runs(3, faults=[f"break {worker} 9 reduced"])
    same(ran, undisturbed)
    assert not ran.lost


def test_completed_by_some_when_one_dies(runs: Runs, undisturbed: Ran) -> None:
    ran = runs(3, faults=["kill 0 9 after", "break 1 9 reduced"])
    same(ran, undisturbed)


def test_frozen(runs: Runs, undisturbed: Ran) -> None:
    """SIGSTOP: the heartbeat tells, the others go on, the frozen one is ended."""
    ran = runs(3, faults=["stop 1 9 scatter"], elastic=Elastic(high=4, heartbeat_s=1.0))
    same(ran, undisturbed)
    assert ran.lost == [1]


def grow(to: int, at: int = 3) -> Callable[..., None]:
    """Ask for more workers once training goes on."""
    asked: list[int] = []

    def act(handle, records: list[Record]) -> None:
        if not asked and handle.members:
            asked.append(to)
            handle.resize(to)

    return act


def test_grows_and_no_member_restarts(runs: Runs, undisturbed: Ran) -> None:
    pids: list[dict[int, int]] = []

    def act(handle, records: list[Record]) -> None:
        pids.append(dict(handle.pids))
        asking(handle, records)

    asking = grow(3)
    ran = runs(1, act=act, slow_until=together(3))
    same(ran, undisturbed)
    assert max(len(r.members) for r in ran.regrouped) == 3, ran.regrouped
    assert len({p[0] for p in pids if 0 in p}) == 1, "the first worker is one process throughout"


def test_the_program_resizes_itself(runs: Runs, undisturbed: Ran) -> None:
    ran = runs(2, resize=["3 4", "30 1"])
    same(ran, undisturbed)
    assert {len(r.members) for r in ran.regrouped} >= {4, 1}, ran.regrouped


def test_joiner_dies_in_mid_hand_over(runs: Runs, undisturbed: Ran) -> None:
    grown = grow(3)

    def act(handle, records: list[Record]) -> None:
        if any("inner" in getattr(record, "metrics", {}) for record in records):  # else all three may begin together
            grown(handle, records)

    ran = runs(2, act=act, slow_until=gone(2), faults=["kill 2 0 taking"])
    same(ran, undisturbed)
    assert 2 in ran.lost


def test_a_joiner_that_cannot_train_harms_nobody(runs: Runs, undisturbed: Ran) -> None:
    """Its machine lacks something: the next one comes."""
    ran = runs(2, act=grow(3), slow_until=lambda records: gone(2)(records) and together(3)(records), unfit=[2])
    same(ran, undisturbed)
    assert ran.lost == [2]
    assert any(3 in r.members for r in ran.regrouped)


def test_giver_dies_in_mid_hand_over(runs: Runs, undisturbed: Ran) -> None:
    """The joiner's source dies: others have the state."""
    faults = [f"kill 0 {step} giving" for step in range(48)]
    ran = runs(3, act=grow(4), slow_until=gone(0), faults=faults)
    same(ran, undisturbed)
    assert 0 in ran.lost


@pytest.mark.parametrize("workers", [2, *soaked(1)])
def test_the_givers_die_before_they_have_told_of_their_steps(runs: Runs, undisturbed: Ran, workers: int) -> None:
    """All that had trained up to then die in the first step with the joiner, who claims their steps for them."""
    faults = [f"kill {worker} 2 sharing" for worker in range(workers)]
    ran = runs(workers, act=grow(workers + 1), slow_until=gone(*range(workers)), faults=faults)
    assert sorted(ran.lost) == list(range(workers))
    same(ran, undisturbed)


def test_a_worker_told_to_go_leaves(runs: Runs, undisturbed: Ran) -> None:
    """SIGTERM: it leaves at a step boundary, and another one comes."""
    results: list[int] = []

    def act(handle, records: list[Record]) -> None:
        if not results and len(handle.members) == 2 and any("inner" in getattr(r, "metrics", {}) for r in records):
            results.append(handle.pids[1])
            os.kill(results[0], signal.SIGTERM)

    ran = runs(2, act=act, slow_until=gone(1))
    same(ran, undisturbed)
    assert results
    assert not ran.lost


@pytest.fixture(scope="module")
def fast(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One worker in fast mode."""
    return Runs(cluster, tmp_path_factory.mktemp("fast"), PROGRAM)(1, mode="fast", plain=True)


@pytest.mark.parametrize(
    "fault", ["kill 0 9 before", "break 1 9 reduced", *soaked("kill 1 9 after", "kill 2 16 evaluation")]
)
def test_fast_mode_survives_too(runs: Runs, fast: Ran, fault: str) -> None:
    """Equal to float tolerance, so the verdict is the ledger and where the loss comes out."""
    ran = runs(3, mode="fast", plain=True, faults=[fault])
    assert ran.ledger.exact
    assert isinstance(ran.outcome, RunFinished)
    assert isinstance(fast.outcome, RunFinished)
    assert ran.outcome.metrics["loss"] == pytest.approx(fast.outcome.metrics["loss"], rel=1e-3)


def test_all_die_and_the_run_goes_on_from_its_checkpoint(runs: Runs, undisturbed: Ran) -> None:
    ran = runs(2, faults=["kill 0 20 before", "kill 1 20 before"])
    same(ran, undisturbed)


def test_all_die_again_and_again_and_the_run_comes_further_each_time(runs: Runs, undisturbed: Ran) -> None:
    """Right after every second checkpoint; two losses without progress in between would end it."""
    faults = [f"kill {worker} {4 * worker + 4} before" for worker in range(4)]
    ran = runs(1, faults=faults, elastic=Elastic(most_losses=2), spec={"checkpoint_every_steps": 2})
    same(ran, undisturbed)
    assert ran.lost == list(range(4))


def decided(ran: Ran) -> list[tuple[str, int, str, dict[str, object]]]:
    return [(r.policy, r.step, r.outcome, r.decision) for r in ran.records if isinstance(r, Decided)]


def rates(ran: Ran) -> list[float]:
    """The mean over workers of the first group's learning rate, at every fifth step."""
    return [r["lr"] for r in ran.reports if "lr" in r]


CHANGES = ["6 batch_size 128", "9 lr 0.01"]


@pytest.fixture(scope="module")
def changing(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One worker whose program changes batch size and learning rate."""
    plain = Runs(cluster, tmp_path_factory.mktemp("changing"), PROGRAM)(1, change=CHANGES)
    sizes = {
        (s.stop - s.start) / (s.last_step - s.first_step + 1) for s in plain.records if isinstance(s, StepsCompleted)
    }
    assert len(sizes) > 1, "the batch size never changed"
    assert plain.ledger.exact
    assert decided(plain) == [
        ("program", 8, "applied", {"batch_size": 128}),
        ("program", 11, "applied", {"lr": 0.01}),
    ]
    before, after = 2e-3 * 0.999**10, 0.01 * 0.999**4  # the schedule goes on from the new rate
    assert rates(plain)[:3] == pytest.approx([2e-3 * 0.999**5, before, after])
    return plain


@pytest.mark.parametrize(
    "faults",
    [["kill 0 11 before"], ["break 1 10 reduced"], *soaked([], ["kill 1 10 gather"], ["kill 2 9 after"])],
)
def test_parameters_change_for_all_at_one_step(runs: Runs, changing: Ran, faults: list[str]) -> None:
    """Whoever is there, and whoever dies around it: one batch size a step, and one learning rate."""
    ran = runs(3, change=CHANGES, faults=faults)
    assert ran.sha256 == changing.sha256
    assert decided(ran) == decided(changing)
    assert rates(ran) == rates(changing)
    assert ran.ledger.exact, ran.ledger
    assert [seen.once for seen in ran.ledger.epochs] == [SAMPLES] * 3


def test_a_change_that_one_worker_asks_for_is_told_and_not_made(runs: Runs, undisturbed: Ran) -> None:
    ran = runs(3, change=["9 lr 0.01"], changing=0)
    same(ran, undisturbed)
    assert decided(ran) == [("program", 11, "disagreed", {"lr": 0.01})]
