"""What is recorded of how a model is divided among the workers of a replica."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from elastune.journal.values import Count

_RULES = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_RULES)
class StagesCut:
    """A pipeline's stages, in the order of layers: ``names`` of the layers that they begin with, and their ``shares``
    of the whole cost. ``weighed``: by what costs were told ("counted operations").
    """

    names: list[str]
    shares: list[float]
    weighed: str
    kind: Literal["stages_cut"] = "stages_cut"


@dataclass(frozen=True, config=_RULES)
class LayersDivided:
    """What the tensor axis divides, each layer into so many virtual ``blocks``, in numbers that are trained: those that
    are in ``divided`` blocks, and those that lie ``whole`` on every worker along the axis. ``apart``: these workers run
    what is outside of divided layers each on slots of its own.
    """

    blocks: Count
    divided: Count
    whole: Count
    apart: bool
    kind: Literal["layers_divided"] = "layers_divided"
