"""One policy, told in one line, on two data sets and two numbers of workers: it decides by the data alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elastune.core.journal.records import Decided, PolicyFailed, Record
from elastune.core.run import Adapt, ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job

PROGRAM = Program(Path(__file__).parents[1] / "programs" / "two_data_sets.py")
POLICY = "gns:max_batch=256,factor=1,settle=8,cooldown=8"


def test_one_policy_decides_by_the_data_and_not_by_the_workers(tmp_path: Path, cluster: LocalCluster) -> None:
    def adapted(data_set: str, workers: int) -> tuple[str, list[tuple[int, dict[str, Any]]]]:
        records: list[Record] = []
        out, execution = tmp_path / f"{data_set}-{workers}", ExecutionSettings(workers=workers, num_slots=4)
        spec = RunSpec(PROGRAM, out, config={"data_set": data_set}, execution=execution, adapt=Adapt((POLICY,)))
        end = run_job(spec, cluster=cluster, observe=records.append)
        assert not [record for record in records if isinstance(record, PolicyFailed)]
        changes = [(r.step, r.decision) for r in records if isinstance(r, Decided) and r.outcome == "applied"]
        assert all(decision["batch_size"] > 16 for _, decision in changes)
        return end.sha256, changes

    results = {data_set: adapted(data_set, 1) for data_set in ("digits", "bands")}
    for data_set, alone in results.items():
        assert alone[1], f"nothing was decided on {data_set}"
        assert adapted(data_set, 2) == alone
    assert results["digits"][1] != results["bands"][1]
