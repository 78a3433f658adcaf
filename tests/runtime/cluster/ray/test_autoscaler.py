"""Ray's own autoscaler, with nodes that are processes of this machine: agents that wait make it add some."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.elastic_runs import Runs

from elastune.core.journal.files import read
from elastune.core.journal.records import Regrouped, WorkerGone
from elastune.core.run import Program
from elastune.report.sample_ledger import ledger
from elastune.runtime.clusters.local import LocalCluster


@pytest.mark.timeout(400)
@pytest.mark.soak
def test_nodes_are_added_for_agents_that_wait_and_removed_after_a_resize(
    tmp_path: Path, cluster: LocalCluster, apart: Callable[[str], dict[str, Any]], program: Path
) -> None:
    assert apart("autoscaled.py") == {"before": 0, "grown": 2, "resized": 0, "shrunk": 1, "code": 0}
    alone = Runs(cluster, tmp_path / "alone", Program(program))(1, epochs=12, plain=True)
    assert json.loads((tmp_path / "result").read_text())["sha256"] == alone.sha256
    entries = read(tmp_path / "run" / "journal.jsonl")
    assert ledger(entries).exact
    records = [entry.record for entry in entries]
    assert [len(record.members) for record in records if isinstance(record, Regrouped)][-1] == 2
    assert {record.how for record in records if isinstance(record, WorkerGone)} == {"left"}
