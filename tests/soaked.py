"""Cells of a matrix that ``make soak`` runs and ``make test`` does not: its corners prove the same there."""

from __future__ import annotations

from typing import Any

import pytest


def soaked(*cells: Any) -> list[Any]:
    """``cells`` for ``parametrize``; one of several arguments is a tuple."""
    return [pytest.param(*(cell if isinstance(cell, tuple) else (cell,)), marks=pytest.mark.soak) for cell in cells]
