"""What a plan's fullest worker holds, beside the formulas that a run's report uses."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from elastune.core.mesh import MechanismName, Mesh
from elastune.core.plan.memory import HeldAlone, StateBytes, peak_bytes, state_of_worker
from elastune.core.plan.step_time import StepSplits, StepWork

EVEN = StepWork(*(np.float64(x) for x in (8, 1, 1, 1, 100, 0, 0)))
MESHES = [Mesh(*sizes) for sizes in product((1, 2), (1, 2, 4), (1, 2), (1, 2, 4))]


def column(mesh: Mesh, batch: int = 64, micro: int = 2) -> StepSplits:
    results = (batch, micro, mesh.data, mesh.shard, mesh.tensor, mesh.pipeline, 8)
    return StepSplits(*(np.array([x], float) for x in results))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("state", ["zero", "sharded"])
def test_state_is_divided_as_one_holder_of_each_part_divides_it(mesh: Mesh, state: str) -> None:
    words = [axis for axis in ("tensor", "pipeline") if mesh.size(axis) > 1]
    name = MechanismName.parse("+".join([*words, state]))
    result = state_of_worker(StateBytes(4000.0, 4000.0, 8000.0), name, mesh, copies=1)
    held = HeldAlone(4000.0, 4000.0, 8000.0, 0.0, 0.0)
    assert peak_bytes(held, EVEN, column(mesh), sharded=state == "sharded")[0] == pytest.approx(result.total)


def test_the_first_stage_keeps_as_many_passes_as_there_are_stages() -> None:
    held = HeldAlone(0.0, 0.0, 0.0, kept_split=80.0, kept_whole=16.0)
    assert peak_bytes(held, EVEN, column(Mesh()))[0] == pytest.approx(2 * 96)
    assert peak_bytes(held, EVEN, column(Mesh(pipeline=4)))[0] == pytest.approx(2 * 96)
    assert peak_bytes(held, EVEN, column(Mesh(pipeline=4), batch=4))[0] == pytest.approx(2 * 2 * 96 / 4)  # two passes
    assert peak_bytes(held, EVEN, column(Mesh(tensor=4)))[0] == pytest.approx(2 * (20 + 16))


def test_buffers_are_divided_as_the_parameters_that_are_computed_with() -> None:
    held = HeldAlone(0.0, 0.0, 0.0, 0.0, 0.0, buffer=80.0)
    plans = (
        (Mesh(data=4), 3),
        (Mesh(shard=4), 2),
        (Mesh(tensor=4), 0),
        (Mesh(data=2, tensor=4), 2 / 4),
        (Mesh(shard=2, pipeline=2), 2 / 2),
    )
    for mesh, buffers in plans:
        assert peak_bytes(held, EVEN, column(mesh))[0] == pytest.approx(80 * buffers)


def test_the_stage_with_most_parameters_holds_most_and_what_tensor_leaves_whole_is_on_each() -> None:
    held = HeldAlone(100.0, 0.0, 0.0, 0.0, 0.0)
    uneven = replace(EVEN, whole_bytes=np.array(20.0), fullest_bytes=(1.0, 0.7))
    assert peak_bytes(held, uneven, column(Mesh(pipeline=2)))[0] == pytest.approx(70)
    assert peak_bytes(held, uneven, column(Mesh(tensor=4)))[0] == pytest.approx(80 / 4 + 20)


def test_an_edge_makes_its_stage_the_fullest() -> None:
    work = StepWork(*(np.float64(x) for x in (4, 1, 1, 1, 100, 0, 400)))
    held = HeldAlone(800.0, 0.0, 0.0, 0.0, 0.0)
    assert peak_bytes(held, work, column(Mesh(pipeline=4)))[0] == pytest.approx(500)


def test_what_is_no_number_of_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="kept_whole"):
        HeldAlone(1.0, 1.0, 1.0, 1.0, float("nan"))
