"""Calls collectives by name in every step and waits for them in the next, while workers come, go and die."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from elastune.testing.faults import Rests, inject, parse_wishes

config = {"pause_s": 0.0, "until": "", "faults": [], "resize": []}
EPOCHS, STEPS, BATCH = 2, 20, 16


def train(session) -> None:
    torch.manual_seed(0)
    x = torch.randn(STEPS * BATCH, 8)
    samples = TensorDataset(x, x.sum(1, keepdim=True))
    model = nn.Linear(8, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    reach = inject(session)
    wishes = parse_wishes(session.config["resize"])
    pace = Rests(session, EPOCHS * STEPS, wishes)
    last, seen = [], set()
    for _ in session.epochs(EPOCHS):
        for inputs, targets in session.batches(samples, batch_size=BATCH):
            loss = F.mse_loss(model(inputs), targets)
            reach("before")
            handles = []
            if session.ends_step:
                one, step = torch.ones(1000), torch.tensor([session.step])
                calls = [
                    lambda one=one: session.allreduce("ones", one),
                    lambda step=step: session.gather("steps", step),
                    lambda step=step: session.broadcast("step", step, root=0),
                ]
                order = sorted(range(3), key=lambda i: (i + session.rank) % 3)  # another one on each worker
                begun = {i: calls[i]() for i in order}
                handles = [begun[i] for i in range(3)]
            session.backward(loss)
            reach("after")
            if session.ends_step:
                pace.rest()
                if session.step in wishes:
                    session.resize(int(wishes[session.step]))
            optimizer.step()
            optimizer.zero_grad()
            for ones, steps, root in [last] if last else []:
                total, every, first = ones.wait(), steps.wait(), root.wait()
                assert (total.value == len(total.workers)).all()
                assert len({int(value) for value in every.value}) == 1, "all are of one step"
                assert len(every.value) == len(every.workers)
                assert int(first.value) == int(every.value[0])
                if not total.lost:
                    seen.add(len(total.workers))
            last = handles
    session.report(most=max(seen), fewest=min(seen), loss=loss.item())
