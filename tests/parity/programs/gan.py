"""A generator against a discriminator, with an optimizer, a scheduler and turns of their own, as people write it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import TensorDataset

from elastune.testing.faults import inject

config = {"epochs": 2, "normalised": True, "faults": []}


class Generator(nn.Sequential):
    """Noise in, samples out."""


class Discriminator(nn.Sequential):
    """Samples in, a logit out."""


def build(normalised: bool) -> tuple[nn.Module, nn.Module]:
    middle = nn.BatchNorm1d(16) if normalised else nn.Tanh()
    return Generator(nn.Linear(4, 16), middle, nn.ReLU(), nn.Linear(16, 6)), Discriminator(
        nn.Linear(6, 16), nn.LeakyReLU(), nn.Linear(16, 1)
    )


def data() -> TensorDataset:
    source = torch.Generator().manual_seed(5)
    return TensorDataset(torch.rand(56, 6, generator=source), torch.randn(56, 4, generator=source))


def train(session) -> None:
    generator, discriminator = build(session.config["normalised"])
    first = torch.optim.Adam(discriminator.parameters(), lr=4e-3, betas=(0.5, 0.99))
    second = torch.optim.SGD(generator.parameters(), lr=2e-2, momentum=0.9)
    slower = torch.optim.lr_scheduler.StepLR(second, 3, 0.9)
    generator, discriminator, first, second, slower = session.prepare(generator, discriminator, first, second, slower)
    reach = inject(session)
    for _ in session.epochs(session.config["epochs"]):
        for real, noise in session.batches(data(), batch_size=16, turns=2):
            reach("before")
            if session.turn == 0:
                right = discriminator(real)
                wrong = discriminator(generator(noise).detach())
                loss = bce(right, torch.ones_like(right)) + bce(wrong, torch.zeros_like(wrong))
                session.backward(loss, discriminator)
                reach("after")
                first.step()
                first.zero_grad()
            else:
                result = discriminator(generator(noise))
                session.backward(bce(result, torch.ones_like(result)), generator)
                reach("after")
                second.step()
                second.zero_grad()
                slower.step()
        real, noise = data().tensors
        session.report(judged=discriminator(generator(noise)).mean(), rate=second.param_groups[0]["lr"])
