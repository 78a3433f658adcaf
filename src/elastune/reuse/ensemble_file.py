"""An ensemble as one file: safetensors with JSON in the header. Reading it runs none of its content."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from elastune.core.errors import UserError
from elastune.reuse.candidates import library
from elastune.reuse.ensemble import Ensemble
from elastune.reuse.model_file import not_a_model_file, read_model_file, write_model_file
from elastune.reuse.module import EnsembleModel
from elastune.reuse.task import LARGEST_BYTES, Task
from elastune.reuse.weights import Build, built, check_file, fill, weights_of

FORMAT = 2
MOST_MEMBERS = 1000
WIDEST = LARGEST_BYTES // 8
"""Numbers that one sample can have: more predictions than that were never judged."""
_WHAT = "an ensemble"
_RULES = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_RULES)
class FileMember:
    """One model in the file; the names of its tensors begin with its place."""

    trial: int
    weight: Annotated[float, Field(gt=0, le=1)]
    config: dict[str, Any]


@dataclass(frozen=True, config=_RULES)
class FileContent:
    """The content of the header."""

    format: Literal[2]
    kind: Literal["classification", "regression"]
    says: Literal["logits", "probabilities", "values"]
    width: Annotated[int, Field(ge=1, le=WIDEST)]
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
        UserError: Where weights are gone or damaged or NaN, or the file cannot be written.

    Example:
        >>> elastune.save_ensemble(elastune.ensemble("out", members=8), "ensemble.safetensors")
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
    write_model_file(path, content, tensors)
    return path


def load_ensemble(file: str | Path, build: Build) -> EnsembleModel:
    """Return the ensemble in ``file`` as one module, on the CPU and in evaluation mode.

    Args:
        file: A file from ``save_ensemble`` or ``elastune ensemble --out``.
        build: Makes the program's model from the settings of a trial: ``build(config)``.

    Returns:
        A module that takes a batch and gives probabilities of classes, or values.

    Raises:
        UserError: For any other file, one that has changed since, and where ``build`` fails or makes models with other
            names or shapes.

    Example:
        >>> model = elastune.load_ensemble("ensemble.safetensors", lambda config: make_model(config["width"]))
        >>> model(x).argmax(1)
    """
    path = Path(file)
    content, tensors = read_model_file(path, FileContent, _WHAT)
    _check(path, content, tensors)
    models = []
    for place, member in enumerate(content.members):
        model = built(build, member.config, f"of trial {member.trial} in {path}")
        own = f"{place}."
        fill(model, {n.removeprefix(own): t for n, t in tensors.items() if n.startswith(own)}, f"in {path}")
        models.append(model)
    return EnsembleModel(models, [member.weight for member in content.members], content.task).eval()


def _check(path: Path, content: FileContent, tensors: dict[str, torch.Tensor]) -> None:
    """Raise ``UserError`` where parts of the file contradict each other."""
    total = sum(member.weight for member in content.members)
    places = {str(place) for place in range(len(content.members))}
    stray = next((name for name in tensors if name.partition(".")[0] not in places), None)
    if not math.isclose(total, 1, abs_tol=1e-6):
        why = f"its weights add up to {total:g}"
    elif (content.kind == "regression") != (content.says == "values"):
        why = f"{content.says} of a {content.kind}"
    elif stray is not None:
        why = f"{stray} belongs to none of its {len(content.members)} members"
    else:
        return
    raise not_a_model_file(path, why, _WHAT)
