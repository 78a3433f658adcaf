"""A run's state as named parts: whoever saves, hands over or loads a run's state goes through one list of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from elastune.core.errors import UserError
from elastune.train.checkpoints.tree import Pieces, Tensors, from_tree, to_tree


class Part(Protocol):
    """A piece of state that a run cannot go on without: torch's ``Stateful`` and a name.

    ``state_dict`` gives tensors, numbers, text, and lists and dicts of them (``tree.to_tree``), equal on every worker.
    ``load_state_dict`` takes over what it gave, here or on another worker, now or in an earlier process.
    """

    @property
    def name(self) -> str: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> object: ...


@dataclass(frozen=True)
class Named:
    """Anything that has ``state_dict`` and ``load_state_dict``, under ``name``: a model, an optimizer."""

    name: str
    target: Any

    def state_dict(self) -> dict[str, Any]:
        return dict(self.target.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.target.load_state_dict(state)


States = dict[str, Any]
"""The state of every part, by its name."""


def states_of(parts: Sequence[Part]) -> States:
    """What ``parts`` are now; tensors are theirs, not copies."""
    return {part.name: part.state_dict() for part in parts}


def load_states(parts: Sequence[Part], states: Mapping[str, Any], source: str) -> None:
    """Load each of ``parts``, in order. Raises ``UserError`` if one's state, from ``source``, is missing or misfits."""
    for part in parts:
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
    """What ``to_trees`` took apart. Raises ``ValueError`` or ``KeyError`` for what it cannot have written."""
    return {str(name): from_tree(tree, tensors) for name, tree in trees.items()}
