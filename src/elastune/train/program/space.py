"""Run a user's define-by-run ``space(trial)`` without training: one configuration, random ones, or all of them.

The file uses private names of Optuna: ``_contains`` of distributions, and ``_suggest``, ``_distributions`` and
``_suggested_params`` of ``FixedTrial``. They were checked on Optuna 5.0; pyproject.toml requires optuna>=5.0,<5.1.
"""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    check_distribution_compatibility,
    distribution_to_json,
    json_to_distribution,
)
from optuna.trial import BaseTrial, FixedTrial

from elastune.core.errors import UserError
from elastune.train.program.errors import cause_of

Space = Callable[[Any], dict[str, Any]]
Distributions = Mapping[str, BaseDistribution]
MOST_CORNERS = 256  # configurations
_LIBRARY_FOLDERS = tuple(str(folder) for folder in (Path(__file__).parents[2], Path(optuna.__file__).parent))
Chooser = Callable[[str, BaseDistribution], Any]


@dataclass(frozen=True)
class Sample:
    """One configuration: the result of one call of ``space``.

    Attributes:
        params: The parameters that the space requested.
        distributions: The distributions of the parameters.
        values: The dict that the space returned.
    """

    params: dict[str, Any]
    distributions: dict[str, BaseDistribution]
    values: dict[str, Any]


class _FixedChoices(FixedTrial):
    """A trial outside any study. ``choose`` decides each parameter when the space requests it."""

    def __init__(self, choose: Chooser) -> None:
        super().__init__({})
        self._choose = choose

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        if name in self._distributions:
            check_distribution_compatibility(self._distributions[name], distribution)
        else:
            self._distributions[name] = distribution
            self._suggested_params[name] = self._choose(name, distribution)
        return self._suggested_params[name]


def call(space: Space, trial: BaseTrial) -> dict[str, Any]:
    """Return the result of ``space(trial)`` as plain JSON values.

    Raises ``UserError``, with the user's file and line, if the space raises. It also raises unless the result is a dict
    with text keys and numbers, text, booleans, None or lists of these as values.
    """
    try:
        returned = space(trial)
    except UserError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        value = cause_of(error, _program_of(error))
        raise UserError("space(trial) must not raise", value, "fix that line") from error
    if not isinstance(returned, dict) or not all(isinstance(name, str) for name in returned):
        raise UserError("space(trial) must return a dict with text keys", returned, "return {'lr': lr, ...}")
    try:
        plain: dict[str, Any] = json.loads(json.dumps(returned, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        fix = "return finite numbers, text, booleans or lists of them"
        raise UserError("what space(trial) returns must be plain values", error, fix) from error
    return plain


def compose(space: Space, choose: Chooser) -> Sample:
    """Return the configuration whose parameters ``choose`` decides, one by one, as the space requests them."""
    trial = _FixedChoices(choose)
    values = call(space, trial)
    return Sample(dict(trial.params), dict(trial.distributions), values)


def probe(space: Space, n: int, seed: int) -> list[Sample]:
    """Return ``n`` random configurations, each parameter uniform on its own scale (linear or log)."""
    rng = np.random.default_rng(seed)
    return [compose(space, lambda _, distribution: draw(distribution, rng)) for _ in range(n)]


def corners(space: Space, seed: int) -> list[Sample]:
    """Return configurations at the ends of the space, at most ``MOST_CORNERS``.

    These are all parameters at their low ends, all at their high ends, and each parameter at each of its ends with the
    others drawn. The ends of a categorical parameter are all its choices.
    """
    rng = np.random.default_rng(seed)
    samples = [
        compose(space, lambda _, distribution: _ends(distribution)[0]),
        compose(space, lambda _, distribution: _ends(distribution)[-1]),
    ]
    tried: set[tuple[str, int]] = set()
    for sample in samples:  # the list grows: a corner may have parameters that no other corner has
        for name, distribution in sample.distributions.items():
            for end in range(len(_ends(distribution))):
                if (name, end) in tried or len(samples) >= MOST_CORNERS:
                    continue
                tried.add((name, end))
                kept = {**sample.params, name: _ends(distribution)[end]}
                samples.append(_at_corner(space, name, kept, sample, rng))
    return samples


def _at_corner(space: Space, corner: str, params: Mapping[str, Any], near: Sample, rng: np.random.Generator) -> Sample:
    """The configuration with ``params[corner]``; parameters requested before it are as in ``near``, others drawn."""
    before = list(near.params)[: list(near.params).index(corner) + 1]

    def choose(name: str, distribution: BaseDistribution) -> Any:
        return params[name] if name in before and near.distributions[name] == distribution else draw(distribution, rng)

    return compose(space, choose)


def _ends(distribution: BaseDistribution) -> list[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return [distribution.low, distribution.high]


def redraw(space: Space, sample: Sample, keep: float, rng: np.random.Generator) -> Sample:
    """Return ``sample`` with each parameter redrawn, or kept with probability ``keep`` where it still fits."""

    def choose(name: str, distribution: BaseDistribution) -> Any:
        kept = rng.random() < keep and sample.distributions.get(name) == distribution
        return sample.params[name] if kept else draw(distribution, rng)

    return compose(space, choose)


def fill_in(space: Space, params: Mapping[str, Any], rng: np.random.Generator) -> Sample:
    """Return the configuration with ``params``; missing ones are drawn. Raises ``UserError`` for one out of range."""

    def choose(name: str, distribution: BaseDistribution) -> Any:
        if name not in params:
            return draw(distribution, rng)
        if not contains(distribution, params[name]):
            raise UserError(f"{name} must be in its range", params[name], f"choose from {distribution}")
        return params[name]

    return compose(space, choose)


def enumerate_all(space: Space, limit: int) -> list[Sample] | None:
    """Return all configurations, or None for more than ``limit``, or if a parameter is continuous."""
    samples: list[Sample] = []
    for sample in _walk(space):
        if sample is None or len(samples) == limit:
            return None
        samples.append(sample)
    return samples


def draw(distribution: BaseDistribution, rng: np.random.Generator) -> Any:
    """Return a random value of ``distribution``."""
    match distribution:
        case CategoricalDistribution(choices=choices):
            return choices[int(rng.integers(len(choices)))]
        case IntDistribution(log=True, low=low, high=high):
            return min(max(round(math.exp(rng.uniform(math.log(low - 0.5), math.log(high + 0.5)))), low), high)
        case FloatDistribution(log=True, low=low, high=high):
            return min(max(math.exp(rng.uniform(math.log(low), math.log(high))), low), high)
        case FloatDistribution(step=None, low=low, high=high):
            return float(rng.uniform(low, high))
        case IntDistribution() | FloatDistribution():
            return nth(distribution, int(rng.integers(int(size(distribution)))))
    raise AssertionError(f"unknown distribution {distribution}")


def contains(distribution: BaseDistribution, value: Any) -> bool:
    """Return whether ``value`` is in ``distribution``. A value of another type may raise an error of Optuna."""
    return bool(distribution._contains(distribution.to_internal_repr(value)))


def size(distribution: BaseDistribution) -> float:
    """Return how many values ``distribution`` has; infinite for a continuous one."""
    match distribution:
        case CategoricalDistribution(choices=choices):
            return len(choices)
        case IntDistribution(low=low, high=high, step=step):
            return (high - low) // step + 1
        case FloatDistribution(step=float() as step, low=low, high=high):
            return round((high - low) / step) + 1
    return 1 if distribution.single() else math.inf


def nth(distribution: BaseDistribution, index: int) -> Any:
    """Return value ``index`` of a finite distribution."""
    match distribution:
        case CategoricalDistribution(choices=choices):
            return choices[index]
        case IntDistribution(low=low, step=step):
            return low + index * step
        case FloatDistribution(low=low, high=high, step=step):
            return min(low + index * (step or 0.0), high)
    raise AssertionError(f"unknown distribution {distribution}")


def to_json(distributions: Distributions) -> dict[str, str]:
    """Return distributions as Optuna's JSON texts, by parameter, in the same order."""
    return {name: distribution_to_json(distribution) for name, distribution in distributions.items()}


def from_json(texts: Mapping[str, str]) -> dict[str, BaseDistribution]:
    """Return distributions from Optuna's JSON texts. Raises ``UserError`` for a text that is not a distribution."""
    try:
        return {name: json_to_distribution(text) for name, text in texts.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        rule = "a journal's distributions must be Optuna's"
        raise UserError(rule, error, "start a new study in another output folder") from error


def _walk(space: Space) -> Iterator[Sample | None]:
    """All configurations, depth first: an odometer whose wheels are the parameters in the order of their requests.

    Yields None, and ends, at the first parameter with infinitely many values.
    """
    wheels: list[tuple[int, float]] = []  # (value's index, number of values)
    while True:
        position = 0
        endless = False

        def choose(_: str, distribution: BaseDistribution) -> Any:
            nonlocal position, endless
            if position == len(wheels):
                wheels.append((0, size(distribution)))
            index, count = wheels[position]
            position += 1
            endless = endless or math.isinf(count)
            return draw(distribution, np.random.default_rng(0)) if math.isinf(count) else nth(distribution, index)

        sample = compose(space, choose)
        yield None if endless else sample
        while wheels and wheels[-1][0] + 1 >= wheels[-1][1]:
            wheels.pop()
        if endless or not wheels:
            return
        wheels[-1] = (wheels[-1][0] + 1, wheels[-1][1])


def _program_of(error: BaseException) -> str:
    """The user's file nearest to the error, since elastune calls the space, and the space calls Optuna."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return next((name for name in reversed(files) if not name.startswith((*_LIBRARY_FOLDERS, "<"))), "")
