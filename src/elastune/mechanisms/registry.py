"""Mechanisms by name."""

from __future__ import annotations

from collections.abc import Mapping

from elastune.core.errors import UserError
from elastune.core.run import Means
from elastune.mechanisms.base import Mechanism
from elastune.mechanisms.replicated import Replicated

MECHANISMS: Mapping[str, Mechanism] = {mechanism.name: mechanism for mechanism in (Replicated(),)}


def mechanism_for(means: Means) -> Mechanism:
    """The mechanism that ``means`` name. Raises ``UserError`` where there is none, or it cannot do what they ask."""
    for word in means.parts.words:
        if word not in MECHANISMS:
            raise UserError("mechanism must be known", word, f"use one of {', '.join(MECHANISMS)}")
    mechanism = MECHANISMS[means.parts.words[0]]
    if means.mode == "exact" and not mechanism.exact:
        rule = "exact mode needs a mechanism that promises equal bits"
        raise UserError(rule, means.mechanism, "use --mode fast, or another mechanism")
    mechanism.check(means, means.first_mesh)
    return mechanism
