"""What is recorded of models that are made of a study's kept trials: ensembles and soups."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from elastune.journal.values import Count, Number

_RULES = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_RULES)
class AssetMember:
    """A trial, and its part of the whole."""

    trial: Number
    weight: Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, config=_RULES)
class SingleScore:
    """What a trial scores by itself; its model has so many ``parameters``."""

    trial: Number
    score: float
    parameters: Count


@dataclass(frozen=True, config=_RULES)
class AssetMade:
    """An ensemble or a soup was written to ``file``, whose SHA-256 is ``sha256``.

    ``method``: how it was found. ``score``: by ``objective``, which is to be ``direction``, on the predictions ``data``
    that it was chosen by; ``singles``: of the trials there were to choose from, by the same. ``test``: on data that no
    choice has seen. ``parameters``: how many numbers one inference goes through.
    """

    form: Literal["ensemble", "soup"]
    method: str
    members: Annotated[list[AssetMember], Field(min_length=1, max_length=100_000)]
    data: str
    objective: str
    direction: Literal["max", "min"]
    score: float
    test: float | None
    parameters: Count
    singles: list[SingleScore]
    file: str
    sha256: str
    kind: Literal["asset_made"] = "asset_made"
