"""Mechanisms that other packages offer by entry points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.fake_package import write_package

from elastune.core.errors import UserError
from elastune.core.mesh import MechanismName, Mesh
from elastune.core.run import ExecutionSettings
from elastune.parallel.mechanisms.capabilities import capabilities_of
from elastune.parallel.mechanisms.registry import mechanism_for

HALVES = Path(__file__).with_name("halves.py").read_text()
OTHERS = """
from dataclasses import replace
from toy_halves import Halves
from elastune.parallel.mechanisms.base import Replicated
from elastune.parallel.mechanisms.capabilities import ALL_CAPABILITIES

class Loud(Replicated):
    name = "loud"

    def attach(self, model, optimizer, comms, execution):
        print("attached by toys", flush=True)
        return super().attach(model, optimizer, comms, execution)

class Rigid(Halves):
    name = "rigid"
    exact = False
    capabilities = replace(ALL_CAPABILITIES, elastic=False)

class Needy(Halves):
    name = "needy"
    def __init__(self, size):
        self.size = size
"""
POINTS = {
    "halves": "toy_halves:Halves",
    "loud": "toy_others:Loud",
    "rigid": "toy_others:Rigid",
    "needy": "toy_others:Needy",
    "part": "toy_halves:PARTS",
    "broken": "toys_nowhere:Halves",
    "zero": "toys_nowhere:Zero",
}
PROGRAM = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def train(session):
    points = torch.linspace(-1, 1, 32).reshape(32, 1)
    data = TensorDataset(points, torch.cat([points, points * 2], 1))
    model = nn.Linear(1, 2)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in session.epochs(1):
        for x, y in session.batches(data, batch_size=8):
            session.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.fixture(autouse=True)
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    modules = {"toy_halves": HALVES, "toy_others": OTHERS}
    folder = write_package(tmp_path / "site", {"elastune.mechanisms": POINTS}, modules)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_it_is_known_by_its_name() -> None:
    execution = ExecutionSettings(mechanism="halves", mesh=Mesh(tensor=2))
    mechanism = mechanism_for(execution)
    assert mechanism.name == "halves"
    assert str(execution.parts) == "halves"
    assert ExecutionSettings.from_json(execution.to_json()) == execution
    assert MechanismName.parse("halves").mesh(3) == Mesh(data=3)


def test_its_capabilities_count() -> None:
    rigid = ExecutionSettings(mechanism="rigid", mesh=Mesh(tensor=2), mode="fast")
    assert not capabilities_of(rigid).elastic
    assert capabilities_of(ExecutionSettings(mechanism="halves", mesh=Mesh(tensor=2))).elastic
    with pytest.raises(UserError, match="exact mode needs a mechanism that promises equal bits"):
        mechanism_for(ExecutionSettings(mechanism="rigid", mesh=Mesh(tensor=2), mode="exact"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "an installed mechanism must load: ModuleNotFoundError"),
        ("part", "must be a subclass of elastune.parallel.mechanisms.base.Mechanism"),
        ("needy", "must be made without arguments: TypeError"),
        ("halves+zero", "halves goes with no other mechanism"),
        ("quarters", "mechanism must be known .got 'quarters'.: use one of .*horovod, broken, halves"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        mechanism_for(ExecutionSettings(mechanism=name, mesh=Mesh(tensor=2)))


def test_nobody_replaces_a_mechanism_of_elastune() -> None:
    assert not MechanismName.parse("zero").installed


def elastune(toys: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(toys), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "elastune", *words]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.soak
def test_two_workers_train_with_it(toys: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ("--mechanism", "loud", "--workers", "2", "--out", "loud", "--json")
    done = elastune(toys, tmp_path, "run", "program.py", *words)
    assert done.returncode == 0, done.stderr
    assert "attached by toys" in (tmp_path / "loud" / "logs" / "worker-1.log").read_text()
    plain = elastune(toys, tmp_path, "run", "program.py", "--workers", "1", "--out", "plain", "--json")
    assert json.loads(done.stdout)["sha256"] == json.loads(plain.stdout)["sha256"]


def test_its_check_refuses_a_mesh_before_a_worker_starts(toys: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = elastune(toys, tmp_path, "run", "program.py", "--mechanism", "halves", "--workers", "2", "--out", "out")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "a replica of halves lies on two workers (got tensor=1): use tensor=2" in done.stderr
