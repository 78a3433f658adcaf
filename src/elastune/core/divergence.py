"""When a loss has exploded: one rule for runs, studies, simulations and the divergence policy. Pure.

A loss that is not finite has diverged at once. A finite loss is judged by a running median, so a short spike of any
height does not count. Training has diverged when half of the last ``WINDOW`` losses are above ``factor`` times the loss
at its start. The best loss is not above the start, so they are above ``factor`` times the best as well. A training that
falls back to the loss of its start is a bad result, but no explosion.

The default comes from 180 trainings of three small networks on digits (SGD, momentum, Adam; learning rates 1e-3 to 30).
The 90 that learned anything (over 30 % right) never rose above 1.4 x their start. The 30 that passed 10 x were wrong on
three of four samples or more, most of them beyond 100 x. So 10 leaves a margin on either side.

A loss that has been negative (a policy gradient, a log-density) has no zero to measure a factor from. Its distance from
0 must not grow beyond ``BOUND`` times the distance at the start, or ``BOUND`` where that is below 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from elastune.core.errors import UserError

FACTOR = 10.0  # a loss this many times that of the start has diverged
WINDOW = 10  # losses of a step each, that are judged together
REPORTS = 3  # values of a reported metric, which is a mean over many samples already
BOUND = 1e9  # for losses without a scale of their own


@dataclass(frozen=True)
class Divergence:
    """The rule by which a training counts as diverged.

    Attributes:
        factor: The factor over the loss at the start (see the module); None: only values that are not finite count.
        metrics: Reported metrics that should go down and are judged, too.
    """

    factor: float | None = FACTOR
    metrics: tuple[str, ...] = ()


def limit(level: float, factor: float, spread: float = 0.0) -> float:
    """Return the loss above which losses are too high: ``factor`` x ``level``.

    Near or below 0 the losses' ``spread`` is the scale.
    """
    return level + (factor - 1) * max(abs(level), spread)


@dataclass(frozen=True)
class LossTrack:
    """What the rule remembers of a loss.

    Attributes:
        newest: The newest values.
        first: The first value.
        start: The median of the first window, but at most ``factor`` times the first value. Else a loss that explodes
            at once would set its own standard. None until the first window is full.
        best: The best median.
        signed: A value was negative.
    """

    newest: tuple[float, ...] = ()
    first: float | None = None
    start: float | None = None
    best: float = math.inf
    signed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain values; infinity and None are left out."""
        data = {"newest": list(self.newest), "signed": self.signed, "first": self.first, "start": self.start}
        return {name: value for name, value in {**data, "best": self.best}.items() if value not in (None, math.inf)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LossTrack:
        """Return the track that ``to_json`` described as ``data``."""
        return cls(**{**data, "newest": tuple(data["newest"])})


def follow(track: LossTrack, loss: float, factor: float | None, window: int = WINDOW) -> tuple[LossTrack, str]:
    """Return the track after the finite value ``loss``, and the reason why training has diverged by now, or "".

    Example:
        >>> track, why = LossTrack(), ""
        >>> for loss in [2.3, 2.1, *[1e4] * 12]:
        ...     track, why = follow(track, loss, factor=10.0)
        >>> why
        'its median over 10 is 1e+04, 434.8 times that at the start (23); the best was 2.3'
    """
    newest = (*track.newest, loss)[-window:]
    first = loss if track.first is None else track.first
    signed = track.signed or loss < 0
    if len(newest) < window:
        return replace(track, newest=newest, first=first, signed=signed), ""
    level = sorted(newest)[window // 2]
    start = _start(level, first, factor) if track.start is None else track.start
    track = LossTrack(newest, first, start, min(track.best, level, first), signed)
    return track, "" if factor is None else _judged(track, level, factor, window)


def follow_reports(
    tracks: Mapping[str, LossTrack], metrics: Mapping[str, float], rule: Divergence
) -> tuple[dict[str, LossTrack], str]:
    """Return the track of each metric after a report of ``metrics``, and what has diverged, in words, or ""."""
    followed, wrong = (
        dict(tracks),
        [f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)],
    )
    for name in () if wrong else rule.metrics:
        if name in metrics:
            followed[name], why = follow(followed.get(name, LossTrack()), metrics[name], rule.factor, REPORTS)
            wrong += [f"{name} is {metrics[name]:.4g}, {why}"] if why else []
    return followed, ", ".join(wrong)


def _start(level: float, first: float, factor: float | None) -> float:
    return min(level, limit(first, factor)) if factor is not None and first > 0 else level


def _judged(track: LossTrack, level: float, factor: float, window: int) -> str:
    assert track.start is not None
    if track.signed or track.start <= 0:
        bound = BOUND * max(1.0, abs(track.start))
        return f"its median over {window} is {level:.4g}, beyond {bound:.4g} from 0" if abs(level) > bound else ""
    if level <= limit(track.start, factor):
        return ""
    times = level / track.start
    shown = f"{times:.4g} times that at the start ({track.start:.4g}); the best was {track.best:.4g}"
    return f"its median over {window} is {level:.4g}, {shown}"


def parse_divergence(text: str) -> float | None:
    """Return the factor that ``--divergence`` gives: a number above 1, or None for "off". Raises ``UserError``."""
    if text.strip().lower() == "off":
        return None
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    return check_factor(factor, repr(text))


def check_factor(factor: float | None, shown: object = None) -> float | None:
    """Return ``factor`` if it can be a divergence factor. ``shown``: the user's text, for the error. Raises
    ``UserError``.
    """
    if factor is None or (not isinstance(factor, bool) and isinstance(factor, int | float) and 1 < factor < math.inf):
        return factor
    rule = "a loss has diverged at a factor above 1, or is not judged (off)"
    raise UserError(rule, factor if shown is None else shown, f"such as {FACTOR:g}")
