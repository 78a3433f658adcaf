"""``mesh_chaos.py``'s program: layers of several units that every mechanism can divide, dropout, clipping, AdamW."""

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from elastune.recipes.datasets import digits

config = {"pause_s": 0.0, "until": "", "samples": 640}


def train(session):
    wide = 192
    model = nn.Sequential(
        *(nn.Linear(64, wide), nn.ReLU(), nn.Linear(wide, wide), nn.Dropout(0.2)),
        *(nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 10)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    model, optimizer = session.prepare(model, optimizer)
    images, labels = digits().train[: session.config["samples"]]
    data = TensorDataset(images.flatten(1), labels)
    until = session.config["until"]
    for _ in session.epochs(10**6):
        for x, y in session.batches(data, batch_size=64):
            session.backward(F.cross_entropy(model(x), y))
            if session.ends_step and until and not Path(until).exists():
                time.sleep(session.config["pause_s"])  # it goes slowly for as long as something is to happen to it
            session.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
