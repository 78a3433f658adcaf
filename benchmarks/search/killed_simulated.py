"""Simulated studies that are killed and resumed at random records: do they try what an undisturbed one tries?

Part of ``killed_studies.py --simulated``. Each study dies by an exception that nothing catches, right after a random
record was written, and is resumed from its journal by a fresh loop; 20 times for each sampler and stopping.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.simulated_studies import simulate_until

from elastune.core.journal.files import read
from elastune.core.journal.records import TrialAdopted, TrialFinished, TrialStarted
from elastune.core.run import Program
from elastune.tuning.study.request import StudyRequest

PROGRAM = Program(Path(__file__).parents[1] / "programs" / "killed_surrogate.py")
STUDIES = (("auto", "asha"), ("gp", "none"), ("tpe", "hyperband"), ("genetic:population=4", "asha"), ("nsga2", "asha"))
KILLS_OF_EACH = 20
TRIALS, WORKERS = 24, 4


def tried(out: Path) -> tuple[list[Any], list[Any], int]:
    """Each trial's parameters, in order; how each ended; how often a trial went on though its controller had died."""
    results = [entry.record for entry in read(out / "journal.jsonl")]
    begun = [(record.trial, record.params) for record in results if isinstance(record, TrialStarted)]
    ends = [(r.trial, r.state, r.values, r.seconds, r.worker_seconds) for r in results if isinstance(r, TrialFinished)]
    return begun, ends, sum(isinstance(record, TrialAdopted) for record in results)


def one(sampler: str, stopping: str, kills: int, seed: int, folder: Path) -> dict[str, Any]:
    request = StudyRequest(
        PROGRAM, folder / "whole", sampler=sampler, stopping=stopping, trials=TRIALS, workers=WORKERS
    )
    simulate_until(request)
    records = len(read(request.out / "journal.jsonl"))
    rng = random.Random(f"{sampler} {stopping} {seed}")
    killed, points = replace(request, out=folder / "killed"), []
    for _ in range(kills):
        after = rng.randint(2, max(3, 2 * records // kills))
        resume = (killed.out / "journal.jsonl").exists()
        if not simulate_until(replace(killed, resume=resume), after):
            break
        points.append(len(read(killed.out / "journal.jsonl")))
    simulate_until(replace(killed, resume=True))
    (begun, ends, _), (begun_again, ends_again, went_on) = tried(request.out), tried(killed.out)
    same = sum(a == b for a, b in zip(begun, begun_again, strict=False))
    return {
        "kills": len(points),
        "killed_after_record": points,
        "trials": len(begun),
        "same_configurations": same,
        "alike": begun == begun_again and ends == ends_again,
        "trials_that_went_on_after_a_kill": went_on,
    }


def run(kills_of_each: int = KILLS_OF_EACH, seed: int = 0) -> dict[str, Any]:
    results: dict[str, Any] = {}
    began = time.monotonic()
    for sampler, stopping in STUDIES:
        kills, again = 0, 0
        while kills < kills_of_each:  # a study that ends first is followed by another
            folder = Path(tempfile.mkdtemp(prefix="killed-"))
            try:
                row = one(sampler, stopping, kills_of_each - kills, seed + again, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            results[f"{sampler} {stopping} {seed + again}"] = row
            kills, again = kills + row["kills"], again + 1
            print(sampler, stopping, seed + again - 1, row, flush=True)
    return {
        "kills": sum(row["kills"] for row in results.values()),
        "studies": len(results),
        "studies_that_differ": sum(not row["alike"] for row in results.values()),
        "seconds": round(time.monotonic() - began, 1),
        "by_study": results,
    }
