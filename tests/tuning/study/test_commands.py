"""Studies whose program is a command: from the command line, through stops and deaths, to the report."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastune.cli import main
from elastune.core.journal.files import read
from elastune.core.journal.records import TrialFinished, TrialPaused, TrialReported, TrialResumed

SCRIPT = """
import argparse, json, os, sys, time

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--workers", type=int, default=1)
parser.add_argument("--how", default="")
args = parser.parse_args()
if args.how == "fail" and args.lr > 0.5:
    raise ValueError(f"lr {args.lr} is too high")
for epoch in range(1, args.epochs + 1):
    time.sleep(float(os.environ.get("EPOCH_S", "0.01")))
    print(json.dumps({"epoch": epoch, "accuracy": 1 - abs(args.lr - 0.1) - 1 / (1 + epoch)}))
"""
SPACE = "lr: {low: 0.001, high: 1.0, log: true}\nepochs: 4\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "space.yaml").write_text(SPACE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(*more: str, command: str = "{python} train.py --lr {{lr}} --epochs {{epochs}}") -> list[str]:
    line = command.format(python=sys.executable)
    return ["tune", "--command", line, "--space", "space.yaml", "--objective", "accuracy:max", "--out", "out", *more]


def records(folder: Path, kind: type) -> list:  # type: ignore[type-arg]
    return [entry.record for entry in read(folder / "out" / "journal.jsonl") if isinstance(entry.record, kind)]


def test_a_study_of_a_command(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words("--trials", "4", "--workers", "2", "--json")) == 0
    result = json.loads(capfd.readouterr().out)
    assert f"{sys.executable} train.py --lr " in result["pick"]["command"]
    ended = records(folder, TrialFinished)
    assert [each.state for each in ended] == ["complete"] * 4
    assert len(records(folder, TrialReported)) == 16
    assert (folder / "out" / "report.html").exists()


def test_early_stopping_ends_commands(folder: Path) -> None:
    assert main(words("--trials", "9", "--workers", "2", "--stopping", "asha")) == 0
    paused = records(folder, TrialPaused)
    assert paused
    assert all("not among the best" in each.reason for each in paused)
    assert any(each.state == "complete" for each in records(folder, TrialFinished))


def test_a_failing_command_is_an_infeasible_trial(folder: Path) -> None:
    command = "{python} train.py --lr {{lr}} --epochs {{epochs}} --how fail"
    assert main(words("--trials", "8", "--sampler", "random", command=command)) == 0
    ended = records(folder, TrialFinished)
    failed = [each for each in ended if each.state == "infeasible"]
    assert failed
    assert len(failed) < len(ended)
    assert "exited with code 1: ValueError: lr" in failed[0].reason


def test_a_command_that_always_fails_ends_the_study(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words("--trials", "50", command="{python} train.py --lr {{lr}} --epochs x{{epochs}}")) == 2
    said = capsys.readouterr().err
    assert "of the first 5 trials one must not raise" in said
    assert "invalid int value" in said


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--cluster", "ray"], "run on this machine"),
        (["--mechanism", "sharded"], "decides itself how its processes compute"),
        (["--stopping", "pbt"], "neither reads nor copies"),
        (["--keep", "front"], "neither reads nor copies"),
        (["--trial-workers", "1:2", "--workers", "2"], "cannot change from outside"),
        (["--monitor", "noise_scale"], "cannot change from outside"),
        (["--set", "wd=1"], "one of the program's config"),
        (["--set", "lr=0.1"], "either set or searched"),
        (["--metrics", "x"], "json or NAME=REGEX"),
        (["train.py"], "either FILE or --command"),
    ],
)
def test_what_a_command_cannot_have_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], says: str
) -> None:
    assert main(words("--trials", "2", *more)) == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1
    assert not (folder / "out").exists()


def test_a_study_killed_at_once_goes_on(folder: Path) -> None:
    """SIGKILL of the controller while trials run: their processes end, and ``elastune resume`` does the rest."""
    environment = {**os.environ, "EPOCH_S": "0.5"}
    begun = subprocess.Popen(
        [sys.executable, "-m", "elastune", *words("--trials", "4", "--workers", "2")],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    journal, end = folder / "out" / "journal.jsonl", time.monotonic() + 60
    while not (journal.exists() and '"trial_reported"' in journal.read_text()):
        assert begun.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    begun.send_signal(signal.SIGKILL)
    begun.wait()
    assert main(["resume", "out"]) == 0
    resumed = [each.trial for each in records(folder, TrialResumed)]
    assert sorted(resumed) == [0, 1]
    ended = records(folder, TrialFinished)
    assert sorted(each.trial for each in ended) == [0, 1, 2, 3]
    assert {each.state for each in ended} == {"complete"}


def test_a_study_goes_on_with_its_own_command_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words("--trials", "1")) == 0
    other = words("--trials", "2", "--resume", command="{python} train.py --epochs {{epochs}} --lr {{lr}}")
    assert main(other) == 2
    assert "resumes with the command it was begun with" in capsys.readouterr().err
    (folder / "train.py").write_text(SCRIPT.replace("0.1)", "0.2)"))
    assert main(words("--trials", "2", "--resume")) == 2
    assert "train.py, line" in capsys.readouterr().err
    assert main(words("--trials", "2", "--resume", "--accept-changes")) == 0


ROOT = Path(__file__).parents[3]
DDP = ROOT / "examples" / "plain_ddp"


@pytest.mark.soak
def test_a_script_under_torchrun_is_tuned_killed_and_resumed(tmp_path: Path) -> None:
    """Two processes a trial, for real: importing torch takes most of the time, in each of six processes."""
    command = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node {{workers}} {DDP / 'train.py'}"
    command += " --lr {lr} --batch-size {batch_per_worker} --epochs {epochs}"
    space = tmp_path / "space.py"
    space.write_text(
        "config = {'epochs': 4}\nobjectives = {'accuracy': 'max'}\n"
        "def space(trial):\n"
        "    lr = trial.suggest_float('lr', 0.02, 0.3, log=True)\n"
        "    return {'lr': lr, 'batch_size': 64, 'workers': 2}\n"
    )
    given = ["tune", "--command", command, "--space", str(space), "--trials", "2", "--workers", "2", "--out", "out"]
    begun = subprocess.Popen(
        [sys.executable, "-m", "elastune", *given],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    journal, end = tmp_path / "out" / "journal.jsonl", time.monotonic() + 120
    while not (journal.exists() and '"trial_reported"' in journal.read_text()):
        assert begun.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    begun.send_signal(signal.SIGKILL)
    begun.wait()
    subprocess.run([sys.executable, "-m", "elastune", "resume", "out"], cwd=tmp_path, check=True, timeout=180)
    ended = records(tmp_path, TrialFinished)
    assert [each.state for each in ended] == ["complete"] * 2
    assert all(each.run.workers == 2 and each.values["accuracy"] > 0.8 for each in ended)
    assert records(tmp_path, TrialResumed)
