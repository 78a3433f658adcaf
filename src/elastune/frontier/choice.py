"""Which configuration is best for so many parts of a batch, and which must be trained again before it is believed."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, median

from elastune.core.run import Config
from elastune.frontier.criteria import FrontierCriteria
from elastune.frontier.plan import FrontierPlan
from elastune.frontier.trainings import Training, Trainings, key, name_of
from elastune.frontier.verdict import judge
from elastune.search.stopping.schedule import FixedTrial, Next
from elastune.study.loop.fixed_trials import FixedTrials

FRESH_SEEDS = 1000  # confirmations use seeds that no search has seen
Cell = tuple[Config, int]
"""A configuration, and into how many parts its batches are cut: one for each worker, but where they divide layers."""


class Choice:
    """What the trainings so far say about the configurations of ``plan``, by quality and time."""

    def __init__(self, plan: FrontierPlan, trainings: Trainings) -> None:
        self._plan = plan
        self._request = plan.request
        self._trainings = trainings

    def seeds(self, first: int = 0) -> range:
        return range(self._request.seed + first, self._request.seed + first + self._request.seeds)

    def missing(self, phase: str, cells: list[Cell], first: int = 0) -> list[tuple[Config, int, int]]:
        """The (configuration, parts, seed) of ``cells`` that were not trained yet and are not open in ``phase``."""
        known = {*self._trainings.done, *self._trainings.open(phase)}
        wanted = {key(c, seed, parts): (c, parts, seed) for c, parts in cells for seed in self.seeds(first)}
        return [each for name, each in wanted.items() if name not in known]

    def tried(self, config: Config, parts: int) -> list[Training]:
        """The trainings that tell most of ``config`` on ``parts``.

        Those for so many parts: with fresh seeds if complete, else the naive ones, else any. Where there are none,
        those for other numbers of parts.
        """
        for first in (FRESH_SEEDS, 0):
            if found := self._complete(config, parts, first):
                return found
        of_config = [t for t in self._trainings.done.values() if t.config == config]
        return [t for t in of_config if t.slots == parts] or of_config

    def with_own_seeds(self, parts: int) -> list[Training]:
        """The trainings of the naive rule for ``parts``."""
        naive = self._plan.naive(parts)
        found = [self._trainings.done.get(key(naive, seed, parts)) for seed in self.seeds()]
        return [training for training in found if training is not None]

    def baseline(self) -> list[Training]:
        """All trainings of the program's own settings on the smallest worker count, with whatever seeds."""
        config, parts = self._base
        return [t for t in self._trainings.done.values() if t.config == config and t.slots == parts]

    def unconfirmed(self, by: FrontierCriteria) -> list[Cell]:
        """What looks best for a worker count, where one lucky seed, or another count's training, may have made it so.

        The largest counts come first: what tuning buys back is most there. Before them the baseline, where the others
        are to be compared with it seed by seed.
        """
        best = [(self.best(parts, by), parts) for parts in reversed(self._plan.parts)]
        new = [(config, parts) for config, parts in best if config and not self._confirmed(config, parts)]
        paired = by.target is None and new and not self._complete(*self._base, FRESH_SEEDS)
        return [self._base, *new] if paired else new

    def best(self, parts: int, by: FrontierCriteria, *, confirmed_only: bool = False) -> Config | None:
        """The fastest configuration that looks good enough; where none does, the one of the best quality.

        None where every training diverged; with ``confirmed_only``, every one that was made for ``parts``.
        """
        done = self._trainings.done.values()
        candidates = {name_of(t.config): t.config for t in done if t.result.state == "complete"}
        scored, enough, mesh = [], [], self._plan.mesh(parts)
        for config in candidates.values():
            if confirmed_only and not self._confirmed(config, parts):
                continue
            quality = self._mean_quality(config, parts)
            if quality is not None:
                seconds = median(by.seconds(t, mesh)[0] for t in self.tried(config, parts) if t.run is not None)
                scored.append((quality, config))
                if self._looks_good(config, parts, quality, by):
                    enough.append((seconds, config))
        if not scored:
            return None
        if enough:
            return min(enough, key=lambda pair: pair[0])[1]
        sign = -1.0 if by.quality.direction == "max" else 1.0
        return min(scored, key=lambda each: sign * each[0])[1]

    @property
    def _base(self) -> Cell:
        first = self._plan.parts[0]
        return self._plan.naive(first), first

    def _looks_good(self, config: Config, parts: int, quality: float, by: FrontierCriteria) -> bool:
        """Whether validation shows that quality holds; before it is confirmed, whether its mean says so."""
        baseline = self.baseline()
        if self._confirmed(config, parts):
            found = judge(self.tried(config, parts), baseline, by, self._plan.quality.name)
            if found is not None and (by.target is not None or found.against is not None):
                return found.word == "holds"
        if by.target is not None:
            return by.reaches(quality)
        base = [t.result.metrics[self._plan.quality.name] for t in baseline if t.run is not None]
        return not base or by.loss(quality, fmean(base)) < by.margin_at(fmean(base))

    def _confirmed(self, config: Config, parts: int) -> bool:
        return any(self._complete(config, parts, first) for first in (FRESH_SEEDS, 0))

    def _complete(self, config: Config, parts: int, first: int) -> list[Training]:
        """The trainings with all seeds from ``first`` on; none where one is missing."""
        found = [self._trainings.done.get(key(config, seed, parts)) for seed in self.seeds(first)]
        return [t for t in found if t is not None] if all(found) else []

    def _mean_quality(self, config: Config, parts: int) -> float | None:
        """Mean validation quality over the trainings of ``config``; None where one diverged."""
        tried = self.tried(config, parts)
        if not tried or any(t.run is None for t in tried):
            return None
        return fmean(t.result.metrics[self._plan.quality.name] for t in tried)


class Confirm(FixedTrials):
    """Trains what looks best with fresh seeds, until what looks best has been: a single lucky seed proves nothing."""

    def __init__(self, wanted: Callable[[], list[FixedTrial]], busy: Callable[[], bool]) -> None:
        super().__init__("confirm")
        self._wanted = wanted
        self._busy = busy

    def next(self, fresh: bool) -> Next:
        if fresh and not self.todo and self._offered is None and not self._busy():
            self.todo = self._wanted()
        return super().next(fresh)
