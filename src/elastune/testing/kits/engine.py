"""Tests that every mechanism around another package's engine must pass, for inheritance.

class TestMine(EngineKit):
    mechanism = Mine()  # of a module that worker processes can import
    cases = (ExecutionSettings(mechanism="mine", mode="fast"),)
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings
from elastune.core.slots import shares
from elastune.parallel.comm.backends import GlooFactory
from elastune.parallel.comm.process_groups import Comms, form_comms
from elastune.parallel.mechanisms.base import Mechanism
from elastune.parallel.mechanisms.engine import EngineReplica
from elastune.parallel.sync.registry import prepare
from elastune.testing.worker_processes import LIMIT_S, Processes, Worker, processes

SLOTS, BATCH, MICRO_BATCH, STEPS, EVENT_STEP, CLIP = 5, 25, 7, 6, 3, 0.5
CONTROL = 3
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class EngineCase:
    """A mechanism, its execution settings, and the number type of the models."""

    mechanism: Mechanism
    execution: ExecutionSettings
    dtype: torch.dtype


def network(dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """A network with blocks in a list, odd sizes, a buffer, and a parameter that is not trained."""
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.LayerNorm(7)) for _ in range(2)]
    model = nn.Sequential(nn.Linear(6, 7), *blocks, nn.Linear(7, 4)).to(dtype)
    model.register_buffer("constant", torch.ones(1))
    model[0].bias.requires_grad_(False)
    return model


def data(step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of ``step``."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(0, 4, (BATCH,), generator=generator)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with moments and two groups of parameters."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)


class Trained:
    """A model in training under a mechanism."""

    def __init__(self, case: EngineCase, worker: Worker, comms: Comms, seed: int = 0) -> None:
        self._case = case
        self._worker = worker
        model = network(case.dtype, seed)
        optimizer = optimizer_of(model)
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        self.sync = prepare(model, optimizer, case.execution, comms, control=CONTROL)
        assert self.sync.replica.optimizer is optimizer, "schedulers and the user's lines hold it"
        assert isinstance(self.sync.replica, EngineReplica)
        self.replica: EngineReplica = self.sync.replica
        self.norms: list[float] = []
        self.losses: list[float] = []

    def step(self, step: int) -> None:
        """Take one step as a user's loop: clip, step and clear after every slice, without effect inside a step."""
        x, y = data(step, self._case.dtype)
        sync, replica, worker = self.sync, self.replica, self._worker
        run = worker.size, worker.rank, self._case.execution.mode, MICRO_BATCH
        sync.control = [1.0, float(step), float(worker.rank)]
        plan = shares(BATCH, SLOTS, *run, even=replica.equal_passes)
        for i, share in enumerate(plan):
            sync.begin(share, starts_step=i == 0)
            part = slice(share.samples.start, share.samples.stop)
            sync.backward(F.cross_entropy(replica.model(x[part]), y[part]), share)
            if share.ends_step:
                self.memory = replica.memory()
            norm = replica.clip(CLIP)
            if share.ends_step:
                self.norms.append(norm)
            replica.optimizer.step()
            replica.optimizer.zero_grad()
        self.schedule.step()
        self.losses.append(sync.statistics.parts["loss"])
        assert sync.totals == [worker.size, step * worker.size, worker.size * (worker.size - 1) / 2]

    def evaluated(self) -> torch.Tensor:
        """The outputs of the model; workers evaluate it different numbers of times."""
        self.replica.gather()
        self.replica.model.eval()
        with torch.no_grad():
            for _ in range(1 + 2 * self._worker.rank):
                outputs: torch.Tensor = self.replica.model(data(99, self._case.dtype)[0])
        self.replica.model.train()
        return outputs.clone()

    def states(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """The states of model, optimizer and schedule, whole on rank 0."""
        replica = self.replica
        return copy.deepcopy((replica.model_state(), replica.optimizer_state(), self.schedule.state_dict()))

    def load(self, states: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]) -> None:
        """Load the states of ``states()``."""
        self.replica.load_model(states[0])
        self.replica.load_optimizer(states[1])
        self.schedule.load_state_dict(states[2])


def work(worker: Worker, cases: Sequence[EngineCase]) -> None:
    """The work of each process: all cases on one mesh, because importing an engine takes longer than the cases."""
    comms = form_comms(GlooFactory("lo", LIMIT_S), worker.store, "first", worker.rank, cases[0].execution.first_mesh)
    for case in cases:
        train(worker, case, comms)
        worker.receive()


def train(worker: Worker, case: EngineCase, comms: Comms) -> None:
    """Train, evaluate and save halfway; then load the state into a new training, and complete that too."""
    first = Trained(case, worker, comms)
    for step in range(EVENT_STEP):
        first.step(step)
    worker.send("evaluated", first.evaluated())
    states = first.states()
    for step in range(EVENT_STEP, STEPS):
        first.step(step)
    worker.send("trained", first.states()[0], first.norms, first.losses, first.replica.numbers, first.memory)
    worker.send("states", states)
    again = Trained(case, worker, comms, seed=1)
    again.load(copy.deepcopy(worker.receive()))  # tensors in a pipe are shared
    worker.send("loaded", again.states())
    for step in range(EVENT_STEP, STEPS):
        again.step(step)
    worker.send("again", again.states()[0])
    worker.send("own clip", own_clip(case, again))


def own_clip(case: EngineCase, trained: Trained) -> float | str:
    """The result of torch's own clipping in a user's program: the norm of the whole gradient, or its refusal."""
    x, y = data(0, case.dtype)
    group, even = trained.sync.group, trained.replica.equal_passes
    plan = shares(BATCH, SLOTS, group.size, group.rank, case.execution.mode, None, even=even)
    for i, share in enumerate(plan):
        trained.sync.begin(share, starts_step=i == 0)
        part = slice(share.samples.start, share.samples.stop)
        trained.sync.backward(F.cross_entropy(trained.replica.model(x[part]), y[part]), share)
    try:
        norm: Any = nn.utils.clip_grad_norm_(trained.replica.module.parameters(), 1e9)
    except UserError as refused:
        return str(refused)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


@dataclass(frozen=True)
class Plain:
    """The result of plain PyTorch, in one process without any engine."""

    evaluated: torch.Tensor
    states: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
    model: Tensors
    norms: list[float]
    losses: list[float]
    last_norm: float


def in_plain_torch(dtype: torch.dtype) -> Plain:
    """Train with plain PyTorch, the whole batch in one pass."""
    model = network(dtype)
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    norms, losses = [], []
    for step in range(STEPS):
        if step == EVENT_STEP:
            evaluated = model(data(99, dtype)[0]).detach()
            states = copy.deepcopy((model.state_dict(), optimizer.state_dict(), schedule.state_dict()))
        x, y = data(step, dtype)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    trained = copy.deepcopy(dict(model.state_dict()))
    x, y = data(0, dtype)
    F.cross_entropy(model(x), y).backward()
    last = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    return Plain(evaluated, states, trained, norms, losses, last)


def need(mechanism: Mechanism) -> None:
    """Skip the test if a package of ``mechanism`` is not installed; fail if this environment must have it."""
    can = mechanism.capabilities
    if not can.installed:
        promised = can.package in os.environ.get("ELASTUNE_ENGINES", "").split(",")
        (pytest.fail if promised else pytest.skip)(f"{can.package} is not installed: {can.install}")


class EngineKit:
    """An engine trains as plain PyTorch does, evaluates, and gives and takes whole states."""

    mechanism: ClassVar[Mechanism]
    cases: ClassVar[Sequence[ExecutionSettings]]
    dtype: ClassVar[torch.dtype] = torch.float64
    rtol: ClassVar[float] = 1e-9

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        need(self.mechanism)

    def near(self, actual: Any, wanted: Any) -> None:
        """Assert that trees of tensors and values are equal but for the order of additions."""
        if isinstance(wanted, dict):
            assert set(actual) == set(wanted)
            for key in wanted:
                self.near(actual[key], wanted[key])
        elif isinstance(wanted, (list, tuple)):
            assert len(actual) == len(wanted)
            for a, b in zip(actual, wanted, strict=True):
                self.near(a, b)
        elif isinstance(wanted, torch.Tensor):
            torch.testing.assert_close(actual, wanted, rtol=self.rtol, atol=self.rtol / 10)
        elif isinstance(wanted, float):
            assert actual == pytest.approx(wanted, rel=max(self.rtol, 1e-6))  # the tail is in fp32
        else:
            assert actual == wanted

    def test_trains_evaluates_and_is_saved_as_plain_torch(self, subtests: Any) -> None:
        """Cases on one mesh in one spawn: engines take seconds to begin."""
        wanted = in_plain_torch(self.dtype)
        for mesh in dict.fromkeys(execution.first_mesh for execution in self.cases):
            alike = [execution for execution in self.cases if execution.first_mesh == mesh]
            cases = [EngineCase(self.mechanism, execution, self.dtype) for execution in alike]
            with processes(mesh.workers, work, cases) as them:
                for execution in alike:
                    with subtests.test(str(execution)):
                        self._compare(them, execution, wanted)

    def _divided(self, execution: ExecutionSettings, memories: list[dict[str, int]]) -> None:
        """The optimizer's state is whole on each worker, or divided among all of them with padding."""
        trained = sum(p.numel() for p in network(self.dtype).parameters() if p.requires_grad)
        both_moments = 2 * trained * self.dtype.itemsize
        copies = 1 if memories[0]["optimizer"] < both_moments else execution.workers
        total = sum(memory["optimizer"] for memory in memories)
        assert copies * both_moments <= total <= copies * both_moments + execution.workers * 1024, memories
        assert all(memory["parameters"] and memory["gradients"] for memory in memories), memories

    def _compare(self, them: Processes, execution: ExecutionSettings, wanted: Plain) -> None:
        ranks = range(execution.workers)
        for rank in ranks:
            self.near(them.receive(rank)[1], wanted.evaluated)
        results = [them.receive(rank)[1:] for rank in ranks]
        for _, norms, losses, numbers, _ in results:
            self.near((norms, losses), (wanted.norms, wanted.losses))
            assert numbers == sum(p.numel() for p in network(self.dtype).parameters() if p.requires_grad)
        self.near(results[0][0], wanted.model)
        self._divided(execution, [row[-1] for row in results])
        states = [them.receive(rank)[1] for rank in ranks]
        self.near(states[0], wanted.states)
        for rank in ranks:
            them.send(rank, wanted.states)  # the states of plain PyTorch
        loaded = [them.receive(rank)[1] for rank in ranks]
        self.near(loaded[0], wanted.states)
        again = [them.receive(rank)[1] for rank in ranks]
        self.near(again[0], wanted.model)
        for rank in ranks:
            (clipped,) = them.receive(rank)[1:]
            if isinstance(clipped, str):
                assert "session.clip_grad_norm_" in clipped
            else:
                self.near(clipped, wanted.last_norm)
            them.send(rank, "go on")
