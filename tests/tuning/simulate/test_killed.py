"""A simulated study that is killed and resumed tries what an undisturbed one tries, to the last bit."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.soaked import soaked
from tests.support.simulated_studies import simulate_until

from elastune.core.journal.files import read
from elastune.core.journal.records import TrialAdopted, TrialFinished, TrialStarted
from elastune.tuning.study.request import StudyRequest

SURROGATE = """
config = {"lr": 0.1, "x": 0.5}
objectives = {"error": "min", "seconds": "min"}

def space(trial):
    return {"lr": trial.suggest_float("lr", 0.001, 1.0, log=True), "x": trial.suggest_float("x", 0.0, 1.0)}

def surrogate(config, workers):
    if config["x"] > 0.95:
        raise ArithmeticError("no luck")
    epoch_s = 10.0 * PACE
    return [(epoch_s, {"error": abs(config["lr"] - 0.1) + (config["x"] - 0.3) ** 2 + 1 / e}) for e in range(1, 6)]
"""
PACES = {"each its own": '(1 + config["x"] / 7)', "all the same": "1"}  # the latter: everything happens at once


def tried(out: Path) -> tuple[list[Any], list[Any], int]:
    """Each trial's parameters, in order; how each ended; and how often a run went on though its controller had died."""
    results = [entry.record for entry in read(out / "journal.jsonl")]
    begun = [(record.trial, record.params) for record in results if isinstance(record, TrialStarted)]
    ends = [(r.trial, r.state, r.values, r.seconds, r.worker_seconds) for r in results if isinstance(r, TrialFinished)]
    return begun, ends, sum(isinstance(record, TrialAdopted) for record in results)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("pace", "changes"),
    [
        ("all the same", {"sampler": "tpe", "constraints": ("lr * x <= 0.01",)}),
        ("all the same", {"sampler": "genetic:population=3", "stopping": "hyperband"}),
        ("each its own", {"sampler": "nsga2", "stopping": "asha", "constraints": ("seconds <= 55",)}),
        *soaked(
            ("each its own", {"sampler": "tpe", "stopping": "asha"}),
            ("each its own", {"sampler": "gp", "stopping": "asha", "trials": 16}),
            (
                "all the same",
                {"sampler": "auto", "stopping": "hyperband", "constraints": ("seconds <= 55",), "trials": 16},
            ),
        ),
    ],
)
def test_kills_change_no_trial(pace: str, changes: dict[str, Any], program, tmp_path: Path) -> None:
    mine = program(SURROGATE.replace("PACE", PACES[pace]))
    request = StudyRequest(mine, tmp_path / "whole", workers=4, **{"trials": 24, **changes})
    simulate_until(request)
    rng, killed = random.Random(1), replace(request, out=tmp_path / "killed")
    simulate_until(killed, 2)
    for _ in range(8):
        simulate_until(replace(killed, resume=True), rng.randint(3, 30))
    simulate_until(replace(killed, resume=True))
    begun, ends, _ = tried(request.out)
    begun_again, ends_again, went_on = tried(killed.out)
    assert begun_again == begun
    assert ends_again == ends
    assert went_on > 4
