"""What is recorded of models that are made of a study's kept trials: ensembles, soups, joined and stacked ones."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator
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
    """The score of a trial by itself, and the number of its model's parameters."""

    trial: Number
    score: float
    parameters: Count


@dataclass(frozen=True, config=_RULES)
class AssetPart:
    """A trial of the study in the folder ``study``."""

    study: str
    trial: Count


@dataclass(frozen=True, config=_RULES)
class AssetMade:
    """An ensemble, a soup, a joined or a stacked model was written to ``file``.

    Attributes:
        sha256: The SHA-256 of the file.
        method: How it was found.
        score: Its score by ``objective`` (``direction`` says which way is better), on the predictions ``data`` that it
            was chosen by.
        singles: The same score of each trial that there was to choose from.
        test: Its score on data that no choice has seen.
        parameters: The number of parameters that one inference uses.
        parts: Trials of other studies that it is made of.
        parts_s: The worker-seconds of their training, and of that of the weights they began with, as far as journals
            told when this was written.
        untold: Weights whose training no journal told.
    """

    form: Literal["ensemble", "soup", "joined", "stacked"]
    method: str
    members: Annotated[list[AssetMember], Field(max_length=100_000)]
    data: str
    objective: str
    direction: Literal["max", "min"]
    score: float
    test: float | None
    parameters: Count
    singles: list[SingleScore]
    file: str
    sha256: str
    parts: Annotated[list[AssetPart], Field(max_length=100_000)] = field(default_factory=list)
    parts_s: Annotated[float, Field(ge=0)] = 0.0
    untold: list[str] = field(default_factory=list)
    kind: Literal["asset_made"] = "asset_made"

    @model_validator(mode="after")
    def _made_of_something(self) -> AssetMade:
        if not self.members and not self.parts:
            raise ValueError("members: there must be one, or a part of another study")
        return self
