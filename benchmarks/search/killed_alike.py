"""Real studies whose controller is killed at random moments: do they try and find what an undisturbed one does?

Part of ``killed_studies.py --alike``. Trials train on two workers, in ``exact`` mode. Where one trial runs at a time,
on both, all that a proposal or an early stop rests on comes in one order, so everything must be the same, bit for bit:
configurations, pauses, reports, weights (SHA-256). Where two run side by side a sampler that learns hears of them in
the order of their ends, which a kill changes; random search must still find the same.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.kept import Rows
from benchmarks.search.killed_life import one_life

from elastune.core.journal.files import read
from elastune.core.journal.records import TrialFinished, TrialPaused, TrialReported, TrialResumed, TrialStarted
from elastune.core.run import ExecutionSettings, Program
from elastune.tuning.study.request import StudyRequest

PROGRAM = Program(Path(__file__).parents[1] / "programs" / "killed_train.py")
WORKERS = 2


@dataclass(frozen=True)
class Kind:
    """A kind of study. ``each``: workers of a trial."""

    sampler: str
    stopping: str
    each: int

    @property
    def name(self) -> str:
        return f"{self.sampler} {self.stopping}, {'side by side' if self.each < WORKERS else 'one at a time'}"


KINDS = (
    Kind("gp", "none", 2),
    Kind("tpe", "asha:eta=2,min_resource=1", 2),
    Kind("random", "none", 1),
)


@dataclass(frozen=True)
class EvaluatedTrial:
    """What a study tried and found, by trial."""

    params: dict[int, Any]
    reports: dict[int, set[tuple[int, float]]]
    ends: dict[int, tuple[Any, ...]]
    paused_after: dict[int, list[int]]  # epochs, by the search's decision
    cut_off: int


def tried(out: Path) -> EvaluatedTrial:
    results = [entry.record for entry in read(out / "journal.jsonl")]
    reports: dict[int, set[tuple[int, float]]] = {}
    paused_after: dict[int, list[int]] = {}
    for record in results:
        if isinstance(record, TrialReported):
            reports.setdefault(record.trial, set()).add((record.report.epoch, record.report.metrics["loss"]))
        if isinstance(record, TrialPaused) and not record.cut_off:
            paused_after.setdefault(record.trial, []).append(record.epoch)
    ends = [record for record in results if isinstance(record, TrialFinished)]
    return EvaluatedTrial(
        {r.trial: (r.config, r.params, r.seed) for r in results if isinstance(r, TrialStarted)},
        reports,
        {r.trial: (r.state, r.values, None if r.run is None else (r.run.sha256, r.run.steps)) for r in ends},
        paused_after,
        sum(isinstance(record, TrialResumed) and record.cut_off for record in results),
    )


def one(kind: Kind, trials: int, kills: int, longest_s: float, seed: int) -> dict[str, Any]:
    """An undisturbed study, and the same one killed ``kills`` times, or until it has ended."""
    rng = random.Random(f"{kind.name} {seed}")
    folder = Path(tempfile.mkdtemp(prefix="alike-"))
    execution = ExecutionSettings(workers=kind.each, mode="exact", num_slots=WORKERS)
    common: dict[str, Any] = {"trials": trials, "workers": WORKERS, "execution": execution, "seed": seed}
    request = StudyRequest(
        PROGRAM, folder / "whole", sampler=kind.sampler, stopping=kind.stopping, config={"pause_s": 0.03}, **common
    )
    try:
        one_life(request, None)
        killed, done, left = replace(request, out=folder / "killed"), 0, 0
        while done < kills:
            over, remaining = one_life(killed, rng.uniform(0.0, longest_s))
            left += remaining
            if over:
                break
            done += 1
        one_life(killed, None)
        whole, again = tried(request.out), tried(killed.out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "kills": done,
        "trials": len(whole.params),
        "same_configurations": sum(again.params.get(n) == params for n, params in whole.params.items()),
        "same_ends": sum(again.ends.get(n) == end for n, end in whole.ends.items()),
        "ended": len(whole.ends),
        "alike": (whole.params, whole.reports, whole.ends, whole.paused_after)
        == (again.params, again.reports, again.ends, again.paused_after),
        "paused_by_the_search": len(whole.paused_after),
        "trials_that_went_on_after_a_kill": again.cut_off,
        "processes_left_behind": left,
    }


def run(kills: int, trials: int, longest_s: float, seed: int, rows: Rows, kinds: tuple[Kind, ...]) -> dict[str, Any]:
    """So many kills of each kind of study, in as many studies as that takes."""
    results: dict[str, Any] = {}
    for kind in kinds:
        done, number = 0, seed
        while done < kills:
            key = f"{kind.name}, seed {number}"
            results[key] = row = rows.of(key, partial(one, kind, trials, kills - done, longest_s, number))
            done, number = done + row["kills"], number + 1
            print(kind.name, number - 1, row, flush=True)
    return {
        "kills": sum(row["kills"] for row in results.values()),
        "trials": sum(row["trials"] for row in results.values()),
        "studies": len(results),
        "studies_that_differ": sum(not row["alike"] for row in results.values()),
        "processes_left_behind": sum(row["processes_left_behind"] for row in results.values()),
    }
