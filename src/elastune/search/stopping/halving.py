"""Successive halving and Hyperband, asynchronous, for objective vectors, with pauses instead of ends.

With one objective it is ASHA (Li et al. 2020, "A system for massively parallel hyperparameter tuning", algorithm 2): at
each rung the best 1/eta of the trials that came so far go on, and later arrivals may take paused trials with them.
Hyperband runs several brackets at once, which begin at higher and higher rungs (ibid. 3.3), and fills them in
Hyperband's proportions.

Several objectives are ranked by constrained domination, front and crowding. ASHA with these ranks, and no more, stalls
late: a share of 1/eta is too small once the sampler proposes almost only good trials, and too large before. So
forecasts decide as well as ranks, once trials have ended to learn from:
- *hopeful*: a trial whose forecast, made better by ``promote_margin`` standard errors, no finished trial dominates,
  goes on;
- *hopeless*: a trial that is dominated even when its forecast is made better by ``prune_margin`` does not, whatever its
  rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np

from elastune.core.options import Range
from elastune.search.analysis.front import nondominated
from elastune.search.space.objective import Floats, Objective
from elastune.search.stopping.extrapolate import Curve, Extrapolator, Forecast
from elastune.search.stopping.rungs import Rung, RungEntry, levels, ranked
from elastune.search.stopping.schedule import ForkTrial, IntermediateResult, NewTrial, Resume, Schedule


@dataclass(frozen=True)
class Halving:
    """At each rung one of ``eta`` trials goes on.

    Attributes:
        min_resource: Passes before the first rung; None: 1/eta^2 of the training.
        brackets: 1 is ASHA; more are Hyperband, whose last bracket should pass no rung.
        promote_margin, prune_margin: In standard errors of the forecast, see the module.
    """

    eta: Annotated[int, Range(2, 64)] = 3
    min_resource: Annotated[int, Range(1, 10**6)] | None = None
    brackets: Annotated[int, Range(1, 16)] = 1
    promote_margin: Annotated[float, Range(0, 100)] = 0.5
    prune_margin: Annotated[float, Range(0, 100)] = 2.0


@dataclass(frozen=True)
class _Chances:
    """Of reaching the front: ``hopeful`` and ``hopeless`` as the module says, ``possible`` within one standard error.

    With one objective, or before there are standard errors, a trial is neither hopeful nor hopeless.
    """

    hopeful: bool
    hopeless: bool
    possible: bool


@dataclass
class _Trial:
    """Where a trial stands. ``rung``: the newest it came to, -1 before."""

    bracket: int
    curve: Curve = field(default_factory=lambda: Curve(0))
    violation: float = 0.0
    rung: int = -1
    asked_to_pause: str = ""
    paused: bool = False
    forecast: Forecast | None = None
    forecast_of: tuple[object, ...] = ()
    chances: _Chances | None = None
    chances_of: tuple[object, ...] = ()


class SuccessiveHalving(Schedule):
    """See the module. ``objectives`` say what is better, and what grows with the passes (``Objective.clock``)."""

    def __init__(self, objectives: Sequence[Objective], halving: Halving | None = None) -> None:
        self._halving = halving or Halving()
        self._signs = tuple(-1.0 if o.direction == "max" else 1.0 for o in objectives)
        self._extrapolator = Extrapolator([o.clock == "total" for o in objectives])
        self._trials: dict[int, _Trial] = {}  # those that are not over
        self._rungs: dict[tuple[int, int], Rung] = {}  # by bracket and rung
        self._min_resource = self._halving.min_resource
        self._filled: dict[int, int] = {}
        self._front: Floats = np.empty((0, len(objectives)))
        self._fronts = 0  # how often it has changed
        self._answers: dict[bool, Resume | NewTrial | None] = {}  # of ``next``, until something happens
        self._refused: set[int] = set()  # of the paused, who may not go on by what is known now

    def started(self, trial: int, params: Mapping[str, Any], parent: int | None = None) -> None:
        self._answers.clear()
        self._trials[trial] = _Trial(self._emptiest())
        bracket = self._trials[trial].bracket
        self._filled[bracket] = self._filled.get(bracket, 0) + 1

    def reported(self, glimpse: IntermediateResult) -> str:
        trial = self._trials[glimpse.trial]
        finite = all(map(math.isfinite, (*glimpse.values, glimpse.violation)))
        trial.violation = glimpse.violation if finite else math.inf  # after all others
        trial.curve.epochs = glimpse.epochs
        if finite and glimpse.epoch > 0:
            trial.curve.add(glimpse.epoch, glimpse.values)
        if self._min_resource is None:
            self._min_resource = max(1, round(glimpse.epochs / self._halving.eta**2))
        if trial.asked_to_pause or glimpse.epoch >= glimpse.epochs:
            return trial.asked_to_pause
        come = sum(level <= glimpse.epoch for level in self._levels(trial)) - 1
        if come <= trial.rung:
            return ""
        self._answers.clear()
        trial.rung = come
        rung = self._rung(trial)
        if rung.enter(RungEntry(glimpse.trial, self._oriented(glimpse.values), trial.violation)):
            self._refused.clear()
        if self._why_on(glimpse.trial):
            rung.gone_on.add(glimpse.trial)
        else:
            best = f"the best 1/{self._halving.eta} of {len(rung)}"
            trial.asked_to_pause = f"not among {best} at epoch {glimpse.epoch}"
        return trial.asked_to_pause

    def paused(self, trial: int, epoch: int) -> None:
        self._answers.clear()
        self._refused.discard(trial)
        self._trials[trial].paused = True

    def resumed(self, trial: int) -> None:
        self._answers.clear()
        at = self._trials[trial]
        at.paused, at.asked_to_pause = False, ""
        if at.rung >= 0:
            self._rung(at).gone_on.add(trial)

    def ended(self, trial: int, values: tuple[float, ...] | None, violation: float = 0.0) -> None:
        self._answers.clear()
        at = self._trials.pop(trial)
        self._refused.discard(trial)
        if values is None:
            return
        self._refused.clear()
        self._extrapolator.finish(at.curve, values)
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
        open_ones = [number for number in waiting if number not in self._refused]
        for number in sorted(open_ones, key=lambda n: (-self._trials[n].rung, n)):
            if reason := self._why_on(number):
                return Resume(number, reason)
            self._refused.add(number)
        if fresh:
            return NewTrial()
        return self._last(waiting)

    def estimates(self) -> Mapping[int, tuple[float, ...]]:
        known = {n: self._forecast(t) for n, t in self._trials.items() if t.rung >= 0 and t.violation < math.inf}
        return {number: forecast.values for number, forecast in known.items() if forecast is not None}

    # -- decisions

    def _why_on(self, number: int) -> str:
        """Why a trial should go on past its rung; empty: it should not."""
        trial, halving = self._trials[number], self._halving
        if trial.rung < 0:
            return "has not come to a rung"
        rung = self._rung(trial)
        if number in rung.gone_on:
            return "was told to go on before"  # and stopped for another cause
        chances = self._chances(trial)
        if chances.hopeful:
            return "may reach the front"
        if chances.hopeless or number not in rung.best:
            return ""
        return f"among the best 1/{halving.eta} of {len(rung)} at its rung"

    def _chances(self, trial: _Trial) -> _Chances:
        forecast = self._forecast(trial)
        known = self._fronts, trial.forecast_of, trial.violation
        if trial.chances is None or trial.chances_of != known:
            judged = len(self._signs) > 1 and forecast is not None and forecast.low is not None
            trial.chances_of = known
            trial.chances = _Chances(
                hopeful=judged and self._hopes(trial, self._halving.promote_margin),
                hopeless=judged and not self._hopes(trial, self._halving.prune_margin),
                possible=self._hopes(trial, 1.0),
            )
        return trial.chances

    def _hopes(self, trial: _Trial, errors: float) -> bool:
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
        """Of the paused, when no trial may begin any more, the best that could still be on the front.

        Where no trial has ended with a valid result and none runs, the best there is.
        """
        nothing = not len(self._front)
        if nothing and len(waiting) < len(self._trials):
            return None
        hopeful = [n for n in waiting if nothing or self._chances(self._trials[n]).possible]
        entrants = []
        for number in hopeful:
            trial = self._trials[number]
            point = self._optimistic(trial, 1.0) or (math.inf,) * len(self._signs)
            entrants.append(RungEntry(number, point, trial.violation))
        best = ranked(entrants, 1)
        return Resume(best[0], "could still be on the front") if best else None

    # -- what is known

    def _forecast(self, trial: _Trial) -> Forecast | None:
        """None without valid reports."""
        curve = trial.curve
        if not curve.passes:
            return None
        known = self._extrapolator.learnt, curve.passes[-1], curve.values[-1]
        if trial.forecast_of != known:
            trial.forecast, trial.forecast_of = self._extrapolator.forecast(curve), known
        return trial.forecast

    def _levels(self, trial: _Trial) -> list[int]:
        found = levels(self._min_resource or 1, self._halving.eta, trial.curve.epochs)
        return found[trial.bracket :]

    def _rung(self, trial: _Trial) -> Rung:
        return self._rungs.setdefault((trial.bracket, trial.rung), Rung(self._halving.eta))

    def _emptiest(self) -> int:
        """The bracket furthest behind its share: with s rungs to pass, eta^s / (s+1) (Li et al. 2018, algorithm 1)."""
        if self._halving.brackets == 1:
            return 0
        count = self._halving.brackets
        shares = [self._halving.eta ** (count - 1 - s) / (count - s) for s in range(count)]
        return min(range(count), key=lambda s: ((self._filled.get(s, 0) + 1) / shares[s], s))

    def _oriented(self, values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(sign * value for sign, value in zip(self._signs, values, strict=True))
