"""A joined or stacked model as one file: safetensors with JSON in the header. Reading it runs none of its content."""

from __future__ import annotations

import json
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
from elastune.reuse.class_tree import class_tree
from elastune.reuse.composed import Composed
from elastune.reuse.joined import Build, JoinedModel
from elastune.reuse.stacked import StackedParts, View, everything
from elastune.reuse.weights import check_file, fill, tensors_of

KEY = "elastune"
LONGEST = 1 << 24  # characters of JSON
MOST_PARTS = 10_000
_RULES = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_RULES)
class FilePart:
    """One model in the file: its trial, its study, and its settings."""

    study: str
    trial: int
    config: dict[str, Any]


@dataclass(frozen=True, config=_RULES)
class ComposedContent:
    """The content of the header.

    Attributes:
        tree: For a joined model, its tree.
        head: For a stacked model, the inputs and outputs of its head.
    """

    format: Literal[1]
    form: Literal["joined", "stacked"]
    parts: Annotated[list[FilePart], Field(min_length=1, max_length=MOST_PARTS)]
    tree: list[Any] | None = None
    head: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None = None


def save_composed(model: Composed, file: str | Path) -> Path:
    """Write a model from ``join`` or ``stacked_parts``; the file appears whole or not at all.

    Args:
        model: The model, with its present weights.
        file: The path; a file that is there is replaced.

    Returns:
        The path.

    Raises:
        UserError: For a model that was built in another way, and where the file cannot be written.
    """
    path = Path(file)
    check_file(path)
    parts = len(model.models if isinstance(model, JoinedModel) else model.parts)
    if len(model.made_of) < parts:
        raise UserError("a model that is written knows its parts' settings", "made of nothing", "build it by join")
    content = {
        "format": 1,
        "form": "joined" if isinstance(model, JoinedModel) else "stacked",
        "parts": [{"study": one.study.name, "trial": one.trial, "config": one.config} for one in model.made_of[:parts]],
        "tree": model.tree.to_json() if isinstance(model, JoinedModel) else None,
        "head": None if isinstance(model, JoinedModel) else [model.head.in_features, model.head.out_features],
    }
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors_of(model).items()}
    try:
        atomic_write(path, save(tensors, {KEY: json.dumps(content)}))
    except OSError as error:
        raise UserError("a model must be writable", error, "name a file in a folder that is there") from None
    return path


def load_composed(file: str | Path, build: Build, view: View = everything) -> Composed:
    """Return the model in ``file``, on the CPU and in evaluation mode.

    Args:
        file: A file from ``save_composed`` or ``elastune join --out``.
        build: Makes the program's model from the settings of a part.
        view: For a stacked model, what each part sees of the inputs, as for ``stacked_parts``.

    Returns:
        The module.

    Raises:
        UserError: For any other file, and where ``build`` makes models with other names or shapes.

    Example:
        >>> model = elastune.load_composed("joined.safetensors", build)
    """
    path = Path(file)
    content, tensors = _read(path)
    models = []
    for part in content.parts:
        model = build(dict(part.config))
        if not isinstance(model, nn.Module):
            raise UserError("build(config) gives a torch.nn.Module", type(model).__name__, "return the model")
        models.append(model)
    whole: Composed
    if content.form == "joined" and content.tree is not None:
        tree = class_tree(content.tree)
        if len(tree.nodes()) != len(models):
            raise _other(path, f"{len(models)} parts of {len(tree.nodes())} nodes")
        whole = JoinedModel(dict(zip(tree.nodes(), models, strict=True)), tree)
    elif content.form == "stacked" and content.head is not None:
        inputs, outputs = content.head
        if "head.weight" not in tensors or tuple(tensors["head.weight"].shape) != (outputs, inputs):
            raise _other(path, f"no head of {inputs} inputs and {outputs} outputs")
        whole = StackedParts(models, [part.config for part in content.parts], view, nn.Linear(inputs, outputs))
    else:
        raise _other(path, f"no {'tree' if content.form == 'joined' else 'head'} of a {content.form} model")
    fill(whole, tensors, f"in {path}")
    return whole.eval()


def _read(path: Path) -> tuple[ComposedContent, dict[str, torch.Tensor]]:
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")
        with safe_open(path, "pt") as opened:
            told = (opened.metadata() or {}).get(KEY, "")
            if not told or len(told) > LONGEST:
                raise ValueError("it is no joined or stacked model")
            content = TypeAdapter(ComposedContent).validate_python(json.loads(told))
            return content, {name: opened.get_tensor(name) for name in list(opened.keys())}
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        why = str(error)[:200]
    raise _other(path, why)


def _other(path: Path, why: str) -> UserError:
    return UserError(
        "a joined or stacked model is a file that elastune has written", f"{path}: {why}", "write it again"
    )
