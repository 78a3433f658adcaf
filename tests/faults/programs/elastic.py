"""A small network with everything that a lost worker could upset: dropout, BatchNorm, momentum, schedules, evaluation
that steers a schedule, reports inside and outside of the batch loop."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset

from elastune.testing.faults import Rests, digit_rows, inject, parse_wishes

config = {
    "batch_size": 64,
    "epochs": 3,
    "samples": 1000,
    "pause_s": 0.0,  # how the program rests: see testing/faults.py
    "until": "",
    "faults": [],
    "resize": [],
    "change": [],
    "agree": [],
    "changing": None,
    "optimizer": "adamw",
    "plain": False,
    "wide": 64,
    "unfit": [],
    "loaders": 0,
    "lr": 2e-3,
}
objectives = {"loss": "min"}


def space(trial):
    return {"lr": trial.suggest_float("lr", 1e-3, 1e-2, log=True)}


def train(session) -> None:
    config = session.config
    if session.rank in config["unfit"]:  # of a joiner, its number
        raise FileNotFoundError("no data on this machine")
    plain = config["plain"]
    model = nn.Sequential(
        nn.Linear(64, config["wide"]),
        nn.Identity() if plain else nn.BatchNorm1d(config["wide"]),
        nn.ReLU(),
        nn.Identity() if plain else nn.Dropout(0.3),
        nn.Linear(config["wide"], 10),
    )
    if config["optimizer"] == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    each_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
    model, optimizer, each_step, plateau = session.prepare(model, optimizer, each_step, plateau)
    reach = inject(session)
    samples, unseen = digit_rows(config["samples"])
    if config["loaders"]:  # a plain tensor needs none
        samples = Subset(samples, range(len(samples)))
    changes = {step: (name, value) for step, name, value in (text.split() for text in config["change"])}
    wishes, strategies = parse_wishes(config["resize"]), parse_wishes(config["agree"])
    pace = Rests(session, config["epochs"] * -(-len(samples) // config["batch_size"]), wishes)
    for _ in session.epochs(config["epochs"]):
        model.train()
        for x, y in session.batches(samples, batch_size=config["batch_size"], loader_workers=config["loaders"]):
            loss = F.cross_entropy(model(x), y)
            reach("before")
            session.backward(loss)
            reach("after")
            if session.ends_step:
                pace.rest()
                if session.step in wishes:
                    session.resize(int(wishes[session.step]))
                if session.step in strategies:
                    session.set_sync(strategies[session.step])
                if str(session.step) in changes and config["changing"] in (None, session.rank):
                    name, value = changes[str(session.step)]
                    if name == "topology":
                        session.set_topology(value)
                    elif name == "tree":
                        session.set_tree([int(parent) for parent in value.split(",")])
                    else:
                        session.change(**{name: int(value) if name == "batch_size" else float(value)})
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            each_step.step()
            if session.ends_step and session.step % 5 == 4:
                reach("inner")
                session.report(inner=session.step, lr=float(optimizer.param_groups[0]["lr"]))
        reach("tail")
        assert torch.isfinite(loss)  # what the batch loop leaves is there, whatever has happened
        model.eval()
        losses, hits = [], []
        with torch.no_grad():
            for x, y in session.batches(unseen, batch_size=32, train=False):
                reach("evaluation")
                scores = model(x)
                losses.append(F.cross_entropy(scores, y))
                hits += (scores.argmax(1) == y).tolist()
        reach("summing")
        loss = session.sum(losses)
        plateau.step(torch.tensor(loss, dtype=torch.float64))
        session.report(loss=loss, accuracy=session.mean(hits))
