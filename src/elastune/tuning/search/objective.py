"""Objectives: named numbers with a direction and a unit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from elastune.core.cost import MEASURED
from elastune.core.errors import UserError
from elastune.core.formatting import cost, duration, number

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Direction = Literal["max", "min"]
Clock = Literal["total", "duration"]
Floats: TypeAlias = "NDArray[np.float64]"
_ALL = (-math.inf, math.inf)
_FRACTIONS = ("accuracy", "error_rate", "precision", "recall", "f1", "f1_score", "auc", "iou", "dice")
_POSITIVE = ("loss", "error", "perplexity", "mse", "rmse", "mae")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_DIRECTIONS: dict[str, Direction] = {"max": "max", "maximize": "max", "min": "min", "minimize": "min"}


@dataclass(frozen=True)
class Objective:
    """A metric to optimise.

    Attributes:
        name: The name of the metric.
        direction: "max" or "min".
        unit: The unit of its values in reports; "" where it is unknown.
        low: The lower bound of its values, as declared, else by its name (``bounds``).
        high: The upper bound.
    """

    name: str
    direction: Direction
    unit: str = ""
    low: float = -math.inf
    high: float = math.inf

    @property
    def clock(self) -> Clock | None:
        """Whether the objective is a time: see ``clock``."""
        return clock(self.name)


def parse_objectives(objectives: Mapping[str, str] | Iterable[str]) -> tuple[Objective, ...]:
    """Return objectives from ``{"accuracy": "max"}`` or ``["accuracy:max", "seconds:min"]``, in their order.

    Bounds of a metric may follow its direction: ``{"score": "max 0..100", "loss": "min 0.."}``. Without them its name
    decides, see ``bounds``.

    Raises:
        UserError: For an empty set, a missing name, an unknown direction, invalid bounds or a name that comes twice.
    """
    if isinstance(objectives, str):
        objectives = [objectives]
    pairs = list(objectives.items()) if isinstance(objectives, Mapping) else [_pair(text) for text in objectives]
    if not pairs:
        raise UserError("a study needs at least one objective", "none", "for example accuracy:max")
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise UserError("an objective may be named once", name, "remove the others")
    return tuple(_objective(name, direction) for name, direction in pairs)


def clock(name: str) -> Clock | None:
    """Return whether the metric ``name`` is a time, or its price, and so depends on the machine; None: it is neither.

    "total" counts since the training began, and grows with every pass over the data: ``seconds`` and ``cost``, which
    elastune measures, and ``time``, which a program reports. "duration" is independent of the length of the training:
    every other name that ends in ``_s`` or ``_seconds``, such as ``latency_s``, and ``seconds_to_target``.
    """
    if name in (*MEASURED, "time"):
        return "total"
    return "duration" if name.endswith(("_s", "_seconds")) or name == "seconds_to_target" else None


def valued(name: str, value: float | None, price_per_worker_hour: float | None = None) -> str:
    """Return the value of the metric ``name`` as a text with a unit; costs need the price they are computed from."""
    if name == "cost":
        return f"{number(value)} price units" if price_per_worker_hour is None else cost(value, price_per_worker_hour)
    return duration(value) if clock(name) else number(value)


def bounds(name: str) -> tuple[float, float]:
    """Return the bounds of the metric ``name`` by its name: fractions in [0, 1], losses and errors from 0 on.

    A program may use such a name for another metric, so callers must check values against the bounds.
    """
    if name in ("error", "error_rate") or name.endswith(_FRACTIONS):
        return 0.0, 1.0
    return (0.0, math.inf) if name.endswith(_POSITIVE) or clock(name) else _ALL


def chance(name: str) -> float | None:
    """Return the value of the metric ``name`` for guessing; None where it depends on the data."""
    return 0.5 if name == "auc" or name.endswith("_auc") else None


def oriented(values: Mapping[str, float] | Sequence[Mapping[str, float]], objectives: Sequence[Objective]) -> Floats:
    """Return values as an array where smaller is better: shape (k,) for one mapping, (n, k) for a sequence of n."""
    import numpy as np  # here: a controller that takes workers over does without

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
    word, _, limits = direction.strip().partition(" ") if isinstance(direction, str) else ("", "", "")
    parsed = _DIRECTIONS.get(word)
    if parsed is None:
        raise UserError(
            f"the direction of {name} must be max or min", repr(direction), f"write {name}:max or {name}:min"
        )
    low, high = _declared(name, limits) if limits else bounds(name)
    return Objective(name, parsed, _unit(name), low, high)


def _declared(name: str, within: str) -> tuple[float, float]:
    match = re.fullmatch(rf"\s*({_NUMBER})?\.\.({_NUMBER})?\s*", within)
    low, high = (match[1] or "-inf", match[2] or "inf") if match else ("inf", "-inf")
    if within.strip() == ".." or not float(low) < float(high):
        raise UserError(f"the bounds of {name} must be LOW..HIGH", repr(within), "for example max 0..1 or min 0..")
    return float(low), float(high)


def _unit(name: str) -> str:
    if clock(name):
        return "price units" if name == "cost" else "s"
    return "fraction" if name.endswith(("accuracy", "error")) else ""
