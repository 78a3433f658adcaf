"""``elastic.py``'s program for elastune: an ordinary loop that notes when each step was done."""

from pathlib import Path

import torch.nn.functional as F
from workload import TickLog, build, emulate, samples

config = {"size": "small", "batch_size": 64, "ticks": ""}


def train(session):
    model, optimizer = session.prepare(*build(session.config["size"]))
    log, data = TickLog(Path(session.config["ticks"])), samples()
    for _ in session.epochs(10**9):
        for x, y in session.batches(data, batch_size=session.config["batch_size"], drop_last=True):
            emulate(len(x))
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if session.ends_step:
                log.write(session.step + 1, session.size, session.rank)
