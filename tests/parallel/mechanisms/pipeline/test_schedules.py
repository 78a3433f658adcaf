"""Every schedule: each action once, never a deadlock, no more in flight and no longer a bubble than its source says."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from benchmarks.parallel.bubble import idle_part

from elastune.core.run import Schedule
from elastune.parallel.mechanisms.pipeline.pipeline_parallel import CHUNKS, SCHEDULES, Action

COSTS = {"forward": 1.0, "backward": 2.0, "input": 1.0, "weight": 1.0}
NAMES: list[Schedule] = ["1f1b", "gpipe", "interleaved", "zero-bubble"]
Lists = list[list[Action]]


def chunks_of(schedule: Schedule) -> int:
    return CHUNKS if schedule == "interleaved" else 1


def lists_of(schedule: Schedule, workers: int, batches: int) -> Lists:
    return [SCHEDULES[schedule](workers, worker, batches, chunks_of(schedule)) for worker in range(workers)]


def needs(action: Action, last_chunk: int) -> Iterator[Action]:
    """The actions, on any worker, that ``action`` waits for; a whole backward pass counts for its halves."""
    kind, chunk, k = action.kind, action.chunk, action.batch
    if kind == "forward":
        if chunk:
            yield Action("forward", chunk - 1, k)
    elif kind == "weight":
        yield Action("input", chunk, k)
    else:
        yield Action("forward", chunk, k)
        if chunk < last_chunk:
            yield Action(kind, chunk + 1, k)


def simulate(lists: Lists, last_chunk: int) -> dict[Action, float]:
    """When each action ends, if every worker does its list as soon as it can; all of them, or they wait for ever."""
    ended: dict[Action, float] = {}
    at, clock = [0] * len(lists), [0.0] * len(lists)
    moved = True
    while moved:
        moved = False
        for worker, actions in enumerate(lists):
            while at[worker] < len(actions):
                action = actions[at[worker]]
                needed = list(needs(action, last_chunk))
                if not all(one in ended for one in needed):
                    break
                start = max([clock[worker], *(ended[one] for one in needed)])
                clock[worker] = ended[action] = start + COSTS[action.kind]
                at[worker] += 1
                moved = True
    assert at == [len(actions) for actions in lists], "a deadlock"
    return ended


def most_in_flight(actions: list[Action]) -> int:
    """Micro-batches (times chunks) whose activations lie on a worker at once."""
    now = most = 0
    for action in actions:
        now += {"forward": 1, "backward": -1, "input": 0, "weight": -1}[action.kind]
        most = max(most, now)
    return most


@pytest.mark.parametrize("schedule", NAMES)
def test_every_action_once_and_never_a_deadlock(schedule: Schedule) -> None:
    """For up to six workers and thirteen micro-batches, fewer than workers included."""
    kinds = {"forward", "input", "weight"} if schedule == "zero-bubble" else {"forward", "backward"}
    for workers in range(1, 7):
        for batches in range(1, 14):
            chunks = workers * chunks_of(schedule)
            lists = lists_of(schedule, workers, batches)
            wanted = {Action(kind, c, k) for kind in kinds for c in range(chunks) for k in range(batches)}  # type: ignore[arg-type]
            for worker, actions in enumerate(lists):
                own = {action for action in wanted if action.chunk % workers == worker}
                assert set(actions) == own
                assert len(actions) == len(own)
            simulate(lists, chunks - 1)


@pytest.mark.parametrize("schedule", NAMES)
def test_each_chunk_takes_micro_batches_in_order(schedule: Schedule) -> None:
    """What is carried from one micro-batch to the next (a slot's buffers) and sums over slots rely on it."""
    for workers, batches in ((2, 5), (3, 7), (4, 8)):
        for actions in lists_of(schedule, workers, batches):
            for kind in COSTS:
                for chunk in {action.chunk for action in actions}:
                    order = [a.batch for a in actions if (a.kind, a.chunk) == (kind, chunk)]
                    assert order == sorted(order)


@pytest.mark.parametrize("workers", [1, 2, 4, 6])
@pytest.mark.parametrize("batches", [1, 2, 4, 12])
def test_peak_in_flight(workers: int, batches: int) -> None:
    """The figures of the papers; of GPipe all, of 1F1B what lies behind a stage, of ZB-H1 as many as stages."""
    for worker in range(workers):
        most = {name: most_in_flight(lists_of(name, workers, batches)[worker]) for name in NAMES}
        assert most["gpipe"] == batches
        assert most["1f1b"] == min(batches, workers - worker)
        assert most["zero-bubble"] == min(batches, workers)
        if batches % workers == 0 and workers > 1:
            ahead = 2 * (workers - 1 - worker) + (CHUNKS - 1) * workers + 1
            assert most["interleaved"] == min(CHUNKS * batches, ahead)


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize(("workers", "batches"), [(2, 4), (4, 8), (4, 16), (6, 12)])
def test_the_bubble_is_that_of_the_source(schedule: Schedule, workers: int, batches: int) -> None:
    """Passes of equal length, free transfers: *simulated* against the formula."""
    chunks = chunks_of(schedule)
    ended = simulate(lists_of(schedule, workers, batches), workers * chunks - 1)
    busy = 3.0 * batches * chunks
    assert math.isclose(1 - busy / max(ended.values()), idle_part(schedule, workers, batches))


def test_a_wrong_order_is_found() -> None:
    """The simulation sees a worker that waits for ever."""
    lists = lists_of("1f1b", 2, 2)
    lists[0] = [lists[0][0], *reversed(lists[0][1:])]
    with pytest.raises(AssertionError, match="deadlock"):
        simulate(lists, 1)
