"""The simulated cluster: what it tells, when, and that it keeps the contract of a cluster."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.core.clock import VirtualClock
from elastune.core.errors import UserError
from elastune.core.journal.records import Regrouped, Reported, Restarted, RunFailed, RunFinished, WorkerGone
from elastune.core.run import Config, Elastic, RunSpec
from elastune.runtime.clusters.base import Event, Exited, Message
from elastune.testing.kits.cluster import ClusterKit, exits, reports, spec_of
from elastune.tuning.simulate.cluster import SimulatedCluster, SimulatedHandle, WorkerFailures


class Ideal:
    """Epochs of 100 steps that take 100 s on one worker, and W times less on W."""

    start_s = 5.0
    resize_pause_s = 2.0

    def epochs(self, config: Config, asked: int | None) -> int:
        return asked or 3

    def samples(self, config: Config) -> int:
        return 1000

    def batch(self, config: Config) -> int:
        return int(str(config.get("batch", 10)))

    def metrics(self, config: Config, seed: int, epoch: int) -> dict[str, float]:
        if config.get("act") == "raises":
            raise ArithmeticError(f"seed {seed} was unlucky")
        return {"error": math.nan if config.get("act") == "diverges" else 1 / epoch}

    def epoch_s(self, config: Config, workers: int, epoch: int) -> float:
        return 100.0 / workers


def cluster_of(capacity: int = 8, **more: Any) -> SimulatedCluster:
    return SimulatedCluster(capacity, Ideal(), **more)


def spec(out: Path, workers: int = 1, **more: Any) -> RunSpec:
    return replace(spec_of(out, workers), **{"checkpoint_every_steps": 0, **more})


def history(cluster: SimulatedCluster, *runs: SimulatedHandle) -> list[tuple[float, Event]]:
    """Everything to the end of these runs, with its time."""
    results: list[tuple[float, Event]] = []
    while any(run.alive for run in runs):
        cluster.wait(math.inf)
        results += [(cluster.clock.now(), event) for run in runs for event in run.poll()]
    return results


def go_on(cluster: SimulatedCluster, seconds: float, *runs: SimulatedHandle) -> None:
    """Let time pass, whatever these runs say."""
    until = cluster.clock.now() + seconds
    while cluster.clock.now() < until:
        cluster.wait(until - cluster.clock.now())
        for run in runs:
            run.poll()


def end_of(told: list[tuple[float, Event]]) -> RunFinished:
    (end,) = [e.record for _, e in told if isinstance(e, Message) and isinstance(e.record, RunFinished)]
    return end


def of(kind: type, told: list[tuple[float, Event]]) -> list[tuple[float, Any]]:
    return [(at, e.record) for at, e in told if isinstance(e, Message) and isinstance(e.record, kind)]


class TestContract(ClusterKit):
    """The parts of the contract that do not speak of a worker's own code."""

    test_messages_come_in_order_and_before_the_exit = None
    test_an_exit_code_is_handed_on = None
    test_an_exception_ends_with_its_story = None
    test_sys_exit_ends_as_in_any_program = None
    test_a_run_can_be_asked_to_stop = None

    def make(self, entry: str) -> SimulatedCluster:
        return cluster_of(3)


def test_a_run_reports_each_epoch_and_ends(tmp_path: Path) -> None:
    cluster = cluster_of()
    run = cluster.start(spec(tmp_path / "run", 4))
    assert (cluster.free, run.alive, run.members, run.pids) == (4, 4, [], {})
    trial_history = history(cluster, run)
    assert [at for at, _ in of(Reported, trial_history)] == [30.0, 55.0, 80.0]
    assert [(r.epoch, r.epochs, r.step, r.samples, r.seconds) for _, r in of(Reported, trial_history)] == [
        (1, 3, 100, 1000, 25.0),
        (2, 3, 200, 2000, 50.0),
        (3, 3, 300, 3000, 75.0),
    ]
    end = end_of(trial_history)
    assert (end.workers, end.steps, end.samples, end.seconds, end.stopped) == (4, 300, 3000, 75.0, "complete")
    assert end.metrics == {"error": 1 / 3}
    assert [(e.rank, e.code) for _, e in trial_history[-4:] if isinstance(e, Exited)] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (3, 0),
    ]
    assert (cluster.free, cluster.busy_s, run.alive) == (8, 4 * 80.0, 0)
    assert not (tmp_path / "run").exists()


def test_a_wait_goes_to_the_next_news_and_no_further_than_asked(tmp_path: Path) -> None:
    clock = VirtualClock(wall_s=1000.0)
    cluster = cluster_of(clock=clock)
    cluster.start(spec(tmp_path / "a"))
    cluster.wait(30.0)
    assert (clock.now(), clock.wall(), cluster.news()) == (30.0, 1030.0, [])
    cluster.wait(500.0)
    assert (clock.now(), len(cluster.news())) == (105.0, 1)
    cluster.wait(500.0)
    assert clock.now() == 105.0, "what is known has to be polled first"


@pytest.mark.parametrize("epochs", [1, 2])
def test_until_epoch_and_resume_come_to_the_same_as_going_through(tmp_path: Path, epochs: int) -> None:
    cluster = cluster_of()
    whole = end_of(history(cluster, cluster.start(spec(tmp_path / "whole", 2))))
    first = end_of(history(cluster, cluster.start(spec(tmp_path / "run", 2, until_epoch=epochs))))
    assert (first.stopped, first.steps, first.metrics) == ("until_epoch", epochs * 100, {"error": 1 / epochs})
    trial_history = history(cluster, cluster.start(spec(tmp_path / "run", 4, resume=True)))
    assert [r.epoch for _, r in of(Reported, trial_history)] == list(range(epochs + 1, 4))
    last = end_of(trial_history)
    assert last.sha256 == whole.sha256 != first.sha256
    assert last.seconds == epochs * 50.0 + (3 - epochs) * 25.0


def test_until_the_last_epoch_is_complete(tmp_path: Path) -> None:
    cluster = cluster_of()
    assert end_of(history(cluster, cluster.start(spec(tmp_path, until_epoch=3)))).stopped == "complete"


def test_a_stop_ends_at_the_next_step_and_keeps_what_was_done(tmp_path: Path) -> None:
    cluster = cluster_of()
    whole = end_of(history(cluster, cluster.start(spec(tmp_path / "whole"))))
    run = cluster.start(spec(tmp_path / "run"))
    cluster.wait(150.0)
    run.poll()
    cluster.wait(20.3)  # to 125.3 s, 20.3 steps into the second epoch
    assert run.step == 120
    run.stop()
    run.stop()
    trial_history = history(cluster, run)
    assert (end_of(trial_history).stopped, end_of(trial_history).steps, end_of(trial_history).seconds) == (
        "requested",
        121,
        121.0,
    )
    assert cluster.clock.now() == pytest.approx(305.0 + 5.0 + 121.0)
    last = end_of(history(cluster, cluster.start(spec(tmp_path / "run", resume=True))))
    assert (last.steps, last.samples, last.seconds) == (300, 3000, 300.0)
    assert last.sha256 == whole.sha256


def test_a_child_goes_on_from_its_parent_with_its_own_settings(tmp_path: Path) -> None:
    cluster = cluster_of()
    parent = spec(tmp_path / "parent", until_epoch=1, config={"batch": 10})
    history(cluster, cluster.start(parent))
    same = history(cluster, cluster.start(spec(tmp_path / "same", parent=parent.out, config={"batch": 10})))
    other = history(cluster, cluster.start(spec(tmp_path / "other", parent=parent.out, config={"batch": 20})))
    through = history(cluster, cluster.start(spec(tmp_path / "through", config={"batch": 10})))
    assert [r.epoch for _, r in of(Reported, same)] == [2, 3]
    assert end_of(same).sha256 == end_of(through).sha256 != end_of(other).sha256
    assert (end_of(same).steps, end_of(other).steps) == (300, 200)

    orphan = history(cluster, cluster.start(spec(tmp_path / "orphan", parent=tmp_path / "nobody")))
    assert [r.reason for _, r in of(RunFailed, orphan)] == ["user_error"]


def test_growing_takes_a_start_and_a_pause_shrinking_a_pause(tmp_path: Path) -> None:
    cluster = cluster_of()
    run = cluster.start(spec(tmp_path, 2, elastic=Elastic(1, 8)))
    cluster.wait(25.1)  # 20.1 s of training, 40.2 steps
    run.resize(4, "rank 1")
    assert (cluster.free, run.members) == (4, [0, 1])
    results: list[tuple[float, Event]] = []
    while not of(Regrouped, results):
        cluster.wait(math.inf)
        results += [(cluster.clock.now(), event) for event in run.poll()]
    ((at, grown),) = of(Regrouped, results)
    assert (grown.members, grown.planned, grown.step, grown.pause_s) == ([0, 1, 2, 3], True, 51, 2.0)
    assert at == pytest.approx(5 + 25.5 + 2)
    run.resize(1, "others deserve more")
    results = history(cluster, run)
    ((_, shrunk),) = of(Regrouped, results)
    assert (shrunk.members, shrunk.step, shrunk.pause_s) == ([0], 51, 2.0)
    assert [(g.worker, g.how, g.why) for _, g in of(WorkerGone, results)] == [
        (n, "left", "others deserve more") for n in (1, 2, 3)
    ]
    whole = end_of(history(cluster, cluster.start(spec(tmp_path / "whole"))))
    assert end_of(results).sha256 == whole.sha256
    assert end_of(results).seconds == pytest.approx(25.5 + 2 + 2 + 249)


def test_a_resize_keeps_to_the_bounds_and_to_the_room(tmp_path: Path) -> None:
    cluster = cluster_of(8)
    run = cluster.start(spec(tmp_path / "a", 4, elastic=Elastic(2, 16)))
    other = cluster.start(spec(tmp_path / "b", 3))
    run.resize(100)
    assert cluster.free == 0
    go_on(cluster, 12.0, run, other)
    assert len(run.members) == 5
    other.kill()
    assert cluster.free == 0, "what was wished is done once there is room"
    history(cluster, other)
    go_on(cluster, 8.0, run)
    assert len(run.members) == 8
    run.resize(0)
    history(cluster, run)
    assert cluster.free == 8
    third = cluster.start(spec(tmp_path / "c", 2))
    third.resize(8)
    assert cluster.free == 6, "two are the most that it may have"
    cluster.close()
    cluster.close()
    assert [e.code for e in third.poll() if isinstance(e, Exited)] == [-9, -9]


@pytest.mark.parametrize(
    ("act", "reason", "detail", "expected_count"),
    [("raises", "exception", "ArithmeticError: seed 0 was unlucky", 0), ("diverges", "diverged", "error is nan", 1)],
)
def test_what_the_model_does_is_the_runs_result(
    tmp_path: Path, act: str, reason: str, detail: str, expected_count: int
) -> None:
    cluster = cluster_of()
    happened = history(cluster, cluster.start(spec(tmp_path, 2, config={"act": act})))
    ((at, failed),) = of(RunFailed, happened)
    assert (at, failed.reason) == (55.0, reason)
    assert failed.detail.startswith(detail)
    assert len(reports([e for _, e in happened])) == expected_count
    assert {end.code for end in exits([e for _, e in happened]).values()} == {1}
    assert cluster.free == 8


def test_a_lost_worker_is_replaced_and_its_step_done_again(tmp_path: Path) -> None:
    cluster = cluster_of()
    whole = end_of(history(cluster, cluster.start(spec(tmp_path / "whole"))))
    run = cluster.start(spec(tmp_path / "run", 2))
    cluster.wait(25.1)
    run.kill_worker(0)
    trial_history = history(cluster, run)
    (_, alone), (_, both) = of(Regrouped, trial_history)
    assert (alone.members, alone.planned, alone.step, alone.discarded) == ([1], False, 40, 1)
    assert (both.members, both.planned, both.discarded) == ([1, 2], True, 0)
    assert [(g.worker, g.how) for _, g in of(WorkerGone, trial_history)] == [(0, "lost")]
    assert end_of(trial_history).sha256 == whole.sha256


def test_the_last_workers_loss_goes_back_to_the_checkpoint(tmp_path: Path) -> None:
    cluster = cluster_of()
    run = cluster.start(spec(tmp_path, checkpoint_every_steps=None))
    cluster.wait(130.0)
    run.poll()
    cluster.wait(60.0)  # in the second epoch
    run.kill_worker(0)
    trial_history = history(cluster, run)
    assert [r.step for _, r in of(Restarted, trial_history)] == [100]
    assert end_of(trial_history).steps == 300


def test_losses_are_those_of_the_seed(tmp_path: Path) -> None:
    def lost(seed: int, every_s: float = 60.0) -> list[tuple[float, int]]:
        cluster = cluster_of(losses=WorkerFailures(every_s, seed))
        return [(at, g.worker) for at, g in of(WorkerGone, history(cluster, cluster.start(spec(tmp_path, 4))))]

    assert lost(1) == lost(1) != lost(2)
    assert lost(1, math.inf) == []
    assert lost(1)
    cluster = cluster_of(losses=WorkerFailures(1e-3))
    (failure,) = of(RunFailed, history(cluster, cluster.start(spec(tmp_path, 4))))
    assert failure[1].reason == "worker_lost"


def test_thousands_of_workers_take_no_time(tmp_path: Path) -> None:
    begun = time.perf_counter()
    cluster = cluster_of(2048)
    for number in range(2048):
        cluster.start(spec(tmp_path / str(number), config={"lr": number}))
    cluster.wait(math.inf)
    ended = 0
    while ended < 2048:
        for run in cluster.news():
            ended += sum(isinstance(event, Exited) for event in run.poll())
        cluster.wait(math.inf)
    assert cluster.clock.now() == 305.0
    assert time.perf_counter() - begun < 5.0


def test_what_a_simulation_kept_is_checked(tmp_path: Path) -> None:
    (tmp_path / "simulated.json").write_text("{")
    cluster = cluster_of()
    trial_history = history(cluster, cluster.start(spec(tmp_path, resume=True)))
    assert [r.reason for _, r in of(RunFailed, trial_history)] == ["user_error"]
    with pytest.raises(UserError):
        cluster_of(0)
    with pytest.raises(ValueError, match="forward"):
        VirtualClock().advance_to(-1.0)
