"""What holders of divided state take, in shares and in words, beside what ``core.ownership`` deals out."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from elastune.core.layout import owners
from elastune.core.mesh import MechanismName, Mesh
from elastune.core.plan.memory import (
    HeldAlone,
    StateBytes,
    copies_text,
    further_parts,
    peak_bytes,
    serial_share_text,
    state_of_worker,
)
from elastune.core.plan.step_time import StepSplits, chain_of
from elastune.core.run import ExecutionSettings

MESHES = [Mesh(*sizes) for sizes in product((1, 2, 3), (1, 2, 4), (1, 2, 4), (1, 3))]


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_parts_of_the_fullest_worker_are_those_that_are_dealt_out(copies: int) -> None:
    for mesh in MESHES:
        dealt = [0] * mesh.workers
        inner = mesh.tensor * mesh.pipeline
        for part in owners(mesh, copies)[: mesh.shard * inner]:
            for rank in part:
                dealt[rank] += 1
        own, others = further_parts(*(np.array([float(n)]) for n in (mesh.data, mesh.shard, inner)), copies)
        assert 1 + own[0] + others[0] == max(dealt), mesh


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_a_plan_s_state_is_that_of_the_run_with_as_many_holders(copies: int) -> None:
    """A quarter of the model lies whole along tensor. Buffers, activations: none."""
    held = HeldAlone(1000.0, 1000.0, 2000.0, 0.0, 0.0, copies=copies)
    work = chain_of(12, 1.0, 0.0, 1000.0, divided=0.75)
    for mesh in MESHES:
        for sharded in (False, True) if mesh.pipeline == 1 else (False,):
            words = [axis for axis in ("tensor", "pipeline") if mesh.size(axis) > 1]
            name = MechanismName.parse("+".join([*words, "sharded" if sharded else "zero"]))
            columns = (96, 1, mesh.data, mesh.shard, mesh.tensor, mesh.pipeline, 8)
            splits = StepSplits(*(np.array([float(n)]) for n in columns))
            modelled = peak_bytes(held, work, splits, sharded)[0]
            expected = state_of_worker(StateBytes(1000.0, 1000.0, 2000.0), name, mesh, copies, 0.25).total
            assert modelled == pytest.approx(expected), (mesh, sharded)


def test_a_mesh_without_replicas_saves_nothing_with_two_holders() -> None:
    said = copies_text(ExecutionSettings(mesh=Mesh(tensor=2)))
    assert said.startswith(
        "each part of the divided state has 2 holders (the default), so that a lost worker costs no "
    )
    assert "a worker holds 100% of parameters, 100% of gradients and optimizer state (dividing saves no memory)" in said
    assert said.endswith("With --copies 1: 50% and 50%, if all layers divide")
    assert "holds 50% of parameters, 50% of gradients" in copies_text(ExecutionSettings(mesh=Mesh(tensor=4)))
    assert "has 3 holders, so" in copies_text(ExecutionSettings(mesh=Mesh(shard=4), mechanism="sharded", copies=3))


@pytest.mark.parametrize(
    "execution",
    [
        ExecutionSettings(workers=4),
        ExecutionSettings(mesh=Mesh(data=2, tensor=2)),
        ExecutionSettings(mesh=Mesh(tensor=2), copies=1),
        ExecutionSettings(workers=1, mechanism="tensor"),
    ],
)
def test_what_takes_no_memory_is_not_told(execution: ExecutionSettings) -> None:
    assert copies_text(execution) == ""


def test_without_elastic_workers_there_is_one_holder() -> None:
    assert copies_text(ExecutionSettings(mesh=Mesh(tensor=2)), elastic=False) == ""


def test_the_serial_share_bounds_what_tensor_brings() -> None:
    said = serial_share_text(0.25, 0.5)
    assert "tensor leaves 25% of parameters and 50% of arithmetic whole on each worker (the serial share)" in said
    assert "62% on tensor=2, 44% on tensor=4" in said
    assert said.endswith("1.33 x on tensor=2, 1.6 x on tensor=4, 1.78 x on tensor=8, at most 2 x on any")
    assert serial_share_text(0.25, None, Mesh(tensor=4)).endswith(
        "of the parameters a worker computes with 44% on tensor=4"
    )
    assert "no layer" in serial_share_text(1.0, 1.0)
    assert serial_share_text(0.001, 0.002).startswith("tensor divides nearly all of this model: less than 1%")
