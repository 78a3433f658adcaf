"""``elastune.run`` and ``tune`` as calls of a library: the caller goes on, whoever it is."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import elastune
from elastune.core.errors import UserError
from elastune.train.session import Session

PROGRAM = """
import atexit
import os
import sys

import torch
from torch.utils.data import TensorDataset

import elastune

RANK = os.environ.get("RANK", "")
config = {"lr": 0.1, "fails": "none"}


def say(*words):
    os.write(1, (" ".join(map(str, ("rank", RANK, *words))) + "\\n").encode())


def train(session):
    model = torch.nn.Linear(3, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=session.config["lr"]))
    for _ in session.epochs(2):
        for (x,) in session.batches(TensorDataset(torch.arange(60.0).view(20, 3) / 60), batch_size=10):
            session.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if session.config["fails"] == RANK and session.step == 2:
                raise RuntimeError("no luck")
        session.report(loss=float(session.step))


def space(trial):
    return {"lr": trial.suggest_float("lr", 0.01, 0.1)}


if __name__ == "__main__":
    threads = torch.get_num_threads()
    atexit.register(say, "tracker ends")
    out, fails, *more = sys.argv[1:]
    for number, failing in enumerate((fails, *more)):
        try:
            result = elastune.run(train, {"lr": 0.1, "fails": failing}, out=f"{out}{number}", price_per_worker_hour=2.0)
            say("has", result.sha256, result.metrics, result.money is not None)
        except elastune.JobFailed as failed:
            say("failed:", failed)
        say("group", torch.distributed.is_initialized(), "threads", torch.get_num_threads() == threads)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(PROGRAM)
    return path


def said_by(command: list[str], folder: Path, typed: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=env, input=typed, capture_output=True, text=True, timeout=150)


def torchrun(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return said_by([*launch, str(program), *words], program.parent)


def test_under_torchrun_each_rank_goes_on_and_may_run_again(program: Path) -> None:
    done = torchrun(program, "out", "", "")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for rank in (0, 1):
        first, group, second, group_again, last = [
            line.removeprefix(f"rank {rank} ") for line in lines if line.startswith(f"rank {rank} ")
        ]
        assert first == second, "the same weights again, in the same process"
        assert first.startswith("has ")
        assert first.endswith(f"{{'loss': 4.0}} {rank == 0}"), "rank 0 has the cost"
        assert group == group_again == "group False threads True"
        assert last == "tracker ends"
    assert len({line.split()[3] for line in lines if " has " in line}) == 1


@pytest.mark.soak
def test_under_torchrun_a_rank_that_fails_holds_nobody(program: Path) -> None:
    """Rank 0 waits for a collective when rank 1 fails: both go on, and exit well if their script wants so."""
    done = torchrun(program, "out", "1")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        failed, group, last = [line for line in done.stdout.splitlines() if line.startswith(f"rank {rank} ")]
        assert failed.startswith(f"rank {rank} failed: ")
        assert (rank == 0) == ("Connection closed by peer" in failed)
        assert "RuntimeError: no luck" in failed, "the survivor says why, too"
        assert (rank == 0) == ("rank 1 has failed: " in failed)
        assert group == f"rank {rank} group False threads True"
        assert last == f"rank {rank} tracker ends"


def test_a_group_of_the_caller_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        with pytest.raises(elastune.JobFailed, match=r"destroy_process_group\(\) before elastune.run"):
            elastune.run(reports, out=tmp_path / "run")
        assert torch.distributed.is_initialized(), "it stays the caller's"
    finally:
        torch.distributed.destroy_process_group()


def test_a_study_under_torchrun_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"one process starts a study \(got rank 1 of 2\): start it without torchrun"):
        elastune.tune(reports, lambda trial: {}, objectives={"size": "min"}, trials=1, out=tmp_path / "study")
    assert not (tmp_path / "study").exists()


@pytest.mark.soak
def test_at_a_prompt(program: Path) -> None:
    """A function of a file trains; one that was typed has no file that a worker could import."""
    typed = """
        import elastune, mine
        def train(session): pass

        elastune.run(train)
        print("lives on")
        print("ran", elastune.run(mine.train, out="run").metrics)
        study = elastune.tune(mine.train, mine.space, objectives={"loss": "min"}, trials=1, out="study")
        print("searched", len(study.complete))
    """
    done = said_by([sys.executable, "-i"], program.parent, textwrap.dedent(typed))
    assert done.returncode == 0, done.stderr
    for words in ("lives on", "ran {'loss': 4.0}", "searched 1"):
        assert words in done.stdout, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("elastune.core.errors.UserError")]
    assert "workers must be able to import the training function (got train, which was typed at a prompt" in line
    assert "write it to a file, such as train.py, and 'from train import train'" in line


def test_in_a_notebook(program: Path) -> None:
    """A cell runs in a ``__main__`` without a file; its source is known under a name that is no path. A function of a
    cell trains, where it uses nothing that workers cannot have, and says what that is."""
    cells = """
        import linecache, sys
        main = sys.modules["__main__"].__dict__
        del main["__file__"]
        for number, cell in enumerate((
            "import elastune, mine",
            "print('ran', elastune.run(mine.train, out='run').metrics)",
            "def train(session):\\n    session.report(number=7)",
            "print('cell', elastune.run(train, out='cell').metrics)",
            "session = object()\\ndef train(_):\\n    return session",
            "try:\\n    elastune.run(train)\\nexcept elastune.UserError as error:\\n    print(error)",
        )):
            name = f"<ipython-input-{number}>"
            linecache.cache[name] = len(cell), None, cell.splitlines(True), name
            exec(compile(cell, name, "exec"), main)
    """
    (program.parent / "notebook.py").write_text(textwrap.dedent(cells))
    done = said_by([sys.executable, "notebook.py"], program.parent)
    assert done.returncode == 0, done.stderr
    ran, of_cell, refused = done.stdout.splitlines()
    assert (ran, of_cell) == ("ran {'loss': 4.0}", "cell {'number': 7.0}")
    assert "(got session, a object): make it in a function" in refused
    assert not list(program.parent.glob("elastune-out/*")), "a refused call leaves nothing"


def reports(session: Session) -> None:
    session.report(size=session.size)


@pytest.mark.soak
def test_in_a_test(tmp_path: Path) -> None:
    """The training function of a file of tests, which workers import by its path."""
    assert elastune.run(reports, workers=2, out=tmp_path / "run").metrics == {"size": 2}
    space = {"objectives": {"size": "min"}, "trials": 2, "sampler": "random"}
    study = elastune.tune(reports, nothing, out=tmp_path / "study", **space)
    assert [trial.metrics["size"] for trial in study.complete] == [1, 1]


def nothing(trial: object) -> dict[str, int]:
    return {}
