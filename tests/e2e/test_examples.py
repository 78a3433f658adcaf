"""Examples train, as a user runs them, to what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def trained(example: str, workers: int, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "elastune", "run", f"examples/{example}", "--workers", str(workers), "--json"]
    ran = subprocess.run(
        [*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_the_recurrent_network_reads_digits_alike_on_one_and_two_workers(tmp_path: Path) -> None:
    one, two = (trained("rows.py", workers, tmp_path / str(workers)) for workers in (1, 2))
    assert one["metrics"]["accuracy"] > 0.9
    assert one["sha256"] == two["sha256"]
