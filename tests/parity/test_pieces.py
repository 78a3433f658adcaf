"""Checkpoints that several workers have written in pieces: read by any others, the bits of a run without a stop."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tests.soaked import soaked

from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job
from elastune.train.checkpoints.checkpoint import complete
from elastune.train.checkpoints.checkpoint_part import file_name

PROGRAM = Path(__file__).parent / "programs" / "shares.py"
ZERO: dict[str, Any] = {"mechanism": "zero"}


def spec(out: Path, execution: dict[str, Any], max_steps: int | None = None) -> RunSpec:
    return RunSpec(
        Program(PROGRAM), out, execution=ExecutionSettings(**{"num_slots": 4, **execution}), max_steps=max_steps
    )


def test_any_workers_go_on_from_any_others(cluster: LocalCluster, tmp_path: Path) -> None:
    """Four with two copies each, then three, one, two that hold all of it, and two again; steps are in mid-epoch."""
    whole = run_job(spec(tmp_path / "whole", {"workers": 1}), cluster=cluster)
    chain = ({**ZERO, "workers": 4, "copies": 2}, {**ZERO, "workers": 3}, {**ZERO, "workers": 1}, {"workers": 2}, ZERO)
    for step, execution in enumerate(chain, start=2):
        until = None if execution is chain[-1] else step
        finished = run_job(replace(spec(tmp_path / "run", execution, until), resume=step > 2), cluster=cluster)
        assert finished.steps == (until or whole.steps)
        written = complete(tmp_path / "run" / "checkpoints")[-1]
        workers = ExecutionSettings(**{"num_slots": 4, **execution}).workers if "mechanism" in execution else 1
        names = {file_name(i, workers) for i in range(workers)}
        assert {file.name for file in written.iterdir()} == {"state.json", *names}
        assert_nothing_is_twice(written)
    assert finished.sha256 == whole.sha256


def assert_nothing_is_twice(path: Path) -> None:
    """Files together are as large as the tensors: 4 bytes for each element, and their names."""
    index = json.loads((path / "state.json").read_bytes())["checkpoint"]["tensors"]
    elements = 0
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            elements += sum(opened.get_tensor(key).numel() for key in opened.keys())  # noqa: SIM118
    wanted = [piece for entry in index.values() for piece in entry["pieces"]]
    assert elements == sum(stop - start for *_, start, stop in wanted)


@pytest.mark.parametrize("ahead", [1, *soaked(2, 3)])
def test_every_mechanism_reads_what_every_other_has_written(cluster: LocalCluster, tmp_path: Path, ahead: int) -> None:
    """State of blocks, stages and shares; what is read has the hash of what was written, before a step is taken.

    What one has written is read by who comes so far ``ahead`` of it in their round: by all others in three of them.
    """
    meshes = {"zero": Mesh(data=3), "sharded": Mesh(shard=2), "tensor": Mesh(tensor=2), "pipeline": Mesh(pipeline=2)}
    kinds: dict[str, dict[str, Any]] = {name: {"mechanism": name, "mesh": mesh} for name, mesh in meshes.items()}
    names = list(kinds)
    for at, writer in enumerate(names):
        out, reader = tmp_path / writer, names[(at + ahead) % len(names)]
        written = run_job(spec(out, kinds[writer], 2), cluster=cluster)
        read = run_job(replace(spec(out, kinds[reader], 2), resume=True), cluster=cluster)
        assert (read.steps, read.sha256) == (2, written.sha256), (writer, reader)


@pytest.mark.parametrize("which", [2, *soaked(0)])
def test_a_file_of_a_worker_that_is_damaged_costs_the_steps_since_the_one_before(
    cluster: LocalCluster, tmp_path: Path, which: int, capfd: pytest.CaptureFixture[str]
) -> None:
    execution = {**ZERO, "workers": 3}
    whole = run_job(spec(tmp_path / "whole", {"workers": 1}), cluster=cluster)
    for step in (3, 5):
        run_job(replace(spec(tmp_path / "run", execution, step), resume=step > 3), cluster=cluster)
    file = complete(tmp_path / "run" / "checkpoints")[-1] / file_name(which, 3)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    finished = run_job(replace(spec(tmp_path / "run", {**ZERO, "workers": 2}), resume=True), cluster=cluster)
    assert finished.sha256 == whole.sha256
    assert (tmp_path / "run" / "checkpoints" / "damaged-step-0000000005").is_dir()
