"""What stands around a block of Python on its page: the names that it uses and does not make.

Each name has a maker, which gets the scene of the block. A maker may use other names of the same scene.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.sessions import lone_session
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

import elastune
from elastune.core.fields import setting
from elastune.core.notation import TIME
from elastune.core.run import ExecutionSettings
from elastune.tuning.study.settings import SearchSettings

CLASSES = 3


def unknown(code: str) -> set[str]:
    """The names that a block uses before it makes them. Scopes count as one, so this is the least."""
    nodes = list(ast.walk(ast.parse(code)))
    made: dict[str, float] = dict.fromkeys(vars(builtins), 0.0)
    used: dict[str, float] = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            made[node.name] = 0.0
        elif isinstance(node, ast.arg):
            made[node.arg] = 0.0
        elif isinstance(node, ast.Import | ast.ImportFrom):
            made |= {(each.asname or each.name).split(".")[0]: 0.0 for each in node.names}
        elif isinstance(node, ast.comprehension | ast.For):
            made |= {each.id: 0.0 for each in ast.walk(node.target) if isinstance(each, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Name):
            lines = made if isinstance(node.ctx, ast.Store) else used
            lines[node.id] = min(node.lineno, lines.get(node.id, math.inf))
    return {name for name, line in used.items() if line <= made.get(name, math.inf)}


def plain(code: str) -> str:
    """The code without its comments."""
    return ast.unparse(ast.parse(code))


class Scene:
    """The names of one block, made when they are asked for."""

    def __init__(self, folder: Path, code: str) -> None:
        self.folder, self.code = folder, plain(code)
        self.made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.made:
            self.made[name] = MAKERS[name](self)
        return self.made[name]


class Body(nn.Module):
    """Six numbers to three classes, through a part that has a name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def samples() -> TensorDataset:
    x = torch.arange(240.0).reshape(40, 6).sin()
    return TensorDataset(x, x.argmax(1) % CLASSES)


class Numbers(IterableDataset[Any]):
    """A stream of the samples."""

    def __iter__(self) -> Any:
        return iter(samples())


def session(scene: Scene) -> Any:
    """A session; prepared, where the block's lines prepare nothing and its page has done so."""
    made = lone_session(
        scene.folder / "session",
        config={"unfreeze": {"head.*": 0, "*": 1}, "tree": [[0, 2], [1]], "lr": 0.1},
        execution=ExecutionSettings(num_slots=2 if "ends_step" in scene.code else 1),
    )
    if "start_from" in scene.code:
        pretrained(scene.folder)
    elif not any(word in scene.code for word in ("session.prepare", "session.unfreeze")):
        scene.made["model"], scene.made["optimizer"] = made.prepare(scene["model"], scene["optimizer"])
    return made


def pretrained(folder: Path) -> None:
    """The folder of a run, with a checkpoint."""
    made = lone_session(folder / "runs" / "pretrained")
    model = Body()
    made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    made.save()


def program(folder: Path) -> Any:
    """The program of the pages, as a module that workers can import."""
    path = folder / "train.py"
    path.write_bytes((Path(__file__).parent / "train.py").read_bytes())
    spec = importlib.util.spec_from_file_location("train", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py"])
        spec.loader.exec_module(module)
    return module


def pairs(_: Scene) -> TensorDataset:
    x, _ = samples().tensors
    return TensorDataset(x, x.roll(1, 1))


def data(_: Scene) -> Any:
    """The splits of a data set; each knows its targets."""
    splits = {}
    for name in ("train", "validation", "test"):
        splits[name] = samples()
        splits[name].targets = splits[name].tensors[1]  # type: ignore[attr-defined]
    return SimpleNamespace(**splits)


def batches(data: TensorDataset) -> Any:
    return DataLoader(data, batch_size=8)


def evaluated(session: Any, model: nn.Module, data: TensorDataset) -> Any:
    read = list(session.batches(data, batch_size=8, train=False))
    return [model(x) for x, _ in read], [y for _, y in read]


class Two(nn.Module):
    """Two towers: an encoder for each part of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(left), self.right(right)


def similarity(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(left @ right.T, torch.arange(len(left)))


def transformer(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))


def real_and_noise(_: Scene) -> DataLoader[Any]:
    x, _ = samples().tensors
    return DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=8)


def of_gan(scene: Scene) -> bool:
    return "generator" in scene.code


def model(scene: Scene) -> nn.Module:
    return Two() if "images, texts" in scene.code else Body()


MAKERS: dict[str, Callable[[Scene], Any]] = {
    **{
        name: lambda _, made=made: made  # type: ignore[misc]
        for name, made in {
            "AveragedModel": AveragedModel,
            "DataLoader": DataLoader,
            "F": F,
            "IterableDataset": IterableDataset,
            "SearchSettings": SearchSettings,
            "TIME": TIME,
            "argparse": argparse,
            "dataclass": dataclass,
            "elastune": elastune,
            "get_ema_multi_avg_fn": get_ema_multi_avg_fn,
            "json": json,
            "nn": nn,
            "setting": setting,
            "torch": torch,
            "Transformer": transformer,
            "batches": batches,
            "evaluated": evaluated,
            "similarity": similarity,
            "pad": default_collate,
        }.items()
    },
    "session": session,
    "model": model,
    "optimizer": lambda scene: torch.optim.SGD(scene["model"].parameters(), lr=0.1),
    "loader": lambda scene: real_and_noise(scene) if of_gan(scene) else batches(samples()),
    "train_set": lambda _: samples(),
    "stream": lambda _: Numbers(),
    "pairs": pairs,
    "data": data,
    "VALIDATION": lambda scene: scene["data"].validation,
    "TEST": lambda scene: scene["data"].test,
    "ROTATED": lambda scene: scene["data"].test,
    "TRAIN": lambda scene: scene["data"].train,
    "VIEWS": lambda _: {"left": slice(0, 3), "right": slice(3, 6)},
    "config": lambda _: {"epochs": 1, "width": 8},
    "make_model": lambda scene: lambda width: program(scene.folder).build({"width": width}),
    "train": lambda scene: program(scene.folder).train,
    "space": lambda scene: program(scene.folder).space,
    "build": lambda scene: program(scene.folder).build,
    "epoch": lambda _: 1,
    "accuracy": lambda _: 0.9,
    "handle": lambda _: None,
    "count_hits": lambda _: lambda model, x, y: (model(x).argmax(1) == y).sum(),
    "augmented": lambda _: lambda x: x + 0.1,
    "consistency": lambda _: lambda a, b: (a - b).square().mean(),
    "validation_loss": lambda _: lambda: 0.5,
    "bce": lambda _: lambda out, target: F.binary_cross_entropy_with_logits(out, torch.full_like(out, target)),
    "generator": lambda _: nn.Linear(6, 6),
    "discriminator": lambda _: nn.Linear(6, 1),
    "opt_g": lambda scene: torch.optim.SGD(scene["generator"].parameters(), lr=0.1),
    "opt_d": lambda scene: torch.optim.SGD(scene["discriminator"].parameters(), lr=0.1),
    "images": lambda _: samples().tensors[0],
    "plan": lambda _: None,
    "x": lambda _: samples().tensors[0],
    "y": lambda _: samples().tensors[1],
    "targets": lambda _: samples().tensors[1],
    "group": lambda _: 0,
}
