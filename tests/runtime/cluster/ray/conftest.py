"""Scripts that have a Ray to themselves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PROGRAM = HERE.parents[2] / "faults" / "programs" / "elastic.py"
APART = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]  # Ray's daemons end with it


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Runs a script of this folder, which makes a Ray, in namespaces that end with it; what it has seen.

    The script is given ``tmp_path`` and the program, may write into a file ``said`` there, and prints a JSON object.
    """
    short = tempfile.mkdtemp(prefix="ray-")  # names of sockets have a limit
    environment = {**os.environ, "RAY_TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0"}
    before = [*APART, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable]

    def run(script: str) -> dict[str, Any]:
        words = [*before, str(HERE / script), str(tmp_path), str(PROGRAM)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        kept = [tmp_path / "said", *Path(short).glob("ray/session_latest/logs/monitor.log")]
        logs = {path.name: path.read_text()[-4000:] for path in kept if path.exists()}
        assert done.returncode == 0, (done.stderr[-4000:], logs)
        data: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return data

    yield run
    shutil.rmtree(short)


@pytest.fixture
def program() -> Path:
    """What the scripts train."""
    return PROGRAM
