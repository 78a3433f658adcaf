"""Programs, and the command line as a function and as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.forked import elastune as start

from elastune.cli import main
from elastune.runtime.clusters.local import LocalCluster

LINEAR = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

config = {"epochs": 2, "batch_size": 16, "lr": 0.1}
objectives = {"loss": "min", "seconds": "min"}

def space(trial):
    return {"lr": trial.suggest_float("lr", 0.01, 1.0, log=True)}

def train(session):
    points = torch.linspace(-1, 1, 64).reshape(64, 1)
    data = TensorDataset(points, 3 * points + 1)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=session.config["lr"])
    model, optimizer = session.prepare(model, optimizer)
    for _ in session.epochs(session.config["epochs"]):
        total = 0.0
        for x, y in session.batches(data, batch_size=session.config["batch_size"]):
            loss = nn.functional.mse_loss(model(x), y)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        session.report(loss=float(loss.detach()))
"""

Command = Callable[..., Any]  # gives what was said


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to stand in, with a program in linear.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ELASTUNE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "linear.py").write_text(LINEAR)
    return tmp_path


@pytest.fixture
def elastune(here: Path, command_here: Command) -> Command:
    """The command line, called in this process and folder."""
    return command_here


@pytest.fixture
def process(here: Path, said: Command) -> Command:
    """The command line as a process of its own."""

    def call(*arguments: object, launcher: tuple[str, ...] = ()) -> Any:
        command = [sys.executable, *launcher, "-m", "elastune", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))
        return said(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture
def fork(here: Path, said: Command) -> Command:
    """The command line as a fork of this process, which has torch."""

    def call(*arguments: object) -> Any:
        with (here / "fork.out").open("w+b") as out, (here / "fork.err").open("w+b") as err:
            code = start(*map(str, arguments), out=out, err=err).wait(120)
        return said(code, (here / "fork.out").read_text(), (here / "fork.err").read_text())

    return call


@contextmanager
def _stdout_to(path: Path) -> Iterator[None]:
    """What is written to this process's stdout meanwhile goes to a file."""
    kept = os.dup(1)
    try:
        with path.open("wb") as file:
            os.dup2(file.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _finish(folder: Path, cluster: LocalCluster, forked_from: Callable[[LocalCluster], Any], *arguments: str) -> Path:
    (folder / "linear.py").write_text(LINEAR)
    with chdir(folder), forked_from(cluster), _stdout_to(folder / "said.json"):
        assert main([*arguments, "--out", "out", "--json"]) == 0
    return (folder / "said.json").rename(folder / "out" / "said.json").parent


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, cluster: LocalCluster, forked_from: Any) -> Path:
    """The folder of a finished run; said.json holds what the command printed."""
    folder = tmp_path_factory.mktemp("run")
    return _finish(folder, cluster, forked_from, "run", "linear.py", "--set", "lr=0.2", "--seed", "4", "--slots", "4")


@pytest.fixture(scope="session")
def study_command() -> tuple[str, ...]:
    """A study with every option of its own."""
    return (
        *(
            "tune",
            "linear.py",
            "--trials",
            "3",
            "--objective",
            "loss:min",
            "--constraint",
            "lr <= 0.5",
            "--workers",
            "2",
        ),
        *("--sampler", "random", "--epochs", "1", "--seed", "7", "--set", "batch_size=32", "--price", "2.5"),
        *("--budget", "5m", "--trial-timeout", "1m", "--until", "loss < -1", "--patience", "50"),
        *("--target", "loss <= 100", "--divergence", "20"),
    )


@pytest.fixture(scope="session")
def finished_study(
    tmp_path_factory: pytest.TempPathFactory, cluster: LocalCluster, forked_from: Any, study_command: tuple[str, ...]
) -> Path:
    """The folder of a finished study; said.json holds what the command printed."""
    return _finish(tmp_path_factory.mktemp("study"), cluster, forked_from, *study_command)


@pytest.fixture(scope="session")
def finished_plan(
    tmp_path_factory: pytest.TempPathFactory, cluster: LocalCluster, forked_from: Callable[[LocalCluster], Any]
) -> Path:
    """The folder of a cluster's plan of which two were measured; said.json holds what the command printed."""
    asked = ("plan", "linear.py", "--nodes", "4", "--calibrate", "1s", "--runs", "8", "--memory", "1GiB")
    return _finish(tmp_path_factory.mktemp("plan"), cluster, forked_from, *asked, "--measure", "2")
