"""One training of ``adaptive.py``: a setting in, its course out (which batches, and what accuracy after them)."""

from __future__ import annotations

import functools
import json
import math
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import TensorDataset

from elastune.core.errors import Diverged
from elastune.core.journal.records import Decided, Measured, PolicyFailed, Record
from elastune.core.run import Adapt, ExecutionSettings
from elastune.recipes.datasets import Splits, digits, fashion_mnist, mnist

MOMENTUM = 0.9
MICRO_BATCH = 256  # samples of one pass: larger ones only miss the caches; the gradient is that of the whole batch
COLLAPSED = 0.2  # accuracy, of ten classes
DATA_SETS = ("mnist", "fashion_mnist", "digits")


@dataclass(frozen=True)
class Setting:
    """All that decides a training. ``batch`` and ``lr`` are those at its start.

    ``decay``: "none", or "cosine": the learning rate times (1 + cos(pi used / all)) / 2 over the samples of all epochs,
    whatever else changes it. ``policies``: as ``--policy`` writes them; none: everything stays. ``looks``: evaluations
    an epoch.
    """

    data: str
    batch: int
    lr: float
    decay: str = "none"
    policies: tuple[str, ...] = ()
    epochs: int = 5
    seed: int = 0
    looks: int = 1
    samples: int | None = None  # of the training set; None: all

    @property
    def key(self) -> str:
        """What a cache knows it by."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Look:
    """An evaluation: after which steps (how many of which size), and what it found.

    ``steps``: (samples in a global batch, number of such steps so far). Accuracies are fractions of all samples of a
    set; ``test`` is None where it was not looked at: settings are chosen on ``validation``.
    """

    steps: tuple[tuple[int, int], ...]
    validation: float
    test: float | None = None

    @property
    def samples(self) -> int:
        """Samples used so far."""
        return sum(size * count for size, count in self.steps)

    @property
    def count(self) -> int:
        """Steps so far."""
        return sum(count for _, count in self.steps)


@dataclass(frozen=True)
class Course:
    """What became of a training. ``failed``: why it has no result (it diverged).

    ``changes``: the applied decisions (step, what); ``scales``: (step, noise scale) where it was measured.
    """

    setting: Setting
    looks: tuple[Look, ...] = ()
    failed: str = ""
    changes: tuple[tuple[int, dict[str, Any]], ...] = ()
    scales: tuple[tuple[int, float], ...] = ()

    @property
    def lost(self) -> bool:
        """Whether it diverged, or collapsed: it guesses at its end."""
        return bool(self.failed) or self.looks[-1].validation < COLLAPSED

    def to_json(self) -> dict[str, Any]:
        """Plain data; ``course_from_json`` reads it."""
        return asdict(self)


def course_from_json(found: dict[str, Any]) -> Course:
    """The course that ``to_json`` wrote."""
    setting = Setting(**{**found["setting"], "policies": tuple(found["setting"]["policies"])})
    looks = tuple(
        Look(tuple((size, count) for size, count in look["steps"]), look["validation"], look["test"])
        for look in found["looks"]
    )
    changes = tuple((step, what) for step, what in found["changes"])
    scales = tuple((step, scale) for step, scale in found["scales"])
    return Course(setting, looks, found["failed"], changes, scales)


def cnn() -> nn.Module:
    """21,286 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(800, 20), nn.ReLU(), nn.Linear(20, 10),
    )  # fmt: skip


@functools.cache
def load(data: str) -> Splits:
    """The data set, standardised; digits are brought to MNIST's size."""
    result = {"mnist": mnist, "fashion_mnist": fashion_mnist, "digits": digits}[data]()
    x = result.train.tensors[0]
    mean, std = x.mean(), x.std()

    def ready(part: TensorDataset) -> TensorDataset:
        images, labels = part.tensors
        images = images if images.shape[-1] == 28 else F.interpolate(images, size=28)
        return TensorDataset((images - mean) / std, labels)

    return Splits(*map(ready, (result.train, result.validation, result.test)))


def train(setting: Setting) -> Course:
    """Run it on one worker: what is trained does not depend on the number of workers."""
    with tempfile.TemporaryDirectory() as folder:
        return _train(setting, Path(folder))


def _train(setting: Setting, out: Path) -> Course:
    sets = load(setting.data)
    train_set = TensorDataset(*(tensor[: setting.samples] for tensor in sets.train.tensors))
    changes: list[tuple[int, dict[str, Any]]] = []
    scales: list[tuple[int, float]] = []
    session = lone_session(out, send=functools.partial(_note, changes, scales), seed=setting.seed, **_spec(setting))
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.lr, momentum=MOMENTUM)
    model, optimizer = session.prepare(model, optimizer)
    whole = setting.epochs * len(train_set)
    used: Counter[int] = Counter()
    looks: list[Look] = []
    held = seen = 0
    course = Course(setting)
    try:
        for _ in session.epochs(setting.epochs):
            for x, y in session.batches(train_set, batch_size=setting.batch):
                session.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                held += len(y)
                if not session.ends_step:
                    continue
                used[held] += 1
                _decay(setting, optimizer, seen / whole, (seen + held) / whole)
                due = (seen + held) * setting.looks // len(train_set) > seen * setting.looks // len(train_set)
                seen, held = seen + held, 0
                if due:
                    looks.append(_look(model, sets, used, test=setting.looks > 1 or seen == whole))
    except Diverged as error:
        course = replace(course, failed=str(error))
    return replace(course, looks=tuple(looks), changes=tuple(changes), scales=tuple(scales))


def _spec(setting: Setting) -> dict[str, Any]:
    # Norms are those of two half batches at least, or of micro-batches: many workers would know the noise scale better.
    spec: dict[str, Any] = {"execution": ExecutionSettings(mode="fast", micro_batch=MICRO_BATCH)}
    return {**spec, "adapt": Adapt(policies=setting.policies)} if setting.policies else spec


def _note(changes: list[tuple[int, dict[str, Any]]], scales: list[tuple[int, float]], record: Record) -> None:
    if isinstance(record, Decided) and record.outcome == "applied":
        changes.append((record.step, record.decision))
    elif isinstance(record, Measured) and "noise_scale" in record.signals:
        scales.append((record.step, record.signals["noise_scale"][0]))
    elif isinstance(record, PolicyFailed):
        raise RuntimeError(f"{record.policy} failed in {record.hook}: {record.detail}")


def _decay(setting: Setting, optimizer: torch.optim.Optimizer, before: float, now: float) -> None:
    """Cosine decay as a factor from one step to the next, so that what a policy made of the rate stays."""
    if setting.decay == "cosine":
        factor = (1 + math.cos(math.pi * now)) / (1 + math.cos(math.pi * before))
        for group in optimizer.param_groups:
            group["lr"] *= factor


@torch.no_grad()
def _look(model: nn.Module, sets: Splits, used: Counter[int], *, test: bool) -> Look:
    steps = tuple(sorted(used.items()))
    return Look(steps, _accuracy(model, sets.validation), _accuracy(model, sets.test) if test else None)


def _accuracy(model: nn.Module, data: TensorDataset) -> float:
    images, labels = data.tensors
    right = sum(
        int((model(x).argmax(dim=1) == y).sum()) for x, y in zip(images.split(500), labels.split(500), strict=True)
    )
    return right / len(labels)
