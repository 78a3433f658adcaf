"""A run's state as named parts: each a JSON tree plus named tensors, and back; its fingerprint. No pickle.

Saving, transfer and loading all go through one list of parts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from elastune.core.errors import UserError
from elastune.parallel.mechanisms.tensor_storage import PartialTensor

Tensors = dict[str, torch.Tensor]
Pieces = dict[str, torch.Tensor | PartialTensor]

States = dict[str, Any]
"""The state of every part, by its name."""


class Part(Protocol):
    """A piece of state that a run needs to go on: torch's ``Stateful`` and a name.

    ``state_dict`` returns tensors, numbers, text, and lists and dicts of them (``to_tree``), equal on every worker.
    ``load_state_dict`` takes over such a state, on any worker, now or in a later process.
    """

    @property
    def name(self) -> str: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> object: ...


@dataclass(frozen=True)
class Named:
    """Any object with ``state_dict`` and ``load_state_dict``, under ``name``: a model, an optimizer."""

    name: str
    target: Any

    def state_dict(self) -> dict[str, Any]:
        return dict(self.target.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.target.load_state_dict(state)


def states_of(parts: Sequence[Part]) -> States:
    """The present states of ``parts``. Tensors are not copied."""
    return {part.name: part.state_dict() for part in parts}


def load_states(parts: Sequence[Part], states: Mapping[str, Any], source: str) -> None:
    """Load each of ``parts``, in order.

    Raises ``UserError`` if a state, from ``source``, is missing or does not fit. States of earlier versions may lack
    parts that are ``optional``.
    """
    for part in parts:
        if part.name not in states and getattr(part, "optional", False):
            continue
        try:
            part.load_state_dict(states[part.name])
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            value = f"{source}, {part.name}: {error}"
            raise UserError(
                "a checkpoint must fit the program", value, "resume with the program that wrote it"
            ) from None


def to_trees(states: Mapping[str, Any], tensors: Tensors | Pieces) -> dict[str, Any]:
    """``states`` as JSON, part by part; their tensors go into ``tensors``."""
    return {name: to_tree(state, tensors, f"state.{name}") for name, state in states.items()}


def from_trees(trees: Mapping[str, Any], tensors: Mapping[str, Any]) -> States:
    """The reverse of ``to_trees``. Raises ``ValueError`` or ``KeyError`` for trees that it cannot have made."""
    return {str(name): from_tree(tree, tensors) for name, tree in trees.items()}


# --- one part as a tree ---


def to_tree(state: Any, tensors: Tensors | Pieces, path: str = "state") -> Any:
    """The JSON form of ``state`` (dicts, lists, tuples, counters, scalars). Its tensors go into ``tensors``, by path.

    Raises ``UserError`` for anything else, since only data can be read back without running code.
    """
    if state is None or isinstance(state, (bool, int, str)):
        return state
    if isinstance(state, float):
        return state if math.isfinite(state) else {"float": str(state)}
    if isinstance(state, PartialTensor):
        pieces: Pieces = tensors  # type: ignore[assignment]  # callers that need whole tensors pass no partial ones
        pieces[state.name] = state
        return {"tensor": state.name}
    if isinstance(state, torch.Tensor):
        while path in tensors:  # {"a": {"b": x}, "a.b": y}
            path += "'"
        tensors[path] = state.detach()
        return {"tensor": path}
    if isinstance(state, np.generic):
        return to_tree(state.item(), tensors, path)
    if isinstance(state, (list, tuple)):
        name = "tuple" if isinstance(state, tuple) else "list"
        return {name: [to_tree(value, tensors, f"{path}.{i}") for i, value in enumerate(state)]}
    if isinstance(state, Mapping):
        name = "counter" if isinstance(state, Counter) else "dict"
        pairs = [[to_tree(k, tensors), to_tree(v, tensors, f"{path}.{k}")] for k, v in state.items()]
        return {name: pairs}
    raise UserError(
        "training state must be made of tensors, numbers, text, lists and dicts",
        f"{type(state).__name__} at {path}",
        "give the optimizer or scheduler a state_dict of plain data",
    )


def from_tree(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """The reverse of ``to_tree``.

    Raises ``ValueError`` or ``KeyError`` for a tree that ``to_tree`` cannot have made.
    """
    if not isinstance(tree, dict):
        if isinstance(tree, list):
            raise ValueError("a list outside of its wrapper")
        return tree
    ((name, body),) = tree.items()
    match name:
        case "float":
            return float(body)
        case "tensor":
            return tensors[body]
        case "list":
            return [from_tree(value, tensors) for value in body]
        case "tuple":
            return tuple(from_tree(value, tensors) for value in body)
        case "dict" | "counter":
            plain = {from_tree(k, tensors): from_tree(v, tensors) for k, v in body}
            return Counter(plain) if name == "counter" else plain
    raise ValueError(f"unknown node {name!r}")


def joined(trees: Sequence[Any]) -> Any:
    """Join the trees that several workers have made of one part: dicts get the keys of all of them.

    For any other value, the tree of the first worker counts.
    """
    first = trees[0]
    if len(trees) == 1 or not (isinstance(first, dict) and "dict" in first):
        return first
    values_by_key: dict[str, tuple[Any, list[Any]]] = {}
    for tree in trees:
        for key, value in tree["dict"]:
            values_by_key.setdefault(json.dumps(key), (key, []))[1].append(value)
    return {"dict": [[key, joined(values)] for key, values in values_by_key.values()]}


def fingerprint(state: Any) -> str:
    """SHA-256 of a state: names, types and every bit of its tensors, independent of device and insertion order."""
    digest = hashlib.sha256()

    def visit(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            data = value.detach().cpu().contiguous()
            digest.update(f"{name}:{data.dtype}:{tuple(data.shape)};".encode())
            digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                visit(f"{name}.{key}", value[key])
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                visit(f"{name}.{i}", item)
        else:
            plain = value.item() if isinstance(value, np.generic) else value  # as it is after a checkpoint
            digest.update(f"{name}={plain!r};".encode())

    visit("", state)
    return digest.hexdigest()
