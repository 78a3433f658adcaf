"""Policies at work while workers die, freeze, come and go: what is decided does not depend on it, nor do weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tests.soaked import soaked
from tests.support.elastic_runs import Ran, Runs, together

from elastune.core.journal.records import Checkpointed, Decided, Measured, PolicyFailed, RunFinished, StepsCompleted
from elastune.core.run import Adapt, Elastic, Program
from elastune.runtime.clusters.local import LocalCluster

PROGRAM = Program(Path(__file__).parent / "programs" / "adaptive.py")
SAMPLES = 1000


def under(*policies: str) -> dict[str, Adapt]:
    return {"adapt": Adapt(policies=policies)}


def decided(ran: Ran) -> list[tuple[str, int, str, tuple[tuple[str, object], ...]]]:
    """Every decision once: who, after which step, what became of it, what it was."""
    results = [r for r in ran.records if isinstance(r, Decided)]
    return sorted({(r.policy, r.step, r.outcome, tuple(sorted(r.decision.items()))) for r in results})


def failed(ran: Ran) -> list[PolicyFailed]:
    return [r for r in ran.records if isinstance(r, PolicyFailed)]


@pytest.fixture(scope="module")
def undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Ran]:
    """The run of a policy on a number of workers that nothing happens to."""
    runs = Runs(cluster, tmp_path_factory.mktemp("undisturbed"), PROGRAM)
    return cache(lambda policy, workers: runs(workers, spec=under(policy)))


@pytest.fixture(scope="module")
def steered(undisturbed: Callable[[str, int], Ran]) -> Ran:
    """On one worker, undisturbed."""
    ran = undisturbed("Steered", 1)
    assert ran.ledger.exact
    assert len(decided(ran)) > 8
    return ran


@pytest.fixture(scope="module")
def plain(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Without policies."""
    return Runs(cluster, tmp_path_factory.mktemp("plain"), PROGRAM)(1)


def same(ran: Ran, undisturbed: Ran) -> None:
    assert ran.sha256 == undisturbed.sha256
    assert decided(ran) == decided(undisturbed)
    assert ran.ledger.exact, ran.ledger
    assert [seen.once for seen in ran.ledger.epochs] == [SAMPLES] * 2
    ends = [r.outcome for r in (ran, undisturbed)]
    assert all(isinstance(end, RunFinished) for end in ends)
    bits = [{k: v for k, v in end.signals.items() if k in ("noise_scale", "loss")} for end in ends]
    assert bits[0] == bits[1] != {}


@pytest.mark.parametrize("workers", [3, *soaked(2)])
def test_decisions_do_not_depend_on_the_number_of_workers(runs: Runs, steered: Ran, workers: int) -> None:
    same(runs(workers, spec=under("Steered")), steered)


@pytest.mark.parametrize(
    ("worker", "place"),
    [
        *((2, "scatter"), (0, "gather"), (2, "reduced")),
        *soaked((0, "before"), (2, "before"), (0, "scatter"), (2, "gather"), (0, "reduced")),
        *soaked((0, "after"), (2, "after")),
    ],
)
def test_a_worker_dies_in_the_step_that_carries_a_decision(runs: Runs, steered: Ran, worker: int, place: str) -> None:
    """Step 13 carries what was decided after step 12; nothing of it is lost, or done twice."""
    same(runs(3, faults=[f"kill {worker} 12 {place}"], spec=under("Steered")), steered)


@pytest.mark.parametrize("worker", [0, *soaked(1)])
def test_a_worker_dies_while_an_epochs_decision_is_agreed_on(runs: Runs, steered: Ran, worker: int) -> None:
    ran = runs(3, faults=[f"kill {worker} 17 agreeing"], spec=under("Steered"))
    same(ran, steered)
    assert ran.lost == [worker]


def test_served_by_another(runs: Runs, steered: Ran) -> None:
    same(runs(3, faults=["break 1 12 reduced"], spec=under("Steered")), steered)


def test_killed_in_an_evaluation_all_go_back_and_decide_the_same_again(runs: Runs, steered: Ran) -> None:
    same(runs(3, faults=["kill 1 16 evaluation"], spec=under("Steered")), steered)


def test_joiners_take_over_monitors_and_policies(runs: Runs, steered: Ran) -> None:
    ran = runs(1, resize=["5 3", "25 2"], spec=under("Steered"))
    same(ran, steered)
    assert max(len(r.members) for r in ran.regrouped) == 3


def test_a_resumed_run_decides_as_one_that_never_stopped(runs: Runs, steered: Ran, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = runs(2, out=out, spec={**under("Steered"), "max_steps": 14})
    assert isinstance(first.outcome, RunFinished)
    second = runs(3, out=out, spec={**under("Steered"), "resume": True})
    assert second.sha256 == steered.sha256


def test_collectives_in_any_order(runs: Runs) -> None:
    ran = runs(3, spec=under("Talking"))
    assert [d[2:] for d in decided(ran)] == [("applied", (("lr", 1e-3),))]
    assert not failed(ran)


def test_collectives_while_workers_die_and_join(runs: Runs) -> None:
    ran = runs(3, faults=["kill 0 2 gather", "kill 2 5 after"], spec=under("Talking"))
    assert isinstance(ran.outcome, RunFinished), ran.outcome
    assert ran.ledger.exact


@pytest.mark.parametrize(
    "faults",
    [
        ["kill 2 13 gather"],
        ["break 1 13 reduced"],
        ["kill 1 13 after", "kill 2 20 scatter"],
        *soaked(["kill 0 13 before"], ["kill 0 13 reduced"], ["kill 1 17 agreeing"]),
    ],
)
def test_a_worker_dies_while_hooks_wait_and_nothing_that_they_decide_is_lost(
    runs: Runs, undisturbed: Callable[[str, int], Ran], faults: list[str]
) -> None:
    ran = runs(3, faults=faults, spec=under("Averaging"))
    same(ran, undisturbed("Averaging", 1))
    assert not failed(ran)


def test_hooks_that_wait_begin_again_among_joiners(runs: Runs, undisturbed: Callable[[str, int], Ran]) -> None:
    ran = runs(1, resize=["5 3", "25 2"], spec=under("Averaging"))
    same(ran, undisturbed("Averaging", 1))
    assert max(len(r.members) for r in ran.regrouped) == 3
    assert not failed(ran)


@pytest.mark.parametrize("workers", [3, *soaked(1)])
def test_going_back_to_what_was_remembered(runs: Runs, plain: Ran, undisturbed, workers: int) -> None:
    ran = runs(workers, spec=under("Remembering"))
    assert [d[3] for d in decided(ran)] == [(("remember", True),), (("lr_factor", 0.5), ("restore", True))]
    assert ran.sha256 == undisturbed("Remembering", 2).sha256 != plain.sha256


def test_workers_that_want_different_things_change_nothing(runs: Runs, plain: Ran) -> None:
    ran = runs(3, spec=under("Divided"))
    assert ran.sha256 == plain.sha256
    assert {d[2] for d in decided(ran)} == {"disagreed"}
    assert {d[1] for d in decided(ran)} == {5, 10}


def test_a_policy_that_raises_changes_nothing(runs: Runs, plain: Ran) -> None:
    ran = runs(2, spec=under("Failing"))
    assert ran.sha256 == plain.sha256
    assert [(f.policy, f.hook, f.step) for f in failed(ran)] == [("Failing", "after_step", s) for s in (4, 9)]
    assert "KeyError" in failed(ran)[0].detail
    assert "adaptive.py" in failed(ran)[0].detail


def test_a_policy_that_asks_for_the_impossible_changes_nothing(runs: Runs, plain: Ran) -> None:
    ran = runs(2, spec=under("Greedy"))
    assert ran.sha256 == plain.sha256
    assert sorted({f.step for f in failed(ran)}) == [4, 8]


def test_workers_beyond_the_bounds_are_cut_to_them_and_it_is_noted(runs: Runs, plain: Ran) -> None:
    ran = runs(2, slow_until=together(4), spec=under("Crowding"))
    assert ran.sha256 == plain.sha256
    assert not failed(ran)
    assert max(len(r.members) for r in ran.regrouped) == 4
    assert {d[2:] for d in decided(ran)} == {("applied", (("workers", 4),)), ("refused", (("workers", 99),))}
    assert len([d for d in decided(ran) if d[2] == "refused"]) == 1, "with four there is nothing more to ask for"
    note = "asked for 99 workers; this run may have from 1 to 4: start it with other --workers LOW:HIGH"
    assert {r.detail for r in ran.records if isinstance(r, Decided)} == {note}


def test_a_policy_brings_workers_and_no_member_restarts(runs: Runs, plain: Ran) -> None:
    pids: list[dict[int, int]] = []
    look = lambda handle, records: pids.append(dict(handle.pids))  # noqa: E731
    ran = runs(1, act=look, slow_until=together(3), spec=under("Growing"))
    assert ran.sha256 == plain.sha256
    assert max(len(r.members) for r in ran.regrouped) == 3
    assert len({p[0] for p in pids if 0 in p}) == 1, "the first worker is one process throughout"


def test_static_workers_cannot_be_resized(runs: Runs, plain: Ran) -> None:
    ran = runs(2, elastic=Elastic(low=2, high=2), spec=under("Growing"))
    assert ran.sha256 == plain.sha256
    assert not failed(ran)
    assert [d[2:] for d in decided(ran)] == [("refused", (("workers", 3),))], "once, however often it asks"


def test_what_is_measured_is_written_down(runs: Runs) -> None:
    ran = runs(
        2, pause_s=0.08, spec={"adapt": Adapt(monitors=("noise_scale", "performance", "loss", "curvature:every=5"))}
    )
    results = [r for r in ran.records if isinstance(r, Measured)]
    assert len(results) >= 3
    signals = results[-1].signals
    assert {"noise_scale", "step_s", "loss", "sharpness", "hessian_trace", "fisher_trace"} <= set(signals)
    assert [r.step for r in results] == sorted(r.step for r in results)
    assert any(isinstance(r, StepsCompleted) for r in ran.records)


def test_before_training_counts_from_the_first_step_and_after_it_there_is_time_to_talk(runs: Runs) -> None:
    ran = runs(3, spec=under("Ending"))
    assert [d[1] for d in decided(ran)] == [0]
    assert not failed(ran)
    assert isinstance(ran.outcome, RunFinished)
    assert ran.outcome.steps == 2 * SAMPLES // 100


def test_a_signal_that_nobody_measures(runs: Runs, plain: Ran) -> None:
    ran = runs(2, spec=under("Curious"))
    assert ran.sha256 == plain.sha256
    assert "happiness" in failed(ran)[0].detail
    assert "noise_scale" in failed(ran)[0].detail, "what there is is named"


def test_a_policy_ends_the_run_with_a_checkpoint(runs: Runs, tmp_path: Path) -> None:
    ran = runs(2, out=tmp_path / "out", spec=under("Halting"))
    assert isinstance(ran.outcome, RunFinished)
    assert (ran.outcome.stopped, ran.outcome.steps) == ("policy", 10)
    assert [c.step for c in ran.records if isinstance(c, Checkpointed)] == [10]


@pytest.mark.parametrize("mode", ["exact", *soaked("fast")])
def test_library_policies_together(runs: Runs, mode: str) -> None:
    policies = ("warmup:k=4,steps=5", "scheduled_batch:at=1/2,factor=2,lr=linear,ramp_steps=3", "gns:max_batch=256")
    one, three = (runs(workers, mode=mode, plain=True, spec=under(*policies)) for workers in (1, 3))
    assert not failed(three)
    assert one.ledger.exact
    assert three.ledger.exact
    assert [d[:3] for d in decided(one) if d[0] != "gns"] == [d[:3] for d in decided(three) if d[0] != "gns"]
    if mode == "exact":
        assert one.sha256 == three.sha256


# -- one worker has completed what another is served, while a third dies ----------------------------------------------


def test_served_while_another_dies_votes_count_as_they_were_cast(runs: Runs, steered: Ran) -> None:
    """Worker 0 applies what three have voted for; worker 1 hears of it in a version of two."""
    faults = ["nap 0 12 reduced", "nap 1 12 reduced", "break 1 12 reduced", "kill 2 12 reduced"]
    same(runs(3, faults=faults, spec=under("Steered")), steered)


@pytest.mark.parametrize(
    "faults",
    [
        ["break 1 11 reduced", "kill 2 11 reduced"],
        ["kill 0 8 gather", "kill 1 12 after"],
        *soaked(["break 1 11 reduced"], ["kill 0 8 gather"]),
    ],
)
def test_who_comes_and_goes_before_a_step_goes_back(runs: Runs, undisturbed, faults: list[str]) -> None:
    ran = runs(3, faults=faults, pause_s=0.06, spec=under("Remembering"))
    assert any(not r.planned for r in ran.regrouped), "the fault has happened"
    assert [d[2] for d in decided(ran)] == ["applied", "applied"]
    assert ran.sha256 == undisturbed("Remembering", 2).sha256


def test_a_report_breaks_while_hooks_wait(runs: Runs) -> None:
    ran = runs(3, faults=["break 1 9 gathered"], spec=under("Talking"))
    assert any(not r.planned for r in ran.regrouped), "the fault has happened"
    assert isinstance(ran.outcome, RunFinished), ran.outcome
    assert ran.ledger.exact


def test_disagreements_while_workers_join(runs: Runs) -> None:
    ran = runs(2, resize=["5 3", "12 4", "24 2", "30 4"], spec=under("Torn"))
    assert isinstance(ran.outcome, RunFinished), ran.outcome
    assert ran.ledger.exact


def test_after_a_death_all_have_seen_the_same(runs: Runs) -> None:
    """Times of workers that are gone included."""
    faults = ["nap 0 16 reduced", "nap 1 16 reduced", "break 1 16 reduced", "kill 2 16 reduced"]
    ran = runs(3, faults=faults, spec=under("Timed"))
    assert any(not r.planned for r in ran.regrouped), "the fault has happened"
    assert isinstance(ran.outcome, RunFinished)
    assert len([d for d in decided(ran) if d[2] == "disagreed"]) <= 2, "only what was on its way may differ"
    assert len(decided(ran)) > 10


def test_a_resize_is_heard_though_rank_0_dies(runs: Runs) -> None:
    ran = runs(2, faults=["nap 0 10 reduced", "kill 0 10 after"], slow_until=together(3), spec=under("AskOnce"))
    assert isinstance(ran.outcome, RunFinished)
    assert max(len(r.members) for r in ran.regrouped) == 3


def test_what_was_asked_for_is_not_asked_again(runs: Runs) -> None:
    ran = runs(2, slow_until=together(3), faults=["break 1 11 reduced"], spec=under("AskAlways"))
    assert {d[2] for d in decided(ran)} == {"applied"}
    assert len(decided(ran)) <= 2
    assert max(len(r.members) for r in ran.regrouped) == 3


def test_early_stopping_at_the_end_of_an_epoch(runs: Runs) -> None:
    ran = runs(2, spec=under("StopEpoch"))
    assert isinstance(ran.outcome, RunFinished)
    assert (ran.outcome.stopped, ran.outcome.steps) == ("policy", 16)


@pytest.mark.parametrize(
    ("policy", "stop"), [("Steered", 12), ("Halving", 20), *soaked(("Halving", 12), ("Steered", 20))]
)
def test_resumed_within_an_epoch(runs: Runs, undisturbed, tmp_path: Path, policy: str, stop: int) -> None:
    """With a decision on its way, and a ramp under way."""
    out = tmp_path / "out"
    runs(2, out=out, spec={**under(policy), "max_steps": stop})
    assert runs(3, out=out, spec={**under(policy), "resume": True}).sha256 == undisturbed(policy, 1).sha256


def test_a_bad_policy_takes_no_other_with_it(runs: Runs) -> None:
    """Votes are counted policy by policy."""
    ran = runs(3, spec=under("Torn", "Scheduled"))
    assert [d[1:3] for d in decided(ran) if d[0] == "Scheduled"] == [(6, "applied"), (11, "applied")]
    assert "disagreed" in {d[2] for d in decided(ran) if d[0] == "Torn"}


def test_of_two_that_want_the_same_thing_one_comes_later(runs: Runs) -> None:
    """The second is refused, is as before, and asks again for what it then sees."""
    ran = runs(2, spec=under("Scheduled", "Scheduled"))
    changes = [d for d in decided(ran) if d[2] == "applied"]
    assert [d[3][0][1] for d in sorted(changes, key=lambda d: d[1])] == [74, 84, 94, 104]
    assert "refused" in {d[2] for d in decided(ran)}


@pytest.mark.parametrize("worker", [0, *soaked(2)])
def test_a_worker_dies_in_an_epochs_last_step(runs: Runs, undisturbed, worker: int) -> None:
    """All go on from rank 0's state at the boundary that begins the next epoch; its hook is called once."""
    ran = runs(3, faults=[f"kill {worker} 15 before"], spec=under("Halving"))
    assert any(not r.planned for r in ran.regrouped), "the fault has happened"
    assert [d[1] for d in decided(ran)] == [0, 16]
    assert ran.sha256 == undisturbed("Halving", 1).sha256


def test_the_batch_and_the_rate_follow_the_workers_with_the_momentum_corrected(runs: Runs) -> None:
    """A run that grows decides as one on one worker whose schedule does the same at the same step, momentum and all."""
    ran = runs(1, resize=["5 2"], optimizer="sgd", spec=under("follow_workers"))
    ((policy, step, outcome, change),) = decided(ran)
    assert (policy, outcome) == ("follow_workers", "applied")
    assert dict(change) == {"batch_size": 128, "lr_factor": 2.0, "correct_momentum": True}
    assert ran.ledger.exact

    def twin(at: int, corrected: str) -> Ran:
        schedule = f"scheduled_batch:at={at},by=step,factor=2,lr=linear,correct_momentum={corrected}"
        return runs(1, optimizer="sgd", spec=under(schedule))

    # Between two epochs a schedule's hook comes a step later than a change of workers.
    at = next(at for at in (step - 1, step) if decided(twin(at, "true"))[0][1] == step)
    assert ran.sha256 == twin(at, "true").sha256 != twin(at, "false").sha256
