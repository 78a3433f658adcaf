"""Ask for the next configuration, tell how it went: one study's search, and what it takes over from earlier ones.

A search can be rebuilt from its journal. A proposal depends on the results known when it was requested, not on those
known when its trial began. The journal therefore records the request (``ProposalAsked``), and a replay opens each
trial at that point, with the estimates of that moment. Samplers run again only for requests that never got an answer.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler

from elastune.core.errors import UserError
from elastune.core.journal.records import (
    DataContext,
    Entry,
    ProposalAsked,
    Record,
    TrialFinished,
    TrialPaused,
    TrialResumed,
    TrialStarted,
    WarmStarted,
)
from elastune.core.run import derive
from elastune.core.sync_plan import in_full
from elastune.train.program import space as spaces
from elastune.train.program.space import Sample, Space
from elastune.tuning.search.constraint import Constraint, violations
from elastune.tuning.search.front import representative
from elastune.tuning.search.genetic import parse_genetics, unfinished
from elastune.tuning.search.history import History, Outcome
from elastune.tuning.search.objective import Objective, clock, oriented
from elastune.tuning.search.registry import GENERATIONAL, MODELS, check_sampler, generational, make_sampler, resolve
from elastune.tuning.search.schedule import RungEntry, ranked

# Warm start: which results and configurations a search takes over from earlier studies.
#
# Results of another context (other data, another model, other hardware where time is an objective) are not
# comparable. To learn from them would need a model of how the contexts relate (Swersky et al. 2013, "Multi-task
# Bayesian optimization"). But good settings of an earlier study are a good beginning for this one. Feurer et al.
# 2015, "Initializing Bayesian hyperparameter optimization via meta-learning", sort earlier data sets by distance,
# such as in the logarithm of their size, and try the best settings of the nearest first. So this search tries some of
# the best earlier configurations first: fewer, the less similar the context is, and at most a share of all trials, so
# that a misleading source costs little. Values of earlier trials count as results only where the context is the same.

TOLD = 100  # earlier trials that samplers learn from: a proposal of ``gp`` then takes 0.16 s, and 0.5 s at 300
PROPOSED = 5  # configurations that one earlier study of the same context proposes
SHARE = 0.2  # of the trials of a study, that all earlier studies together may propose
_HALF = 0.5  # the similarity of properties that differ, or may differ, and have no distance


@dataclass(frozen=True)
class Context:
    """The fixed conditions of a study, which decide whether its results are comparable with those of another study.

    Attributes:
        program: A digest of the trained program; "": unknown.
        data: The data set, as far as it is known.
        parameters: Number of parameters of the model; 0: unknown.
        hardware: The hardware; None where no objective and no constraint depends on it.
    """

    program: str
    data: DataContext
    parameters: int
    hardware: str | None

    @property
    def known(self) -> bool:
        """Whether equal ``data`` are surely the same: there are none, or a digest of their contents exists."""
        return not self.data.samples or bool(self.data.digest)


def similarity(context: Context, earlier: Context) -> float:
    """Return the similarity of two contexts from 0 to 1: a product over their properties, 1 only if all are the same.

    Sizes of ratio r count as 1 / (1 + |log10 r|), so that a factor of ten halves the similarity. Another program, other
    hardware and an unknown size halve it, too. Other data halve it, and halve it again if their samples have another
    form. Numbers of classes are sizes; for the share of the largest class, half of the difference counts.
    """
    data, other = context.data, earlier.data
    sizes = _likeness(data.samples, other.samples) * _likeness(context.parameters, earlier.parameters)
    classes = _likeness(data.classes, other.classes) * (1 - abs(data.largest_class - other.largest_class) / 2)
    differing = (context.program != earlier.program) + (context.hardware != earlier.hardware)
    differing += (data.digest != other.digest) + (data.sample != other.sample)
    return float(sizes * classes * _HALF**differing)


def differences(context: Context, earlier: Context) -> list[str]:
    """Return the differences of two contexts, in words; none where the contexts are the same."""
    data, other = context.data, earlier.data
    differing = {
        "another program": context.program != earlier.program,
        f"{data.samples} samples, not {other.samples}": data.samples != other.samples,
        f"samples of {data.sample or 'what is not known'}, not {other.sample or 'known'}": data.sample != other.sample,
        f"{data.classes} classes, not {other.classes}": data.classes != other.classes,
        "other data": data.digest != other.digest and bool(data.digest) and bool(other.digest),
        "data that could not be compared": not (context.known and earlier.known),
        f"{context.parameters} parameters, not {earlier.parameters}": context.parameters != earlier.parameters,
        f"{context.hardware}, not {earlier.hardware}": context.hardware != earlier.hardware,
    }
    return [words for words, differs in differing.items() if differs]


def _likeness(size: int, earlier: int) -> float:
    if size == earlier:
        return 1.0
    return 1 / (1 + abs(math.log10(size / earlier))) if size and earlier else _HALF


def shares(similarities: Sequence[float], trials: float | None) -> list[int]:
    """Return how many trials each earlier study may propose, in proportion to the ``similarities`` of their contexts.

    All together propose at most ``SHARE`` of the ``trials`` that the study will have, but at least one. ``trials`` None
    means that their number is unknown. The most similar studies come first.
    """
    left = math.inf if trials is None else max(1, int(SHARE * trials))
    counts = [0] * len(similarities)
    for index in sorted(range(len(similarities)), key=lambda index: -similarities[index]):
        counts[index] = int(min(left, math.floor(PROPOSED * similarities[index] + 0.5)))
        left -= counts[index]
    return counts


def clocked(objectives: Sequence[Objective], constraints: Sequence[Constraint]) -> bool:
    """Return whether any objective or constraint is about a time, or its cost."""
    names = {o.name for o in objectives}.union(*(c.names for c in constraints))
    return any(clock(name) for name in names)


def fit(space: Space, params: Mapping[str, Any]) -> Sample | str:
    """Return the configuration with exactly these parameters, or the reason why ``space`` has none."""
    reasons: list[str] = []

    def choose(name: str, distribution: BaseDistribution) -> Any:
        if name not in params:
            reasons.append(f"{name} is missing")
        elif not _allows(distribution, params[name]):
            reasons.append(f"{name} is out of range")
        else:
            return params[name]
        return spaces.draw(distribution, np.random.default_rng(0))

    sample = spaces.compose(space, choose)
    reasons += [f"{name} is not searched here" for name in params if name not in sample.params]
    return reasons[0] if reasons else sample


def _allows(distribution: BaseDistribution, value: Any) -> bool:
    try:
        return spaces.contains(distribution, value)
    except (ValueError, TypeError):  # text for a number, or no such choice
        return False


@dataclass(frozen=True)
class TransferableTrial:
    """An earlier trial that fits the present space: its configuration in this space, and its metrics."""

    sample: Sample
    metrics: Mapping[str, float]


def lacking(names: Iterable[str], trial: TransferableTrial) -> str:
    """Return the first of ``names`` that is neither a setting nor a finite metric of the trial, else ""."""
    present = {*trial.sample.values, *(name for name, value in trial.metrics.items() if math.isfinite(value))}
    return next((name for name in names if name not in present), "")


def best_of(
    trials: Sequence[TransferableTrial], objectives: Sequence[Objective], constraints: Sequence[Constraint], k: int
) -> list[int]:
    """Return indices of the ``k`` trials to try first: those that represent the front, then the next in rank.

    Only trials that hold the constraints count, and of equal configurations only the first.
    """
    points, broken = _judged(trials, objectives, constraints)
    valid = [i for i in range(len(trials)) if broken[i] <= 0]
    if not valid:
        return []
    front = [valid[i] for i in representative(points[valid], k)]
    order = [*front, *ranked([RungEntry(i, tuple(points[i]), broken[i]) for i in valid], len(valid))]
    chosen: dict[str, int] = {}
    for i in order:
        chosen.setdefault(repr(sorted(trials[i].sample.params.items())), i)
    return list(chosen.values())[:k]


def spread_of(
    trials: Sequence[TransferableTrial], objectives: Sequence[Objective], constraints: Sequence[Constraint], k: int
) -> list[int]:
    """Return indices of at most ``k`` informative trials, in order: the best half, and an even choice of the others."""
    if len(trials) <= k:
        return list(range(len(trials)))
    points, broken = _judged(trials, objectives, constraints)
    order = ranked([RungEntry(i, tuple(points[i]), broken[i]) for i in range(len(trials))], len(trials))
    best, others = order[: k // 2], order[k // 2 :]
    chosen = np.linspace(0, len(others) - 1, k - len(best)).round().astype(int)
    return sorted({*best, *(others[i] for i in chosen)})


def _judged(
    trials: Sequence[TransferableTrial], objectives: Sequence[Objective], constraints: Sequence[Constraint]
) -> tuple[Any, list[float]]:
    """Values, shape (n, objectives), smaller is better; and each trial's largest violation."""
    points = oriented([trial.metrics for trial in trials], objectives)
    named_values = [{**trial.sample.values, **trial.metrics} for trial in trials]
    return points, [max(violations(constraints, names).values(), default=0.0) for names in named_values]


# Ask for the next configuration, tell how it went: the search of one study, with any number of open trials.

GRID = 20_000  # configurations of a grid, at most
PROPOSALS = 2  # of a sampler for one trial, before a proposal that breaks a constraint is repaired
REPAIRS = 2000  # attempts to repair a proposal
_PROBES = 50  # configurations drawn to find the names of the space
Estimates = Mapping[int, tuple[Sequence[float], float]]
"""By trial number, the expected values of an open trial, and its expected violation of constraints."""


@dataclass(frozen=True)
class Suggestion:
    """A configuration to try. The trial's ``TrialStarted`` must record it, so that ``SearchReplay`` can repeat it.

    Attributes:
        number: The number of the trial.
        params: The parameters that the sampler chose.
        distributions: The distributions of the parameters (Optuna's JSON).
        values: The values that the space returned.
        sampler: The sampler that proposed it.
        dismissed: The parameters of earlier proposals for this trial, which broke a constraint.
    """

    number: int
    params: dict[str, Any]
    distributions: dict[str, str]
    values: dict[str, Any]
    sampler: str
    dismissed: tuple[dict[str, Any], ...] = ()


class Suggester:
    """The search of one study: proposes configurations (``ask``) and learns from results (``tell``).

    Any number of trials may be open. A proposal is a pure function of the seed and of all earlier calls.

    Args:
        space: The search space.
        objectives: The objectives.
        constraints: Constraints on settings and metrics.
        sampler: A name of ``SAMPLERS``, or of an installed sampler.
        seed: The seed of all proposals.
        known: Fixed values that are known before a trial starts. Constraints on these and on values of the space are
            decided before a trial is launched.

    Raises:
        UserError: For an unknown sampler, or a sampler that does not support these objectives or this space.
    """

    def __init__(
        self,
        space: Space,
        objectives: Sequence[Objective],
        constraints: Sequence[Constraint] = (),
        *,
        sampler: str = "auto",
        seed: int = 0,
        known: Mapping[str, object] | None = None,
    ) -> None:
        check_sampler(sampler, objectives)
        self.space = space
        self.objectives = tuple(objectives)
        self.rejected = 0  # configurations dismissed so far because they broke a constraint
        self._recorded_rejections = 0
        self._sampler = sampler
        self._seed = seed
        self._fixed_values = dict(known or {})
        self.next_number = 0  # of the next trial
        self._open: dict[int, tuple[int, Sample]] = {}
        self._estimated: dict[int, tuple[tuple[float, ...], float]] = {}
        self._seen: set[str] = set()
        self._durations: list[float] = []  # seconds of complete trials
        self._paused: frozenset[int] = frozenset()
        self._proposed: deque[dict[str, Any]] = deque()  # proposals of earlier studies, to be tried first
        names = {
            *self._fixed_values,
            *(n for s in spaces.probe(space, _PROBES, derive(seed, "names")) for n in s.values),
        }
        self._static = tuple(c for c in constraints if c.decidable(names))
        self._measured = tuple(c for c in constraints if not c.decidable(names))
        self._grid = self._all() if sampler == "grid" else []
        self._history = History(
            self.objectives,
            [constraint.text for constraint in self._measured],
            penalise=sampler == "cmaes",
            reenact=sampler in GENERATIONAL,
            scaled=sampler in MODELS,
        )

    def ask(self) -> Suggestion | None:
        """Return the next configuration; None once a grid is exhausted.

        Raises ``UserError`` if the user's space fails, or if no configuration satisfies the constraints.
        """
        while self._proposed:
            proposed = fit(self.space, self._proposed.popleft())
            if isinstance(proposed, Sample) and _key(proposed) not in self._seen and self._allowed(proposed):
                return self.adopt(proposed.params)
        number = self.next_number
        dismissed: list[dict[str, Any]] = []
        proposal = self._from_grid() if self._sampler == "grid" else self._from_sampler(number, dismissed)
        if proposal is None:
            return None
        self.next_number = number + 1
        index, sample, sampler = proposal
        self._open[number] = index, sample
        self._seen.add(_key(sample))
        distributions = spaces.to_json(sample.distributions)
        return Suggestion(number, sample.params, distributions, sample.values, sampler, tuple(dismissed))

    def ready(self) -> bool:
        """Return whether ``ask`` may be called now: a genetic search with ``steady=0`` waits for its generation."""
        if not generational(self._sampler):
            return True
        return unfinished(self._history.frozen(), parse_genetics(self._sampler)) == 0

    def adopt(self, params: Mapping[str, Any]) -> Suggestion:
        """Return the next configuration from ``params`` that the caller chose; missing parameters are drawn at random.

        Raises ``UserError`` as ``ask`` does, and for a value outside its range.
        """
        number, self.next_number = self.next_number, self.next_number + 1
        sample = spaces.fill_in(self.space, params, np.random.default_rng(derive(self._seed, "adopt", number)))
        index = self._history.add(sample, functools.partial(self._make, "random", derive(self._seed, "adopt", number)))
        self._open[number] = index, sample
        self._seen.add(_key(sample))
        return Suggestion(number, sample.params, spaces.to_json(sample.distributions), sample.values, "given")

    def learn(self, earlier: WarmStarted) -> None:
        """Take over an earlier study: samplers learn from its results, and ``ask`` returns its proposals first.

        The results are not trials of this search. Trials that do not fit the present space are left out.
        """
        for past in earlier.results:
            sample = fit(self.space, past.params)
            if isinstance(sample, Sample):
                name = self._sampler if self._sampler in GENERATIONAL else "random"
                seed = derive(self._seed, "earlier", len(self._history))
                index = self._history.add(sample, functools.partial(self._make, name, seed))
                values = {o.name: past.metrics[o.name] for o in self.objectives if o.name in past.metrics}
                self._history.tell(index, self._outcome(sample, TrialFinished(-1, "complete", values, past.metrics)))
        self._proposed.extend(earlier.proposed)

    def reserve(self) -> int:
        """Return a trial number that ``ask`` will not use, for a trial that the search does not choose."""
        self.next_number += 1
        return self.next_number - 1

    def expect(self, estimates: Estimates, paused: Collection[int] = ()) -> None:
        """Call ``estimate`` for each of these trials. ``paused``: open trials without workers, until the next call."""
        self._paused = frozenset(paused)
        for number, (values, violation) in estimates.items():
            self.estimate(number, values, violation)

    def estimate(self, number: int, values: Sequence[float], violation: float = 0.0) -> None:
        """Set the expected values of open trial ``number``: samplers use them as its result.

        They count until ``tell``, or the next estimate. ``violation`` is the largest violation of the constraints on
        measured values, and stands for each of them. Raises ``ValueError`` if the trial is not open.
        """
        if number not in self._open:
            raise ValueError(f"trial {number} is not open; open are {sorted(self._open)}")
        if len(values) != len(self.objectives) or not all(map(math.isfinite, (*values, violation))):
            raise ValueError(f"an estimate has {len(self.objectives)} finite values, not {values}")
        index, sample = self._open[number]
        if self._estimated.get(number) == (values, violation):
            return
        self._estimated[number] = tuple(values), violation
        broken = {constraint.text: violation for constraint in self._measured}
        self._history.estimate(index, Outcome(tuple(map(float, values)), broken, True, self._forbidden(sample)))

    def tell(self, number: int, finished: TrialFinished) -> None:
        """Record the end of trial ``number``. Raises ``ValueError`` if the trial is not open."""
        if number not in self._open:
            raise ValueError(f"trial {number} is not open; open are {sorted(self._open)}")
        index, sample = self._open.pop(number)
        self._estimated.pop(number, None)
        if finished.state == "complete" and finished.seconds > 0:
            self._durations.append(finished.seconds)
        self._history.tell(index, self._outcome(sample, finished))

    def is_open(self, number: int) -> bool:
        """Return whether trial ``number`` was proposed and has not ended."""
        return number in self._open

    @property
    def open_trials(self) -> list[int]:
        """The numbers of the trials that were proposed and have not ended."""
        return list(self._open)

    def drop(self, number: int) -> None:
        """Forget open trial ``number``: no sampler learns from it."""
        self._estimated.pop(number, None)
        self._history.drop(self._open.pop(number)[0])

    def reopen(self, record: TrialStarted) -> None:
        """Open the trial of ``record`` as ``ask`` did, without a call of the sampler."""
        number = record.trial
        if number in self._open:  # the same trial started twice: the later start counts
            self.drop(number)
        chosen = record.parent is not None or record.params in self._proposed
        name = (
            self._sampler if self._sampler in GENERATIONAL and not chosen else "random"
        )  # other samplers keep no notes
        learn = self._learns_of_dismissed()
        for attempt, params in enumerate(record.dismissed):
            sample = fit(self.space, params)
            if isinstance(sample, Sample):
                maker = functools.partial(self._make, name, self._seed_of(number, attempt))
                self._dismiss(self._history.add(sample, maker), sample, learn)
        sample = Sample(record.params, spaces.from_json(record.distributions), _values(record))
        seed = self._seed_of(number, min(len(record.dismissed), PROPOSALS - 1 if learn else 0))
        self._open[number] = self._history.add(sample, functools.partial(self._make, name, seed)), sample
        self._seen.add(_key(sample))

    def _resolved(self) -> str:
        trials, trained = self._history.frozen(), self._history.trained
        return resolve(self._sampler, self.objectives, trials, trained=trained, every_s=self._every_s())

    def _every_s(self) -> float:
        """Expected seconds between two proposals: the median duration of a trial over the number of running ones."""
        running = len(self._open.keys() - self._paused)
        return median(self._durations) / (running + 1) if self._durations else math.inf

    def _make(self, name: str, seed: int) -> BaseSampler:
        return make_sampler(name, seed, self._history.frozen())

    def _from_sampler(self, number: int, dismissed: list[dict[str, Any]]) -> tuple[int, Sample, str]:
        name, learn = self._resolved(), self._learns_of_dismissed()
        for attempt in range(PROPOSALS if learn else 1):
            seed = self._seed_of(number, attempt)
            index, sample = self._history.ask(functools.partial(self._make, name, seed), self._fill)
            forbidden = self._forbidden(sample)
            if forbidden is None or forbidden <= 0:
                return index, sample, name
            dismissed.append(sample.params)
            self._dismiss(index, sample, learn)
        repaired = self._repair(sample, derive(self._seed, "mend", number))
        return self._history.add(repaired, functools.partial(self._make, name, seed)), repaired, name

    def _seed_of(self, number: int, attempt: int) -> int:
        return derive(self._seed, "sampler", number, *([attempt] if attempt else []))

    def _learns_of_dismissed(self) -> bool:
        """Whether samplers learn from dismissed proposals: these must stay few beside measured trials."""
        return self._recorded_rejections < 10 + len(self._history) // 2

    def _dismiss(self, index: int, sample: Sample, learn: bool) -> None:
        self.rejected += 1
        if learn:
            self._recorded_rejections += 1
            self._history.tell(index, Outcome(None, {}, None, self._forbidden(sample)))
        else:
            self._history.drop(index)

    def _fill(self, trial: optuna.Trial) -> Sample:
        values = spaces.call(self.space, trial)
        return Sample(dict(trial.params), dict(trial.distributions), values)

    def _repair(self, proposal: Sample, seed: int) -> Sample:
        """Redraw more and more parameters of ``proposal`` until it satisfies the constraints."""
        rng = np.random.default_rng(seed)
        closest: dict[str, float] = {}
        for trial in range(REPAIRS):
            keep = 0.9 * (1 - trial / (REPAIRS / 2))  # the second half of the attempts draws all parameters afresh
            sample = spaces.redraw(self.space, proposal, keep, rng)
            broken = {text: v for text, v in self._decided(sample).items() if v > 0}
            if not broken:
                return sample
            self.rejected += 1
            if not closest or sum(broken.values()) < sum(closest.values()):
                closest = broken
        rule = "some configuration must satisfy the constraints"
        shown = " and ".join(f"'{text}' by {v:g}" for text, v in closest.items())
        raise UserError(rule, f"none of {REPAIRS} does, the closest breaks {shown}", "loosen them, or widen the space")

    def _decided(self, sample: Sample) -> dict[str, float]:
        """Violations of the constraints that the configuration alone decides."""
        return violations(self._static, {**self._fixed_values, **sample.values})

    def _allowed(self, sample: Sample) -> bool:
        return (self._forbidden(sample) or 0.0) <= 0

    def _forbidden(self, sample: Sample) -> float | None:
        return max(self._decided(sample).values(), default=None)

    def _outcome(self, sample: Sample, finished: TrialFinished) -> Outcome:
        """The outcome of a finished trial. A violation that its record lacks is computed from its metrics."""
        names = {**self._fixed_values, **sample.values, **finished.metrics, **finished.values}
        broken = violations(self._measured, names)
        broken |= {c.text: finished.violations[c.text] for c in self._measured if c.text in finished.violations}
        forbidden = self._forbidden(sample)
        values = tuple(float(finished.values.get(o.name, math.nan)) for o in self.objectives)
        valid = finished.state != "rejected" and all(map(math.isfinite, values))
        breaks = any(violation > 0 for violation in [*broken.values(), forbidden or 0.0])
        if valid and (finished.state == "complete" or breaks):
            return Outcome(values, broken, True, forbidden)
        return Outcome(None, broken, None if finished.state == "rejected" and breaks else False, forbidden)

    def _all(self) -> list[Sample]:
        """All configurations that satisfy the constraints, in an order that the seed decides."""
        for sample in spaces.probe(self.space, _PROBES, derive(self._seed, "grid")):
            for name, distribution in sample.distributions.items():
                if math.isinf(spaces.size(distribution)):
                    rule = "a grid needs finitely many values of each parameter"
                    raise UserError(rule, name, f"give {name} a step, or use another sampler")
        every = spaces.enumerate_all(self.space, GRID)
        if every is None:
            raise UserError(f"a grid has at most {GRID} configurations", "more", "widen the steps, or use auto")
        kept = [sample for sample in every if self._allowed(sample)]
        self.rejected += len(every) - len(kept)
        order = np.random.default_rng(derive(self._seed, "grid")).permutation(len(kept))
        return [kept[i] for i in order[::-1]]

    def _from_grid(self) -> tuple[int, Sample, str] | None:
        while self._grid:
            sample = self._grid.pop()
            if _key(sample) not in self._seen:
                return self._history.add(sample, functools.partial(self._make, "random", 0)), sample, "grid"
        return None


def _key(sample: Sample) -> str:
    return repr(sorted(sample.params.items()))


def _values(record: TrialStarted) -> dict[str, Any]:
    return in_full({**record.execution, **record.config}, record.config)


# --- replay of a journal ---
class SearchReplay:
    """Replays the records of a journal into a new ``suggester``, one by one.

    Each trial is opened at the point where its proposal was requested. ``pending`` holds the requested proposals whose
    trials never began; their trials are open.

    Args:
        suggester: A suggester without trials.
        records: All records of the journal.
        unfinished: Whether trials that never ended stay open, or are dropped.

    Raises:
        ValueError: If the suggester has trials already.
    """

    def __init__(self, suggester: Suggester, records: Iterable[Record], unfinished: Literal["open", "drop"]) -> None:
        if suggester.next_number:
            raise ValueError("replay comes before the first ask")
        records = list(records)
        self.pending: list[Suggestion] = []
        self._suggester = suggester
        self._ended = {record.trial for record in records if isinstance(record, TrialFinished)}
        self._starts: dict[int, TrialStarted] = {}
        self._drops = unfinished == "drop"
        for record in records:
            if isinstance(record, TrialStarted) and record.phase == "search" and record.parent is None:
                self._starts.setdefault(record.trial, record)
        self._paused: set[int] = set()
        self._opened: set[int] = set()  # opened at their requests, so that their starts add nothing

    def observe(self, record: Record, estimates: Callable[[], Estimates] = dict) -> Suggestion | None:
        """Replay the next record, with the ``estimates`` of this point. Returns a proposal that never got an answer."""
        suggester = self._suggester
        match record:
            case ProposalAsked(trial=number):
                suggester.expect(estimates(), self._paused)
                suggester.next_number = max(suggester.next_number, number)
                if number in self._starts:
                    self._opened.add(number)
                    self._reopen(self._starts[number])
                elif (proposal := suggester.ask()) is not None:
                    self.pending.append(proposal)
                    return proposal
            case TrialPaused(trial=number, cut_off=False):
                self._paused.add(number)
            case TrialResumed(trial=number):
                self._paused.discard(number)
            case TrialStarted(trial=number, phase=phase):
                self._paused.discard(number)
                suggester.next_number = max(suggester.next_number, number + 1)
                if number in self._opened:
                    self._opened.discard(number)
                elif phase == "search":
                    self._reopen(record)
            case WarmStarted():
                suggester.learn(record)
            case TrialFinished(trial=number) if suggester.is_open(number):
                suggester.tell(number, record)
        return None

    def finish(self) -> None:
        """End the replay: all records were heard."""
        for number in self._suggester.open_trials:
            if number in self._ended:  # it was started again after its end
                self._suggester.drop(number)

    def _reopen(self, record: TrialStarted) -> None:
        self._suggester.next_number = max(self._suggester.next_number, record.trial + 1)
        if record.trial in self._ended or not self._drops:
            self._suggester.reopen(record)


def replay(suggester: Suggester, entries: Iterable[Entry], *, unfinished: Literal["open", "drop"] = "drop") -> None:
    """Resume a search from its journal, before the first ``ask``: see ``SearchReplay``.

    The numbers of lost trials, and of trials that the search did not choose, are not used again.
    """
    records = [entry.record for entry in entries]
    search_replay = SearchReplay(suggester, records, unfinished)
    for record in records:
        search_replay.observe(record)
    search_replay.finish()
