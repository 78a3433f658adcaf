"""A run under a hail of faults ends as if there had been none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.soak
def test_a_few_faults_leave_no_trace(tmp_path: Path) -> None:
    command = [
        sys.executable,
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
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}{ended.stderr[-3000:]}"
    assert ended.stdout.endswith("ok: 8 faults, and nothing shows\n")
