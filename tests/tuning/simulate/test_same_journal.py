"""A simulated study's journal, record by record, is that of the version in which these digests were taken.

The digests stand for the decisions of search, early stopping and the allocation of workers, and for the simulation's
own events. Whoever changes one of them on purpose takes new digests, and says so.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from elastune.core.journal.files import read
from elastune.core.journal.records import StudyStarted, encode_entry
from elastune.train.program.load import load
from elastune.tuning.simulate.cluster import WorkerFailures
from elastune.tuning.simulate.run import SurrogateModel, simulate
from elastune.tuning.study.request import StudyRequest

SURROGATE = """
config = {"lr": 0.1, "kind": "a", "batch_size": 100}
objectives = {"error": "min", "seconds": "min"}

def space(trial):
    return {"lr": trial.suggest_float("lr", 0.001, 1.0), "kind": trial.suggest_categorical("kind", ["a", "b"])}

def surrogate(config, workers):
    slow = 2.0 if config["kind"] == "a" else 1.0
    error = abs(config["lr"] - 0.3) + (0.0 if config["kind"] == "a" else 0.5)
    return [(10.0 * slow / workers, {"error": error + 1 / epoch}) for epoch in range(1, 10)]
"""

STUDIES: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "c4b7268bfcc5014d"),
    "asha": ({"stopping": "asha"}, "c7570e52e7790748"),  # a pause says whether it is held back
    "shared": (
        {"stopping": "asha", "trial_workers": (1, 4), "allocation": "steepest", "seed": 3},
        "a07c644f70934668",
    ),  # ranks by crowding on scales; a pause says whether it is held back
    "short first": (
        {"stopping": "asha", "trial_workers": (1, 4), "seed": 3},
        "7e6fb3266be1a474",
    ),  # the default: 266 looks are told, five long trials wait, further workers must bring a fifth of the first's
}


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def digest(journal: Path) -> str:
    """Of all records but the request, times included, to nine digits."""
    entries = [entry for entry in read(journal) if not isinstance(entry.record, StudyStarted)]
    lines = [json.dumps(rounded(json.loads(encode_entry(entry))), sort_keys=True) for entry in entries]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", STUDIES)
def test_the_journal_is_that_of_before(name: str, program, tmp_path: Path) -> None:
    changes, known = STUDIES[name]
    mine = program(SURROGATE)
    surrogate = load(mine).surrogate
    assert surrogate is not None
    request = StudyRequest(mine, tmp_path / name, sampler="random", trials=40, workers=6, **changes)
    losses = WorkerFailures(200.0, 1) if "trial_workers" in changes else None
    simulate(request, SurrogateModel(surrogate, start_s=1.0, resize_pause_s=0.5), losses=losses)
    assert digest(tmp_path / name / "journal.jsonl") == known
