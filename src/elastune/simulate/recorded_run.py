"""A run that has ended, as work for a market: what its steps took, on each number of workers that it had."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from elastune.core.errors import UserError
from elastune.core.run import Config
from elastune.core.text import count, duration
from elastune.job.output_dir import JOURNAL
from elastune.journal.entry import Entry
from elastune.journal.reader import read
from elastune.journal.records import Regrouped, Reported, RunFinished, RunStarted
from elastune.simulate.market import MarketJob
from elastune.simulate.recorded_model import Scaling, parse_scaling


@dataclass(frozen=True)
class RecordedRun:
    """A run's ``steps``, and seconds of one by the number of workers: evaluations and pauses between two reports are in
    them, starting and what was lost with a controller are not."""

    config: Config
    steps: int
    step_s: dict[int, float]

    def seconds(self, workers: int, scaling: Scaling) -> float:
        """Of all its steps on so many workers, from what was measured of the next fewer, or of the fewest."""
        known = max((n for n in self.step_s if n <= workers), default=min(self.step_s))
        return self.steps * self.step_s[known] * scaling(self.config, known, workers)


def recorded_run(entries: Sequence[Entry], name: object) -> RecordedRun:
    """The run in ``entries``, which a message calls ``name``. Raises ``UserError`` where none has ended there, or its
    workers changed between any two reports."""
    points: list[tuple[int, float]] = []  # steps that were done, and the seconds of training until then
    crews: list[tuple[int, int]] = []  # from which step on there were how many workers
    config: Config = {}
    ended = False
    for entry in entries:
        match entry.record:
            case RunStarted() as started:
                kept = started.resumed_step or 0
                points = [point for point in points if point[0] <= kept] or [(0, 0.0)]
                crews = [*(crew for crew in crews if crew[0] <= kept), (kept, int(started.means["workers"]))]
                config, ended = started.config, False
            case Reported(step=step, seconds=seconds):
                points.append((step, seconds))
            case Regrouped(step=step, members=members):
                crews.append((step, len(members)))
            case RunFinished(steps=step, seconds=seconds):
                points.append((step, seconds))
                ended = True
    if not ended or points[-1][0] < 1:
        raise UserError("a run must have trained and ended, to tell what it takes", name, "let it end")
    steps, seconds_by = Counter[int](), defaultdict[int, float](float)
    for (first, begun_s), (last, until_s) in pairwise(points):
        workers = [n for step, n in crews if step <= first][-1]
        if not any(first < step < last for step, _ in crews):  # an evaluation may lie between two reports, and no step
            steps[workers] += last - first
            seconds_by[workers] += until_s - begun_s
    if not steps.total():
        rule = "a run must have made some steps on unchanged workers, from one report to the next"
        raise UserError(rule, name, "take one whose workers change less often")
    return RecordedRun(config, points[-1][0], {n: seconds_by[n] / steps[n] for n in sorted(+steps)})


def job_of_run(out: Path, most: int, scaling: str) -> tuple[MarketJob, str]:
    """The run in the folder ``out`` as work for up to ``most`` workers, and what that rests on.

    Args:
        out: The output folder of ``elastune run``.
        most: Workers that there may be.
        scaling: Of numbers of workers that it did not have: see ``RecordedModel``.

    Raises:
        UserError: Where there is no such run, or a number of workers would take no time.
    """
    entries = read(out / JOURNAL)
    run, factor = recorded_run(entries, out), parse_scaling(scaling, entries)
    seconds = {n: run.seconds(n, factor) for n in range(1, most + 1)}
    if not all(0 < each < math.inf for each in seconds.values()):
        raise UserError("a training takes some time on any number of workers", f"{min(seconds.values()):g} s", "see it")
    speeds = [0.0, *(seconds[1] / each for each in seconds.values())]
    told = ", ".join(f"{duration(each)} on {count(n, 'worker')}" for n, each in run.step_s.items())
    source = f"{count(run.steps, 'step')} of {out}, measured: {told}; other numbers of workers by {scaling} scaling"
    return MarketJob(seconds[1], lambda n: speeds[n]), source
