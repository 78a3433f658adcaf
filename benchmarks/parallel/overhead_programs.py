"""The programs of ``overhead.py``: loops with more in them than one model and a loss, plain and on a session.

Both read every step's loss, shuffle, and index whole batches of a ``TensorDataset``: the plain loop needs no loader.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.common.paired import paired, timed
from tests.support.sessions import lone_session
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from elastune.core.run import ExecutionSettings

Back = Callable[..., None]
Body = Callable[[Back, torch.Tensor, torch.Tensor], None]
INPUTS, WIDTH, SAMPLES = 512, 1024, 2048


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs)
    )


def step(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def gan(prepare: Callable[..., tuple[Any, ...]], track: Callable[[str, Any], Any]) -> Body:
    """Two models, two optimizers, a backward pass for each."""
    one, other = mlp(INPUTS, INPUTS), mlp(INPUTS, 1)
    opts = torch.optim.Adam(one.parameters(), 1e-4), torch.optim.Adam(other.parameters(), 1e-4)
    one, other, first, second = prepare(one, other, *opts)

    def body(back: Back, x: torch.Tensor, y: torch.Tensor) -> None:
        made = one(x)
        back(F.softplus(other(made.detach())).mean() + F.softplus(-other(x)).mean(), other, more=True)
        back(F.softplus(-other(made)).mean(), one)
        step(first, second)

    return body


def averaged(prepare: Callable[..., tuple[Any, ...]], track: Callable[[str, Any], Any]) -> Body:
    """An average of the weights after each step."""
    model = mlp(INPUTS, 10)
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))
    average = track("average", AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999)))

    def body(back: Back, x: torch.Tensor, y: torch.Tensor) -> None:
        back(F.cross_entropy(model(x), y))
        step(optimizer)
        average.update_parameters(model)

    return body


def in_turn(prepare: Callable[..., tuple[Any, ...]], track: Callable[[str, Any], Any]) -> Body:
    """Two losses of a batch, one after another."""
    model = mlp(INPUTS, 10)
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))

    def body(back: Back, x: torch.Tensor, y: torch.Tensor) -> None:
        back(F.cross_entropy(model(x), y), more=True)
        back(model(-x).square().mean())
        step(optimizer)

    return body


def compiled(prepare: Callable[..., tuple[Any, ...]], track: Callable[[str, Any], Any]) -> Body:
    """A model that TorchInductor compiles."""
    model = torch.compile(mlp(INPUTS, 10))
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))

    def body(back: Back, x: torch.Tensor, y: torch.Tensor) -> None:
        back(F.cross_entropy(model(x), y))
        step(optimizer)

    return body


PROGRAMS = {each.__name__: each for each in (gan, averaged, in_turn, compiled)}


def plainly(loss: torch.Tensor, model: nn.Module | None = None, more: bool = False) -> None:
    if model is None:
        loss.backward()
    else:
        torch.autograd.backward(loss, inputs=list(model.parameters()))
    loss.item()  # a session follows it, too


def measure_program(name: str, batch: int, rounds: int, steps: int) -> dict[str, Any]:
    """One worker's ``fast`` mode over the plain loop, paired: rounds of a few steps take turns."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, INPUTS), torch.randint(0, 10, (SAMPLES,)))

    def plain_batches() -> Iterator[list[torch.Tensor]]:
        while True:
            for places in torch.randperm(SAMPLES).split(batch):
                yield [tensor.index_select(0, places) for tensor in data.tensors]  # the quickest way

    session = lone_session(Path("nowhere"), execution=ExecutionSettings(mode="fast", num_slots=1))
    bodies = {
        "plain": PROGRAMS[name](lambda *given: given, lambda name, obj: obj),
        "fast": PROGRAMS[name](session.prepare, session.track),
    }
    backs: dict[str, Back] = {"plain": plainly, "fast": session.backward}
    sources = {
        "plain": plain_batches(),
        "fast": (xy for _ in session.epochs(10**9) for xy in session.batches(data, batch_size=batch)),
    }

    def run(variant: str, count: int) -> None:
        for x, y in itertools.islice(sources[variant], count):
            bodies[variant](backs[variant], x, y)

    for variant in bodies:
        run(variant, 5)
    variants = {variant: timed(partial(run, variant)) for variant in bodies}
    return {"program": name, "batch": batch, **paired(variants, rounds, steps)}
