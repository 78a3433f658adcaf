"""A small training run over a pipeline without the rest of elastune: what the worker processes of the tests do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, Schedule
from elastune.core.slots import BatchSlice, Fold, shares
from elastune.parallel.comm.backends import GlooFactory
from elastune.parallel.comm.group import Group, GroupBroken
from elastune.parallel.comm.process_groups import Comms, form_comms, replicated
from elastune.parallel.mechanisms.base import Buffers, ModelParallel
from elastune.parallel.mechanisms.pipeline.pipeline_parallel import Pipeline, divide_into_stages, plan_stages
from elastune.testing.worker_processes import LIMIT_S, Worker

SLOTS, BATCH, STEPS, CLASSES = 8, 20, 3, 7
State = dict[str, torch.Tensor]


class Block(nn.Module):
    """Of a transformer; tracing does not follow its checks of shapes, so it is one layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        if width % 4:
            raise ValueError("four heads")
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)


class Transformer(nn.Module):
    """With weights that the first and the last layer share, and a parameter of its own."""

    def __init__(self, width: int = 24, length: int = 6, vocabulary: int = CLASSES, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.1)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.dropout(self.embedding(tokens) + self.position) * scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TiedOften(nn.Module):
    """One matrix three times, and what skips layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.shared = nn.Linear(16, 16)
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = torch.tanh(self.first(x))
        x = torch.relu(self.shared(skipped))
        x = torch.relu(self.shared(self.middle(x)))
        x = self.shared(x) + skipped
        return self.last(x)


class Again(nn.Module):
    """A layer that goes forward again in the backward pass, dropout included."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


def checkpointed() -> nn.Module:
    model = Transformer()
    model.blocks = nn.ModuleList(Again(block) for block in model.blocks)
    return model


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, CLASSES)
    )


def cnn() -> nn.Module:
    """With BatchNorm, dropout, and layers that overwrite what they are given."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Dropout(0.1)),
        nn.Sequential(nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp, "cnn": cnn, "transformer": Transformer, "tied": TiedOften, "checkpointed": checkpointed
}  # fmt: skip
INPUTS = {"mlp": (12,), "cnn": (1, 8, 8), "tied": (12,)}


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    model: str
    schedule: Schedule = "1f1b"
    micro_batch: int | None = None
    plan: Pipeline | None = None
    abandons: bool = False
    bf16: bool = False


def data(case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A global batch; the last one is shorter."""
    generator = torch.Generator().manual_seed(step)
    size = BATCH - 3 * (step == STEPS - 1)
    if case.model not in INPUTS:
        tokens = torch.randint(0, CLASSES, (size, 7), generator=generator)
        return tokens[:, :6].contiguous(), tokens[:, 1:].contiguous()
    x = torch.randn(size, *INPUTS[case.model], generator=generator)
    return x, torch.randint(0, CLASSES, (size,), generator=generator)


class Run:
    """What one worker does."""

    def __init__(self, case: Case, comms: Comms) -> None:
        torch.manual_seed(0)
        self.case = case
        module = MODELS[case.model]()
        execution = ExecutionSettings(mesh=comms.mesh, mechanism="pipeline", schedule=case.schedule)
        if case.plan is not None:
            plan_stages(module, case.plan)
        self.division = divide_into_stages(ModelParallel(module), execution)
        split = self.division.split
        self.own = split.computed(comms.mesh, comms.rank)
        for i, p in enumerate(self.division.parameters):
            if i not in self.own:
                p.data = torch.full_like(p, float("nan"))
        spare = nn.Parameter(torch.zeros(1))  # a stage may have no parameters, an optimizer must have some
        self.optimizer = torch.optim.AdamW([spare, *(self.division.parameters[i] for i in self.own)], lr=0.01)
        self.buffers = Buffers(module)
        self.division.enter(comms)
        self.speaks = comms.mesh.speaks(comms.rank)
        self.losses: list[float] = []

    def plan(self, step: int) -> list[BatchSlice]:
        return shares(len(data(self.case, step)[0]), SLOTS, 1, 0, "exact", self.case.micro_batch, 2)

    def dropped_step(self, step: int, passes: int) -> None:
        """The first ``passes`` of a step, and an end that drops them; others may hear of that only then."""
        result = len(self.losses)
        with suppress(GroupBroken):
            assert not self.step(step, passes)
        del self.losses[result:]
        self.division.abandon()
        self.buffers.restore()
        for p in self.division.parameters:
            p.grad = None

    def step(self, step: int, passes: int | None = None) -> bool:
        """One step, or its first ``passes``; whether it was completed."""
        x, y = data(self.case, step)
        plan, division, module = self.plan(step), self.division, self.division.module
        folds = {i: Fold(range(SLOTS), SLOTS, torch.add) for i in self.own}
        moves: Fold[list[torch.Tensor]] = Fold(
            range(SLOTS), SLOTS, lambda a, b: [p + q for p, q in zip(a, b, strict=True)]
        )
        filled = 0
        self.buffers.begin_step()
        division.begin_step(plan)
        module.train()
        weights: dict[int, float] = {}
        for k, part in enumerate(plan):
            if k == 0 or plan[k - 1].ends_slot:
                self.buffers.restore()
            torch.manual_seed(1000 * step + part.samples.start)
            samples = slice(part.samples.start, part.samples.stop)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.case.bf16):
                output = division.model(x[samples]).float()
            loss = F.cross_entropy(output.flatten(0, -2), y[samples].flatten())
            weights[part.slot] = weights.get(part.slot, 0.0) + part.weight
            self.losses.append(float(loss.detach()))
            for done in division.backward(loss, part):
                self.buffers.passed()
                if not done.ends_slot:
                    continue
                for _ in range(filled, done.slot):
                    for i in self.own:
                        folds[i].push(filled, torch.zeros_like(division.parameters[i]))
                    moves.push(filled, [torch.zeros_like(b) for b in self.buffers.floats])
                    filled += 1
                for i in self.own:
                    p = division.parameters[i]
                    folds[i].push(done.slot, torch.zeros_like(p) if p.grad is None else p.grad)
                    p.grad = None
                moves.push(done.slot, self.buffers.moves(weights[done.slot]))
                filled = done.slot + 1
            assert not part.ends_slot or all(p.grad is None for p in division.parameters)
            if k + 1 == passes:
                return False
        assert filled == SLOTS
        for i in self.own:
            ((_, division.parameters[i].grad),) = folds[i].parts
        ((_, moved),) = moves.parts
        self.buffers.move(moved)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return True

    def evaluated(self) -> torch.Tensor:
        self.division.module.eval()
        with torch.no_grad():
            return self.division.model(data(self.case, 99)[0])

    def all_steps(self) -> None:
        for step in range(STEPS):
            if self.case.abandons and step == 1:
                self.dropped_step(step, 3)
            self.step(step)

    def state(self) -> State:
        param_blocks = self.division.split.param_blocks
        results = {param_blocks[i].name: self.division.parameters[i].detach().clone() for i in self.own}
        return results | {name: b.clone() for name, b in self.division.module.named_buffers()}


def alone(case: Case) -> tuple[State, torch.Tensor, list[float]]:
    """What one worker comes to."""
    run = Run(case, replicated(Group()))
    run.all_steps()
    return run.state(), run.evaluated(), run.losses


def train(worker: Worker, cases: list[Case], stages: int) -> None:
    """Each case, over pipelines of ``stages`` workers."""
    for n, case in enumerate(cases):
        comms = form_comms(GlooFactory("lo", LIMIT_S), worker.store, str(n), worker.rank, Mesh(pipeline=stages))
        run = Run(case, comms)
        run.all_steps()
        worker.send("trained", run.state(), run.evaluated(), run.losses if run.speaks else None)
    worker.receive()
