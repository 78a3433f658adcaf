"""The throughput phase: what is tried, and what is taken. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastune.core.journal.records import RunFinished
from elastune.core.run import ExecutionSettings
from elastune.tuning.frontier.short_runs import ExecutionSearch, in_words

FOUR = ExecutionSettings(workers=4, num_slots=4)


def ran(step_s: float, sha256: str = "same") -> RunFinished:
    return RunFinished(sha256, 4, 25, 100, 1.0, {}, step_s=step_s)


def climbed(climb: ExecutionSearch, steps: dict[str, RunFinished | None]) -> list[str]:
    """Each thing tried, in words; ``steps``: how its short run ended, 1 s where it is not named."""
    for execution in climb.rounds():
        for each in execution:
            words = (
                "own" if each == climb.layout else f"{each.mechanism} {each.threads} {each.topology} {each.micro_batch}"
            )
            climb.observe(each, steps.get(words, ran(1.0)))
    return [timed.changed for timed in climb.tried]


def test_each_kind_of_means_goes_on_from_the_best_before() -> None:
    climb = ExecutionSearch(FOUR, 64, 8, free=True)
    tried = climbed(climb, {"replicated 2 native None": ran(0.5), "zero 2 native None": ran(0.4)})
    assert tried == [
        "as asked for",
        "threads 2",
        "mechanism zero, threads 2, mesh shard=4",
        "mechanism sharded, threads 2, mesh shard=4",
        "mechanism zero, threads 2, micro_batch 8, mesh shard=4",
        "as asked for",
        "mechanism zero, threads 2, mesh shard=4",
    ], "no routes where state is divided; the best is timed again"
    assert (climb.best.mechanism, climb.best.threads) == ("zero", 2)
    assert climb.result.chosen == 6
    assert "4 by mechanism zero, threads 2, mesh shard=4 (2.50 times as fast, timed again)" in in_words([climb.result])


def test_bucket_sizes_are_tried_where_gradients_fill_several() -> None:
    def sizes(grad_bytes: int, **changes: object) -> list[int | None]:
        climb = ExecutionSearch(replace(FOUR, **changes), 64, 4, free=False)  # type: ignore[arg-type]
        for execution in climb.rounds():
            for each in execution:
                step_s = 0.5 if each.bucket_bytes == 4 << 20 else 1.0
                climb.observe(each, replace(ran(step_s), grad_bytes=grad_bytes))
        sizes_tried = [ExecutionSettings.from_json(timed.execution).bucket_bytes for timed in climb.tried]
        return [*dict.fromkeys(size for size in sizes_tried if size is not None), climb.best.bucket_bytes]

    assert sizes(50_000) == [None], "one bucket has them all"
    assert sizes(2 << 20) == [256 << 10, 1 << 20, None]
    assert sizes(10 << 20) == [256 << 10, 1 << 20, 4 << 20, 4 << 20]
    assert sizes(100 << 20)[:4] == [256 << 10, 1 << 20, 4 << 20, 64 << 20]
    assert sizes(100 << 20, workers=1) == [None]


def test_without_time_the_best_so_far_is_timed_again_or_given_up() -> None:
    climb = ExecutionSearch(FOUR, 64, 8, free=False)
    for execution in climb.rounds():
        for each in execution:
            climb.observe(each, ran(0.5 if each.threads == 2 else 1.0))
        climb.hurried = len(climb.tried) > 1
    assert [timed.changed for timed in climb.tried] == ["as asked for", "threads 2", "as asked for", "threads 2"]
    assert climb.best.threads == 2
    climb.give_up()
    assert (climb.best, climb.result.chosen) == (FOUR, 0)


def test_other_bits_are_not_taken_however_fast() -> None:
    climb = ExecutionSearch(FOUR, 64, 8, free=False)
    climbed(climb, {"replicated 2 native None": ran(0.1, "other"), "replicated 1 ring None": None})
    assert climb.best == FOUR
    other, failed = climb.result.tried[1], climb.result.tried[2]
    assert (other.same, failed.same, failed.step_s) == (False, None, None)
    assert "1 of them with other bits" in in_words([climb.result])
    assert in_words([climb.result]).endswith("those asked for")


def test_a_lucky_short_run_is_timed_again() -> None:
    climb = ExecutionSearch(FOUR, 64, 8, free=False)
    for execution in climb.rounds():
        for each in execution:
            climb.observe(each, ran(0.5 if each.threads == 2 and not climb.repeats else 1.0))
    assert climb.tried[-1].changed == "threads 2"
    assert (climb.best, climb.result.chosen) == (FOUR, 0)


def test_a_gain_within_the_noise_is_none() -> None:
    climb = ExecutionSearch(FOUR, 64, 4, free=False)
    climbed(climb, {"replicated 1 tree None": ran(0.97)})
    assert climb.best == FOUR


@pytest.mark.parametrize("own", [None, RunFinished("same", 4, 2, 8, 1.0, {})])
def test_what_cannot_be_timed_is_left_as_it_is(own: RunFinished | None) -> None:
    """It failed, or had too few steps."""
    climb = ExecutionSearch(FOUR, 64, 8, free=True)
    assert climbed(climb, {"own": own}) == ["as asked for"]
    assert climb.best == FOUR
    assert in_words([]) == ""


def test_threads_are_those_that_there_are_cores_for() -> None:
    alone = replace(FOUR, workers=1)
    assert [m.threads for m in list(_after(ExecutionSearch(alone, 64, 6, free=False)))] == [2, 4, 6]
    assert list(_after(ExecutionSearch(FOUR, 64, 4, free=False))) == []


def _after(climb: ExecutionSearch) -> list[ExecutionSettings]:
    """The second round."""
    rounds = climb.rounds()
    for execution in next(rounds):
        climb.observe(execution, ran(1.0))
    return next(rounds)
