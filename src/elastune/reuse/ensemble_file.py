"""An ensemble as one file: safetensors with JSON in the header. Reading it runs none of its content."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from elastune.core.errors import UserError
from elastune.journal.atomic import atomic_write
from elastune.reuse.candidates import library
from elastune.reuse.ensemble import Ensemble
from elastune.reuse.module import EnsembleModel
from elastune.reuse.task import Task
from elastune.reuse.weights import check_file, fill, weights_of

KEY = "elastune"
FORMAT = 1
MOST_MEMBERS = 1000
LONGEST = 1 << 24  # characters of JSON
_RULES = ConfigDict(extra="forbid")
Build = Callable[[dict[str, Any]], nn.Module]


@dataclass(frozen=True, config=_RULES)
class FileMember:
    """One model in the file; the names of its tensors begin with its place."""

    trial: int
    weight: Annotated[float, Field(gt=0, le=1)]
    config: dict[str, Any]


@dataclass(frozen=True, config=_RULES)
class FileContent:
    """The content of the header."""

    format: Literal[1]
    kind: Literal["classification", "regression"]
    says: Literal["logits", "probabilities", "values"]
    width: Annotated[int, Field(ge=1)]
    members: Annotated[list[FileMember], Field(min_length=1, max_length=MOST_MEMBERS)]
    about: dict[str, Any]

    @property
    def task(self) -> Task:
        """The kind of problem."""
        return Task(self.kind, self.says, self.width)


def save_ensemble(found: Ensemble, file: str | Path) -> Path:
    """Write the weights and the description of an ensemble as one file; it appears whole or not at all.

    Args:
        found: An ensemble from ``ensemble``; the folder of its study must be unchanged.
        file: The path; a file that is there is replaced.

    Returns:
        The path.

    Raises:
        UserError: Where weights are gone or damaged, or the file cannot be written.
    """
    path = Path(file)
    check_file(path)
    known = {one.trial: one for one in library(found.study).candidates}
    tensors: dict[str, torch.Tensor] = {}
    for place, member in enumerate(found.members):
        if member.trial not in known:
            rule = "the weights of all members stay where they are until the ensemble is written"
            raise UserError(rule, f"trial {member.trial} of {found.study}", "choose anew")
        tensors |= {f"{place}.{name}": tensor for name, tensor in weights_of(known[member.trial]).items()}
    content = {
        "format": FORMAT,
        "kind": found.task.kind,
        "says": found.task.says,
        "width": found.task.width,
        "members": [{"trial": m.trial, "weight": m.weight, "config": m.config} for m in found.members],
        "about": {
            "study": found.study.name,
            "method": found.method,
            "objective": found.objective,
            "data": found.data,
            "score": found.score,
            "test": None if found.test is None else found.test.ensemble,
        },
    }
    try:
        atomic_write(path, save(tensors, {KEY: json.dumps(content)}))
    except OSError as error:
        raise UserError("an ensemble must be writable", error, "free space, or name another file") from None
    return path


def load_ensemble(file: str | Path, build: Build) -> EnsembleModel:
    """Return the ensemble in ``file`` as one module, on the CPU and in evaluation mode.

    Args:
        file: A file from ``save_ensemble`` or ``elastune ensemble --out``.
        build: Makes the program's model from the settings of a trial: ``build(config)``.

    Returns:
        A module that takes a batch and gives probabilities of classes, or values.

    Raises:
        UserError: For any other file, and where ``build`` makes models with other names or shapes.

    Example:
        >>> model = elastune.load_ensemble("ensemble.safetensors", lambda config: make_model(config["width"]))
        >>> model(x).argmax(1)
    """
    path = Path(file)
    content, tensors = _read(path)
    models = []
    for place, member in enumerate(content.members):
        model = build(dict(member.config))
        if not isinstance(model, nn.Module):
            raise UserError("build(config) gives a torch.nn.Module", type(model).__name__, "return the model")
        own = f"{place}."
        fill(model, {n.removeprefix(own): t for n, t in tensors.items() if n.startswith(own)}, f"in {path}")
        models.append(model)
    return EnsembleModel(models, [member.weight for member in content.members], content.task).eval()


def _read(path: Path) -> tuple[FileContent, dict[str, torch.Tensor]]:
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")
        with safe_open(path, "pt") as opened:
            told = (opened.metadata() or {}).get(KEY, "")
            if not told:
                raise ValueError("it is no ensemble")
            if len(told) > LONGEST:
                raise ValueError("its header is too long")
            content = TypeAdapter(FileContent).validate_python(json.loads(told))
            total = sum(member.weight for member in content.members)
            if not math.isclose(total, 1, abs_tol=1e-6):
                raise ValueError(f"its weights add up to {total:g}")
            return content, {name: opened.get_tensor(name) for name in list(opened.keys())}
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        why = str(error)[:200]
    raise UserError("an ensemble is a file that elastune has written", f"{path}: {why}", "write it again") from None
