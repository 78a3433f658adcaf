"""Runs that begin with another run's checkpoint, under settings of their own."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.sessions import lone_session
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import TensorDataset

from elastune.core.errors import UserError
from elastune.core.run import Elastic, ExecutionSettings, Program, RunSpec
from elastune.elastic.worker.group import WorkerGroup
from elastune.parallel.comm.group import Group
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job
from elastune.train.checkpoints.checkpoint import complete, load
from elastune.train.checkpoints.run_folder import inherit
from elastune.train.session import Session
from elastune.train.step import StopTraining

STEPS = 3  # of an epoch
Rates = list[float]


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(48, 6, generator=generator), torch.randn(48, 3, generator=generator))


def network(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 3))


def trained(
    out: Path,
    build: Any = lambda model: (SGD(model.parameters(), lr=0.1, momentum=0.9),),
    width: int = 8,
    epochs: int = 4,
    per_step: bool = False,
    given: bool = True,
    **spec: Any,
) -> tuple[Session, Optimizer, Rates]:
    """A run to its end or its pause, and the learning rate of each of its steps; metrics never get better.

    ``given``: schedulers are given to ``session.prepare``; else they are found.
    """
    session = lone_session(out, **{"execution": ExecutionSettings(num_slots=4), **spec})
    model = network(width)
    optimizer, *schedulers = build(model)
    model, optimizer, *_ = session.prepare(model, optimizer, *(schedulers if given else []))
    rates: Rates = []
    try:
        for _ in session.epochs(epochs):
            for x, y in session.batches(samples(), batch_size=16):
                optimizer.zero_grad()
                session.backward(F.mse_loss(model(x), y))
                if session.ends_step:
                    rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                if per_step:
                    schedulers[0].step()
            for scheduler in schedulers[per_step:]:
                scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
            session.report(loss=1.0)
    except StopTraining:
        assert session.stopped == "until_epoch"
    return session, optimizer, rates


def digest(session: Session) -> str:
    assert session.trained is not None
    return session.trained.fingerprint(WorkerGroup(Group()))


def sgd(make: Any, **settings: Any) -> Any:
    def build(model: nn.Module) -> tuple[Any, ...]:
        optimizer = SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **settings})
        found = make(optimizer)
        return (optimizer, *(found if isinstance(found, tuple) else (found,)))

    return build


SCHEDULES: dict[str, Any] = {
    "step": lambda o: StepLR(o, 1, 0.5),
    "cosine": lambda o: CosineAnnealingLR(o, 4),
    "lambda": lambda o: LambdaLR(o, lambda t: 0.9**t),
    "one cycle": lambda o: OneCycleLR(o, 0.1, total_steps=20),
    "warm-up": lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=1), MultiStepLR(o, [1, 2], 0.3)], [1]),
    "chain": lambda o: ChainedScheduler([ExponentialLR(o, 0.7), StepLR(o, 3, 0.5)]),
    "plateau": lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0),
    "two": lambda o: (CosineAnnealingLR(o, 20), StepLR(o, 1, 0.5)),
}


FOUND = ("plateau", "step", "two", "warm-up")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize(
    ("name", "given"), [*((name, True) for name in sorted(SCHEDULES)), *((name, False) for name in FOUND)]
)
def test_a_child_with_its_parents_settings_is_the_parent_continued(
    tmp_path: Path, name: str, per_step: bool, given: bool
) -> None:
    if (name, per_step) == ("plateau", True):
        per_step = False  # its metric comes with the epoch
    build, loop = sgd(SCHEDULES[name]), {"per_step": per_step, "given": given}
    whole, _, expected = trained(tmp_path / "whole", build, **loop)
    _, _, before = trained(tmp_path / "parent", build, until_epoch=2, **loop)
    child, _, after = trained(tmp_path / "child", build, parent=tmp_path / "parent", **loop)
    assert before + after == expected
    assert digest(child) == digest(whole)
    assert (child.epoch, child.step, child.samples) == (4, 4 * STEPS, 192)
    assert child.seconds > 0


def test_hyperparameters_are_the_childs(tmp_path: Path) -> None:
    def adam(lr: float, betas: tuple[float, float], weight_decay: float) -> Any:
        return lambda model: (Adam(model.parameters(), lr=lr, betas=betas, weight_decay=weight_decay),)

    parent, of_parent, _ = trained(tmp_path / "parent", adam(0.01, (0.9, 0.999), 0.0), until_epoch=1)
    session = lone_session(tmp_path / "child", parent=tmp_path / "parent", execution=ExecutionSettings(num_slots=4))
    model = network()
    _, optimizer = session.prepare(model, *adam(0.005, (0.5, 0.9), 0.1)(model))
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.005, (0.5, 0.9), 0.1)
    assert parent.trained is not None
    for mine, theirs in zip(model.parameters(), parent.trained.replica.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[mine][name], of_parent.state[theirs][name])
    assert (session.epoch, session.step, session.metrics) == (1, STEPS, {"loss": 1.0})


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("make", "of_child", "expected"),
    [
        (lambda o, gamma=0.1: StepLR(o, 1, gamma), {"gamma": 0.5}, 0.05 * 0.5**2),
        (lambda o, end=20: CosineAnnealingLR(o, end), {"end": 4}, 0.05 * 0.5),
        (lambda o, factor=0.1: ReduceLROnPlateau(o, factor=factor, patience=0), {"factor": 0.5}, 0.05 * 0.5),
        (lambda o, kind=ExponentialLR: kind(o, 0.5), {"kind": lambda o, g: StepLR(o, 2, g)}, 0.05 * 0.5),
        (lambda o, kind=StepLR: kind(o, 1), {"kind": lambda o, _: ReduceLROnPlateau(o)}, 0.05),
        (lambda o: LambdaLR(o, lambda t: 1.0), {}, 0.05),
    ],
)
def test_the_rate_is_what_the_childs_schedule_gives_there(
    tmp_path: Path, make: Any, of_child: dict[str, Any], expected: float
) -> None:
    """After two epochs; half the parent's rate to begin with."""
    trained(tmp_path / "parent", sgd(make), until_epoch=2)
    _, _, rates = trained(
        tmp_path / "child",
        sgd(lambda o: make(o, **of_child), lr=0.05),
        parent=tmp_path / "parent",
        until_epoch=3,
    )
    assert rates[0] == pytest.approx(expected)
    assert len(rates) == STEPS


def test_options_that_need_a_buffer_find_one(tmp_path: Path) -> None:
    def rms(momentum: float, centered: bool) -> Any:
        return lambda model: (RMSprop(model.parameters(), lr=0.001, momentum=momentum, centered=centered),)

    trained(tmp_path / "parent", rms(0.0, False), until_epoch=1)
    _, optimizer, _ = trained(tmp_path / "child", rms(0.9, True), parent=tmp_path / "parent", until_epoch=2)
    assert all({"momentum_buffer", "grad_avg"} <= state.keys() for state in optimizer.state.values())
    _, optimizer, _ = trained(tmp_path / "grandchild", rms(0.0, True), parent=tmp_path / "child", until_epoch=3)
    assert all("momentum_buffer" not in state for state in optimizer.state.values())


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    build = sgd(lambda o: OneCycleLR(o, 0.1, total_steps=20))
    trained(parent, build, until_epoch=1, per_step=True)
    cases: dict[str, dict[str, Any]] = {
        r"0.weight: \(9, 6\), in .*: \(8, 6\)": {"width": 9},
        "AdamW, in .*: SGD": {"build": lambda model: (AdamW(model.parameters()),)},
        r"groups of \[4, 2\]": {
            "build": lambda model: (SGD([{"params": list(model.parameters())[:4]}, {"params": model[3].parameters()}]),)
        },
        "0 schedulers, in .*: 1": {},
        "reaches as far": {"build": sgd(lambda o: OneCycleLR(o, 0.1, total_steps=2))},
        "the seed of its parent": {"build": build, "seed": 7},
        "the mode of its parent": {"build": build, "execution": ExecutionSettings(mode="fast", num_slots=4)},
        "the num_slots of its parent": {"build": build, "execution": ExecutionSettings(num_slots=2)},
    }
    for message, changes in cases.items():
        with pytest.raises(UserError, match=message):
            trained(tmp_path / "child", parent=parent, **changes)
    with pytest.raises(UserError, match="newest checkpoint .got none in"):
        trained(tmp_path / "child", build, parent=tmp_path / "nobody")
    (complete(parent / "checkpoints")[-1] / "tensors.safetensors").unlink()
    with pytest.raises(UserError, match="keep a parent's folder"):
        trained(tmp_path / "child", build, parent=parent)
    assert not (tmp_path / "child" / "checkpoints").exists()


def test_a_scheduler_that_counts_nothing_is_refused(tmp_path: Path) -> None:
    session, _, _ = trained(tmp_path / "parent", sgd(lambda o: StepLR(o, 1)), until_epoch=1)
    state = load(complete(tmp_path / "parent" / "checkpoints")[-1]).states
    del state["schedulers"]["states"][0]["last_epoch"]
    assert session.trained is not None
    with pytest.raises(UserError, match="last_epoch"):
        inherit(session.trained, state, "there")


def test_a_child_needs_its_parent_only_to_begin(tmp_path: Path) -> None:
    build = sgd(lambda o: StepLR(o, 1, 0.5), lr=0.02)
    trained(tmp_path / "parent", sgd(lambda o: StepLR(o, 1, 0.9)), until_epoch=1)
    whole, _, expected = trained(tmp_path / "whole", build, parent=tmp_path / "parent")
    session = lone_session(
        tmp_path / "child", parent=tmp_path / "parent", execution=ExecutionSettings(num_slots=4)
    )  # it begins, and is killed at once
    model = network()
    session.prepare(model, *build(model))
    shutil.rmtree(tmp_path / "parent")
    _, _, first = trained(tmp_path / "child", build, parent=tmp_path / "parent", resume=True, until_epoch=3)
    child, _, rest = trained(tmp_path / "child", build, parent=tmp_path / "parent", resume=True)
    assert first + rest == expected
    assert digest(child) == digest(whole)


TEXT = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

config = {"lr": 0.05, "gamma": 0.5, "wishes": 0}

def train(session):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=session.config["lr"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, session.config["gamma"])
    model, optimizer, scheduler = session.prepare(model, optimizer, scheduler)
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(64, 4, generator=generator), torch.randn(64, 1, generator=generator))
    for epoch in session.epochs(4):
        for x, y in session.batches(data, batch_size=16):
            optimizer.zero_grad()
            session.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if session.ends_step and session.config["wishes"] and session.step == 10:
                session.resize(session.config["wishes"])
        scheduler.step()
        session.report(lr=optimizer.param_groups[0]["lr"])
"""


def test_children_on_any_number_of_workers_are_alike(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TEXT)
    parent = RunSpec(
        Program(tmp_path / "mine.py"),
        tmp_path / "parent",
        config={"lr": 0.05},
        seed=5,
        execution=ExecutionSettings(workers=2, num_slots=4),
        elastic=Elastic(high=3),
        until_epoch=2,
    )
    run_job(parent, cluster=cluster)
    child = replace(parent, config={"lr": 0.02, "gamma": 0.1}, until_epoch=None, parent=parent.out)
    found = [
        run_job(
            replace(
                child,
                out=tmp_path / f"child-{i}",
                execution=replace(child.execution, workers=workers),
                config={**child.config, "wishes": wishes},
            ),
            cluster=cluster,
        )
        for i, (workers, wishes) in enumerate([(1, 0), (2, 3), (3, 1)])
    ]
    assert len({end.sha256 for end in found}) == 1
    assert [end.steps for end in found] == [16] * 3
    assert found[0].metrics["lr"] == pytest.approx(0.02 * 0.1**4)
