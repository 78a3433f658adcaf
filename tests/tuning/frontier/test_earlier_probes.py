"""Which earlier runs count as probes: those that are alike in all but mesh and pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.files import JournalWriter
from elastune.core.journal.records import DataContext, RunContext, RunFinished, RunStarted
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, Program
from elastune.tuning.cluster_plan.probes import EarlierProbe, earlier_probes

HERE = RunContext(DataContext(100), 1000, "cpu", "a processor", 2, "lo", {"torch": "2"})
CONFIG = {"lr": 0.1}


def kept(folder: Path, program: Program, execution: ExecutionSettings, **other: Any) -> Path:
    """A run's folder, with one step time."""
    begun = {"config": CONFIG, "sync": "allreduce", **{k: v for k, v in other.items() if k in ("config", "sync")}}
    end = {
        "context": HERE,
        "steps": 12,
        "step_s": 0.25,
        **{k: v for k, v in other.items() if k in ("context", "steps", "step_s")},
    }
    folder.mkdir(parents=True)
    with JournalWriter(folder / "journal.jsonl") as journal:
        journal.write(RunStarted(program=str(program.path), seed=0, execution=execution.to_json(), **begun))
        journal.write(
            RunFinished(sha256="0" * 64, workers=execution.workers, samples=192, seconds=3.0, metrics={}, **end)
        )
    return folder


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path / "train.py")


TWO = ExecutionSettings(mode="fast", mesh=Mesh(data=2), micro_batch=8)


def test_runs_in_a_folder_of_folders_and_a_run_s_own_count(tmp_path: Path, program: Program) -> None:
    kept(tmp_path / "plan" / "probe-1", program, TWO)
    one = kept(tmp_path / "one", program, ExecutionSettings(mode="fast", micro_batch=16))
    result = earlier_probes([tmp_path / "plan", one], program, CONFIG, HERE)
    assert result == (EarlierProbe(Mesh(data=2), 8, 0.25, ()), EarlierProbe(Mesh(), 16, 0.25, ()))
    assert earlier_probes([one], program, CONFIG, None) == ()


@pytest.mark.parametrize(
    "other",
    [
        {"config": {"lr": 0.2}},
        {"sync": "local:learners=2,every=4"},
        {"context": replace(HERE, processor="another")},
        {"context": replace(HERE, parameters=2000)},
        {"steps": 3},
        {"step_s": None},
    ],
    ids=str,
)
def test_what_differs_does_not_count(tmp_path: Path, program: Program, other: dict[str, Any]) -> None:
    assert earlier_probes([kept(tmp_path / "run", program, TWO, **other)], program, CONFIG, HERE) == ()


@pytest.mark.parametrize(
    "execution", [replace(TWO, mode="exact"), replace(TWO, precision="bf16"), replace(TWO, micro_batch=None)]
)
def test_other_means_do_not_count(tmp_path: Path, program: Program, execution: ExecutionSettings) -> None:
    assert earlier_probes([kept(tmp_path / "run", program, execution)], program, CONFIG, HERE) == ()


def test_a_folder_without_a_journal_is_told(tmp_path: Path, program: Program) -> None:
    with pytest.raises(UserError, match="must have journals"):
        earlier_probes([tmp_path], program, CONFIG, HERE)
