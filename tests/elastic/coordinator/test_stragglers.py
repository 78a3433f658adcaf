from __future__ import annotations

import pytest

from elastune.elastic.stragglers import HeartbeatSample, Pace, Straggler, straggler
from elastune.elastic.wire.messages import Beat, Doing

MIB = 1 << 20


def sight(
    worker: int, doing: Doing, since_s: float, step: int = 341, size: int = 0, age_s: float = 0.0
) -> HeartbeatSample:
    return HeartbeatSample(worker, worker - 1, f"node{worker}", Beat(step, doing, since_s, size), age_s)


def found(*sights: HeartbeatSample, patience_s: float = 3.0, log: str = "") -> Straggler | None:
    return straggler(sights, patience_s, lambda worker: log)


def waiting(*workers: int, since_s: float = 12.0, step: int = 341) -> list[HeartbeatSample]:
    return [sight(worker, "reducing", since_s, step, int(13.1 * MIB)) for worker in workers]


def test_one_that_computes_while_the_others_wait() -> None:
    late = found(*waiting(1, 3, 4), sight(2, "computing", 12.3), log="decoding\n  image 7")
    assert late == Straggler(
        2,
        341,
        "worker 2 (rank 1, host node2) keeps 3 others waiting for 12 s in all-reduce of step 341 (13.1 MiB): "
        'it has been computing for 12.3 s; its log ends: "decoding image 7"',
    )


def test_one_that_is_a_step_behind() -> None:
    late = found(*waiting(1), sight(2, "saving", 9.0, step=340))
    assert late is not None
    assert late.line == (
        "worker 2 (rank 1, host node2) keeps 1 other waiting for 12 s in all-reduce of step 341 (13.1 MiB): "
        "it has been saving for 9.0 s in step 340"
    )


def test_the_furthest_behind_is_named_first() -> None:
    late = found(*waiting(1), sight(2, "computing", 50.0), sight(3, "computing", 5.0, step=340), sight(4, "saving", 60))
    assert late is not None
    assert (late.worker, "behind as well: worker 2, 4" in late.line) == (3, True)


def test_one_that_waits_in_an_older_collective_is_behind() -> None:
    late = found(*waiting(1, 2), *waiting(3, step=340))
    assert late is not None
    assert late.worker == 3


def test_all_in_one_collective_hang() -> None:
    late = found(*waiting(1, 2))
    assert late == Straggler(
        1,
        341,
        "all have been waiting for 12 s in all-reduce of step 341 (13.1 MiB): "
        "worker 1 (rank 0, host node1), worker 2 (rank 1, host node2)",
    )


def test_the_age_of_a_beat_counts() -> None:
    assert found(sight(1, "gathering", 1.0, age_s=4.0), sight(2, "computing", 1.0)) is not None
    assert found(sight(1, "gathering", 1.0, age_s=1.0), sight(2, "computing", 1.0)) is None


@pytest.mark.parametrize(
    "sights",
    [
        [],
        [*waiting(1, 2, 3, since_s=2.9), sight(4, "computing", 100.0)],
        [sight(1, "computing", 100.0), sight(2, "saving", 100.0)],
        [*waiting(1), sight(2, "computing", 0.1, step=342)],  # it has completed the step: the news is under way
        [sight(1, "done", 100.0), sight(2, "done", 100.0)],
    ],
)
def test_nobody_is_to_blame(sights: list[HeartbeatSample]) -> None:
    assert found(*sights) is None


def test_who_is_done_keeps_nobody_waiting() -> None:
    late = found(*waiting(1, 2), sight(3, "done", 100.0))
    assert late is not None
    assert late.line.startswith("all have been waiting")


def test_a_long_log_line_is_cut() -> None:
    late = found(*waiting(1), sight(2, "computing", 5.0), log="x" * 10_000)
    assert late is not None
    assert len(late.line) < 500


def test_patience_grows_with_the_steps() -> None:
    pace = Pace()
    assert pace.patience_s == 3.0
    for at in range(20):
        pace.message_received(2.0 * at, at)
        pace.message_received(2.0 * at + 0.5, max(0, at - 1))  # another member, a step behind
    assert pace.patience_s == 10.0
    fast = Pace()
    for at in range(20):
        fast.message_received(0.5 * at, 50 * at)
    assert fast.patience_s == 3.0
