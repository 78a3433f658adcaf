"""A network of several units a layer, whose state can be held in shares: BatchNorm, dropout, clipping, schedules,
evaluation, a frozen layer, one that is not used at first."""

from __future__ import annotations

import os
import signal

import torch
import torch.nn.functional as F
from torch import nn

from elastune.elastic.worker.elastic_group import ElasticWorkerGroup
from elastune.parallel.comm.group import GroupBroken
from elastune.testing.faults import Rests, digit_rows, inject, parse_wishes
from elastune.train.checkpoints.run_folder import RunFolder

config = {
    "batch_size": 64,
    "epochs": 2,
    "samples": 640,
    "faults": [],
    "reshape": [],
    "pause_s": 0.0,
    "until": "",
    "width": 192,
    "batchnorm": True,
    "late": True,
    "early": False,
    "tampers": False,
    "lost_loading": False,
}


class Net(nn.Module):
    def __init__(self, width: int, batchnorm: bool) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.norm = nn.BatchNorm1d(width) if batchnorm else nn.Identity()
        self.drop = nn.Dropout(0.2)
        self.middle = nn.Linear(width, width)  # with the first one a pair, where layers are divided
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(3))  # blocks, where parameters are divided
        self.hidden[1].requires_grad_(requires_grad=False)
        self.last = nn.Linear(width, 10)
        self.uses_late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(F.relu(self.norm(self.first(x))))
        block, frozen, late = self.hidden
        h = h + F.relu(self.middle(h)) + 0.1 * frozen(h)
        h = h + F.relu(block(h))
        if self.uses_late:
            h = h + late(h)
        return self.last(h)


LOST_LOADING: list[int] = []  # once is enough


def lose_while_loading(worker: int) -> None:
    """Worker 2 dies before it loads a checkpoint; worker 0 believes that it was lost before, and has loaded nothing."""
    gather = ElasticWorkerGroup._gather_alike

    def gathered(group: ElasticWorkerGroup, mine: torch.Tensor, what: str) -> list[torch.Tensor]:
        rows = gather(group, mine, what)
        if what.startswith("the files of"):
            ElasticWorkerGroup._gather_alike = gather
            raise GroupBroken("an injected fault")
        return rows

    if worker == 0 and not LOST_LOADING:
        LOST_LOADING.append(worker)
        ElasticWorkerGroup._gather_alike = gathered
    if worker == 2:
        RunFolder._load = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def train(session) -> None:
    config = session.config
    if config["lost_loading"]:
        lose_while_loading(session.state.workers.worker)
    model = Net(config["width"], config["batchnorm"])
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    each_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    net = model
    model, optimizer, each_step = session.prepare(model, optimizer, each_step)
    reach = inject(session)
    net.drop.register_forward_hook(lambda *_: reach("forward"))
    samples, unseen = digit_rows(config["samples"])
    wishes = parse_wishes(config["reshape"])
    pace = Rests(session, config["epochs"] * -(-len(samples) // config["batch_size"]), wishes)
    for _ in session.epochs(config["epochs"]):
        model.train()
        for x, y in session.batches(samples, batch_size=config["batch_size"]):
            net.uses_late = config["late"] and session.step >= 3
            scores = model(x)
            if scores.requires_grad:
                scores.register_hook(lambda g: reach("backward"))
            session.backward(F.cross_entropy(scores, y))
            reach("after")
            if config["early"] and session.ends_step:
                session.mean(scores.detach())
            if config["tampers"] and session.step == 2 and session.rank == 1:
                next(iter(optimizer.state.values()))["exp_avg"][0] += 1.0
            if session.ends_step:
                pace.rest()
                if session.step in wishes:
                    session.reshape(wishes[session.step])
            session.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            each_step.step()
            reach("stepped")
            if session.ends_step and session.step % 5 == 4:
                session.report(inner=session.step)
        reach("tail")
        model.eval()
        losses = []
        with torch.no_grad():
            for x, y in session.batches(unseen, batch_size=32, train=False):
                reach("evaluation")
                losses.append(F.cross_entropy(model(x), y))
        reach("summing")
        session.report(loss=session.sum(losses))
