"""Successive halving and Hyperband, asynchronous, for several objectives, with pauses instead of ends.

With one objective it is ASHA (Li et al. 2020, "A system for massively parallel hyperparameter tuning", algorithm 2): at
each rung the best 1/eta of the trials so far go on, and later arrivals may promote paused trials. Hyperband runs
several brackets, which begin at higher rungs (ibid. 3.3), in Hyperband's proportions.
Several objectives are ranked by constrained domination, front and crowding. Ranks alone stall late in a study: a share
of 1/eta is too small once the sampler proposes almost only good trials. So forecasts decide as well, once trials have
ended to learn from:
- *hopeful*: a trial goes on if no finished trial dominates its forecast made better by ``promote_margin`` errors;
- *hopeless*: a trial pauses, whatever its rank, if a finished trial dominates its forecast made better by
  ``prune_margin`` errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from elastune.core.options import Range
from elastune.tuning.search.front import nondominated, scale_of
from elastune.tuning.search.objective import Floats, Objective
from elastune.tuning.search.schedule import (
    ForkTrial,
    IntermediateResult,
    NewTrial,
    Resume,
    Rung,
    RungEntry,
    Schedule,
    levels,
    ranked,
)

ALIKE = 15  # finished trials with similar curves that a correction is learnt from
FEWEST = 5  # with fewer finished trials a forecast has no correction and no range
_TINY = 1e-12  # stands for a clocked value of 0 under the logarithm


@dataclass(frozen=True)
class Halving:
    """Options of successive halving and Hyperband.

    Attributes:
        eta: At each rung one of ``eta`` trials goes on.
        min_resource: Passes before the first rung; None: 1/eta^2 of the training.
        brackets: 1 is ASHA; more are Hyperband, whose last bracket should pass no rung.
        promote_margin: Standard errors by which a hopeful trial's forecast is made better.
        prune_margin: Standard errors by which a hopeless trial's forecast is made better.
    """

    eta: Annotated[int, Range(2, 64)] = 3
    min_resource: Annotated[int, Range(1, 10**6)] | None = None
    brackets: Annotated[int, Range(1, 16)] = 1
    promote_margin: Annotated[float, Range(0, 100)] = 0.5
    prune_margin: Annotated[float, Range(0, 100)] = 2.0


@dataclass(frozen=True)
class _Chances:
    """Whether a trial may reach the front: ``hopeful`` and ``hopeless`` as defined in the module.

    ``possible``: it may reach the front within one standard error. With one objective, or without standard errors, a
    trial is neither hopeful nor hopeless.
    """

    hopeful: bool
    hopeless: bool
    possible: bool


@dataclass
class _Trial:
    """The state of a trial. ``rung``: the newest rung that it reached, -1 before the first."""

    bracket: int
    curve: Curve = field(default_factory=lambda: Curve(0))
    violation: float = 0.0
    rung: int = -1
    pause_reason: str = ""
    paused: bool = False
    forecast: Forecast | None = None
    forecast_of: tuple[object, ...] = ()
    chances: _Chances | None = None
    chances_of: tuple[object, ...] = ()


class SuccessiveHalving(Schedule):
    """Successive halving (ASHA) and Hyperband, for one objective or several.

    Args:
        objectives: Decide which values are better, and which grow with the passes (``Objective.clock``).
        halving: The options; None: the defaults.
        resumes: Whether trials that it stops can go on later. If not, the best of the first trials at a rung goes on,
            since nobody could promote it once others have come.
    """

    def __init__(
        self, objectives: Sequence[Objective], halving: Halving | None = None, *, resumes: bool = True
    ) -> None:
        self._least = 0 if resumes else 1
        self._halving = halving or Halving()
        self._signs = tuple(-1.0 if o.direction == "max" else 1.0 for o in objectives)
        self._extrapolator = Extrapolator([o.clock == "total" for o in objectives])
        self._trials: dict[int, _Trial] = {}  # running and paused ones
        self._rungs: dict[tuple[int, int], Rung] = {}  # by bracket and rung
        self._min_resource = self._halving.min_resource
        self._filled: dict[int, int] = {}
        self._front: Floats = np.empty((0, len(objectives)))
        self._fronts = 0  # how often it has changed
        self._answers: dict[bool, Resume | NewTrial | None] = {}  # of ``next``, until something happens
        self._refused: set[int] = set()  # paused trials that may not go on before the next event

    def started(self, trial: int, params: Mapping[str, Any], parent: int | None = None) -> None:
        self._answers.clear()
        self._trials[trial] = _Trial(self._emptiest())
        bracket = self._trials[trial].bracket
        self._filled[bracket] = self._filled.get(bracket, 0) + 1

    def reported(self, intermediate: IntermediateResult) -> str:
        trial = self._trials[intermediate.trial]
        finite = all(map(math.isfinite, (*intermediate.values, intermediate.violation)))
        trial.violation = intermediate.violation if finite else math.inf  # after all others
        trial.curve.epochs = intermediate.epochs
        if finite and intermediate.epoch > 0:
            trial.curve.add(intermediate.epoch, intermediate.values)
        if self._min_resource is None:
            self._min_resource = max(1, round(intermediate.epochs / self._halving.eta**2))
        if trial.pause_reason or intermediate.epoch >= intermediate.epochs:
            return trial.pause_reason
        reached = sum(level <= intermediate.epoch for level in self._levels(trial)) - 1
        if reached <= trial.rung:
            return ""
        self._answers.clear()
        trial.rung = reached
        rung = self._rung(trial)
        if rung.enter(RungEntry(intermediate.trial, self._oriented(intermediate.values), trial.violation)):
            self._refused.clear()
        if self._reason_to_continue(intermediate.trial):
            rung.promoted.add(intermediate.trial)
        else:
            best = f"the best 1/{self._halving.eta} of {len(rung)}"
            trial.pause_reason = f"not among {best} at epoch {intermediate.epoch}"
        return trial.pause_reason

    def paused(self, trial: int, epoch: int) -> None:
        self._answers.clear()
        self._refused.discard(trial)
        self._trials[trial].paused = True

    def resumed(self, trial: int) -> None:
        self._answers.clear()
        state = self._trials[trial]
        state.paused, state.pause_reason = False, ""
        if state.rung >= 0:
            self._rung(state).promoted.add(trial)

    def ended(self, trial: int, values: tuple[float, ...] | None, violation: float = 0.0) -> None:
        self._answers.clear()
        state = self._trials.pop(trial)
        self._refused.discard(trial)
        if values is None:
            return
        self._refused.clear()
        self._extrapolator.finish(state.curve, values)
        if violation <= 0 and all(map(math.isfinite, values)):
            points = np.vstack([self._front, self._oriented(values)])
            on_front = nondominated(points)
            if on_front[-1]:
                self._front, self._fronts = points[on_front], self._fronts + 1

    def next(self, fresh: bool) -> Resume | ForkTrial | NewTrial | None:
        if fresh not in self._answers:
            self._answers[fresh] = self._next(fresh)
        return self._answers[fresh]

    def _next(self, fresh: bool) -> Resume | NewTrial | None:
        waiting = [number for number, trial in self._trials.items() if trial.paused]
        candidates = [number for number in waiting if number not in self._refused]
        for number in sorted(candidates, key=lambda n: (-self._trials[n].rung, n)):
            if reason := self._reason_to_continue(number):
                return Resume(number, reason)
            self._refused.add(number)
        if fresh:
            return NewTrial()
        return self._last(waiting)

    def estimates(self) -> Mapping[int, tuple[float, ...]]:
        forecasts = {n: self._forecast(t) for n, t in self._trials.items() if t.rung >= 0 and t.violation < math.inf}
        return {number: forecast.values for number, forecast in forecasts.items() if forecast is not None}

    # -- decisions --

    def _reason_to_continue(self, number: int) -> str:
        """The reason why a trial should go on past its rung; "": it should not."""
        trial, halving = self._trials[number], self._halving
        if trial.rung < 0:
            return "has not come to a rung"
        rung = self._rung(trial)
        if number in rung.promoted:
            return "was to go on before"  # and paused for another reason
        chances = self._chances(trial)
        if chances.hopeful:
            return "may reach the front"
        if chances.hopeless or number not in rung.best:
            return ""
        return f"among the best 1/{halving.eta} of {len(rung)} at its rung"

    def _chances(self, trial: _Trial) -> _Chances:
        forecast = self._forecast(trial)
        basis = self._fronts, trial.forecast_of, trial.violation
        if trial.chances is None or trial.chances_of != basis:
            decidable = len(self._signs) > 1 and forecast is not None and forecast.low is not None
            trial.chances_of = basis
            trial.chances = _Chances(
                hopeful=decidable and self._may_reach_front(trial, self._halving.promote_margin),
                hopeless=decidable and not self._may_reach_front(trial, self._halving.prune_margin),
                possible=self._may_reach_front(trial, 1.0),
            )
        return trial.chances

    def _may_reach_front(self, trial: _Trial, errors: float) -> bool:
        """Whether no finished trial is as good as the trial's forecast made better by ``errors`` standard errors."""
        point = self._optimistic(trial, errors)
        if trial.violation > 0 or point is None:
            return False
        return not bool(np.any(np.all(self._front <= np.array(point), axis=1)))

    def _optimistic(self, trial: _Trial, errors: float) -> tuple[float, ...] | None:
        """The forecast, oriented, made better by ``errors`` standard errors, where these are known."""
        forecast = self._forecast(trial)
        if forecast is None:
            return None
        middle = self._oriented(forecast.values)
        if forecast.low is None or forecast.high is None:
            return middle
        best = map(min, self._oriented(forecast.low), self._oriented(forecast.high))
        return tuple(m - errors * (m - b) for m, b in zip(middle, best, strict=True))

    def _last(self, waiting: Sequence[int]) -> Resume | None:
        """When no trial may begin any more, the best paused trial that could still reach the front.

        If no trial has ended with a valid result and none runs, the best paused trial.
        """
        no_front = not len(self._front)
        if no_front and len(waiting) < len(self._trials):
            return None
        hopeful = [n for n in waiting if no_front or self._chances(self._trials[n]).possible]
        entrants = []
        for number in hopeful:
            trial = self._trials[number]
            point = self._optimistic(trial, 1.0) or (math.inf,) * len(self._signs)
            entrants.append(RungEntry(number, point, trial.violation))
        best = ranked(entrants, 1)
        return Resume(best[0], "could still be on the front") if best else None

    # -- state --

    def _forecast(self, trial: _Trial) -> Forecast | None:
        """The forecast by the newest reports; None without valid reports."""
        curve = trial.curve
        if not curve.passes:
            return None
        basis = self._extrapolator.learnt, curve.passes[-1], curve.values[-1]
        if trial.forecast_of != basis:
            trial.forecast, trial.forecast_of = self._extrapolator.forecast(curve), basis
        return trial.forecast

    def _levels(self, trial: _Trial) -> list[int]:
        passes = levels(self._min_resource or 1, self._halving.eta, trial.curve.epochs)
        return passes[trial.bracket :]

    def _rung(self, trial: _Trial) -> Rung:
        return self._rungs.setdefault((trial.bracket, trial.rung), Rung(self._halving.eta, self._least))

    def _emptiest(self) -> int:
        """The bracket furthest behind its share: with s rungs to pass, eta^s / (s+1) (Li et al. 2018, algorithm 1)."""
        if self._halving.brackets == 1:
            return 0
        count = self._halving.brackets
        shares = [self._halving.eta ** (count - 1 - s) / (count - s) for s in range(count)]
        return min(range(count), key=lambda s: ((self._filled.get(s, 0) + 1) / shares[s], s))

    def _oriented(self, values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(sign * value for sign, value in zip(self._signs, values, strict=True))


# --- forecasts from the curves of finished trials ---


@dataclass(frozen=True)
class Forecast:
    """Values at a trial's end, one per objective, and a range that holds each in about two of three cases.

    ``low`` and ``high`` are None where too few trials have ended.
    """

    values: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None


@dataclass
class Curve:
    """The reports of a trial: ``passes`` (n,) ascending, ``values`` (n, objectives), of ``epochs`` planned passes."""

    epochs: int
    passes: list[int] = field(default_factory=list)
    values: list[tuple[float, ...]] = field(default_factory=list)

    def add(self, epoch: int, values: tuple[float, ...]) -> None:
        """Add a report. If its pass was reported before, it replaces the reports from that pass on."""
        while self.passes and self.passes[-1] >= epoch:
            self.passes.pop()
            self.values.pop()
        self.passes.append(epoch)
        self.values.append(values)

    def at(self, part: float, objective: int) -> float:
        """Return the value after ``part`` (0 to 1) of the training, interpolated between two reports."""
        column = [row[objective] for row in self.values]
        return float(np.interp(part * self.epochs, self.passes, column))


class Extrapolator:
    """Forecasts the end of a trial from the curves of finished trials.

    A prior guess is corrected by its errors for finished trials with similar curves. The guess: a clocked objective
    (time, cost) goes on growing, any other keeps its last value, which is hard to beat for one curve alone (Kielhoefer,
    Mohr, van Rijn 2024). The correction is a ridge regression of the errors on the guess and on how fast the curve
    moves, as in Baker et al. 2017 ("Accelerating neural architecture search using performance prediction"). It is local
    (Cleveland 1979), since good and bad trials end differently. Clocked objectives are regressed as logarithms, as are
    objectives that samplers see on a logarithmic scale. With few finished trials the correction tends to zero.

    A forecast depends only on the finished trials and their order. ``learnt`` is how many of them it uses: beyond a few
    trials, it grows when a tenth more have finished.

    Args:
        clocked: For each objective, whether it grows with every pass.
    """

    def __init__(self, clocked: Sequence[bool]) -> None:
        self._clocked = tuple(clocked)
        self._finished: list[tuple[Curve, tuple[float, ...]]] = []
        self.learnt = 0
        self._cached_errors: dict[tuple[float, int, bool], tuple[Floats, Floats]] = {}
        self._log_scaled: dict[int, bool] = {}  # objectives whose ends have a logarithmic scale

    def finish(self, curve: Curve, values: tuple[float, ...]) -> None:
        """Learn from a trial that trained to its end."""
        if curve.passes and all(map(math.isfinite, values)):
            self._finished.append((curve, values))
            if len(self._finished) >= int(1.1 * self.learnt):
                self.learnt = len(self._finished)
                self._cached_errors.clear()
                self._log_scaled.clear()

    def forecast(self, curve: Curve) -> Forecast:
        """Return the expected end of a trial with this curve. The curve must hold a report."""
        part = min(1.0, curve.passes[-1] / curve.epochs)
        ranges = [self._forecast_objective(curve, part, objective) for objective in range(len(self._clocked))]
        values = tuple(value for value, _, _ in ranges)
        if self.learnt < FEWEST:
            return Forecast(values)
        return Forecast(values, tuple(low for _, low, _ in ranges), tuple(high for _, _, high in ranges))

    def _forecast_objective(self, curve: Curve, part: float, objective: int) -> tuple[float, float, float]:
        clocked = self._clocked[objective]
        logs = clocked or (self._logarithmic(objective) and _positive(curve, objective))
        guess = _features(curve, part, objective, clocked, logs)
        missed, spread = 0.0, 0.0
        if self.learnt >= FEWEST:
            features, errors = self._past_errors(part, objective, logs)
            alike = np.argsort(np.abs(features[:, 0] - guess[0]), kind="stable")[:ALIKE]
            missed, spread = ridge(features[alike], errors[alike], guess)
        value = guess[0] + missed
        low, high = value - spread, value + spread
        if logs:
            value, low, high = (math.exp(min(bound, 700.0)) for bound in (value, low, high))
        return float(value), float(low), float(high)

    def _logarithmic(self, objective: int) -> bool:
        """Whether the values of finished trials suit a logarithmic scale at their ends, and are positive all along."""
        if objective not in self._log_scaled:
            past = self._finished[: self.learnt]
            ends = scale_of([values[objective] for _, values in past])
            self._log_scaled[objective] = ends.name == "log" and all(_positive(curve, objective) for curve, _ in past)
        return self._log_scaled[objective]

    def _past_errors(self, part: float, objective: int, logs: bool) -> tuple[Floats, Floats]:
        """Features of the finished trials (n, 2) after this part of the training, and errors of the guess (n,)."""
        key = part, objective, logs
        if key not in self._cached_errors:
            clocked = self._clocked[objective]
            past = self._finished[: self.learnt]
            features = np.array([_features(curve, part, objective, clocked, logs) for curve, _ in past])
            ends = np.array([_scale(values[objective], logs) for _, values in past])
            self._cached_errors[key] = features, ends - features[:, 0]
        return self._cached_errors[key]


def _scale(value: float, logs: bool) -> float:
    return math.log(max(value, _TINY)) if logs else value


def _positive(curve: Curve, objective: int) -> bool:
    return all(row[objective] > 0 for row in curve.values)


def _features(curve: Curve, part: float, objective: int, clocked: bool, logs: bool) -> NDArray[np.float64]:
    """The guess of the final value, and how the second half of the curve differs from the first. Shape (2,)."""
    last, half = curve.at(part, objective), curve.at(part / 2, objective)
    if not clocked:
        return np.array([_scale(last, logs), _scale(last, logs) - _scale(half, logs)])
    guess = _scale(last / part, True)
    recent = last + (last - half) * (1 - part) / (part / 2)
    return np.array([guess, _scale(max(recent, last), True) - guess])


def ridge(features: Floats, targets: Floats, at: Floats) -> tuple[float, float]:
    """Fit ``targets`` (n,) to standardised ``features`` (n, k) by ridge regression.

    Returns:
        The prediction at ``at`` (k,), and its standard error: the root mean square of the leave-one-out errors
        (Hastie et al. 2009, 7.10).
    """
    middle, width = features.mean(axis=0), features.std(axis=0) + _TINY
    design = np.column_stack([np.ones(len(features)), (features - middle) / width])
    inverse = np.linalg.inv(design.T @ design + np.diag([0.5, *np.ones(features.shape[1])]))
    weights = inverse @ design.T @ targets
    leverage = np.einsum("ij,jk,ik->i", design, inverse, design)
    left_out = (targets - design @ weights) / np.maximum(1 - leverage, 0.05)
    prediction = np.concatenate([[1.0], np.clip((at - middle) / width, -3, 3)]) @ weights  # no far extrapolation
    return float(prediction), float(np.sqrt(np.mean(left_out**2)))
