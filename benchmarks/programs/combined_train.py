"""``combined.py``'s program: the split CNN on some images of MNIST, ten steps of Adam on a device of declared speed.

Judging it on other images is not paced: it runs at this machine's own speed.
"""

from __future__ import annotations

import functools
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from benchmarks.common.paced import Paced
from split_cnn import network

BATCH, STEPS, JUDGES = 64, 10, 500
MEAN, SPREAD = 0.1307, 0.3081  # of MNIST's pixels

config = {"lr": 1e-3, "momentum": 0.9, "gain": 1.0, "images": "", "flops_a_second": 0.0}
objectives = {"accuracy": "max"}


@functools.cache
def parts(images: str) -> tuple[TensorDataset, TensorDataset]:
    """What trains and what judges, out of the file ``images``: "pixels", bytes, and "labels"."""
    with np.load(images) as result:
        pixels, labels = torch.from_numpy(result["pixels"]), torch.from_numpy(result["labels"])
    pixels = ((pixels.float() / 255 - MEAN) / SPREAD).reshape(-1, 1, 28, 28)
    cut = BATCH * STEPS
    return TensorDataset(pixels[:cut], labels[:cut]), TensorDataset(pixels[cut:], labels[cut:])


def train(session: Any) -> None:
    """In a fixed order, so that what a configuration reaches is the same for every search."""
    config = session.config
    data, judges = parts(config["images"])
    torch.manual_seed(0)
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(config["gain"])
    model, optimizer = session.prepare(
        model, torch.optim.Adam(model.parameters(), lr=config["lr"], betas=(config["momentum"], 0.99))
    )
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in session.epochs(1):
        with Paced(config["flops_a_second"]) if config["flops_a_second"] else nullcontext():
            for x, y in session.batches(data, batch_size=BATCH, shuffle=False):
                session.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        took = {"train_seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        right = 0
        with torch.no_grad():
            for x, y in session.batches(judges, batch_size=100, train=False):
                right += int((model(x).argmax(1) == y).sum())
        session.report(accuracy=session.sum(right) / len(judges), **took)
