"""Mechanisms by name."""

from __future__ import annotations

from collections.abc import Mapping

from elastune.core.errors import UserError
from elastune.core.run import Means
from elastune.mechanisms.base import Mechanism
from elastune.mechanisms.division import Divide
from elastune.mechanisms.owned.mechanism import Owned
from elastune.mechanisms.pipeline.divide import divide as divide_stages
from elastune.mechanisms.replicated import Replicated
from elastune.mechanisms.tensor.division import divide as divide_layers

MECHANISMS: Mapping[str, Mechanism] = {mechanism.name: mechanism for mechanism in (Replicated(),)}
DIVIDES: Mapping[str, Divide] = {"tensor": divide_layers, "pipeline": divide_stages}
"""What divides the arithmetic of a replica, by name; applied in the order of ``MechanismName.words``."""
STATES = ("zero", "sharded")
"""How state lies where it is held in shares."""


def mechanism_for(means: Means) -> Mechanism:
    """The mechanism that ``means`` name. Raises ``UserError`` where there is none, or it cannot do what they ask."""
    parts = means.parts
    known = (*MECHANISMS, *STATES, *DIVIDES)
    for word in parts.words:
        if word not in known:
            raise UserError("mechanism must be known", word, f"use one of {', '.join(known)}")
    divides = [DIVIDES[word] for word in parts.words if word in DIVIDES]
    mechanism = MECHANISMS.get(str(parts)) or Owned(str(parts), parts.dividing, divides, frees=parts.state == "sharded")
    if means.mode == "exact" and not mechanism.exact:
        rule = "exact mode needs a mechanism that promises equal bits"
        raise UserError(rule, means.mechanism, "use --mode fast, or another mechanism")
    mechanism.check(means, means.first_mesh)
    return mechanism
