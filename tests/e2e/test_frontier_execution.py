"""A frontier through the command line whose search chooses means: workers, and how they agree."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastune.core.journal.files import read
from elastune.core.journal.records import TrialFinished, TrialStarted
from elastune.tuning.study.run_command import run_command

ROOT = Path(__file__).resolve().parents[2]
SPACE = """
def space(trial):
    chosen = {"sync": trial.suggest_categorical("sync", ["allreduce", "local"])}
    if chosen["sync"] == "local":
        chosen |= {"learners": 4, "every": 4}
    return {
        "batch_size": 32,
        "workers": trial.suggest_categorical("workers", [2, 3, 4]),
        **chosen,
    }


"""


@pytest.mark.soak
def test_the_search_chooses_workers_and_strategies(tmp_path: Path, command_here: Callable[..., Any]) -> None:
    text = (ROOT / "examples" / "digits.py").read_text()
    file, out = tmp_path / "digits.py", tmp_path / "out"
    file.write_text(text[: text.index("def space")] + SPACE.lstrip() + text[text.index("def make_model") :])
    asked = ("--workers", "2,4", "--budget", "5m", "--seeds", "2", "--epochs", "1", "--sampler", "grid")  # it is small
    said = command_here("frontier", str(file), *asked, "--out", str(out), "--json")
    assert said.code == 0, said.err
    rows = said.json["rows"]
    assert [(row["workers"], row["differences"]) for row in rows if row["role"] == "naive"] == [(2, ""), (4, "")]
    records = [entry.record for entry in read(out / "journal.jsonl")]
    begun = {record.trial: record for record in records if isinstance(record, TrialStarted)}
    searched = [trial for trial in begun.values() if trial.phase == "search"]
    assert {trial.execution.get("sync", "allreduce") for trial in searched} == {"allreduce", "local:learners=4,every=4"}
    assert len({trial.tags["layout"]["workers"] for trial in searched}) > 1
    told = command_here("explain", str(out))
    assert "of the search" in told.out
    page = (out / "report.html").read_text()
    ended = {record.trial: record for record in records if isinstance(record, TrialFinished)}
    rounds = next(trial for trial in searched if "sync" in trial.execution and ended[trial.trial].run is not None)
    if moved := [row for row in rows if row["differences"]]:
        assert "local:learners=4,every=4" in page
        assert "as asked for" in said.err + told.out + page
        assert all(row["seconds_label"] == "modelled" and row["seconds_factor"] is None for row in moved)
    # What one worker did for two: two do the same, bit for bit.
    execution = {**rounds.execution, "workers": 2}
    command = run_command(file, rounds.config, execution, rounds.seed, epochs=1)
    again = command_here(*shlex.split(command)[1:], "--out", str(tmp_path / "again"), "--json")
    trained = ended[rounds.trial].run
    assert trained is not None
    assert (again.json["workers"], again.json["sha256"]) == (2, trained.sha256)
