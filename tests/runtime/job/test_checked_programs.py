"""What is remembered of checks: by the program's digest, whatever lies in the folder, and whether it can be written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastune.core.run import Program
from elastune.runtime.job import preflight
from elastune.runtime.job.preflight import checked_folder, is_checked, note_check

PROGRAM = """
import torch
from torch.utils.data import TensorDataset

def train(session):
    model = torch.nn.Linear(4, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in session.epochs(1):
        for (x,) in session.batches(TensorDataset(torch.ones(16, 4)), batch_size=8):
            session.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        session.report(steps=session.step)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "elastune" / "checked"


def test_a_check_counts_for_what_the_program_means(program: Callable[..., Program]) -> None:
    made = program(PROGRAM)
    assert not is_checked(made)
    note_check(made, passed=True)
    assert is_checked(made)
    assert is_checked(program(PROGRAM + "\n# a comment", "other.py")), "a comment changes nothing"
    assert not is_checked(program(PROGRAM.replace("lr=0.1", "lr=0.2"), "third.py"))
    note_check(made, passed=False)
    assert not is_checked(made), "what was found later counts"
    note_check(made, passed=False)


def test_rubbish_means_nothing(folder: Path, program: Callable[..., Program], tmp_path: Path) -> None:
    made = program(PROGRAM)
    folder.parent.mkdir(parents=True)
    folder.write_bytes(b"\xff rubbish")
    assert not is_checked(made)
    with pytest.raises(OSError):  # noqa: PT011 - whichever the system raises
        note_check(made, passed=True)
    folder.unlink()
    folder.mkdir()
    (folder / "rubbish").write_bytes(b"\0" * 99)
    note_check(made, passed=True)
    assert is_checked(made)
    assert not is_checked(program("def train(:", "broken.py"))
    assert not is_checked(Program(tmp_path / "nowhere.py"))


def test_without_a_home_nothing_is_known(program: Callable[..., Program], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert not is_checked(program(PROGRAM))
    with pytest.raises(OSError, match="set XDG_CACHE_HOME"):
        note_check(program(PROGRAM), passed=True)


def test_the_oldest_are_forgotten(
    folder: Path, program: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "MOST", 4)
    (folder / "a folder").mkdir(parents=True)
    for age in range(5):
        (folder / f"{age}").touch()
        os.utime(folder / f"{age}", (0, time.time() - 100 * age))
    note_check(program(PROGRAM), passed=True)
    assert is_checked(program(PROGRAM))
    assert {path.name for path in folder.iterdir()} >= {"0", "1", "a folder"}
    assert len(list(folder.iterdir())) <= 4 + 1


def test_a_run_advises_to_check_until_it_was_checked(
    program: Callable[..., Program], tmp_path: Path, command_here: Callable[..., Any]
) -> None:
    path = program(PROGRAM).path

    def said(nth: int, *options: str) -> str:
        done = command_here("run", path, "--out", tmp_path / f"out{nth}", *options)
        assert done.code == 0
        return str(done.err)

    first = said(0, "--workers", "2").splitlines()
    assert f"mine.py was never checked: 'elastune check {path}'" in first[0]
    assert "never checked" not in "".join(first[1:])
    assert "] step 1: loss" in first[1], "it takes no other line's place"
    assert "never checked" not in said(1), "one worker"
    assert "never checked" not in said(2, "--workers", "2", "--mode", "fast")
    assert "never checked" in said(3, "--workers", "1:2")
    assert command_here("check", path).code == 0
    assert checked_folder().is_dir()
    assert "never checked" not in said(4, "--workers", "2")


def test_a_check_that_cannot_be_remembered_says_so(
    folder: Path, program: Callable[..., Program], command_here: Callable[..., Any]
) -> None:
    folder.parent.mkdir(parents=True)
    folder.touch()
    said = command_here("check", program(PROGRAM).path)
    assert said.code == 0
    assert "cut and resumed" in said.out
    assert said.err.count("cannot be remembered") == 1


WORDS = """
import sys

from elsewhere import build

def train(session):
    build(session, {reads})

if __name__ == "__main__":
    print(sys.argv)
"""


@pytest.mark.parametrize(
    ("reads", "counts"),
    [
        ("sys.argv[1]", True),
        ("fire.Fire(build)", True),
        ("ArgumentParser().parse_args(sys.argv[1:])", False),  # its values are settings
        ("1", False),
    ],
)
def test_words_that_no_parser_of_argparse_reads_belong_to_the_program(tmp_path: Path, reads: str, counts: bool) -> None:
    path = tmp_path / "train.py"
    path.write_text("import fire\n" + WORDS.format(reads=reads))
    one, other, none = (Program(path, arguments=words) for words in (("--loss", "sum"), ("--loss", "mean"), ()))
    note_check(one, passed=True)
    assert is_checked(one)
    assert is_checked(other) == is_checked(none) == (not counts)
