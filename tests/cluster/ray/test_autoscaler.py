"""Ray's own autoscaler, with nodes that are processes of this machine: agents that wait make it add some."""

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
from elastune.journal.records import Regrouped, WorkerGone
from elastune.report.tables.sample_ledger import ledger
from elastune.testing.elastic_runs import Runs

HERE = Path(__file__).parent
PROGRAM = HERE.parents[1] / "faults" / "programs" / "elastic.py"
APART = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]  # Ray's daemons end with it


@pytest.mark.timeout(400)
def test_nodes_are_added_for_agents_that_wait_and_removed_after_a_resize(tmp_path: Path, cluster: LocalCluster) -> None:
    short = tempfile.mkdtemp(prefix="ray-")  # names of sockets have a limit
    environment = {**os.environ, "RAY_TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [*APART, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, str(HERE / "autoscaled.py")]
    try:
        words = [*command, str(tmp_path), str(PROGRAM)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        logs = {path.name: path.read_text()[-2000:] for path in Path(short).glob("ray/session_latest/logs/monitor.log")}
    finally:
        shutil.rmtree(short)
    assert done.returncode == 0, (done.stderr, logs)
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen == {"before": 0, "grown": 2, "resized": 0, "shrunk": 1, "code": 0}
    alone = Runs(cluster, tmp_path / "alone", Program(PROGRAM))(1, epochs=12, plain=True)
    assert json.loads((tmp_path / "result").read_text())["sha256"] == alone.sha256
    entries = read(tmp_path / "run" / "journal.jsonl")
    assert ledger(entries).exact
    records = [entry.record for entry in entries]
    assert [len(record.members) for record in records if isinstance(record, Regrouped)][-1] == 2
    assert {record.how for record in records if isinstance(record, WorkerGone)} == {"left"}
