"""What a mechanism would refuse of a program's model, told before any worker starts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.job.preflight import examined_meanwhile
from elastune.train.program.load import load_as_guest
from elastune.train.rehearsal import refusal_of

PROGRAM = """
import time
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

config = {"model": "layers", "optimizer": "SGD", "plan": "", "trouble": ""}

class Looking(nn.Sequential):
    def forward(self, x):
        if float(self.ready) > 0:
            return super().forward(x)
        return x

def looking():
    model = Looking(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model.register_buffer("ready", torch.ones(()))
    return model

MODELS = {
    "layers": lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)),
    "heads": lambda: nn.TransformerEncoderLayer(12, 3),
    "gru": lambda: nn.GRU(4, 4),
    "looking": looking,
    "frozen": lambda: nn.Linear(4, 4).requires_grad_(False),
}

def train(session):
    trouble = session.config["trouble"]
    if trouble == "slow":
        time.sleep(600)
    if trouble == "fails":
        raise RuntimeError("no data")
    if trouble == "looks" and float(torch.ones(1)) != 1.0:
        raise RuntimeError("not as it seems")
    if trouble == "idle":
        return
    with session.model_context():
        models = [MODELS[session.config["model"]]() for _ in range(1 + (trouble == "two"))]
    optimizers = [getattr(torch.optim, session.config["optimizer"])(each.parameters()) for each in models]
    plan = {session.config["plan"]: ColwiseParallel()} if session.config["plan"] else None
    try:
        session.prepare(*models, *optimizers, plan=plan)
    except Exception:
        pass
    raise RuntimeError("behind session.prepare")
"""


@pytest.fixture
def choosy(tmp_path: Path) -> Program:
    (tmp_path / "choosy.py").write_text(PROGRAM)
    return Program(tmp_path / "choosy.py")


TENSOR, PIPELINE = ExecutionSettings(mesh=Mesh(tensor=2)), ExecutionSettings(mesh=Mesh(pipeline=4), num_slots=4)


def refusal(program: Program, execution: ExecutionSettings, **config: str) -> str | None:
    refused = refusal_of(load_as_guest(program), dict(config), execution, program.path.parent)
    return refused and str(refused)


@pytest.mark.parametrize(
    ("execution", "config", "message"),
    [
        (TENSOR, {"plan": "layers.*"}, "a plan names modules of the model"),
        (TENSOR, {"model": "heads"}, "has 3 heads"),
        (TENSOR, {"model": "gru"}, "none found in GRU"),
        (TENSOR, {"plan": "1"}, "is a ReLU"),
        (PIPELINE, {}, "at least one layer a stage"),
        (ExecutionSettings(mechanism="zero"), {"optimizer": "Adafactor"}, "each element by itself"),
        (ExecutionSettings(mechanism="zero"), {"trouble": "two"}, "lie whole on every worker"),
        (ExecutionSettings(mechanism="sharded"), {"model": "frozen"}, "must have parameters to train"),
        (ExecutionSettings(mechanism="fsdp2"), {"optimizer": "Adafactor"}, "each element by itself"),
        (TENSOR, {"model": "heads", "trouble": "looks"}, "has 3 heads"),
    ],
)
def test_what_a_model_is_refused_for(
    choosy: Program, execution: ExecutionSettings, config: dict[str, str], message: str
) -> None:
    result = refusal(choosy, execution, **config)
    assert result is not None
    assert message in result


@pytest.mark.parametrize(
    ("execution", "config"),
    [
        (TENSOR, {}),
        (TENSOR, {"plan": "0"}),
        (ExecutionSettings(mesh=Mesh(pipeline=3), num_slots=4), {}),
        (ExecutionSettings(mechanism="zero"), {"trouble": "looks"}),
        # What fails by itself is told by the workers, at its own line.
        (TENSOR, {"trouble": "fails", "model": "heads"}),
        (TENSOR, {"trouble": "idle"}),
    ],
)
def test_what_is_taken_or_left_to_the_workers(
    choosy: Program, execution: ExecutionSettings, config: dict[str, str]
) -> None:
    before = torch.random.get_rng_state()
    assert refusal(choosy, execution, **config) is None
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_model_that_looks_at_its_values_while_it_is_traced_is_not_refused_for_lack_of_them(choosy: Program) -> None:
    assert refusal(choosy, ExecutionSettings(mesh=Mesh(pipeline=2)), model="looking") is None


def spec_of(program: Program, execution: ExecutionSettings, **config: str) -> RunSpec:
    return RunSpec(program, program.path.parent / "out", config=dict(config), execution=execution)


def test_a_process_of_its_own_tells_the_same(choosy: Program) -> None:
    done = []
    with pytest.raises(UserError, match="has 3 heads"), examined_meanwhile(spec_of(choosy, TENSOR, model="heads")):
        done.append("meanwhile")
    assert done


def test_a_program_that_takes_long_is_left_to_its_workers(choosy: Program) -> None:
    began = time.monotonic()
    with examined_meanwhile(spec_of(choosy, TENSOR, model="heads", trouble="slow"), longest_s=0.1):
        pass
    assert time.monotonic() - began < 300


def test_an_error_of_the_callers_ends_the_process(choosy: Program) -> None:
    began = time.monotonic()
    spec = spec_of(choosy, TENSOR, model="heads", trouble="slow")
    with pytest.raises(KeyError), examined_meanwhile(spec, longest_s=500):
        raise KeyError
    assert time.monotonic() - began < 300


def test_where_nothing_is_divided_no_process_is_started(choosy: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastune.runtime.job.preflight.subprocess.Popen", None)
    with examined_meanwhile(spec_of(choosy, ExecutionSettings(workers=4))):
        pass
