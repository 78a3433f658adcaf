"""Odd models on several workers: one result for any number of them, or one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.soaked import soaked

from elastune.core.journal.records import RunFinished
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import JobFailed, run_job

PROGRAM = Path(__file__).parent / "programs" / "odd.py"


def run(cluster: LocalCluster, out: Path, case: str, workers: int, **execution: Any) -> RunFinished:
    config = {"case": case, **{k: execution.pop(k) for k in ("batch_size", "samples") if k in execution}}
    spec = RunSpec(
        Program(PROGRAM),
        out / f"{case}-{workers}-{execution.get('mode', 'exact')}",
        config=config,
        execution=ExecutionSettings(workers=workers, **{"num_slots": 4, **execution}),
        max_steps=6,
        checkpoint_every_steps=0,
    )
    return run_job(spec, cluster=cluster)


def same_for_all(cluster: LocalCluster, out: Path, case: str, counts: tuple[int, ...], **execution: Any) -> RunFinished:
    """The result of ``case``, after a check that it does not show the number of workers."""
    runs = {workers: run(cluster, out, case, workers, **execution) for workers in counts}
    assert len({r.sha256 for r in runs.values()}) == 1, {w: (r.sha256[:8], r.metrics) for w, r in runs.items()}
    return runs[counts[0]]


def moved(found: RunFinished) -> set[str]:
    """The layers whose weights training has changed."""
    return {name[6:] for name, value in found.metrics.items() if name.startswith("moved_") and value == 1.0}


def test_workers_begin_with_the_state_of_the_first(cluster: LocalCluster, tmp_path: Path) -> None:
    same_for_all(cluster, tmp_path, "plain", (1, 3))


def test_a_layer_that_few_slots_use_moves_everywhere_and_an_unused_one_nowhere(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    found = same_for_all(cluster, tmp_path, "unused", (1, 3))
    assert moved(found) == {f"{layer}_{kind}" for layer in ("body", "rare", "head") for kind in ("weight", "bias")}


def test_frozen_parameters_stay(cluster: LocalCluster, tmp_path: Path) -> None:
    assert not {name for name in moved(same_for_all(cluster, tmp_path, "frozen", (1, 2))) if "rare" in name}


@pytest.mark.parametrize("micro_batch", [3, *soaked(None, 1)])
def test_buffers_and_counters_do_not_show_the_workers(
    cluster: LocalCluster, tmp_path: Path, micro_batch: int | None
) -> None:
    """Slots of four and three samples: with micro-batches of three the workers make different numbers of passes."""
    found = same_for_all(cluster, tmp_path, "buffers", (1, 2), batch_size=25, micro_batch=micro_batch, num_slots=7)
    assert found.metrics["constant_kept"] == found.metrics["fine_kept"] == 1.0
    assert found.metrics["calls"] == 6.0


def test_batches_smaller_than_the_workers(cluster: LocalCluster, tmp_path: Path) -> None:
    """Three samples for four workers: one runs a copy that counts for nothing. Batch statistics and counters agree."""
    found = same_for_all(cluster, tmp_path, "buffers", (1, 4), batch_size=3, samples=7)
    assert found.metrics["calls"] == 6.0


def test_types_and_layouts(cluster: LocalCluster, tmp_path: Path) -> None:
    found = same_for_all(cluster, tmp_path, "layouts", (1, 2))
    assert {"conv_weight", "transposed", "narrow", "wide"} <= moved(found)


@pytest.mark.parametrize("workers", [2, *soaked(1)])
def test_a_sparse_gradient_is_refused(cluster: LocalCluster, tmp_path: Path, workers: int) -> None:
    with pytest.raises(JobFailed, match="sparse=False or --mode fast") as told:
        run(cluster, tmp_path, "sparse", workers)
    assert told.value.failure.reason == "user_error"


def test_a_gradient_that_comes_in_two_parts_is_refused(cluster: LocalCluster, tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="use_reentrant=False") as told:
        run(cluster, tmp_path, "recomputed", 1)
    assert told.value.failure.reason == "user_error"


@pytest.mark.parametrize(("case", "workers"), [("buffers", 3), ("layouts", 2), *soaked(("buffers", 2), ("layouts", 3))])
def test_fast_mode_agrees_on_buffers_whatever_the_passes(
    cluster: LocalCluster, tmp_path: Path, case: str, workers: int
) -> None:
    """25 samples in micro-batches of 9 are two passes on one worker and one on others; the run's end compares all."""
    found = run(cluster, tmp_path, case, workers, mode="fast", batch_size=25, micro_batch=9)
    assert found.metrics["constant_kept"] == found.metrics["fine_kept"] == 1.0


def test_fast_mode_takes_batches_smaller_than_the_workers(cluster: LocalCluster, tmp_path: Path) -> None:
    one = run(cluster, tmp_path, "frozen", 1, mode="fast", batch_size=2, samples=5)
    four = run(cluster, tmp_path, "frozen", 4, mode="fast", batch_size=2, samples=5)
    assert (one.steps, one.samples) == (four.steps, four.samples)


def test_fast_mode_takes_layers_that_few_or_no_samples_use(cluster: LocalCluster, tmp_path: Path) -> None:
    """Torch's DDP would stop at the second step with a page of advice."""
    for case in ("plain", "unused"):
        one = run(cluster, tmp_path, case, 1, mode="fast")
        three = run(cluster, tmp_path, case, 3, mode="fast")
        assert not {name for name in moved(three) if "never" in name}
        assert "body_weight" in moved(one) & moved(three)
