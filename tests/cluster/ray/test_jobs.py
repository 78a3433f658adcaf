"""``ray job submit``: the controller is a job of Ray, its program comes with the job's working directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from elastune.cluster.local import LocalCluster
from elastune.core.run import Program
from elastune.journal.reader import read
from elastune.journal.records import RunFinished
from elastune.report.tables.sample_ledger import ledger
from elastune.testing.elastic_runs import Runs

HERE = Path(__file__).parent
PROGRAM = HERE.parents[1] / "faults" / "programs" / "elastic.py"
APART = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]  # Ray's daemons end with it


@pytest.mark.timeout(400)
def test_a_run_is_submitted_as_a_job_and_grows_with_the_nodes(tmp_path: Path, cluster: LocalCluster) -> None:
    short = tempfile.mkdtemp(prefix="ray-")  # names of sockets have a limit
    environment = {**os.environ, "RAY_TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [*APART, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, str(HERE / "submitted.py")]
    try:
        words = [*command, str(tmp_path), str(PROGRAM)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
    finally:
        shutil.rmtree(short)
    said = (tmp_path / "said").read_text() if (tmp_path / "said").exists() else ""
    assert done.returncode == 0, (done.stderr[-4000:], said[-4000:])
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen == {"waits": True, "code": 0, "succeeded": True, "left": []}
    alone = Runs(cluster, tmp_path / "alone", Program(PROGRAM))(1, epochs=12, plain=True)
    entries = read(tmp_path / "run" / "journal.jsonl")
    (finished,) = (entry.record for entry in entries if isinstance(entry.record, RunFinished))
    assert (finished.stopped, finished.sha256) == ("complete", alone.sha256)
    assert ledger(entries).exact
