"""Simulated studies that hold long trials back: they wait, go on, and end; told again, the journal says the same."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.simulated_studies import simulate_until

from elastune.core.journal.files import read
from elastune.core.journal.records import (
    Entry,
    StudyStarted,
    TrialFinished,
    TrialPaused,
    TrialReported,
    TrialResumed,
    TrialStarted,
)
from elastune.tuning.study.rebalancer import MAX_WAIT_S, parse_allocation
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.trial_progress import HeldTrials

SURROGATE = """
config = {"x": 0.5, "batch_size": 100}
objectives = {"error": "min", "cost": "min"}

def space(trial):
    return {"x": trial.suggest_float("x", 0.0, 1.0), "batch_size": trial.suggest_categorical("batch_size", [20, 500])}

def surrogate(config, workers):
    gain = 1 + (workers - 1) * (0.2 if config["batch_size"] == 20 else 0.9)
    epoch_s = 5.0 + (200.0 if config["x"] > 0.85 else 20.0 * config["x"])
    return [(epoch_s / gain, {"error": abs(config["x"] - 0.6) + 1 / epoch}) for epoch in range(1, 10)]
"""


def asked(program: Any, out: Path, **changes: Any) -> StudyRequest:
    common = {"sampler": "random", "trials": 20, "workers": 10, "trial_workers": (1, 8), "seed": 1}
    return StudyRequest(program, out, allocation="short_first", **{**common, **changes})


def go(request: StudyRequest, records: int | None = None) -> None:
    simulate_until(request, records, resize_pause_s=0.5)


def journal(out: Path) -> list[Entry]:
    return read(out / "journal.jsonl")


def told(out: Path, kind: type) -> list[Any]:
    return [entry.record for entry in journal(out) if isinstance(entry.record, kind)]


def held(out: Path) -> set[int]:
    return {r.trial for r in told(out, TrialPaused) if r.held}


@pytest.mark.parametrize("stopping", ["none", "asha:min_resource=3", "hyperband"])
def test_long_trials_wait_and_go_on(stopping: str, program, tmp_path: Path) -> None:
    request = asked(program(SURROGATE), tmp_path / "out", stopping=stopping)
    go(request)
    entries, waited = journal(request.out), held(request.out)
    xs = {r.trial: r.config["x"] for r in told(request.out, TrialStarted)}
    assert waited
    assert min(xs[trial] for trial in waited) > 0.4, "the long ones"
    for trial in waited:
        (paused,) = [i for i, e in enumerate(entries) if e.record == next(_pauses(entries, trial))]
        resumed = [i for i, e in enumerate(entries) if isinstance(e.record, TrialResumed) and e.record.trial == trial]
        assert resumed[0] > paused
        assert entries[resumed[0]].record.cut_off, "early stopping knows nothing of it"
    ended = {r.trial for r in told(request.out, TrialFinished)}
    stopped = {r.trial for r in told(request.out, TrialPaused) if not r.cut_off}
    assert ended | stopped == set(range(20)), "nobody is left waiting"
    if stopping == "none":
        assert len(ended) == 20


def _pauses(entries: list[Entry], trial: int) -> Any:
    return (
        e.record for e in entries if isinstance(e.record, TrialPaused) and e.record.trial == trial and e.record.held
    )


def test_in_a_study_without_end_who_waited_long_enough_comes_next(program, tmp_path: Path) -> None:
    """New trials would always take what is idle: a held one goes on once it has waited as long as it trains."""
    request = asked(program(SURROGATE), tmp_path / "out", trials=None, budget_s=6000.0, workers=6, trial_workers=(1, 4))
    go(request)
    assert held(request.out) & {r.trial for r in told(request.out, TrialFinished)}


def test_who_is_held_follows_from_the_journal(program, tmp_path: Path) -> None:
    request = asked(program(SURROGATE), tmp_path / "out")
    go(request)
    entries, found = journal(request.out), set()
    choice = parse_allocation(request.allocation)
    again = HeldTrials(choice.courses(), choice.held, MAX_WAIT_S)
    for entry in entries:
        again.observe(entry)
        if isinstance(entry.record, TrialReported):
            report = entry.record.report
            found |= {entry.record.trial} if again.why(entry.record.trial, report, entry.at) else set()
    assert found == held(request.out)


def test_a_killed_study_goes_on_holding(program, tmp_path: Path) -> None:
    request, rng = asked(program(SURROGATE), tmp_path / "out"), random.Random(2)
    go(whole := replace(request, out=tmp_path / "whole"))
    records = [entry.record for entry in journal(whole.out)]
    first = next(n for n, record in enumerate(records) if isinstance(record, TrialPaused) and record.held)
    go(request, first + 3)
    before = held(request.out)
    for _ in range(6):
        go(replace(request, resume=True), rng.randint(5, 60))
    go(replace(request, resume=True))
    assert before
    assert before <= held(request.out)
    ended = [r.trial for r in told(request.out, TrialFinished)]
    assert sorted(ended) == list(range(20))
    assert len(told(request.out, StudyStarted)) == 8


def test_the_same_request_gives_the_same_journal(program, tmp_path: Path) -> None:
    mine = program(SURROGATE)
    journals = []
    for name in ("one", "other"):
        go(asked(mine, tmp_path / name))
        entries = [entry for entry in journal(tmp_path / name) if not isinstance(entry.record, StudyStarted)]
        journals.append(entries)
    assert journals[0] == journals[1]
