"""Programs, and the command line as a function and as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elastune.cli import main
from elastune.cluster.local import LocalCluster

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


@dataclass(frozen=True)
class Said:
    """What a command said, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """Its one line of complaint."""
        assert self.code == 2, (self.code, self.err)
        assert self.out == "", self.out
        (line,) = self.err.splitlines()
        assert line.startswith("elastune: ")
        assert "Traceback" not in line
        return line

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        (line,) = self.out.splitlines()
        found = json.loads(line)
        assert isinstance(found, dict)
        return found


Command = Callable[..., Said]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to stand in, with a program in linear.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ELASTUNE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "linear.py").write_text(LINEAR)
    return tmp_path


@pytest.fixture
def elastune(
    here: Path, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Command:
    """The command line, called in this process; what it starts is forked from the tests' warm server."""
    for module in ("job.run", "study.run", "frontier.phases"):
        monkeypatch.setattr(f"elastune.{module}.LocalCluster", lambda capacity: nullcontext(cluster))

    def call(*arguments: object) -> Said:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Said(code, out, err)

    return call


@pytest.fixture
def process(here: Path) -> Command:
    """The command line as a process of its own."""

    def call(*arguments: object, launcher: tuple[str, ...] = ()) -> Said:
        command = [sys.executable, *launcher, "-m", "elastune", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))
        return Said(done.returncode, done.stdout, done.stderr)

    return call


def _finish(folder: Path, *arguments: str) -> Path:
    (folder / "linear.py").write_text(LINEAR)
    command = [sys.executable, "-m", "elastune", *arguments, "--out", "out", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "out" / "said.json").write_text(done.stdout)
    return folder / "out"


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run; said.json holds what the command printed."""
    return _finish(tmp_path_factory.mktemp("run"), "run", "linear.py", "--set", "lr=0.2", "--seed", "4")


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
def finished_study(tmp_path_factory: pytest.TempPathFactory, study_command: tuple[str, ...]) -> Path:
    """The folder of a finished study; said.json holds what the command printed."""
    return _finish(tmp_path_factory.mktemp("study"), *study_command)
