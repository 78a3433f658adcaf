"""On a GPU: several workers on one device reduce over gloo, through host memory, to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastune.cluster.local import LocalCluster
from elastune.core.run import Means, Program, RunSpec
from elastune.job.run import run_job

PROGRAM = Path(__file__).parent / "programs" / "lenet.py"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_do_not_show_workers(cluster: LocalCluster, tmp_path: Path, precision: str) -> None:
    found = {
        workers: run_job(
            RunSpec(
                Program(PROGRAM),
                tmp_path / str(workers),
                means=Means(workers=workers, device="cuda", precision=precision),  # type: ignore[arg-type]
                max_steps=30,
            ),
            cluster=cluster,
        ).sha256
        for workers in (1, 2, 3)
    }
    assert len(set(found.values())) == 1, found
