"""A network whose AdamW state is about 100 MB, for the benchmark of reshapes: made data, a few steps."""

from __future__ import annotations

import os
import signal
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

config = {"width": 2304, "kill": -1}


def train(session) -> None:
    width = session.config["width"]
    sizes = (784, width, width, width, 10)
    model = nn.Sequential()
    for i, (a, b) in enumerate(pairwise(sizes)):
        model.append(nn.Linear(a, b))
        if i < len(sizes) - 2:
            model.append(nn.ReLU())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = session.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(512, 784, generator=generator), torch.randint(0, 10, (512,), generator=generator))
    for _ in session.epochs(1):
        for x, y in session.batches(data, batch_size=32):
            session.backward(F.cross_entropy(model(x), y))
            if session.ends_step and session.step == 8 and session.state.workers.worker == session.config["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
