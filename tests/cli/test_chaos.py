"""What ``--chaos`` and ``--chaos-verify`` say at a run's end: of what did not happen nothing is shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastune.cli import chaos
from elastune.core.journal.records import Entry, FaultInjected, Record, RunFinished
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.job import run as job
from elastune.runtime.job.fault_injection import parse_chaos

ENDED = RunFinished("abc", 0, 0, 2, 1.0, {})


def verdict(
    monkeypatch: pytest.MonkeyPatch, *records: Record, missing: dict[str, str], planned: bool, again: str = "abc"
) -> tuple[chaos.Verdict, list[RunSpec]]:
    """Of a run with ``records``; ``again``: the weights of an undisturbed one, and whether such a one was trained."""
    trained: list[RunSpec] = []

    def run_job(spec: RunSpec) -> RunFinished:
        trained.append(spec)
        return replace(ENDED, sha256=again)

    monkeypatch.setattr(chaos, "read", lambda path: [Entry(float(i), r) for i, r in enumerate((*records, ENDED))])
    monkeypatch.setattr(job, "run_job", run_job)
    faults = chaos.Faults(parse_chaos("kill,join,kill@40%"), verify=True)
    injector = cast(Any, SimpleNamespace(not_injected=missing, planned_missing=planned))
    found = faults.verdict(
        RunSpec(Program(Path("p.py")), Path("out"), execution=ExecutionSettings(workers=2)), injector
    )
    assert found is not None
    return found, trained


def test_all_that_was_asked_for_has_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    found, trained = verdict(monkeypatch, FaultInjected("kill", 1), missing={}, planned=False)
    assert found.lines[-1] == "        the same state as an undisturbed run: abc"
    assert (found.good, found.data["verified"], found.data["equal"], len(trained)) == (True, True, True, 1)


def test_no_fault_is_no_proof_and_nothing_is_trained_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"kill@40%": "the run ended before its time", "join": "none fell due at 0.05 a second"}
    found, trained = verdict(monkeypatch, missing=missing, planned=True)
    said = "\n".join(found.lines)
    assert "faults injected: none" in said
    assert "not injected: kill@40% (the run ended before its time)" in said
    assert "not injected: join (none fell due at 0.05 a second)" in said
    assert "NOT verified" in said
    assert "same state" not in said
    assert (found.good, found.data["verified"], found.data["equal"], trained) == (False, False, None, [])
    assert found.data["not_injected"] == missing


def test_a_planned_fault_that_did_not_come_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"kill@40%": "the run ended before its time"}
    found, _ = verdict(monkeypatch, FaultInjected("join"), missing=missing, planned=True)
    said = "\n".join(found.lines)
    assert "equal to an undisturbed run as far as 1 join can show: abc" in said
    assert "NOT verified" in said
    assert "same state" not in said
    assert not found.good


def test_a_rate_that_brought_nothing_is_told_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"join": "none fell due at 0.05 a second"}
    found, _ = verdict(monkeypatch, FaultInjected("kill", 1), missing=missing, planned=False)
    assert found.lines[-1] == "        equal to an undisturbed run as far as 1 kill can show: abc"
    assert (found.good, found.data["verified"]) == (True, True)


def test_other_weights_are_told_whatever_has_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = verdict(monkeypatch, FaultInjected("kill", 1), missing={"join": "no"}, planned=False, again="other")
    assert found.lines[-1] == "        NOT the same state as an undisturbed run: other"
    assert not found.good
