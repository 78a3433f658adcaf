"""A joined or stacked model as one file: safetensors with JSON in the header. Reading it runs none of its content."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import nn

from elastune.core.errors import UserError
from elastune.reuse.class_tree import class_tree
from elastune.reuse.composed import Composed
from elastune.reuse.joined import JoinedModel
from elastune.reuse.model_file import not_a_model_file, read_model_file, write_model_file
from elastune.reuse.stacked import StackedParts, View, everything
from elastune.reuse.weights import Build, built, check_file, fill, tensors_of

FORMAT = 2
_WHAT = "a joined or stacked model"
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

    format: Literal[2]
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
        UserError: For a model that was built in another way, weights that are NaN, and where the file cannot be
            written.

    Example:
        >>> elastune.save_composed(elastune.join("gate", "parts", build, tree), "joined.safetensors")
    """
    path = Path(file)
    check_file(path)
    parts = len(model.models if isinstance(model, JoinedModel) else model.parts)
    if len(model.made_of) < parts:
        raise UserError("a model that is written knows its parts' settings", "made of nothing", "build it by join")
    content = {
        "format": FORMAT,
        "form": "joined" if isinstance(model, JoinedModel) else "stacked",
        "parts": [{"study": one.study.name, "trial": one.trial, "config": one.config} for one in model.made_of[:parts]],
        "tree": model.tree.to_json() if isinstance(model, JoinedModel) else None,
        "head": None if isinstance(model, JoinedModel) else [model.head.in_features, model.head.out_features],
    }
    write_model_file(path, content, {name: tensor.clone() for name, tensor in tensors_of(model).items()})
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
        UserError: For any other file, one that has changed since, and where ``build`` fails or makes models with other
            names or shapes.

    Example:
        >>> model = elastune.load_composed("joined.safetensors", build)
    """
    path = Path(file)
    content, tensors = read_model_file(path, ComposedContent, _WHAT)
    if (content.tree is None) != (content.form == "stacked") or (content.head is None) != (content.form == "joined"):
        wants = "tree and no head" if content.form == "joined" else "head and no tree"
        raise not_a_model_file(path, f"a {content.form} model has a {wants}", _WHAT)
    models = [built(build, part.config, f"of trial {part.trial} in {path}") for part in content.parts]
    whole: Composed
    if content.tree is not None:
        tree = class_tree(content.tree)
        if len(tree.nodes()) != len(models):
            raise not_a_model_file(path, f"{len(models)} parts of {len(tree.nodes())} nodes", _WHAT)
        whole = JoinedModel(dict(zip(tree.nodes(), models, strict=True)), tree)
    else:
        assert content.head is not None
        inputs, outputs = content.head
        if "head.weight" not in tensors or tuple(tensors["head.weight"].shape) != (outputs, inputs):
            raise not_a_model_file(path, f"no head of {inputs} inputs and {outputs} outputs", _WHAT)
        whole = StackedParts(models, [part.config for part in content.parts], view, nn.Linear(inputs, outputs))
    fill(whole, tensors, f"in {path}")
    return whole.eval()
