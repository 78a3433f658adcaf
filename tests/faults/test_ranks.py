"""Programs whose ranks do not do the same: none hangs, none passes unseen; the line names rank, step and place."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.soaked import soaked
from tests.support.launched import launched

from elastune.core.journal.files import read
from elastune.core.journal.records import RunFailed
from elastune.core.run import Elastic, ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import JobFailed, run_job

PROGRAM = Program(Path(__file__).parent / "programs" / "ranks.py")
LIMIT_S = 90.0  # seconds of waiting are enough; the rest is for a busy machine
CALLS = "all ranks must make the same session calls in the same order (got after step "
STEPS = "all ranks must take a step with the same data and settings (got in step "


def line(text: str) -> int:
    """The number of the program's only line that holds ``text``."""
    (result,) = [number for number, of in enumerate(PROGRAM.path.read_text().splitlines(), 1) if text in of]
    return result


def place(text: str) -> str:
    return f"(ranks.py:{line(text)})"


BACKWARD, LOSS_MEAN = place("session.backward("), place("session.mean(loss)")
REPORT = place("session.report(loss=value)  # as all")
LEFT = "in the end of the training function (after it left session.epochs at"
TOLD: dict[str, tuple[str, ...]] = {
    "break": (
        CALLS + f"5, rank 0 in the reduction of step 6 {BACKWARD}",
        f"rank 1 in session.mean {LOSS_MEAN[:-1]}, after it left the batch loop at {place('break  # rank 1')[1:]}",
    ),
    "sum": (
        CALLS + f"10, rank 0 in session.report(loss) {REPORT}; rank 1 in session.sum {place('session.sum(value)')}",
    ),
    "sum inside": (CALLS + f"5, rank 0 in the reduction of step 6 {BACKWARD}; rank 1 in session.sum ",),
    "save": (
        CALLS + f"5, rank 0 in the reduction of step 6 {BACKWARD}; rank 1 in session.save {place('session.save()')}",
    ),
    "report": (CALLS + "10, rank 0 in a checkpoint", "; rank 1 in session.report(loss) (ranks.py:"),
    "other metrics": (CALLS + f"10, rank 0 in session.report(loss) {REPORT}; rank 1 in session.report(error) ",),
    "more metrics": (CALLS + f"10, rank 0 in session.report(loss) {REPORT}; rank 1 in session.report(error, loss) ",),
    "returns at once": (CALLS + "0, rank 0 in session.prepare(SGD, ", "rank 1 in the end of the training function"),
    "returns": (CALLS + "20, rank 0 in a checkpoint", f"; rank 1 {LEFT} {place('return  # rank 1')[1:]}"),
    "stops early": (CALLS + "20, rank 0 in a checkpoint", f"; rank 1 {LEFT} {place('break  # early')[1:]}"),
    "stops by its own loss": (CALLS + "20, rank 0 in a checkpoint", f"; rank 1 {LEFT} {place('break  # its own')[1:]}"),
    "one epoch more": (CALLS + "30, rank 0 in the end of the training function; rank 1 in the reduction of step 31",),
    "another model": (CALLS + "0, rank 0 in session.prepare(SGD, 9 tensors of 82 numbers", "2 tensors of 10 numbers"),
    "another optimizer": (CALLS + "0, rank 0 in session.prepare(SGD, ", "rank 1 in session.prepare(AdamW, "),
    "evaluates": (CALLS + "10, rank 0 in session.sum after the evaluation of 90 samples", "evaluation of 60 samples"),
    "other data": (STEPS + "1, rank 0 has data with checksum ", f"{BACKWARD}; rank 1 has data with checksum "),
    "less data": (STEPS + "1, rank 0 has a pass of 200 samples", "; rank 1 has a pass of 180 samples"),
    "smaller batch": (STEPS + "1, rank 0 has a batch of 20 samples", "; rank 1 has a batch of 10 samples"),
    "no shuffle": (STEPS + "1, rank 0 has samples whose numbers add up to ",),
    "rate": (STEPS + f"6, rank 0 has lr of group 0 0.05 {BACKWARD}; rank 1 has lr of group 0 0.025 {BACKWARD}",),
}


def ends(
    cluster: LocalCluster, out: Path, act: str, *, mode: Any = "exact", workers: int = 2, **spec: Any
) -> RunFailed:
    """How the run ends; within seconds, and with nothing of it left."""
    execution = ExecutionSettings(workers=workers, mode=mode, num_slots=4)
    begun = time.monotonic()
    with pytest.raises(JobFailed) as failed:
        run_job(RunSpec(PROGRAM, out, {"act": act}, execution=execution, **spec), cluster=cluster)
    assert time.monotonic() - begun < LIMIT_S
    assert cluster.free == cluster.capacity, "its workers are gone"
    return failed.value.failure


IN_CI = (  # of each way to say it: a call, a number of calls, an end, a start, data, settings
    *("break", "sum inside", "save", "more metrics", "returns at once", "stops early"),
    *("another model", "evaluates", "other data", "rate"),
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("act", [*IN_CI, *soaked(*sorted(TOLD.keys() - set(IN_CI)))])
def test_ranks_that_differ_are_named(cluster: LocalCluster, tmp_path: Path, act: str) -> None:
    failure = ends(cluster, tmp_path / "run", act)
    assert failure.reason == "user_error", failure
    for words in TOLD[act]:
        assert words in failure.detail
    assert "\n" not in failure.detail


@pytest.mark.parametrize("act", ["break", "other data", *soaked("sum", "rate")])
def test_in_fast_mode_and_among_three(cluster: LocalCluster, tmp_path: Path, act: str) -> None:
    failure = ends(cluster, tmp_path / "run", act, mode="fast", workers=3)
    assert failure.reason == "user_error", failure
    assert "ranks 0, 2 " in failure.detail
    assert "; rank 1 " in failure.detail


def test_a_rank_that_does_not_come_is_named_after_a_time(cluster: LocalCluster, tmp_path: Path) -> None:
    failure = ends(cluster, tmp_path / "run", "sleep", elastic=Elastic(collective_timeout_s=2.0))
    assert (failure.reason, failure.rank) == ("timeout", 1)
    assert f"in the reduction of step 6 {BACKWARD} after step 5, and --collective-timeout is 2 s" in failure.detail
    assert f"; missing: rank 1 in computing {place('time.sleep(')} for " in failure.detail


def test_what_reads_differently_each_time_is_no_difference(cluster: LocalCluster, tmp_path: Path) -> None:
    """A data set that draws from random numbers of its own: plain PyTorch trains it, and so do we."""
    spec = RunSpec(PROGRAM, tmp_path / "run", {"act": "noise"}, execution=ExecutionSettings(workers=2, mode="fast"))
    assert run_job(spec, cluster=cluster).steps == 30


def test_ranks_that_agree_train_alike_on_any_number(cluster: LocalCluster, tmp_path: Path) -> None:
    spec = RunSpec(PROGRAM, tmp_path / "one", execution=ExecutionSettings(num_slots=4))
    many = replace(spec, out=tmp_path / "three", execution=replace(spec.execution, workers=3))
    assert run_job(spec, cluster=cluster).sha256 == run_job(many, cluster=cluster).sha256


TORCHRUN = {
    "break": TOLD["break"],
    "sum": TOLD["sum"],
    "rate": TOLD["rate"],
    "stops early": (CALLS + "20, rank 0 in the reduction of step 21", f"; rank 1 {LEFT} {place('break  # early')[1:]}"),
    "sleep": (
        f"in the reduction of step 6 {BACKWARD} after step 5, and --collective-timeout is 2 s",
        f"; missing: rank 1 in computing {place('time.sleep(')} for ",
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("act", ["break", "rate", "sleep", *soaked("stops early", "sum", "break, by torchrun")])
def test_under_torchrun(tmp_path: Path, act: str) -> None:
    """There is no coordinator: workers tell each other through the store by which they met. Once by torchrun itself."""
    act, _, itself = act.partition(", ")
    run = ["run", str(PROGRAM.path), "--set", f"act={act}", "--slots", "4", "--collective-timeout", "2s"]
    run += ["--out", str(tmp_path / "run")]
    if itself:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        ended = subprocess.run([*launch, "-m", "elastune", *run], timeout=120.0, stderr=subprocess.PIPE, text=True)
        assert ended.returncode != 0
        result = ended.stderr
    else:
        # Who sleeps does not hear that it is to end.
        assert any(launched(run, 2, tmp_path / "errors", grace_s=1.0 if act == "sleep" else 30.0))
        result = (tmp_path / "errors").read_text()
    *_, end = (entry.record for entry in read(tmp_path / "run" / "journal.jsonl"))
    assert isinstance(end, RunFailed)
    assert end.reason == ("timeout" if act == "sleep" else "user_error")
    for words in TORCHRUN[act]:
        assert words in end.detail
        assert words in result
