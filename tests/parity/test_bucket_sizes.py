"""How gradients are cut into messages shows in no result: the same bits by any bucket size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.core.sync_plan import SyncPlan
from elastune.parallel.comm.reducer import plan
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job
from elastune.runtime.job.validation import check_execution


def test_buckets_hold_as_much_as_is_asked_for() -> None:
    like = [torch.zeros(1000) for _ in range(12)]  # of 4,000 bytes
    assert [len(each) for each in plan(like, 8000)] == [2] * 6
    assert [len(each) for each in plan(like, 1)] == [1] * 12
    assert [len(each) for each in plan(like)] == [12]


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_bits_are_those_of_other_buckets(cluster: LocalCluster, tmp_path: Path, tiny: Program, mode: str) -> None:
    found = []
    for size in (None, 4):
        execution = ExecutionSettings(workers=2, num_slots=2, mode=mode, bucket_bytes=size)  # type: ignore[arg-type]
        spec = RunSpec(tiny, tmp_path / str(size), execution=execution, checkpoint_every_steps=0, epochs=1)
        found.append(run_job(spec, cluster=cluster).sha256)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("execution", "sync"),
    [
        (ExecutionSettings(bucket_bytes=0), SyncPlan()),
        (ExecutionSettings(workers=2, mechanism="zero", bucket_bytes=64), SyncPlan()),
        (ExecutionSettings(workers=2, mode="fast", compress="int8", bucket_bytes=64), SyncPlan()),
    ],
)
def test_where_there_are_no_such_buckets_a_size_is_refused(
    tmp_path: Path, tiny: Program, execution: ExecutionSettings, sync
) -> None:
    with pytest.raises(UserError, match="bucket"):
        check_execution(RunSpec(tiny, tmp_path, execution=execution, sync=sync))


def test_means_tell_it_where_it_was_chosen() -> None:
    assert "bucket_bytes" not in ExecutionSettings().to_json()
    assert ExecutionSettings.from_json(ExecutionSettings(bucket_bytes=64).to_json()) == ExecutionSettings(
        bucket_bytes=64
    )
    with pytest.raises(UserError, match="bucket_bytes must be a whole number"):
        ExecutionSettings(bucket_bytes=1.5)  # type: ignore[arg-type]
