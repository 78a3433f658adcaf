"""Runs and studies that adapt, through the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastune.core.journal.files import read
from elastune.core.journal.records import Decided, Measured, RunStarted

Command = Callable[..., Any]
DOUBLING = """
from elastune.adapt.policies.base import Policy

class Doubling(Policy):
    monitors = ("loss",)

    def __init__(self, at: int = 3) -> None:
        self.at = at

    def after_step(self, run):
        if run.step == self.at:
            run.set_batch_size(2 * run.batch_size(), lr="linear")
"""


def test_a_policy_of_the_program_is_picked_told_and_journaled(here: Path, elastune: Command) -> None:
    text = DOUBLING + (here / "linear.py").read_text()
    (here / "adaptive.py").write_text(text)
    output = elastune(
        *("run", "adaptive.py", "--policy", "Doubling:at=2", "--monitor", "noise_scale", "--set", "lr=0.01"),
        *("--slots", "4", "--log", "tensorboard", "--log", "csv", "--out", "out", "--json"),
    )
    assert output.code == 0, output.err
    adapt = output.json["adapt"]
    assert (adapt["policies"], adapt["decisions"], adapt["failed"]) == (["Doubling:at=2"], 1, 0)
    assert adapt["noise_scale"] > 0
    assert adapt["batch_verdict"].startswith("Gradient noise scale ")
    assert adapt["batch_size"] in (16, 32), "as measured last"
    assert "Doubling: batch 16 -> 32, lr 0.01 -> 0.02" in output.err
    records = [entry.record for entry in read(here / "out" / "journal.jsonl")]
    (started,) = [record for record in records if isinstance(record, RunStarted)]
    assert started.adapt == {"policies": ["Doubling:at=2"], "monitors": ["noise_scale"]}
    (decided,) = [record for record in records if isinstance(record, Decided)]
    assert (decided.outcome, decided.decision["batch_size"], decided.cause.batch_size) == ("applied", 32, 16)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(here / "out" / "tensorboard"))
    events.Reload()
    batches = [(event.step, event.value) for event in events.Scalars("run/batch_size")]
    assert batches == [(m.step, m.batch_size) for m in records if isinstance(m, Measured)]
    assert f"decisions/{decided.policy}/text_summary" in events.Tags()["tensors"]
    assert "lr 0.01 -> 0.02" in (here / "out" / "csv" / "events.csv").read_text()

    result = elastune("report", "out", "--log", "csv")
    assert result.code == 0, result.err
    assert "Decisions (1)" in result.out
    assert f"batch {adapt['batch_verdict']}" in " ".join(result.out.split())
    assert "batch 16 -> 32, lr 0.01 -> 0.02" in result.out
    assert (here / "out" / "csv" / "events.csv").read_text().count("lr 0.01 -> 0.02") == 1, "nothing is logged twice"
    assert json.loads(elastune("report", "out", "--json").out)["adapt"] == adapt
    assert (here / "out" / "adapting.png").exists()


def test_a_study_has_static_and_adaptive_trials(here: Path, elastune: Command) -> None:
    space = (
        '\ndef space(trial):\n    policy = trial.suggest_categorical("policy", ["none", "Doubling:at=1"])\n'
        '    return {"policy": policy, "lr": 0.01}\n'
    )
    (here / "adaptive.py").write_text(DOUBLING + (here / "linear.py").read_text() + space)
    result = elastune("tune", "adaptive.py", "--trials", "2", "--sampler", "grid", "--out", "out", "--json")
    assert result.code == 0, result.err
    assert result.json["trials"] == {"complete": 2}
    report = (here / "out" / "report.html").read_text()
    assert "policy=Doubling:at=1" in report
    results = {trial["execution"]["policy"]: trial["values"]["loss"] for trial in result.json["front"]}
    assert results, "the front holds one of them at least"
    assert set(results) <= {"none", "Doubling:at=1"}
    assert ("--policy" in result.json["pick"]["command"]) == (
        next(t for t in result.json["front"] if t["trial"] == result.json["pick"]["trial"])["execution"]["policy"]
        != "none"
    )
