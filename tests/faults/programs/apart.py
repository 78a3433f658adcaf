"""A regression in double precision whose every number is written down here: what learners come to can be calculated."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

from elastune import Policy
from elastune.testing.faults import Rests, inject, parse

config = {"batch_size": 32, "epochs": 2, "faults": [], "file": "", "until": "", "pause_s": 0.0, "first_s": 0.0}


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.sin(torch.arange(384 * 6, dtype=torch.float64)).view(384, 6)
    return x, torch.cos(x.sum(1, keepdim=True))


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.cos(torch.arange(p.numel(), dtype=torch.float64)).view_as(p) / 3)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)


class Counting(Policy):
    """Asks for what changes nothing after each round that has ended without a learner."""

    monitors = ()

    def after_step(self, run) -> None:
        if run.left_out() == 1:
            run.remember()


class MidRound:
    """The place ``amid`` of a fault: its worker waits there until another has begun the round, too.

    Else, on a busy machine, it may be known to be dead before any other begins: the others deal the round out among
    themselves then, and nobody is left out of it.
    """

    def __init__(self, session) -> None:
        self._folder, self._session = Path(session.config["file"]).parent, session
        self._worker = session.state.workers.worker
        faults = [parse(text) for text in session.config["faults"]]
        self._dies_at = {fault.step for fault in faults if (fault.worker, fault.place) == (self._worker, "amid")}

    def begun(self) -> None:
        """This worker has begun a step."""
        (self._folder / f"begun-{self._session.step}-{self._worker}").touch()
        others = f"begun-{self._session.step}-[!{self._worker}]"
        while self._session.step in self._dies_at and not any(self._folder.glob(others)):
            time.sleep(0.005)


def train(session) -> None:
    config = session.config
    model = network()
    model, optimizer = session.prepare(model, optimizer_of(model))
    reach, mid_round = inject(session), MidRound(session)
    data = TensorDataset(*samples())
    pace = Rests(session, config["epochs"] * len(data) // config["batch_size"], {})
    for _ in session.epochs(config["epochs"]):
        for x, y in session.batches(data, batch_size=config["batch_size"]):
            reach("before")
            mid_round.begun()
            if session.step == 0:
                time.sleep(config["first_s"])  # in each batch of the first round
            session.backward(((model(x) - y) ** 2).mean())
            reach("after")
            reach("amid")
            optimizer.step()
            optimizer.zero_grad()
            if session.ends_step:
                pace.rest()
        session.report(loss=0.0)
    if session.rank == 0:
        save_file({name: p.detach() for name, p in model.named_parameters()}, config["file"])
