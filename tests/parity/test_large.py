"""Models that are built in parts, and layers that run again in a backward pass: the bits of plain ones, less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.soaked import soaked

from elastune.core.journal.records import RunFinished
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import JobFailed, run_job

PROGRAM = Path(__file__).parent / "programs" / "large.py"


def ran(cluster: LocalCluster, out: Path, execution: dict[str, Any], **config: Any) -> RunFinished:
    return run_job(
        RunSpec(Program(PROGRAM), out, config, execution=ExecutionSettings(**{"num_slots": 4, **execution})),
        cluster=cluster,
    )


@pytest.mark.parametrize("mechanism", ["tensor", "sharded", *soaked("zero")])
def test_bits_show_neither_where_a_model_was_built_nor_what_ran_again(
    cluster: LocalCluster, tmp_path: Path, mechanism: str
) -> None:
    """Layers are wide enough to lie in files while they are built; dropout draws the same when it runs again."""
    wide, execution = {"width": 160}, {"mechanism": mechanism, "workers": 2}
    plain = ran(cluster, tmp_path / "plain", {**execution, "workers": 1}, context=False, **wide)
    for name, config in (("context", {}), ("again", {"again": True})):
        assert ran(cluster, tmp_path / name, execution, **wide, **config).sha256 == plain.sha256, name


@pytest.mark.soak
def test_a_model_for_which_no_worker_has_room_trains_on_four(cluster: LocalCluster, tmp_path: Path) -> None:
    """Each process may take so much more than it has; a replica would need 64 MB each for parameters, gradients, their
    sums and momentum. (What counts is address space, in which a thread's stack takes 8 MB.)
    """
    large, room = {"width": 512, "layers": 16}, {"spare_mb": 230}
    sharded = {"mechanism": "sharded", "workers": 4, "copies": 1, "num_slots": 4}
    alone = {"mechanism": "replicated", "workers": 1, "num_slots": 4}
    plain = ran(cluster, tmp_path / "plain", alone, **large)
    with pytest.raises(JobFailed) as failed:
        ran(cluster, tmp_path / "alone", alone, **large, **room)
    assert failed.value.failure.reason == "out_of_memory"
    assert ran(cluster, tmp_path / "four", sharded, **large, **room).sha256 == plain.sha256
