"""Reports after each step a hash of all weights, buffers and moments, and a number that differs from rank to rank."""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch import nn

from elastune.testing.faults import Rests, digit_rows, inject, parse_wishes

config = {"batch_size": 64, "epochs": 2, "samples": 1000, "pause_s": 0.0, "faults": [], "resize": []}


def hashed(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The first 48 bits of a hash: a float holds them all."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    for parameter in model.parameters():
        for name, value in sorted(optimizer.state[parameter].items()):
            digest.update(name.encode() + torch.as_tensor(value).contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest()[:6], "little")


def train(session) -> None:
    config = session.config
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10))
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
    reach = inject(session)
    samples, _ = digit_rows(config["samples"])
    wishes = parse_wishes(config["resize"])
    pace = Rests(session, config["epochs"] * -(-len(samples) // config["batch_size"]), wishes)
    for _ in session.epochs(config["epochs"]):
        for x, y in session.batches(samples, batch_size=config["batch_size"]):
            reach("before")
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if session.ends_step:
                pace.rest()
                if session.step in wishes:
                    session.resize(int(wishes[session.step]))
                session.report(hash=hashed(model, optimizer), share=1 / (session.rank + 1), size=session.size)
