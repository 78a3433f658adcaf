"""A run under a hail of faults ends as if there had been none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHAOS = "benchmarks.elastic.chaos"


@pytest.mark.soak
def test_a_few_faults_leave_no_trace(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        CHAOS,
        "--faults",
        "8",
        "--seed",
        "3",
        "--data-set",
        "digits",
        "--keep",
        tmp_path / "runs",
    ]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}{ended.stderr[-3000:]}"
    assert ended.stdout.endswith("ok: 8 faults, and nothing shows\n")


@pytest.mark.soak
@pytest.mark.timeout(1300)
def test_kills_and_reshapes_of_divided_models_leave_no_trace() -> None:
    command = [sys.executable, "-m", "benchmarks.elastic.mesh_chaos", "--events", "12", "--seed", "100"]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=1200, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}{ended.stderr[-3000:]}"
    assert ended.stdout.endswith("kills and reshapes, and nothing shows\n")
