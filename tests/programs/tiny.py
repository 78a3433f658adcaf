"""Linear regression on 200 samples: a training of a few milliseconds. ``config["act"]`` makes it misbehave.

With ``config["marker"]``, the path of a file, it does so only once.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

config = {
    "lr": 0.05,
    "batch_size": 20,
    "epochs": 3,
    "act": "",
    "pause_s": 0.0,
    "until": "",
    "misbehaving_rank": 1,
    "marker": "",
}
objectives = {"loss": "min"}


def space(trial):
    return {"lr": trial.suggest_float("lr", 0.01, 0.3, log=True), "epochs": trial.suggest_int("epochs", 1, 4)}


def data():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(200, 4, generator=generator)
    return TensorDataset(x, x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]))


def misbehave(act: str, step: int, marker: str) -> None:
    if step < 4 or not act:
        return
    if marker:
        if Path(marker).exists():
            return
        Path(marker).touch()
    if act == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "raises":
        print("the last words of the log", flush=True)
        raise ArithmeticError("this worker cannot go on")
    if act == "could not restore":
        raise RuntimeError("could not restore the store")
    if act == "memory":
        raise MemoryError("no room")
    if act == "leaves":
        os._exit(7)


def train(session) -> None:
    config = session.config
    if config["act"] == "diverges":
        config = {**config, "lr": 1e6}
    model = torch.nn.Linear(4, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=config["lr"]))
    for _ in session.epochs(config["epochs"]):
        total, count = 0.0, 0
        for x, y in session.batches(data(), batch_size=config["batch_size"]):
            loss = F.mse_loss(model(x), y)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total, count = total + float(loss.detach()), count + 1
            if not (config["until"] and Path(config["until"]).exists()):
                time.sleep(config["pause_s"])
            if session.rank == config["misbehaving_rank"]:
                misbehave(config["act"], session.step, config["marker"])
        session.report(loss=session.sum(total) / max(1.0, session.sum(count)), test_loss=1.0)
