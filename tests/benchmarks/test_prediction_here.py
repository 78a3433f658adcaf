"""Pure parts of benchmarks/parallel/prediction_here.py: rows, limits of the step model, verdict and file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.parallel.prediction_here import ENGINES, Kept, judge, key_of, plans
from benchmarks.parallel.prediction_planned import own_part, plan_of, times

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh


def row(predicted: float, measured: float | None, *, model: str = "mlp", probed: bool = False) -> dict[str, Any]:
    error = None if measured is None else predicted / measured - 1
    results = {
        "model": model,
        "key": str(predicted),
        "probed": probed,
        "step_s": predicted,
        "measured_step_s": measured,
    }
    return {**results, "step_error": error, "within": True, "memory_error": 0.02, "part_error": None, "busy": 0.5}


def test_rows_are_every_mechanism_on_meshes_of_up_to_so_many_workers() -> None:
    wanted = plans(8)
    assert len({key_of(plan) for plan in wanted}) == len(wanted) == 42
    assert {own_part(plan) for plan in wanted} == {"replicated", "zero", "sharded", *ENGINES}
    assert max(plan.mesh.workers for plan in wanted) == 8
    assert all(plan.mesh.workers <= 2 for plan in plans(2))
    assert all(plan.micro * plan.mesh.batch <= plan.batch for plan in wanted)


def test_what_is_beyond_the_step_model_comes_as_often_as_the_mechanism_does_it() -> None:
    """32 samples on 4 workers in passes of 4: two passes, three hops."""
    four = Mesh(shard=4)
    results = {name: times(plan_of(name, four, 32, 4)) for name in ("zero", "sharded", *ENGINES)}
    assert results == {"zero": 1, "sharded": 6, "fsdp2": 6, "deepspeed": 2, "fairscale": 1}


def test_the_verdict_is_of_all_rows_that_ran() -> None:
    whole = judge([row(1.0, 2.0), row(3.0, 3.0, probed=True), row(4.0, None), row(2.2, 2.0)])
    assert (whole["rows"], whole["ran"]) == (4, 3)
    assert whole["mean_error"] == pytest.approx((0.5 + 0 + 0.1) / 3)
    assert whole["mean_error_not_probed"] == pytest.approx(0.3)
    assert whole["memory_part_error"] is None
    assert judge([row(1.0, None)]) == {"rows": 1, "ran": 0}
    assert judge([row(1.0, 1.0), row(2.0, 2.0), row(3.0, 3.0)])["tau"] == pytest.approx(1.0)


def test_a_run_that_was_cut_goes_on_with_its_own_settings(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    kept = Kept.begun({"batch": 32}, out)
    kept.facts["mlp"] = {"predicted": {"1.0": {}, "2.0": {}}}
    kept.rows.append(row(1.0, 2.0))
    kept.write()
    assert Kept.begun({"batch": 32}, out).left("mlp") == ["2.0"]
    with pytest.raises(UserError, match="own settings"):
        Kept.begun({"batch": 64}, out)
