"""``ray job submit``: the controller is a job of Ray, its program comes with the job's working directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.elastic_runs import Runs

from elastune.core.journal.files import read
from elastune.core.journal.records import RunFinished
from elastune.core.run import Program
from elastune.report.sample_ledger import ledger
from elastune.runtime.clusters.local import LocalCluster


@pytest.mark.timeout(400)
@pytest.mark.soak
def test_a_run_is_submitted_as_a_job_and_grows_with_the_nodes(
    tmp_path: Path, cluster: LocalCluster, apart: Callable[[str], dict[str, Any]], program: Path
) -> None:
    assert apart("submitted.py") == {"waits": True, "code": 0, "succeeded": True, "left": []}
    alone = Runs(cluster, tmp_path / "alone", Program(program))(1, epochs=12, plain=True)
    entries = read(tmp_path / "run" / "journal.jsonl")
    (finished,) = (entry.record for entry in entries if isinstance(entry.record, RunFinished))
    assert (finished.stopped, finished.sha256) == ("complete", alone.sha256)
    assert ledger(entries).exact
