"""A frontier whose controller is killed goes on with its trainings from their checkpoints."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from elastune.cluster.local import LocalCluster
from elastune.core.run import Program
from elastune.frontier.phases import frontier
from elastune.journal.reader import read
from elastune.journal.records import Record, TrialFinished, TrialReported, TrialResumed, TrialStarted
from elastune.study.request import FrontierRequest

COUNTS = (1, 2)


def request(program: Program, out: Path, **changes: Any) -> FrontierRequest:
    settings: dict[str, Any] = {"budget_s": 0.5, "seeds": 2, "sampler": "random", "config": {"epochs": 4}, **changes}
    return FrontierRequest(program, out, COUNTS, **settings)


def records(out: Path) -> list[Record]:
    journal = out / "journal.jsonl"
    return [entry.record for entry in read(journal)] if journal.exists() else []


def naive(out: Path) -> set[int]:
    return {r.trial for r in records(out) if isinstance(r, TrialStarted) and r.phase == "naive"}


def cut_short(out: Path) -> set[int]:
    """Naive trainings that have a checkpoint, and have not ended."""
    over = {r.trial for r in records(out) if isinstance(r, TrialFinished)}
    return {t for t in naive(out) - over if list((out / "trials" / f"{t:05d}").glob("checkpoints/step-*"))}


def results(out: Path) -> dict[tuple[float, int, int], str]:
    """Weights of the naive trainings by learning rate, slots and seed."""
    began = {r.trial: r for r in records(out) if isinstance(r, TrialStarted)}
    ended = {r.trial: r.run for r in records(out) if isinstance(r, TrialFinished) and r.trial in naive(out)}
    told = {}
    for trial, run in ended.items():
        assert run is not None
        told[began[trial].config["lr"], began[trial].means["num_slots"], began[trial].seed] = run.sha256
    return told


def test_a_killed_frontier_trains_on_from_its_checkpoints(
    cluster: LocalCluster, tmp_path: Path, tiny: Program, program: Any, controller, until, all_gone
) -> None:
    """Trainings with the second seed wait after their third report until the controller is gone."""
    gate = tmp_path / "go on"
    waits = f"session.seed == 1 and session.epoch == 3 and not os.path.exists({str(gate)!r})"
    wait = f"        while {waits}:\n            time.sleep(0.01)\n"
    slow = program(tiny.path.read_text() + wait)
    out = tmp_path / "out"
    running = controller(lambda: frontier(request(slow, out)))
    until(lambda: len(cut_short(out)) >= 1, 60.0)
    family = running.family()
    running.signal(signal.SIGKILL)
    assert running.end() == -9
    all_gone(family)
    begun, before = cut_short(out), records(out)
    assert begun

    gate.touch()
    frontier(request(slow, out, resume=True), cluster=cluster)
    after = records(out)[len(before) :]
    assert {r.trial for r in after if isinstance(r, TrialResumed)} >= begun
    for trial in begun:
        again = [r.report.epoch for r in after if isinstance(r, TrialReported) and r.trial == trial]
        assert again, "it trained on"
        assert min(again) > 1, "not from its start"
        (end,) = [r for r in after if isinstance(r, TrialFinished) and r.trial == trial]
        assert end.run is not None
        assert end.run.epoch == 4

    frontier(request(slow, tmp_path / "undisturbed"), cluster=cluster)
    assert results(out) == results(tmp_path / "undisturbed")
    assert len(results(out)) == 4
