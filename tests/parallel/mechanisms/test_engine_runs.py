"""Runs under mechanisms of other packages: as others train, from and to others' checkpoints, when one dies."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.launched import launched

from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import RunFinished
from elastune.core.run import Adapt, Elastic, ExecutionSettings, Program, RunSpec
from elastune.parallel.mechanisms.registry import MECHANISMS
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import JobFailed, run_job
from elastune.runtime.job.validation import check_adapt, check_execution
from elastune.testing.kits.engine import need
from elastune.train.program.load import load_as_guest

PROGRAM = Program(Path(__file__).parent / "programs" / "blocks.py")


def spec_of(
    out: Path, mechanism: str, *, workers: int = 2, config: dict[str, Any] | None = None, **more: Any
) -> RunSpec:
    execution = {
        name: more.pop(name)
        for name in ("mode", "num_slots", "zero_stage", "micro_batch", "precision", "offload")
        if name in more
    }
    return RunSpec(
        PROGRAM,
        out,
        config=config or {},
        execution=ExecutionSettings(workers, mechanism=mechanism, **{"num_slots": 4, "mode": "fast", **execution}),
        **more,
    )


@pytest.mark.soak
def test_a_run_goes_on_under_one_mechanism_after_another(cluster: LocalCluster, tmp_path: Path) -> None:
    """An epoch each, from the checkpoint of the one before; micro-batches that workers have unequally many of."""
    for name in ("deepspeed", "fairscale"):
        need(MECHANISMS[name])
    plain = run_job(spec_of(tmp_path / "plain", "replicated", micro_batch=5), cluster=cluster)
    turns = [("deepspeed", 3, 3), ("fsdp2", None, 3), ("fairscale", None, 2)]
    for epochs, (mechanism, stage, workers) in enumerate(turns, 1):
        spec = spec_of(
            tmp_path / "turns",
            mechanism,
            workers=workers,
            zero_stage=stage,
            micro_batch=5,
            epochs=epochs,
            resume=epochs > 1,
        )
        found = run_job(spec, cluster=cluster)
    assert (found.steps, found.samples, found.metrics["right"]) == (plain.steps, plain.samples, plain.metrics["right"])
    assert found.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-5)
    assert found.context.parameters == plain.context.parameters


def test_fsdp2_shares_torchruns_group_and_comes_to_the_same_bits(cluster: LocalCluster, tmp_path: Path) -> None:
    """What FSDP gathers and what this library reduces go through one process group there, in turns."""
    whole = run_job(spec_of(tmp_path / "whole", "replicated", workers=1, mode="exact", num_slots=2), cluster=cluster)
    out = tmp_path / "launched"
    run = ["run", str(PROGRAM.path), "--out", str(out), "--mechanism", "fsdp2", "--mode", "exact"]
    assert launched(run, 2, tmp_path / "errors") == [0, 0]
    *_, end = (entry.record for entry in read(out / "journal.jsonl"))
    assert isinstance(end, RunFinished)
    assert (end.sha256, end.workers) == (whole.sha256, 2)


def test_a_lost_worker_ends_the_run_at_once_and_it_can_be_resumed(cluster: LocalCluster, tmp_path: Path) -> None:
    need(MECHANISMS["fairscale"])
    begun = time.monotonic()
    with pytest.raises(JobFailed, match="signal 9"):
        run_job(spec_of(tmp_path, "fairscale", config={"dies": 12}), cluster=cluster)
    assert time.monotonic() - begun < 120
    found = run_job(spec_of(tmp_path, "fairscale", config={"dies": 12}, resume=True, until_epoch=1), cluster=cluster)
    assert found.steps == 8


@pytest.mark.parametrize("name", sorted(set(MECHANISMS) - {"replicated"}))
def test_what_it_cannot_do_is_refused_before_launch(name: str, tmp_path: Path) -> None:
    mechanism = MECHANISMS[name]
    need(mechanism)
    check_execution(spec_of(tmp_path, name))
    if not mechanism.exact:
        with pytest.raises(UserError, match="use --mode fast"):
            check_execution(spec_of(tmp_path, name, mode="exact"))
    with pytest.raises(UserError, match="use --precision fp32"):
        check_execution(spec_of(tmp_path, name, precision="bf16"))
    with pytest.raises(UserError, match="stay as they are"):
        check_execution(spec_of(tmp_path, name, elastic=Elastic(1, 3)))
    with pytest.raises(UserError, match="offload"):
        check_execution(spec_of(tmp_path, name, offload=True))
    with pytest.raises(UserError, match="noise_scale"):
        check_adapt(Adapt(monitors=("noise_scale",)), load_as_guest(PROGRAM), spec_of(tmp_path, name))
    check_adapt(Adapt(monitors=("performance",)), load_as_guest(PROGRAM), spec_of(tmp_path, name))


def test_exact_sums_of_fully_shard_need_a_torch_that_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastune.parallel.mechanisms.fsdp2.ORDERED", "99.0")
    check_execution(spec_of(tmp_path, "fsdp2"))
    with pytest.raises(UserError, match=r"needs torch 99.0.*use --mode fast"):
        check_execution(spec_of(tmp_path, "fsdp2", mode="exact"))


def test_a_stage_that_there_is_not(tmp_path: Path) -> None:
    need(MECHANISMS["fairscale"])
    with pytest.raises(UserError, match="use --zero-stage 2"):
        check_execution(spec_of(tmp_path, "fairscale", zero_stage=3))


@pytest.mark.parametrize("name", [name for name, mechanism in MECHANISMS.items() if mechanism.capabilities.package])
def test_what_is_not_installed_is_told_with_the_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastune.parallel.mechanisms.capabilities.find_spec", lambda name: None)
    with pytest.raises(UserError, match=MECHANISMS[name].capabilities.install.split()[0]):
        check_execution(spec_of(tmp_path, name))
