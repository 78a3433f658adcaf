"""What a study optimises: named numbers, each with a direction and a unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from elastune.core.cost import MEASURED
from elastune.core.errors import UserError
from elastune.core.text import cost, duration, number

Direction = Literal["max", "min"]
Clock = Literal["total", "duration"]
Floats = NDArray[np.float64]

_DIRECTIONS: dict[str, Direction] = {"max": "max", "maximize": "max", "min": "min", "minimize": "min"}


@dataclass(frozen=True)
class Objective:
    """A metric, the way it should go, and the unit to show it in (empty where it is not known)."""

    name: str
    direction: Direction
    unit: str = ""

    @property
    def clock(self) -> Clock | None:
        """Whether it is a time: see ``clock``."""
        return clock(self.name)


def parse_objectives(given: Mapping[str, str] | Iterable[str]) -> tuple[Objective, ...]:
    """Objectives from ``{"accuracy": "max"}`` or ``["accuracy:max", "seconds:min"]``, in the order given.

    Raises ``UserError`` for an empty set, a missing name, an unknown direction or a name that comes twice.
    """
    if isinstance(given, str):
        given = [given]
    pairs = list(given.items()) if isinstance(given, Mapping) else [_pair(text) for text in given]
    if not pairs:
        raise UserError("a study needs at least one objective", "none", "for example accuracy:max")
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise UserError("an objective may be named once", name, "remove the others")
    return tuple(_objective(name, direction) for name, direction in pairs)


def clock(name: str) -> Clock | None:
    """Whether the metric ``name`` is a time, or its price, and so depends on the machine; None where it is neither.

    "total": since the training began; it grows with every pass over the data. ``seconds`` and ``cost`` (measured by
    elastune), and ``time`` where a program reports it. "duration": of one thing, however long the training is: every
    other name that ends in ``_s`` or ``_seconds``, such as ``latency_s``.
    """
    if name in (*MEASURED, "time"):
        return "total"
    return "duration" if name.endswith(("_s", "_seconds")) else None


def valued(name: str, value: float | None, price_per_worker_hour: float | None = None) -> str:
    """The value of the metric ``name`` in a unit that a person reads; costs need the price that they are made of."""
    if name == "cost":
        return f"{number(value)} price units" if price_per_worker_hour is None else cost(value, price_per_worker_hour)
    return duration(value) if clock(name) else number(value)


def oriented(values: Mapping[str, float] | Sequence[Mapping[str, float]], objectives: Sequence[Objective]) -> Floats:
    """Values as an array where smaller is better: shape (k,) for one mapping, (n, k) for a sequence of n."""
    if isinstance(values, Mapping):
        return np.array([_sign(o) * float(values[o.name]) for o in objectives])
    return np.array([oriented(each, objectives) for each in values]).reshape(len(values), len(objectives))


def _sign(objective: Objective) -> float:
    return -1.0 if objective.direction == "max" else 1.0


def _pair(text: object) -> tuple[str, str]:
    if not isinstance(text, str) or text.count(":") != 1:
        raise UserError("an objective must be NAME:max or NAME:min", text, "for example accuracy:max")
    name, direction = text.split(":")
    return name.strip(), direction.strip()


def _objective(name: str, direction: str) -> Objective:
    if not isinstance(name, str) or not name.isidentifier():
        raise UserError("an objective must name a metric", repr(name), "for example accuracy:max")
    known = _DIRECTIONS.get(direction) if isinstance(direction, str) else None
    if known is None:
        raise UserError(
            f"the direction of {name} must be max or min", repr(direction), f"write {name}:max or {name}:min"
        )
    return Objective(name, known, _unit(name))


def _unit(name: str) -> str:
    if clock(name):
        return "price units" if name == "cost" else "s"
    return "fraction" if name.endswith(("accuracy", "error")) else ""
