"""Early stopping as users write it: "none", "asha", "hyperband:eta=4", "pbt:every=2"."""

from __future__ import annotations

from collections.abc import Sequence

from elastune.core.errors import UserError
from elastune.core.options import options_of, parse, read, split
from elastune.train.program.space import Space
from elastune.tuning.search.constraint import Constraint, violations
from elastune.tuning.search.halving import Halving, SuccessiveHalving
from elastune.tuning.search.objective import Objective
from elastune.tuning.search.population import PopulationBasedTraining, Selection
from elastune.tuning.search.schedule import Schedule, ToTheEnd

STOPPINGS = ("none", "asha", "hyperband", "pbt")
_HALVING = ("asha", "hyperband")


def halves(text: str) -> bool:
    """Return whether most of the trials that this early stopping pauses never go on."""
    return text.strip().partition(":")[0] in _HALVING


def make_schedule(
    text: str,
    objectives: Sequence[Objective],
    seed: int = 0,
    *,
    space: Space | None = None,
    constraints: Sequence[Constraint] = (),
) -> Schedule:
    """Return the schedule that ``text`` names.

    Args:
        text: A name of ``STOPPINGS``, with options of ``Halving`` or ``Selection``.
        objectives: The objectives of the study.
        seed: For population-based training, which changes settings.
        space: The space in which it changes them.
        constraints: The constraints that the changed settings must hold.

    Raises:
        UserError: For an unknown name or option.
    """
    name, options = split(text, "early stopping", "asha:eta=3,min_resource=1")
    if name not in STOPPINGS:
        raise UserError("early stopping must be one that is known", repr(text), f"one of {', '.join(STOPPINGS)}")
    if name == "none":
        read(name, options, {})
        return ToTheEnd()
    if name == "pbt":
        selection = parse(name, options, Selection)
        if space is None:
            raise UserError("population-based training changes settings within a space", "no space", "give it one")
        return PopulationBasedTraining(
            objectives,
            space,
            selection,
            seed,
            lambda sample: all(violation <= 0 for violation in violations(constraints, sample.values).values()),
        )
    if name == "asha":
        return SuccessiveHalving(objectives, parse(name, options, Halving, brackets=1))
    fields = {"brackets": 3, **read(name, options, options_of(Halving))}
    return SuccessiveHalving(objectives, Halving(**fields))
