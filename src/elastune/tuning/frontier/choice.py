"""Which recipe is best for a number of batch parts, and which must be trained again before it is believed."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, median

from elastune.tuning.frontier.checked_request import CheckedFrontier
from elastune.tuning.frontier.criteria import FrontierCriteria, judge
from elastune.tuning.frontier.trainings import Recipe, Training, Trainings, key
from elastune.tuning.search.schedule import FixedTrial, FixedTrials, Next

FRESH_SEEDS = 1000  # confirmations use seeds that no search has seen
Cell = tuple[Recipe, int]
"""A recipe, and into how many parts its batches are cut: one for each worker, unless the workers divide layers."""


class Choice:
    """Ranks the recipes of ``plan`` by quality and time, from the trainings so far."""

    def __init__(self, plan: CheckedFrontier, trainings: Trainings) -> None:
        self._plan = plan
        self._request = plan.request
        self._trainings = trainings

    def seeds(self, first: int = 0) -> range:
        return range(self._request.seed + first, self._request.seed + first + self._request.seeds)

    def missing(self, phase: str, cells: list[Cell], first: int = 0) -> list[tuple[Recipe, int, int]]:
        """The (recipe, parts, seed) of ``cells`` that are neither trained yet nor running or waiting in ``phase``."""
        existing = {*self._trainings.done, *self._trainings.open(phase)}
        wanted = {self._key(r, seed, parts): (r, parts, seed) for r, parts in cells for seed in self.seeds(first)}
        return [each for name, each in wanted.items() if name not in existing]

    def tried(self, recipe: Recipe, parts: int) -> list[Training]:
        """The most informative trainings of ``recipe`` for ``parts``.

        Trainings for so many parts come first: all fresh seeds if complete, else all first seeds, else any. Without
        any, trainings for other numbers of parts count.
        """
        for first in (FRESH_SEEDS, 0):
            if complete := self._complete(recipe, parts, first):
                return complete
        of_recipe = [t for t in self._trainings.done.values() if t.recipe == recipe]
        return [t for t in of_recipe if t.parts == parts] or of_recipe

    def of_seed(self, recipe: Recipe, parts: int, seed: int) -> Training | None:
        """The training of ``recipe`` for ``parts`` with ``seed``, if it has ended."""
        return self._trainings.done.get(self._key(recipe, seed, parts))

    def with_own_seeds(self, parts: int, policies: tuple[str, ...] = ()) -> list[Training]:
        """The trainings of the naive rule for ``parts``, perhaps under policies."""
        naive = self._plan.naive_recipe(parts, policies)
        trainings = [self.of_seed(naive, parts, seed) for seed in self.seeds()]
        return [training for training in trainings if training is not None]

    def baseline(self) -> list[Training]:
        """All trainings of the program's own settings on the smallest worker count, with any seeds."""
        recipe, parts = self._base
        return [t for t in self._trainings.done.values() if t.recipe == recipe and t.parts == parts]

    def unconfirmed(self, by: FrontierCriteria) -> list[Cell]:
        """The cells that look best for their worker count but lack a full set of seeds.

        One lucky seed, or a training for another count, may make a recipe look best. The largest count comes first,
        because tuning gains most there. The smallest comes second, because the worth of all others depends on it. If
        rows are compared with the baseline seed by seed, the baseline comes before both.
        """
        smallest, *larger = self._plan.worker_layouts.parts
        order = dict.fromkeys([*larger[-1:], smallest, *reversed(larger)])
        best = [(recipe, parts) for parts in order for recipe in self.bests(parts, by)]
        new = [(recipe, parts) for recipe, parts in best if not self._confirmed(recipe, parts)]
        paired = by.target is None and new and not self._complete(*self._base, FRESH_SEEDS)
        return [self._base, *new] if paired else new

    def bests(self, parts: int, by: FrontierCriteria, *, confirmed_only: bool = False) -> list[Recipe]:
        """The best recipe of static settings, and the best under each policy that was given or found."""
        recipes = [
            self.best(parts, by, policies=policies, confirmed_only=confirmed_only)
            for policies in dict.fromkeys(((), *(t.variant.policies for t in self._trainings.done.values())))
        ]
        return [recipe for recipe in recipes if recipe is not None]

    def best(
        self,
        parts: int,
        by: FrontierCriteria,
        *,
        policies: tuple[str, ...] = (),
        confirmed_only: bool = False,
    ) -> Recipe | None:
        """The fastest recipe under ``policies`` that looks good enough, or else the recipe of the best quality.

        None if every training diverged. With ``confirmed_only``, only recipes with a full set of seeds count.
        """
        done, layout = self._trainings.done.values(), self._plan.worker_layouts.first(parts)
        of_policies = [t for t in done if t.result.state == "complete" and t.variant.policies == policies]
        candidates = {t.recipe.name: t.recipe for t in of_policies}
        scored, enough = [], []
        for recipe in candidates.values():
            if (confirmed_only and not self._confirmed(recipe, parts)) or not self._plan.is_possible(
                layout, recipe.variant
            ):
                continue
            quality, kind = self._mean_quality(recipe, parts), self._plan.kind(parts, recipe.variant)
            if quality is not None:
                seconds = median(by.seconds(t, kind)[0] for t in self.tried(recipe, parts) if t.run is not None)
                scored.append((quality, recipe))
                if self._looks_good(recipe, parts, quality, by):
                    enough.append((seconds, recipe))
        if not scored:
            return None
        if enough:
            return min(enough, key=lambda pair: pair[0])[1]
        sign = -1.0 if by.quality.direction == "max" else 1.0
        return min(scored, key=lambda each: sign * each[0])[1]

    @property
    def _base(self) -> Cell:
        first = self._plan.parts[0]
        return self._plan.naive_recipe(first), first

    def _looks_good(self, recipe: Recipe, parts: int, quality: float, by: FrontierCriteria) -> bool:
        """Whether validation shows that quality holds; before all seeds are trained, whether the mean does."""
        baseline = self.baseline()
        if self._confirmed(recipe, parts):
            verdict = judge(self.tried(recipe, parts), baseline, by, self._plan.quality.name)
            if verdict is not None and (by.target is not None or verdict.against is not None):
                return verdict.word == "holds"
        if by.target is not None:
            return by.reaches(quality)
        base = [t.result.metrics[self._plan.quality.name] for t in baseline if t.run is not None]
        return not base or by.loss(quality, fmean(base)) < by.margin_at(fmean(base))

    def _key(self, recipe: Recipe, seed: int, parts: int) -> str:
        return key(recipe.config, seed, recipe.variant.to_record(self._plan.execution(parts, recipe.variant)))

    def _confirmed(self, recipe: Recipe, parts: int) -> bool:
        return any(self._complete(recipe, parts, first) for first in (FRESH_SEEDS, 0))

    def _complete(self, recipe: Recipe, parts: int, first: int) -> list[Training]:
        """The trainings with all seeds from ``first`` on; [] if one is missing."""
        trainings = [self._trainings.done.get(self._key(recipe, seed, parts)) for seed in self.seeds(first)]
        return [t for t in trainings if t is not None] if all(trainings) else []

    def _mean_quality(self, recipe: Recipe, parts: int) -> float | None:
        """Mean validation quality over the trainings of ``recipe``; None if one diverged."""
        tried = self.tried(recipe, parts)
        if not tried or any(t.run is None for t in tried):
            return None
        return fmean(t.result.metrics[self._plan.quality.name] for t in tried)


class Confirm(FixedTrials):
    """The schedule that trains the best recipes with fresh seeds, because a single lucky seed proves nothing.

    It ends when the recipes that look best have a full set of seeds. ``at_once``: as of ``FixedTrials``.
    """

    def __init__(
        self, wanted: Callable[[], list[FixedTrial]], busy: Callable[[], bool], *, at_once: int | None = None
    ) -> None:
        super().__init__("confirm", at_once=at_once)
        self._wanted = wanted
        self._busy = busy

    def next(self, fresh: bool) -> Next:
        if fresh and not self.todo and self._offered is None and not self._busy():
            self.todo = self._wanted()
        return super().next(fresh)
