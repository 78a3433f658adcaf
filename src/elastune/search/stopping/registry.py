"""Early stopping as it is written on a command line: "none", "asha", "hyperband:eta=4,least=2", "pbt:every=2"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from elastune.core.errors import UserError
from elastune.search.space.constraint import Constraint, violations
from elastune.search.space.objective import Objective
from elastune.search.space.space import Space
from elastune.search.stopping.halving import Halving, SuccessiveHalving
from elastune.search.stopping.population import PopulationBasedTraining, parse_selection
from elastune.search.stopping.schedule import Schedule, ToTheEnd

STOPPINGS = ("none", "asha", "hyperband", "pbt")
_DEFAULTS = {"asha": Halving(brackets=1), "hyperband": Halving(brackets=3)}
_BOUNDS: dict[str, tuple[type[int] | type[float], float, float]] = {
    "eta": (int, 2, 64),
    "least": (int, 1, 10**6),
    "brackets": (int, 1, 16),
    "hope": (float, 0, 100),
    "doubt": (float, 0, 100),
}
_EXAMPLE = "for example asha, asha:eta=3,least=1 or hyperband"


def halves(text: str) -> bool:
    """Whether most of the trials that it pauses never go on; with others all do."""
    return text.strip().partition(":")[0] in _DEFAULTS


def make_schedule(
    text: str,
    objectives: Sequence[Objective],
    seed: int = 0,
    *,
    space: Space | None = None,
    constraints: Sequence[Constraint] = (),
) -> Schedule:
    """The schedule that ``text`` names, see ``STOPPINGS``, ``Halving`` and ``Selection``. Raises ``UserError``.

    ``seed``, ``space`` and ``constraints`` are for schedules that propose configurations: population-based training.
    """
    name, colon, rest = text.strip().partition(":")
    if name not in STOPPINGS:
        raise UserError("early stopping must be one that is known", repr(text), f"one of {', '.join(STOPPINGS)}")
    if name == "none":
        if colon:
            raise UserError("without early stopping there is nothing to set", repr(text), "write none")
        return ToTheEnd()
    if name == "pbt":
        selection = parse_selection(rest)
        if space is None:
            raise UserError("population-based training changes settings within a space", "no space", "give it one")
        return PopulationBasedTraining(
            objectives,
            space,
            selection,
            seed,
            lambda sample: all(violation <= 0 for violation in violations(constraints, sample.values).values()),
        )
    halving = replace(_DEFAULTS[name], **_options(rest if colon else None, name))
    return SuccessiveHalving(objectives, halving)


def _options(text: str | None, name: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    known = [option for option in _BOUNDS if not (name == "asha" and option == "brackets")]
    for pair in text.split(",") if text is not None else ():
        option, equals, value = (part.strip() for part in pair.partition("="))
        if option not in known or not equals or option in given:
            raise UserError(f"the options of {name} are {', '.join(known)}, once each", repr(pair), _EXAMPLE)
        kind, low, high = _BOUNDS[option]
        rule = f"{option} must be a {'whole ' if kind is int else ''}number from {low:g} to {high:g}"
        try:
            given[option] = kind(value)
        except ValueError:
            raise UserError(rule, repr(value), _EXAMPLE) from None
        if not low <= given[option] <= high:
            raise UserError(rule, repr(value), _EXAMPLE)
    return given
