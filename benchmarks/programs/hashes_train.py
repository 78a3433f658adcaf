"""``hashes.py``'s program: a LeNet on enlarged digits, or a GRU that reads them row by row. Uses public names only."""

import math
import time

import torch
import torch.nn.functional as F
from torch import nn

import elastune

config = {"model": "lenet", "batch_size": 64, "epochs": 3, "lr": 0.02, "pace_s": 0.0}


class Adapt(elastune.Policy):
    """Sets batch and learning rate from the noise scale, and changes the workers.

    With ``average`` the workers average what is equal already. Such a hook ends a step later; one that waits when a
    worker joins or dies begins again.
    """

    monitors = ("noise_scale",)

    def __init__(self, average: bool = False):
        self.average = average

    def after_step(self, run):
        noise = run.grad_noise_scale()
        if self.average:
            noise = run.allreduce(noise, "avg")
        if run.step % 6 == 0 and math.isfinite(noise):
            run.set_batch_size(48 + int(abs(noise) * 16) % 64)
            run.scale_lr(1 + 0.01 * (int(abs(noise) * 256) % 16 - 8), ramp_steps=3)
        if run.step % 10 == 0 and run.limits.low < run.limits.high:
            run.resize(1 + run.step // 10 % run.limits.high)


class Set(elastune.Policy):
    """Sets a learning rate, a batch and a micro-batch at fixed steps."""

    monitors = ()

    def before_step(self, run):
        if run.step == 7:
            run.set_lr(run.lr() / 2)
        if run.step == 14:
            run.set_batch_size(96, lr="sqrt", ramp_steps=4, correct_momentum=True)
        if run.step == 21:
            run.set_micro_batch(5)


class RowReader(nn.Module):
    """Two layers of GRU over the rows of an image, with dropout between them."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(8, 24, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(24, 10)

    def forward(self, x):
        return self.head(self.gru(x.squeeze(1))[0][:, -1])


def lenet():
    """After LeCun et al. 1998, with batch normalisation and dropout, for the 28x28 pixels of MNIST."""
    return nn.Sequential(
        nn.Upsample(scale_factor=3), nn.ZeroPad2d(2),
        nn.Conv2d(1, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Dropout(0.3), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def build(settings):
    """Model, optimizer, and a scheduler that steps after each step."""
    if settings["model"] == "lenet":
        model = lenet()
        optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"], momentum=0.9, weight_decay=1e-4)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)
    model = RowReader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"])
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 20))


def accuracy(session, model, data):
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in session.batches(data, batch_size=100, train=False):
            correct += int((model(x).argmax(1) == y).sum())
    model.train()
    return session.sum(correct) / len(data)


def train(session):
    settings, data = session.config, elastune.datasets.digits()
    model, optimizer, scheduler = session.prepare(*build(settings))
    for _ in session.epochs(settings["epochs"]):
        for x, y in session.batches(data.train, batch_size=settings["batch_size"]):
            session.backward(F.cross_entropy(model(x), y))
            if session.ends_step:
                nn.utils.clip_grad_norm_(model.parameters(), 2.0)
                time.sleep(settings["pace_s"])
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        session.report(accuracy=accuracy(session, model, data.validation))
