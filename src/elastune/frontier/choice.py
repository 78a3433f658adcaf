"""Which configuration is best for a worker count, and which must be trained again before that is believed."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, median

from elastune.core.run import Config
from elastune.frontier.plan import FrontierPlan
from elastune.frontier.rows import FrontierCriteria
from elastune.frontier.trainings import Training, Trainings, key
from elastune.search.stopping.schedule import FixedTrial, Next
from elastune.study.loop.fixed_trials import FixedTrials

FRESH_SEEDS = 1000  # confirmations use seeds that no search has seen


class Choice:
    """What the trainings so far say about the configurations of ``plan``, by quality and time."""

    def __init__(self, plan: FrontierPlan, trainings: Trainings) -> None:
        self._plan = plan
        self._request = plan.request
        self._trainings = trainings

    def seeds(self, first: int = 0) -> range:
        return range(self._request.seed + first, self._request.seed + first + self._request.seeds)

    def missing(self, phase: str, configs: list[Config], first: int = 0) -> list[tuple[Config, int]]:
        """The (configuration, seed) pairs of ``configs`` that were not trained yet and are not open in ``phase``."""
        known = {*self._trainings.done, *self._trainings.open(phase)}
        pairs = {key(config, seed): (config, seed) for config in configs for seed in self.seeds(first)}
        return [pair for name, pair in pairs.items() if name not in known]

    def tried(self, config: Config) -> list[Training]:
        """The trainings that speak for a configuration: fresh seeds if complete, else the naive ones, else any."""
        done = self._trainings.done
        for first in (FRESH_SEEDS, 0):
            found = [done.get(key(config, seed)) for seed in self.seeds(first)]
            if all(found):
                return [t for t in found if t is not None]
        return [t for t in done.values() if t.config == config]

    def with_own_seeds(self, config: Config) -> list[Training]:
        """The trainings of a configuration with the seeds that naive rows have."""
        found = [self._trainings.done.get(key(config, seed)) for seed in self.seeds()]
        return [training for training in found if training is not None]

    def unconfirmed(self, by: FrontierCriteria) -> list[Config]:
        """Of the configurations that look best for some worker count, those that one lucky seed may have made so."""
        best = [self.best(workers, by) for workers in self._request.workers]
        return list({key(config, 0): config for config in best if not self._confirmed(config)}.values())

    def best(self, workers: int, by: FrontierCriteria, *, confirmed_only: bool = False) -> Config:
        """The fastest configuration that looks good enough; where none does, the one of the best quality."""
        base = self._mean_quality(self._plan.naive(self._request.workers[0]))
        done = self._trainings.done.values()
        candidates = {key(t.config, 0): t.config for t in done if t.result.state == "complete"}
        scored = []
        for config in candidates.values():
            if confirmed_only and not self._confirmed(config):
                continue
            quality = self._mean_quality(config)
            if quality is not None:
                seconds = median(by.seconds(t, workers)[0] for t in self.tried(config) if t.run is not None)
                scored.append((quality, seconds, config))
        if not scored:
            return self._plan.naive(self._request.workers[0])
        enough = [
            (seconds, config)
            for quality, seconds, config in scored
            if by.reaches(quality) and (by.target is not None or base is None or not by.better(base, quality))
        ]
        if enough:
            return min(enough, key=lambda pair: pair[0])[1]
        sign = -1.0 if by.quality.direction == "max" else 1.0
        return min(scored, key=lambda each: sign * each[0])[2]

    def _confirmed(self, config: Config) -> bool:
        done = self._trainings.done
        return any(all(key(config, seed) in done for seed in self.seeds(first)) for first in (FRESH_SEEDS, 0))

    def _mean_quality(self, config: Config) -> float | None:
        """Mean validation quality over the trainings of ``config``; None where one diverged."""
        tried = self.tried(config)
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
