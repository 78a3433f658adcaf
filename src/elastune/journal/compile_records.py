"""What is recorded of compilers that run in a worker. Times: every ``*_s`` or ``seconds`` is a duration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from elastune.journal.values import Count


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Compiled:
    """``worker`` has compiled parts of its model for ``seconds`` since it told so last, or began, up to the end of
    ``step``. Times of steps are told without such as it did so in.
    """

    step: Count
    worker: Count
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    kind: Literal["compiled"] = "compiled"
