"""Steps by the record of a cluster's plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.records import PlanMade
from elastune.core.mesh import Mesh
from elastune.core.plan.step_time import CONSTANTS, check_program, predicted_step
from elastune.core.run import ExecutionSettings

SIZE = {"batch_size": 16, "layers": 4, "flops": 1e6, "kept_bytes": 0.0, "gradient_bytes": 1e3}
COST = {**dict.fromkeys(CONSTANTS, 1e-12), "flop_s": 1e-9, "gradient_hop_s": 5e-3}
MADE = PlanMade("train.py", {"workers_per_node": 4}, {"size": SIZE}, COST)
TWO = ExecutionSettings(mode="fast", mesh=Mesh(data=2), micro_batch=8)


def test_a_step_is_what_its_terms_say() -> None:
    assert predicted_step(MADE, ExecutionSettings(mode="fast"), 16) == pytest.approx(16e-3)  # 16 x 1 MFLOP at 1 GFLOP/s
    assert predicted_step(MADE, TWO, 16) == pytest.approx(8e-3 + 2 * 5e-3)
    assert predicted_step(MADE, replace(TWO, mesh=Mesh(data=2, pipeline=2), mechanism="pipeline"), 16) is not None
    assert predicted_step(MADE, replace(TWO, mechanism="fsdp2"), 16) is None


def test_sharded_workers_gather_in_every_pass() -> None:
    """Two passes, of 3 parts each, gathered twice and left once; a sum is two hops."""
    made = replace(MADE, answer={"size": {**SIZE, "gathered": 3}})
    two = ExecutionSettings(mode="fast", mesh=Mesh(shard=2), mechanism="sharded", micro_batch=4)
    assert predicted_step(made, two, 16) == pytest.approx(8e-3 + 2 * 3 * 3 * 5e-3)
    assert predicted_step(made, replace(two, mechanism="zero"), 16) == pytest.approx(8e-3 + 2 * 5e-3)


def test_a_plan_is_of_one_program() -> None:
    check_program(MADE, Path("train.py"))
    check_program(MADE, {"path": "train.py"})
    with pytest.raises(UserError, match="of the program that ran"):
        check_program(MADE, "other.py")
