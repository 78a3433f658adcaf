"""Mechanisms by name."""

from __future__ import annotations

from collections.abc import Mapping

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import Means
from elastune.mechanisms.base import Mechanism
from elastune.mechanisms.replicated import Replicated

MECHANISMS: Mapping[str, Mechanism] = {mechanism.name: mechanism for mechanism in (Replicated(),)}


def mechanism_for(means: Means) -> Mechanism:
    """The mechanism that ``means`` name. Raises ``UserError`` where there is none, or it cannot do what they ask."""
    if means.mechanism not in MECHANISMS:
        raise UserError("mechanism must be known", means.mechanism, f"use one of {', '.join(MECHANISMS)}")
    mechanism = MECHANISMS[means.mechanism]
    mechanism.check(means, Mesh(data=means.workers))
    return mechanism
