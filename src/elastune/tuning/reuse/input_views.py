"""Views of a data set: named parts of a sample's inputs, so that models can see different parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elastune.core.errors import UserError

_FIX = 'such as views = {"temperature": [0, 1], "pressure": [2]}'


class InputView(nn.Module):
    """A first layer that passes on only the columns of some views of its inputs.

    With this layer all models take the whole input, so models of different views can be members of one ensemble.

    Attributes:
        columns: The places along ``dim`` that pass, in the order of the views.
        width: How many columns pass.

    Args:
        views: The columns of each view, by its name.
        shown: The names of the views that the model sees, at least one.
        dim: The axis that views divide; by default the last.

    Raises:
        UserError: For values that are no views, and for unknown names.

    Example:
        >>> views = {"temperature": [0, 1], "pressure": [2]}
        >>> view = elastune.InputView(views, session.config["inputs"])
        >>> model = nn.Sequential(view, nn.Linear(view.width, 1))
    """

    def __init__(self, views: Mapping[str, Sequence[int]], shown: Sequence[str], dim: int = -1) -> None:
        super().__init__()
        checked = checked_views(views, "the program")
        self.columns = tuple(at for name in checked_shown(shown, checked) for at in checked[name])
        self.dim = dim

    @property
    def width(self) -> int:
        """How many columns pass."""
        return len(self.columns)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the columns of ``inputs`` that pass."""
        return inputs.index_select(self.dim, torch.tensor(self.columns, device=inputs.device))

    def extra_repr(self) -> str:
        return f"columns={list(self.columns)}, dim={self.dim}"


def checked_views(views: object, where: object) -> dict[str, tuple[int, ...]]:
    """Return the columns of each view. ``where``: the source of the views, for messages.

    Raises:
        UserError: For values that are no views.
    """
    rule = "a program whose inputs are varied names its views: the columns of each"
    if not isinstance(views, Mapping) or not views:
        raise UserError(rule, f"{'none' if views is None else repr(views)[:80]} in {where}", _FIX)
    checked = {}
    for name, columns in views.items():
        plain = isinstance(columns, list | tuple | range) and all(_is_place(place) for place in columns)
        if not isinstance(name, str) or not name or "," in name or "+" in name or not plain or not columns:
            raise UserError(f"{rule}, under a name without comma and +", f"{name!r}: {columns!r}"[:120], _FIX)
        checked[name] = tuple(columns)
    return checked


def checked_shown(shown: object, views: Mapping[str, object]) -> list[str]:
    """Return the names of the views that a model sees. Raises ``UserError`` for unknown names, and for none."""
    names = list(shown) if isinstance(shown, list | tuple) else []
    fix = f"use {', '.join(views)}"
    if not names or len({repr(name) for name in names}) < len(names):
        raise UserError("what a model is shown is a list of views, each once", repr(shown)[:80], fix)
    for name in names:
        if not isinstance(name, str) or name not in views:
            raise UserError("a view is one that the program names", repr(name)[:80], fix)
    return names


def _is_place(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
