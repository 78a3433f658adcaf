"""Examples train, as a user runs them, to what they promise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastune.core.journal.records import RunFinished
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.soak
def test_the_recurrent_network_reads_digits_alike_on_one_and_two_workers(
    tmp_path: Path, command_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)

    def trained(workers: int) -> dict[str, Any]:
        out = tmp_path / str(workers)
        result = command_here("run", "examples/rows.py", "--workers", workers, "--slots", 2, "--json", "--out", out)
        assert result.code == 0, result.err
        return dict(result.json)

    one, two = trained(1), trained(2)
    assert one["metrics"]["accuracy"] > 0.9
    assert one["sha256"] == two["sha256"]


def test_the_large_layers_of_a_cnn_are_split_over_workers_with_the_same_bits(
    tmp_path: Path, cluster: LocalCluster
) -> None:
    def trained(mesh: Mesh, trunk: str = "whole") -> RunFinished:
        execution = ExecutionSettings(workers=mesh.workers, mechanism="tensor", mesh=mesh, copies=1, num_slots=4)
        program, out = Program(ROOT / "examples" / "split_cnn.py"), tmp_path / f"{mesh}-{trunk}"
        config = {"trunk": trunk}
        return run_job(RunSpec(program, out, config=config, execution=execution, max_steps=6), cluster=cluster)

    one, two = trained(Mesh(tensor=1)), trained(Mesh(tensor=2))
    (whole,), parts = one.memory, two.memory
    assert [part.parameters / whole.parameters for part in parts] == pytest.approx([0.505, 0.505], abs=0.01)
    assert {one.sha256, two.sha256, trained(Mesh(tensor=2), "data").sha256} == {one.sha256}


@pytest.mark.parametrize("setting", ["trunk=half", "data_set=letters"])
def test_the_cnn_that_is_split_takes_the_settings_that_it_knows(
    tmp_path: Path, command_here: Callable[..., Any], setting: str
) -> None:
    program = ROOT / "examples" / "split_cnn.py"
    result = command_here("run", program, "--workers", 1, "--mechanism", "tensor", "--set", setting, "--out", tmp_path)
    assert result.code == 2
    name, value = setting.split("=")
    assert f"(got '{value}'): use --set {name}=" in result.err


@pytest.mark.soak
def test_an_ensemble_tells_what_each_view_of_its_inputs_is_worth(
    tmp_path: Path, command_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    out = tmp_path / "study"
    tuned = command_here("tune", "examples/views.py", "--trials", "1", "--keep", "all", "--epochs", "4", "--out", out)
    assert tuned.code == 0, tuned.err
    asked = ("ensemble", out, "--vary", "inputs=pressure,body+blood", "--workers", "2", "--method", "uniform", "--json")
    result = command_here(*asked).json
    assert {one["value"]: len(one["trials"]) for one in result["settings"]} == {"body": 2, "pressure": 2, "blood": 2}
    assert result["test"]["rows"] == 110
