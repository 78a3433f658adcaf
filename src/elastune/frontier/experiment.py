"""The experiment of a frontier: what is trained for a worker count, and how long that would take there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastune.cluster.run_files import RunFiles
from elastune.core.divergence import Divergence
from elastune.core.run import Adapt, Config, Elastic, Means, RunSpec
from elastune.elastic.protocol.client import left_behind
from elastune.frontier.calibration import STEPS
from elastune.frontier.criteria import FrontierCriteria, batch_of
from elastune.frontier.plan import FrontierPlan
from elastune.frontier.trainings import NOISE_SCALE, Training, Trainings, key, name_of, training_of
from elastune.job.pool import JobEvent
from elastune.journal.records import TrialFinished, TrialResumed, TrialStarted
from elastune.journal.trials import TrialLife
from elastune.mechanisms.registry import mechanism_for
from elastune.search.samplers.suggest import Suggestion
from elastune.search.space.objective import Objective
from elastune.search.stopping.schedule import FixedTrial, IntermediateResult
from elastune.study.loop.experiment import PreparedTrial
from elastune.study.trial_results import Pricing, intermediate_result, judge


class FrontierExperiment:
    """Trainings of ``plan``. The search sees quality, and the time at the largest worker count.

    Any other worker count's time follows from the same steps. ``by``: how rows are judged, once step times are known.
    ``rules``: by which rule a configuration's learning rate follows its batch, by ``name_of(config)``.
    """

    def __init__(self, plan: FrontierPlan, files: RunFiles) -> None:
        self._files = files
        self.by: FrontierCriteria | None = None
        self.rules: dict[str, str] = {}
        self._plan = plan
        self._request = plan.request
        self._pricing = Pricing((plan.quality,), plan.constraints, plan.request.price_per_worker_hour)
        self._trainings: Trainings | None = None

    @property
    def objectives(self) -> Sequence[Objective]:
        return self._plan.searched

    def look_at(self, trainings: Trainings) -> None:
        """What was trained already is not trained again."""
        self._trainings = trainings

    def new(
        self, suggestion: Suggestion, until_epoch: int | None, parent: int | None = None
    ) -> PreparedTrial | TrialFinished:
        config, rule = self._plan.resolve(suggestion.values)
        self.rules[name_of(config)] = rule
        means = self._searching(config)
        seed, slots = self._request.seed, means.num_slots
        twin = None if self._trainings is None else self._trainings.done.get(key(config, seed, slots))
        if twin is not None:  # another parametrisation of what was trained already
            return self._seen_by_search(replace(twin, result=replace(twin.result, trial=suggestion.number)))
        started = TrialStarted(
            suggestion.number,
            config,
            means.to_json(),
            seed,
            "search",
            suggestion.params,
            suggestion.distributions,
            {"lr_rule": rule, "for_workers": slots},
            until_epoch=until_epoch,
            dismissed=list(suggestion.dismissed),
        )
        return PreparedTrial(suggestion.number, replace(self._spec(started, means), until_epoch=until_epoch), started)

    def fixed(self, number: int, trial: FixedTrial) -> PreparedTrial:
        tags = {"for_workers": trial.means.num_slots} if trial.means.workers < trial.means.num_slots else {}
        started = TrialStarted(number, trial.config, trial.means.to_json(), trial.seed, trial.phase, tags=tags)
        spec = self._spec(started, trial.means)
        if trial.max_steps is not None:
            spec = replace(spec, max_steps=trial.max_steps, measure_link=trial.means.workers > 1, spread=trial.spread)
        return PreparedTrial(number, spec, started)

    def again(
        self, life: TrialLife, reason: str, until_epoch: int | None = None, cut_off: bool = False
    ) -> PreparedTrial:
        means = Means.from_json(life.started.means)
        spec = replace(self._spec(life.started, means), resume=True, until_epoch=until_epoch)
        if life.started.phase == "calibrate":  # it counts for nothing any more: see Calibration
            spec = replace(spec, max_steps=STEPS)
        self._files.set_aside(spec.out, self._files.damaged(spec.out))
        return PreparedTrial(life.number, spec, TrialResumed(life.number, means.workers, reason, until_epoch, cut_off))

    def left(self, life: TrialLife) -> RunSpec | None:
        means, shared = Means.from_json(life.started.means), self._request.trial_workers is not None
        if shared and life.started.phase == "search":
            means = means.on(life.workers)
        spec = replace(self._spec(life.started, means), resume=True, until_epoch=life.until_epoch)
        return spec if spec.elastic.grace_s and left_behind(spec.out) is not None else None

    def intermediate(self, life: TrialLife) -> IntermediateResult | None:
        shown = intermediate_result(life, self._pricing)
        if shown is None or self.by is None:
            return None
        step_s = self.by.times.expected_s(batch_of(life.started.config), self._plan.widest)
        return replace(shown, values=(*shown.values, life.reports[-1][0].step * step_s))

    def result(self, life: TrialLife, ended: JobEvent) -> TrialFinished:
        calibrates = life.started.phase == "calibrate"
        return judge(life, ended, replace(self._pricing, constraints=()) if calibrates else self._pricing)

    def for_search(self, life: TrialLife) -> TrialFinished:
        assert life.finished is not None
        if life.started.phase == "calibrate":
            return life.finished
        return self._seen_by_search(training_of(life))

    def _seen_by_search(self, training: Training) -> TrialFinished:
        result = training.result
        if training.run is None or self.by is None:
            return result
        seconds, _ = self.by.seconds(training, self._plan.widest)
        name = self._plan.quality.name
        return replace(result, values={name: result.metrics[name], "seconds": seconds})

    def _searching(self, config: Config) -> Means:
        means, bounds = self._plan.means(self._plan.searched_for(batch_of(config))), self._request.trial_workers
        return means if bounds is None else replace(means, workers=bounds[0])

    def _spec(self, started: TrialStarted, means: Means) -> RunSpec:
        """A training that can go on after its controller ended; one that only measures times cannot."""
        calibrates, bounds = started.phase == "calibrate", self._request.trial_workers
        elastic = Elastic(collective_timeout_s=self._request.collective_timeout_s)
        if not calibrates:
            elastic = replace(elastic, grace_s=self._request.grace_s)
        if bounds is not None and started.phase == "search":
            elastic = replace(elastic, low=bounds[0], high=bounds[1])
        return RunSpec(
            self._request.program,
            self._request.out / "trials" / f"{started.trial:05d}",
            started.config,
            started.seed,
            means,
            epochs=self._request.epochs,
            checkpoint_every_steps=0 if calibrates else None,
            elastic=elastic,
            adapt=Adapt(monitors=(NOISE_SCALE,)) if not calibrates and _compares(means) else Adapt(),
            divergence=Divergence(self._request.divergence),
        )


def _compares(means: Means) -> bool:
    """Whether the noise scale can be told: a batch that is one part has nothing to compare, nor have divided layers."""
    whole = not means.parts.tensor and mechanism_for(means).abilities.measures
    return whole and means.num_slots > 1
