"""Evaluations in which workers need each other, each left at another place; then a collective by name."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from elastune.parallel.mechanisms.tensor.tensor_parallel import DataParallelTrunk
from elastune.testing.faults import inject

config = {"how": "breaks", "faults": [], "pause_s": 0.0, "until": ""}
STEPS, BATCH = 3, 16


def train(session) -> None:
    """``how``: "breaks" out of the loop; "holds" its iterator besides; "asks" until the result is there; "first": rank
    0 alone leaves it early, the others go to its end; or waits "inside" of the loop, of which all workers have equally
    many batches.
    """
    how = session.config["how"]
    torch.manual_seed(0)
    x = torch.randn(STEPS * BATCH, 6)
    samples = TensorDataset(x, x.sum(1, keepdim=True))
    trunk = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
    model = nn.Sequential(trunk, nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = session.prepare(model, optimizer, plan=DataParallelTrunk())  # for the mechanism tensor
    reach = inject(session)
    for _ in session.epochs(2):
        model.train()
        for inputs, targets in session.batches(samples, batch_size=BATCH):
            session.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        own = session.rank  # of one that has come in place of another, too
        seen, inside = torch.zeros(1), torch.zeros(1)
        with torch.no_grad():
            held = session.batches(samples, batch_size=4, train=False)
            passes = held if how == "holds" else session.batches(samples, batch_size=4, train=False)
            for inputs, _targets in passes:
                model(inputs)
                reach("evaluation")
                seen += 1
                if how == "inside":
                    inside += session.allreduce("inside", torch.ones(1)).wait().value
                elif seen > own and (how != "first" or own == 0):
                    break
        begun = session.allreduce("seen", seen)
        while how == "asks" and not begun.done:
            pass
        result = begun.wait()
        session.report(seen=result.value.item(), workers=len(result.workers), inside=inside.item())
