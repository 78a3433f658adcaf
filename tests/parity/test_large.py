"""Models that are built in parts, and layers that run again in a backward pass: the bits of plain ones, less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastune.cluster.local import LocalCluster
from elastune.core.run import Means, Program, RunSpec
from elastune.job.run import run_job
from elastune.journal.records import RunFinished

PROGRAM = Path(__file__).parent / "programs" / "large.py"


def ran(cluster: LocalCluster, out: Path, means: dict[str, Any], **config: Any) -> RunFinished:
    return run_job(RunSpec(Program(PROGRAM), out, config, means=Means(**means)), cluster=cluster)


@pytest.mark.parametrize("mechanism", ["tensor", "zero", "sharded"])
def test_bits_show_neither_where_a_model_was_built_nor_what_ran_again(
    cluster: LocalCluster, tmp_path: Path, mechanism: str
) -> None:
    """Layers are wide enough to lie in files while they are built; dropout draws the same when it runs again."""
    wide, means = {"width": 160}, {"mechanism": mechanism, "workers": 2}
    plain = ran(cluster, tmp_path / "plain", {**means, "workers": 1}, context=False, **wide)
    for name, config in (("context", {}), ("again", {"again": True})):
        assert ran(cluster, tmp_path / name, means, **wide, **config).sha256 == plain.sha256, name
