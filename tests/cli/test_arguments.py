"""Words behind ``--``: a program's own command line, in every process of a command."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import LINEAR, Command
from tests.support.forked import elastune as start
from tests.support.forked import run_script
from tests.support.launched import launched

from elastune.cli.groups import resumed_words
from elastune.core.journal.files import read
from elastune.core.journal.records import RunStarted
from elastune.core.run import CommandLine

PARSED = (
    LINEAR.replace('config = {"epochs": 2, "batch_size": 16, "lr": 0.1}', "").replace("session.config[", "vars(args)[")
    + """
import argparse, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch_size", type=int, default=16)
args = parser.parse_args()
with open("seen.txt", "a") as file:
    print(os.getpid(), *sys.argv[1:], file=file)
"""
)
INSIDE = PARSED.replace("args = parser.parse_args()", "").replace(
    "def train(session):", "def train(session):\n    args = parser.parse_args()"
)
DRAWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split

model = nn.Linear(1, 1)
points = torch.randn(64, 1)
mine, others = random_split(TensorDataset(points, 3 * points), [48, 16])

def train(session):
    prepared, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in session.epochs(2):
        for x, y in session.batches(mine, batch_size=16):
            session.backward(nn.functional.mse_loss(prepared(x), y))
            optimizer.step()
            optimizer.zero_grad()
        session.report(split=float(sum(others.indices)))
"""
UNGUARDED = """
import elastune
print("found", elastune.run(train, {"lr": 0.2}, workers=2, out="out", seed=4).sha256)
"""


@pytest.fixture
def parsed(here: Path) -> Path:
    (here / "parsed.py").write_text(PARSED)
    return here


def seen(folder: Path) -> tuple[set[str], int]:
    """The words that processes have found, and the number of processes."""
    lines = [line.split(maxsplit=1) for line in (folder / "seen.txt").read_text().splitlines()]
    (folder / "seen.txt").unlink()
    return {line[1] if len(line) > 1 else "" for line in lines}, len({line[0] for line in lines})


@pytest.mark.parametrize("text", [PARSED, INSIDE], ids=["top", "inside"])
def test_words_reach_the_workers_and_change_the_training_as_settings_do(
    elastune: Command, here: Path, finished_run: Path, text: str
) -> None:
    (here / "parsed.py").write_text(text)
    command = ("run", "parsed.py", "--seed", "4", "--json", "--workers", "2", "--slots", "4")
    by_words = elastune(*command, "--out", "words", "--", "--lr", "0.2").json
    words, processes = seen(here)
    assert words == {"--lr 0.2"}
    assert processes >= 3, "two workers and the command itself"
    by_setting = elastune(*command, "--set", "lr=0.2", "--out", "setting", "--", "--lr", "0.7").json
    assert by_words["sha256"] == by_setting["sha256"] == json.loads((finished_run / "said.json").read_text())["sha256"]


def test_what_the_parser_refuses_is_one_line_and_leaves_no_folder(elastune: Command, parsed: Path) -> None:
    assert "unrecognized arguments: --what" in elastune("run", "parsed.py", "--", "--what").line
    assert "got lrr" in elastune("run", "parsed.py", "--set", "lrr=1").line
    assert "lr must be a number, as in the program's config" in elastune("run", "parsed.py", "--set", "lr=much").line
    assert "what the program's parser takes" in elastune("run", "parsed.py", "--set", "epochs=1.5").line
    assert "got more): elastune run FILE -- more" in elastune("run", "parsed.py", "more").line
    shown = elastune("run", "parsed.py", "--", "--help")
    assert shown.code == 0
    assert shown.out.startswith("usage: parsed.py [-h] [--lr LR] [--epochs EPOCHS]")
    assert not (parsed / "elastune-out").exists()


def test_a_run_goes_on_with_the_words_of_its_journal(elastune: Command, parsed: Path) -> None:
    command = ("run", "parsed.py", "--out", "out", "--json")
    whole = elastune("run", "parsed.py", "--json", "--out", "whole", "--", "--lr", "0.2", "--epochs", "3").json
    assert elastune(*command, "--max-steps", "4", "--", "--lr", "0.2", "--epochs", "3").json["steps"] == 4
    journal = (parsed / "out" / "journal.jsonl").read_bytes()
    assert "arguments of its program it was begun with" in elastune("resume", "out", "--", "--lr", "0.3").line
    line = elastune(*command[:-1], "--resume", "--", "--lr", "0.3").line
    assert "(got --lr 0.3, begun with --lr 0.2 --epochs 3): leave out what stands behind FILE and --" in line
    assert (parsed / "out" / "journal.jsonl").read_bytes() == journal
    (parsed / "seen.txt").unlink()
    assert elastune(*command, "--resume", "--max-steps", "8").json["steps"] == 8
    assert elastune("resume", "out", "--max-steps", "12", "--json").json["sha256"] == whole["sha256"]
    assert seen(parsed)[0] == {"--lr 0.2 --epochs 3"}
    begun = [entry.record for entry in read(parsed / "out" / "journal.jsonl")]
    assert {tuple(each.arguments) for each in begun if isinstance(each, RunStarted)} == {
        ("--lr", "0.2", "--epochs", "3")
    }


def test_a_study_searches_what_the_parser_takes(elastune: Command, parsed: Path) -> None:
    command = ("tune", "parsed.py", "--trials", "2", "--sampler", "random", "--out", "out", "--objective", "loss:min")
    found = elastune(*command, "--json", "--", "--epochs", "1", "--lr", "0.5").json
    assert seen(parsed)[0] == {"--epochs 1 --lr 0.5"}
    assert all(row["config"]["epochs"] == 1 and row["config"]["lr"] != 0.5 for row in found["front"])
    assert found["choices"][0]["command"].endswith(" -- --epochs 1 --lr 0.5")
    other = elastune(*command, "--resume", "--", "--epochs", "2")
    assert "a study resumes with the arguments it was begun with" in other.line


def test_a_check_and_a_dry_run_have_them(elastune: Command, parsed: Path) -> None:
    assert "the metric 'loss'" in elastune("check", "parsed.py", "--", "--lr", "0.3").out, "it has trained"
    assert seen(parsed)[0] == {"--lr 0.3"}
    assert elastune("run", "parsed.py", "--dry-run", "--json", "--", "--batch_size", "8").json["batch_size"] == 8


@pytest.mark.soak
def test_workers_of_torchrun_have_them(parsed: Path) -> None:
    words = ["run", "parsed.py", "--out", "out", "--json", "--", "--lr", "0.2"]
    assert launched(words, 2, parsed / "errors") == [0, 0], (parsed / "errors").read_text()
    assert seen(parsed)[0] == {"--lr 0.2"}


def test_words_are_given_again_by_resume() -> None:
    earlier, out = CommandLine(("run", "--workers=2", "--", "train.py", "--lr", "0.1"), "/there"), Path("/out")
    ends = ["--out=/out", "--resume", "--", "train.py"]
    assert resumed_words(earlier, [], out) == ["run", "--workers=2", *ends, "--lr", "0.1"]
    assert resumed_words(earlier, ["--json", "--", "--lr", "2"], out) == [
        "run",
        "--workers=2",
        "--json",
        *ends,
        "--lr",
        "2",
    ]
    assert resumed_words(earlier, ["--"], out) == ["run", "--workers=2", *ends]


@pytest.mark.soak
def test_what_is_random_at_import_is_the_same_in_fresh_processes_and_after_a_resume(
    process: Command, fork: Command, here: Path
) -> None:
    """The first is a new Python; the others are forks of the test, which has drawn numbers before."""
    (here / "drawn.py").write_text(DRAWN)

    def run(*words: str, command: Command = fork) -> dict[str, Any]:
        done = command("run", "drawn.py", "--json", *words)
        assert done.code == 0, done.err
        return dict(done.json)

    whole = run("--out", "whole", "--workers", "2", "--slots", "2", command=process)
    run("--out", "cut", "--slots", "2", "--max-steps", "3")
    rest = run("--out", "cut", "--slots", "2", "--resume")
    assert (rest["sha256"], rest["metrics"]) == (whole["sha256"], whole["metrics"])
    other = run("--out", "other", "--slots", "2", "--seed", "1")
    assert other["sha256"] != whole["sha256"]
    assert other["metrics"] != whole["metrics"]


def test_a_script_may_start_its_training_at_its_top(here: Path, finished_run: Path) -> None:
    (here / "script.py").write_text(LINEAR + UNGUARDED)
    with (here / "result").open("wb") as out, (here / "said").open("wb") as err:
        code = run_script(here / "script.py", out=out, err=err).wait(120)
    assert code == 0, (here / "said").read_text()
    expected = json.loads((finished_run / "said.json").read_text())["sha256"]
    assert (here / "result").read_text().splitlines()[-1] == f"found {expected}"


def test_sigterm_ends_a_run_with_the_code_for_another_try(here: Path) -> None:
    with (here / "result").open("wb") as out, (here / "said").open("wb") as err:
        running = start("run", "linear.py", "--epochs", "1000000", "--out", "slow", "--json", out=out, err=err)
    journal = here / "slow" / "journal.jsonl"
    deadline = time.monotonic() + 60
    while not (journal.exists() and b'"reported"' in journal.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    code, said = running.wait(60), (here / "said").read_text()
    assert code == 75, said
    assert json.loads((here / "result").read_text())["stopped"] == "requested"
    assert "--resume --out slow" in said
    assert list((here / "slow" / "checkpoints").iterdir())
