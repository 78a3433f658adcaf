"""What a cluster's plan says of a study's trials: from how many workers on a further one brings nothing, and how trials
gain by more until they have shown it themselves.

It is put into the study's journal once, as a record; the study rests on that alone, so one that resumes decides as
before. It bounds means only: what is drawn and summed follows the bounds that were asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastune.core.errors import UserError
from elastune.core.run import Means
from elastune.core.text import count, duration, number
from elastune.job.output_dir import JOURNAL
from elastune.journal.entry import Entry
from elastune.journal.reader import read
from elastune.journal.records import PlanMade, ScalingPredicted
from elastune.plan.planned_steps import check_program, plan_told, predicted_step
from elastune.study.allocation.throughput import Prior

BATCH = "batch_size"  # by this name a program has its batch in its config
MOST_BATCHES = 16
BRINGS = 0.02  # of the shortest step: what is no more is nothing


def plan_in(folder: Path) -> PlanMade:
    """What ``elastune plan --out`` has kept in ``folder``. Raises ``UserError`` where there is none."""
    made = plan_told(read(folder / JOURNAL))
    if made is None:
        raise UserError("--plan names the folder of a plan", folder, "give the --out of elastune plan")
    return made


def predicted_in(entries: Sequence[Entry]) -> ScalingPredicted | None:
    """What a study's journal tells of it, if anything."""
    return next((entry.record for entry in entries if isinstance(entry.record, ScalingPredicted)), None)


def plan_left(told: ScalingPredicted, program: object) -> PlanMade | None:
    """The plan of ``program`` that ``told`` came of; None where its folder is gone, or has something else by now."""
    try:
        made = plan_in(Path(told.source))
        check_program(made, program)
    except (UserError, ValueError):  # no path has a NUL
        return None
    return made


def predict_scaling(
    made: PlanMade, source: Path, program: Path, means: Means, batches: Sequence[int], bounds: tuple[int, int]
) -> ScalingPredicted:
    """What ``made`` says of trials within ``bounds`` (low, high) that may have any of ``batches``.

    Args:
        made: The plan, from ``source``.
        source: Its folder.
        program: Of which it must be.
        means: Of a trial, whatever its workers.
        batches: Samples of a step.
        bounds: Workers, in whole replicas.

    Raises:
        UserError: For a plan of another program, and for means that it does not speak of.
    """
    check_program(made, program)
    replica = 1 if means.mesh is None else means.first_mesh.replica
    counts = range(bounds[0], bounds[1] + 1, replica)
    some = sorted(set(batches))
    some = [some[round(at * (len(some) - 1) / (MOST_BATCHES - 1))] for at in range(MOST_BATCHES)]
    steps, enough = list[tuple[int, int, float]](), 0
    for batch in sorted(set(some)):
        told = {workers: predicted_step(made, means.on(_counting(means, workers)), batch) for workers in counts}
        seconds = {workers: step_s for workers, step_s in told.items() if step_s is not None}
        if not seconds:
            fix = "leave out --plan, or use a mechanism of elastune's own"
            raise UserError("a plan speaks of elastune's own mechanisms", means.mechanism, fix)
        steps += [(batch, workers, step_s) for workers, step_s in seconds.items()]
        least_s = min(seconds.values())
        enough = max(enough, next(w for w in counts if seconds[w] <= least_s * (1 + BRINGS)))
    return ScalingPredicted(str(source), steps, enough, _why(steps, enough, bounds[1]))


def bounded(told: ScalingPredicted | None, bounds: tuple[int, int]) -> tuple[int, int]:
    """``bounds`` (low, high) without the workers that bring nothing. Of more than were looked at nothing is known."""
    if told is None or told.most >= max(workers for _, workers, _ in told.steps):
        return bounds
    low, high = bounds
    return low, max(low, min(high, told.most))


def prior_of(told: ScalingPredicted | None, replica: int = 1) -> Prior | None:
    """What trials are taken to gain, in replicas of so many workers; None where nothing was predicted."""
    if told is None:
        return None
    by_batch: dict[int, dict[int, float]] = {}
    for batch, workers, step_s in told.steps:
        by_batch.setdefault(batch, {})[workers // replica] = 1 / step_s

    def prior(batch: float | None) -> Mapping[int, float]:
        usual = sorted(by_batch)[len(by_batch) // 2]
        near = usual if batch is None else min(by_batch, key=lambda each: abs(math.log(each / batch)))
        return by_batch[near]

    return prior


def _counting(means: Means, workers: int) -> int:
    """In ``exact`` mode the largest share of slots decides: 8 slots on 5 to 7 workers go as on 4."""
    if means.mode != "exact" or means.mesh is not None:
        return workers
    slots = max(means.num_slots, workers)
    return -(-slots // -(-slots // workers))


def _why(steps: Sequence[tuple[int, int, float]], enough: int, high: int) -> str:
    batch = max(each for each, _, _ in steps)
    seconds = {workers: step_s for each, workers, step_s in steps if each == batch}
    of = f"a step of {count(batch, 'sample')} takes {duration(seconds[enough])} on {count(enough, 'worker')}"
    if enough == high:
        return f"each worker up to {high} brings something: {of} (modelled)"
    return f"{of}, and {number(seconds[high] / seconds[enough], 3)} times as long on {high} (modelled)"
