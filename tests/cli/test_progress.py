"""What progress says, and that stdout stays clean."""

import os
import pty
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.cli.progress import Progress, RunTracker, StudyTracker, eta_s
from elastune.core.journal.records import (
    Checkpointed,
    CheckpointFailed,
    Decided,
    Measured,
    MembershipEvent,
    PolicyFailed,
    Reported,
    Restarted,
    RoundsShortened,
    RunFailed,
    RunFinished,
    RunStarted,
    StepsPlanned,
    StudyFinished,
    StudyStarted,
    SyncChangesUnreached,
    TrialFinished,
    TrialPaused,
    TrialResumed,
    TrialStarted,
)


def reported(epoch: int, step: int) -> Reported:
    return Reported(epoch=epoch, step=step, samples=step * 32, seconds=1.0, metrics={"accuracy": 0.9})


def trial(number: int, phase: str = "search") -> TrialStarted:
    return TrialStarted(trial=number, config={"lr": 0.1}, execution={}, seed=0, phase=phase)  # type: ignore[arg-type]


def test_a_run_knows_how_far_it_is() -> None:
    tracker = RunTracker(epochs=4, max_steps=None)
    assert tracker.done(1.0) is None
    assert tracker.observe(reported(1, 30)) == ("epoch 1/4, step 30: accuracy 0.9", False)
    assert tracker.done(99.0) == 0.25
    tracker = RunTracker(epochs=4, max_steps=40)
    tracker.observe(reported(1, 30))
    assert tracker.done(99.0) == 0.75, "whichever bound comes first"
    tracker = RunTracker(None, None)
    tracker.observe(reported(1, 30))
    assert tracker.done(99.0) is None


def test_a_run_tells_its_start_and_its_end() -> None:
    tracker = RunTracker(1, None, ["", "each part has 2 holders"])
    assert tracker.observe(RunStarted(program="p", config={}, seed=0, execution={})) == ("", False)
    assert tracker.observe(StepsPlanned(9)) == ("each part has 2 holders", True)
    assert tracker.observe(RunStarted("p", {}, 0, {}, resumed_step=7)) == ("resumed after step 7", True)
    assert tracker.observe(RunFailed("exception", "no luck", 0)) == ("", False), "the command's last line says it"
    assert tracker.observe(RunFinished("0", 1, 2, 3, 4.0, {"loss": 0.5})) == ("done: loss 0.5", True)


def test_a_run_says_which_checkpoint_is_missing_and_warns_once_before_the_disk_is_full() -> None:
    tracker = RunTracker(1, None)
    assert tracker.observe(CheckpointFailed(9, "2 GB needed, 1 GB free", 4)) == (
        "no checkpoint after step 9, older ones stay (the newest is of step 4): 2 GB needed, 1 GB free",
        True,
    )
    assert tracker.observe(CheckpointFailed(9, "full")) == ("no checkpoint after step 9, older ones stay: full", True)
    assert tracker.observe(Checkpointed(3, "p")) == ("", False)
    low = Checkpointed(12, "p", [4], "room for 1 more of 2 GB, 3 GB free in c")
    line = "after the checkpoint of step 12 the disk has room for 1 more of 2 GB, 3 GB free in c"
    assert tracker.observe(low) == (line, True)
    assert tracker.observe(low) == ("", False)


@pytest.mark.parametrize("stopped", ["requested", "notice", "policy"])
def test_a_run_that_was_cut_is_not_done_and_has_nothing_to_go(
    stopped: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = RunTracker(epochs=4, max_steps=None)
    progress = Progress(tracker)
    monkeypatch.setattr(progress, "_elapsed_s", lambda: 10.0)
    progress.observe(reported(1, 30))
    assert "30 s to go" in capsys.readouterr().err
    progress.observe(RunFinished("0", 31, 2, 3, 4.0, {"loss": 0.5}, stopped=stopped))  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert "to go" not in said
    assert ("done: loss 0.5" in said) == (stopped == "policy"), "the command's last line says the others, once"


def test_an_advice_comes_once_it_trains() -> None:
    tracker = RunTracker(1, None, ["check it"])
    assert tracker.observe(RunStarted("p", {}, 0, {"mode": "exact", "num_slots": 8, "workers": 1})) == ("", False)
    assert tracker.observe(StepsPlanned(9)) == ("check it", True)
    line, must = tracker.observe(reported(1, 4))
    assert "slots" in line
    assert must
    assert tracker.observe(reported(1, 9)) == ("epoch 1/1, step 9: accuracy 0.9", False)
    tracker = RunTracker(1, None, ["check it"])
    assert tracker.observe(reported(1, 4)) == ("check it", True), "nobody knows how many steps"
    tracker = RunTracker(1, None)  # begun for one worker, and three have come by then
    tracker.observe(RunStarted("p", {}, 0, {"mode": "exact", "num_slots": 12, "workers": 1}))
    for version, workers in ((1, 1), (2, 3)):
        for worker in range(workers):
            tracker.observe(MembershipEvent({"event": "running", "worker": worker, "version": version, "step": 0}))
    assert tracker.observe(StepsPlanned(9))[0].startswith("12 slots on 3 workers: ")


def test_a_run_that_adapts_tells_what_it_measured_and_every_decision() -> None:
    tracker = RunTracker(epochs=4, max_steps=40)
    seen = Measured(10, 0, 640, 1.5, 2, 64, 0.05, {"loss": (0.3123, None), "noise_scale": (412.3, 29.7)})
    now = "step 10: loss 0.312, noise scale 412 ± 30, batch 64, lr 0.05, 2 workers"
    assert tracker.observe(seen) == (now, False)
    assert tracker.state() == now
    assert tracker.done(9.0) == 0.25
    assert tracker.observe(reported(1, 8)) == (f"epoch 1/4, step 8: accuracy 0.9; {now}", False), (
        "neither hides the other"
    )
    assert tracker.state().startswith("epoch 1/4, step 8")
    line = "rounds of local:every=64 end after 47 steps, as each pass over the data does"
    assert tracker.observe(RoundsShortened("local:every=64", 47)) == (line, True)
    line = "the schedule's 9=allreduce never comes: the run has 8 steps"
    assert tracker.observe(SyncChangesUnreached("9=allreduce", 8)) == (line, True)
    decided = Decided("gns", 11, {"batch_size": 128, "lr_factor": 2**0.5}, seen, "applied")
    line = "step 11: gns: batch 64 -> 128, lr 0.05 -> 0.0707 (noise scale 412 ± 30, loss 0.312)"
    assert tracker.observe(decided) == (line, True)
    line, must = tracker.observe(PolicyFailed("Mine", "after_step", 12, 1, "ValueError: no"))
    assert (line, must) == ("step 12: Mine: after_step failed on worker 1: ValueError: no", True)


def test_a_study_counts_its_trials() -> None:
    tracker = StudyTracker(trials=4, budget_s=100.0)
    assert tracker.observe(StudyStarted({})) == ("", False)
    assert tracker.observe(trial(0)) == ("phase: search", True)
    assert tracker.observe(trial(1)) == ("", False)
    line, must = tracker.observe(TrialFinished(0, "complete", values={"accuracy": 0.5}))
    assert (line, must) == ("trial 0 complete: accuracy 0.5 (lr=0.1)", False)
    assert tracker.observe(TrialFinished(1, "infeasible", reason="diverged: loss is nan"))[0].startswith(
        "trial 1 infeasible: diverged"
    )
    assert tracker.state() == "search, 2 trials ended, 0 running"
    assert tracker.done(10.0) == 0.5
    assert tracker.done(80.0) == 0.8
    assert tracker.done(1e9) == 1.0
    assert tracker.observe(trial(2, "confirm")) == ("phase: confirm", True)
    assert tracker.observe(StudyFinished("4 trials", 3.0)) == ("ended (4 trials): 2 trials over", True)
    assert tracker.done(10.0) == 1.0, "nothing is left to wait for"


@pytest.mark.parametrize(("stopping", "done"), [("asha:eta=2", 0.25), ("pbt", 0.0)])
def test_what_halving_paused_counts(stopping: str, done: float) -> None:
    tracker = StudyTracker(trials=4, budget_s=None)
    tracker.observe(StudyStarted({"stopping": stopping}))
    tracker.observe(trial(3))
    tracker.observe(TrialPaused(3, 1, 2.0, 2.0, "not among the best"))
    assert tracker.done(10.0) == done, "it may be resumed; with pbt most are"
    tracker.observe(TrialResumed(3, 1, "may reach the front"))
    assert tracker.done(10.0) == 0.0


@given(st.floats(1e-6, 1), st.floats(0, 1e6))
def test_the_remaining_time_follows_the_pace(done: float, elapsed_s: float) -> None:
    left_s = eta_s(done, elapsed_s)
    assert left_s is not None
    assert (elapsed_s + left_s) * done == pytest.approx(elapsed_s)


def test_time_without_training_is_no_part_of_the_pace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    progress = Progress(RunTracker(epochs=4, max_steps=None))
    monkeypatch.setattr(progress, "_elapsed_s", lambda: now[0])
    progress.observe(RunStarted("p", {}, 0, {}))
    now[0] = 60.0  # a minute in the queue
    progress.observe(StepsPlanned(120))
    now[0] = 70.0
    progress.observe(reported(1, 30))
    assert "epoch 1/4" in (said := capsys.readouterr().err)
    assert "30 s to go" in said


def test_the_pace_of_a_resumed_run_is_that_of_this_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    progress = Progress(RunTracker(epochs=10, max_steps=None))
    monkeypatch.setattr(progress, "_elapsed_s", lambda: now[0])
    progress.observe(RunStarted("p", {}, 0, {}, resumed_step=240))
    now[0] = 10.0
    progress.observe(reported(8, 240))
    assert "to go" not in capsys.readouterr().err, "eight epochs were not trained in ten seconds"
    now[0] = 20.0
    progress.observe(reported(9, 270))
    assert "10 s to go" in capsys.readouterr().err


def test_a_restart_is_one_line() -> None:
    line = "restarted from step 22: 20 steps repeated, after 7.5 s without a worker"
    assert RunTracker(4, None).observe(Restarted(22, 20, 7.5)) == (line, True)


def test_no_pace_no_time() -> None:
    assert eta_s(None, 5.0) is None
    assert eta_s(0.0, 5.0) is None


def test_plain_lines_are_occasional_and_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(RunTracker(1000, None)) as progress:
        for epoch in range(1, 101):
            progress.observe(reported(epoch, epoch))
        progress.observe(RunFinished("0", 1, 2, 3, 4.0, {"accuracy": 1.0}))
    told = capsys.readouterr()
    assert told.out == ""
    lines = told.err.splitlines()
    assert len(lines) == 2, "the first report and the end: both within five seconds"
    assert "epoch 1/1000" in lines[0]
    assert "to go" in lines[0]
    assert "done: accuracy 1" in lines[1]


LIVE = """
import time
from elastune.cli.progress import Progress, RunTracker
from elastune.core.journal.records import Reported, RunFinished
with Progress(RunTracker(2, None)) as progress:
    progress.observe(Reported(1, 5, 5, 1.0, {"accuracy": 0.25}))
    time.sleep(0.6)
    progress.observe(RunFinished("0", 1, 2, 3, 4.0, {"accuracy": 0.75}))
"""


def test_a_terminal_sees_a_bar_and_stdout_nothing() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run([sys.executable, "-c", LIVE], stdout=subprocess.PIPE, stderr=theirs, env=environment)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0
    assert done.stdout == b""
    for part in ("━", "epoch 1/2, step 5: accuracy 0.25", "to go", "done: accuracy 0.75"):
        assert part in shown
