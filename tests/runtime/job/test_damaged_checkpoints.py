"""A run whose newest checkpoint was changed on the disk goes on from the one before it, to the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elastune.cli.progress import RunTracker
from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import RunStarted
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.report.sample_ledger import ledger
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 16
    path.write_bytes(content)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_weights_of_a_changed_checkpoint_are_not_gone_on_with(
    cluster: LocalCluster, tmp_path: Path, tiny: Program
) -> None:
    spec = RunSpec(tiny, tmp_path / "out", execution=ExecutionSettings(workers=2, num_slots=4))
    whole = run_job(replace(spec, out=tmp_path / "whole"), cluster=cluster)
    run_job(replace(spec, until_epoch=2), cluster=cluster)
    saved = spec.out / "checkpoints"
    flip_a_bit(saved / "step-0000000020" / "tensors.safetensors")
    (saved / "step-1e3").mkdir()
    found = run_job(replace(spec, resume=True), cluster=cluster)
    assert (found.sha256, found.steps) == (whole.sha256, whole.steps)
    entries = read(spec.out / "journal.jsonl")
    started = [entry.record for entry in entries if isinstance(entry.record, RunStarted)][-1]
    assert started.resumed_step == 10
    (why,) = started.damaged
    assert "step-0000000020" in why
    line, lasting = RunTracker(3, None).observe(started)
    assert lasting
    assert line.startswith("resumed after step 10, since a newer checkpoint is damaged: ")
    assert ledger(entries).exact
    assert (saved / "damaged-step-0000000020").is_dir()


def test_where_every_checkpoint_was_changed_that_is_told(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    spec = RunSpec(tiny, tmp_path / "out", execution=ExecutionSettings(num_slots=4), until_epoch=2)
    run_job(spec, cluster=cluster)
    for path in (spec.out / "checkpoints").glob("step-*"):
        flip_a_bit(path / "state.json")
    before = contents(spec.out / "checkpoints")
    for _ in range(2):  # the second time is no start from the beginning either
        with pytest.raises(UserError, match="of a run's checkpoints one must be whole") as told:
            run_job(replace(spec, until_epoch=None, resume=True), cluster=cluster)
        assert "\n" not in str(told.value)
    assert contents(spec.out / "checkpoints") == before
