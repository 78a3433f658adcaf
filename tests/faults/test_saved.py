"""SIGKILL at each stage of a checkpoint that a thread writes: the run comes to the same bits, from a whole one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.soaked import soaked
from tests.support.elastic_runs import Ran, Runs, check_kept_on, check_same

from elastune.core.checkpoint_keeping import KeepCheckpoints
from elastune.core.journal.records import Checkpointed, CheckpointFailed, Restarted
from elastune.core.run import Elastic, Program
from elastune.train.checkpoints.checkpoint import complete, load, step_of

PROGRAM = Program(Path(__file__).with_name("programs") / "saved.py")
EVERY = {"checkpoint_every_steps": 4}
STAGES = ("snapshot", "file", "files", "manifest", "done")
LONE = Elastic(low=1, high=1, heartbeat_s=30.0)


@pytest.mark.parametrize("stage", ["file", "manifest", *soaked("snapshot", "files", "done")])
def test_the_only_worker_dies_and_the_run_goes_on_from_a_whole_one(
    runs: Runs, undisturbed: Ran, tmp_path: Path, stage: str
) -> None:
    out = tmp_path / "out"
    ran = runs(1, elastic=LONE, out=out, spec=EVERY, stage=stage, mark=str(tmp_path / "dead"))
    check_same(ran, undisturbed)
    (back,) = [record for record in ran.records if isinstance(record, Restarted)]
    assert back.step == (12 if stage == "done" else 10), "10 ended an epoch"
    whole = [load(path).position.step for path in complete(out / "checkpoints")]
    assert whole == [16, 20]
    assert not list((out / "checkpoints").glob(".*")), "drafts"


@pytest.mark.parametrize(
    ("mechanism", "stage", "dies"),
    [("sharded", "file", 1), *soaked(*(("sharded", stage, 0) for stage in STAGES), ("replicated", "files", 0))],
)
def test_one_of_three_dies_and_the_others_train_on(
    runs: Runs, undisturbed: Ran, tmp_path: Path, mechanism: str, stage: str, dies: int
) -> None:
    """Nobody goes back. The checkpoint may be missing, and then a record says so and names the one before."""
    out, mark = tmp_path / "out", str(tmp_path / "dead")
    ran = runs(3, execution={"mechanism": mechanism}, out=out, spec=EVERY, stage=stage, mark=mark, dies=dies)
    check_kept_on(ran, undisturbed)
    assert ran.lost == [dies]
    failed = [record for record in ran.records if isinstance(record, CheckpointFailed)]
    written = [record.step for record in ran.records if isinstance(record, Checkpointed)]
    assert [(record.step, record.newest) for record in failed] == ([] if stage == "done" else [(12, 10)])
    assert written == [4, 8, 10, 16, 20]
    assert [step_of(path) for path in complete(out / "checkpoints")] == [16, 20]
    assert not list((out / "checkpoints").glob(".*")), "drafts"


@pytest.mark.parametrize("mechanism", ["replicated", "sharded"])
def test_checkpoints_that_rules_keep_stay_and_the_journal_has_the_others(
    runs: Runs, undisturbed: Ran, tmp_path: Path, mechanism: str
) -> None:
    out = tmp_path / "out"
    keep = KeepCheckpoints.parse("last:1,every:8,best:steps:min")
    ran = runs(2, execution={"mechanism": mechanism}, out=out, spec={**EVERY, "keep_checkpoints": keep})
    check_kept_on(ran, undisturbed)
    records = [record for record in ran.records if isinstance(record, Checkpointed)]
    dropped = sorted(step for record in records for step in record.dropped)
    assert [step_of(path) for path in complete(out / "checkpoints")] == [8, 10, 16, 20], "10 has the least report"
    assert dropped == [4, 12]
