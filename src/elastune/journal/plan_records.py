"""What is recorded of a cluster's plan: what was asked, and the whole answer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PlanMade:
    """``elastune plan`` has answered. ``asked``: the request; ``found``: what ``--json`` prints; both JSON-able.

    ``constants``: of the fitted step model, in seconds, by the names of ``plan.steps.terms``.
    """

    program: str
    asked: dict[str, Any]
    found: dict[str, Any]
    constants: dict[str, float]
    kind: Literal["plan_made"] = "plan_made"
