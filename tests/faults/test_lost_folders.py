"""An output folder that is taken away while a run trains, and a journal that cannot be gone on with: told at once."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.soaked import soaked

from elastune.core.errors import UserError
from elastune.core.journal.records import Record, Reported
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job

EPOCHS = 4
AT_ONCE_S = 60.0  # on a machine with other things to do; the run would take half an hour


def spec(program: Program, out: Path, pause_s: float = 0.0) -> RunSpec:
    config = {"epochs": EPOCHS, "pause_s": pause_s}
    return RunSpec(
        program, out, config=config, execution=ExecutionSettings(workers=2, num_slots=4), checkpoint_every_steps=1
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["removed", "replaced", *soaked("moved")])
def test_a_folder_that_is_gone_ends_the_run_at_once(
    cluster: LocalCluster, tmp_path: Path, tiny: Program, how: str
) -> None:
    out, gone_at = tmp_path / "out", []

    def take(record: Record) -> None:
        if not isinstance(record, Reported) or gone_at:
            return
        gone_at.append(time.monotonic())
        out.rename(tmp_path / "elsewhere")
        if how == "removed":
            shutil.rmtree(tmp_path / "elsewhere", ignore_errors=True)
        if how == "replaced":
            out.mkdir()

    changed = replace(spec(tiny, out, 0.2), config={"epochs": 1000, "pause_s": 0.2})
    with pytest.raises(UserError, match="was removed or replaced"):
        run_job(changed, cluster=cluster, observe=take)
    assert time.monotonic() - gone_at[0] < AT_ONCE_S
    while cluster.free < cluster.capacity:  # no worker is left to make it again
        assert time.monotonic() - gone_at[0] < AT_ONCE_S
        cluster.wait(0.05)
        cluster.pump(0.0)
    time.sleep(0.2)  # nor a thread that writes still
    assert out.exists() == (how == "replaced"), "nothing is made again"
    assert how != "replaced" or list(out.iterdir()) == []


@pytest.mark.parametrize("line", [b"no record\n", b'{"at": 1.0, "record": {"kind": "unheard of"}}\n'])
def test_a_bad_line_of_a_journal_is_told_before_a_worker_starts(
    cluster: LocalCluster, tmp_path: Path, tiny: Program, line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run_job(replace(spec(tiny, out), max_steps=3), cluster=cluster)
    journal = out / "journal.jsonl"
    first, rest = journal.read_bytes().split(b"\n", 1)
    journal.write_bytes(first + b"\n" + line + rest)
    before = journal.read_bytes()
    monkeypatch.setattr(cluster, "start", lambda spec: pytest.fail("a worker was started"))
    with pytest.raises(UserError, match=r"every line of a journal must be a record.*line 2"):
        run_job(replace(spec(tiny, out), resume=True), cluster=cluster)
    assert journal.read_bytes() == before
