"""The experiment of a frontier in the study loop: what is trained for a worker count, what the search sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastune.core.checkpoint_keeping import KeepCheckpoints
from elastune.core.divergence import Divergence
from elastune.core.errors import UserError
from elastune.core.journal.folds import TrialSummary
from elastune.core.journal.records import TrialFinished, TrialResumed, TrialStarted
from elastune.core.run import Adapt, Elastic, ExecutionSettings, RunSpec
from elastune.elastic.wire.contact import left_behind
from elastune.parallel.mechanisms.registry import mechanism_for
from elastune.runtime.clusters.base import RunFiles
from elastune.runtime.job.pool import JobEvent
from elastune.tuning.frontier.checked_request import CheckedFrontier
from elastune.tuning.frontier.criteria import FrontierCriteria, batch_of
from elastune.tuning.frontier.short_runs import STEPS
from elastune.tuning.frontier.trainings import (
    FOR_WORKERS,
    LAYOUT_TAG,
    NOISE_SCALE,
    TIMED,
    Training,
    Trainings,
    Variant,
    key,
    name_of,
    read_variant,
    training_of,
)
from elastune.tuning.search.objective import Objective
from elastune.tuning.search.schedule import FixedTrial, IntermediateResult
from elastune.tuning.search.suggester import Suggestion
from elastune.tuning.study.experiment import PreparedTrial
from elastune.tuning.study.trial_results import Pricing, intermediate_result, judge


class FrontierExperiment:
    """The trainings of a frontier, as the study loop runs them.

    The search sees the quality of a training, and its time on the largest worker count or on the layout that its space
    chose. Times on other worker counts follow from the same steps.

    Attributes:
        by: How rows are judged; None until step times are known.
        rules: The rule by which a learning rate follows its batch, by ``name_of(config)``.
        reused: Proposals for a layout chosen by the space that had been trained for another layout already.
    """

    def __init__(self, plan: CheckedFrontier, files: RunFiles) -> None:
        self._files = files
        self.by: FrontierCriteria | None = None
        self.rules: dict[str, str] = {}
        self.reused: list[Training] = []
        self._plan = plan
        self._request = plan.request
        self._pricing = Pricing((plan.quality,), plan.constraints, plan.request.price_per_worker_hour)
        self._trainings: Trainings | None = None
        quality = {plan.quality.name: plan.quality.direction}
        self._keep_checkpoints = KeepCheckpoints.parse(plan.request.keep_checkpoints).directed(quality)

    @property
    def objectives(self) -> Sequence[Objective]:
        return self._plan.searched

    def use(self, plan: CheckedFrontier) -> None:
        """Go on with what was learned of ``plan``."""
        self._plan = plan

    def set_trainings(self, trainings: Trainings) -> None:
        """Give the trainings that have ended, so that none of them is repeated."""
        self._trainings = trainings

    def new(
        self, suggestion: Suggestion, until_epoch: int | None, parent: int | None = None
    ) -> PreparedTrial | TrialFinished:
        seed = self._request.seed
        try:
            proposed, refused = self._plan.propose(suggestion.values), ""
        except UserError as error:
            proposed, refused = self._plan.settings_only(suggestion.values), str(error)
        config, variant, parts = proposed.recipe.config, proposed.recipe.variant, proposed.layout.num_slots
        self.rules[name_of(config)] = proposed.rule
        execution = self._searching(proposed.layout, variant)
        recorded, layout = variant.to_record(execution), proposed.layout if proposed.chosen else None
        earlier = None if self._trainings is None or refused else self._trainings.done.get(key(config, seed, recorded))
        if earlier is not None:  # the proposal has other parameters but the same result
            again = replace(earlier, result=replace(earlier.result, trial=suggestion.number), layout=layout)
            self.reused += [again] if layout is not None else []
            return self._seen_by_search(again)
        started = TrialStarted(
            suggestion.number,
            config,
            recorded,
            seed,
            "search",
            suggestion.params,
            suggestion.distributions,
            {
                "lr_rule": proposed.rule,
                FOR_WORKERS: parts,
                **({} if layout is None else {LAYOUT_TAG: layout.to_json()}),
            },
            until_epoch=until_epoch,
            dismissed=list(suggestion.dismissed),
        )
        spec = replace(self._spec(started, execution), until_epoch=until_epoch)
        return PreparedTrial(suggestion.number, spec, started, refused)

    def fixed(self, number: int, trial: FixedTrial) -> PreparedTrial:
        parts = trial.execution.num_slots if trial.parts is None else trial.parts
        tags = {FOR_WORKERS: parts} if trial.execution.workers < parts or parts != trial.execution.num_slots else {}
        recorded = {**trial.execution.to_json(), **trial.sync_and_policies}
        started = TrialStarted(number, trial.config, recorded, trial.seed, trial.phase, tags=tags)
        spec = self._spec(started, trial.execution)
        if trial.max_steps is not None:
            spec = replace(
                spec, max_steps=trial.max_steps, measure_link=trial.execution.workers > 1, spread=trial.spread
            )
        return PreparedTrial(number, spec, started)

    def again(
        self, life: TrialSummary, reason: str, until_epoch: int | None = None, cut_off: bool = False
    ) -> PreparedTrial:
        execution, _ = read_variant(life.started.execution)
        spec = replace(self._spec(life.started, execution), resume=True, until_epoch=until_epoch)
        if life.started.phase in TIMED:  # Calibration ignores short runs of earlier controllers
            spec = replace(spec, max_steps=STEPS)
        self._files.set_aside(spec.out, self._files.damaged(spec.out))
        return PreparedTrial(
            life.number, spec, TrialResumed(life.number, execution.workers, reason, until_epoch, cut_off)
        )

    def left(self, life: TrialSummary) -> RunSpec | None:
        (execution, _), shared = read_variant(life.started.execution), self._request.trial_workers is not None
        if shared and life.started.phase == "search":
            execution = execution.on(life.workers)
        spec = replace(self._spec(life.started, execution), resume=True, until_epoch=life.until_epoch)
        return spec if spec.elastic.grace_s and left_behind(spec.out) is not None else None

    def intermediate(self, life: TrialSummary) -> IntermediateResult | None:
        shown = intermediate_result(life, self._pricing)
        if shown is None or self.by is None:
            return None
        chosen, (_, variant) = life.started.tags.get(LAYOUT_TAG), read_variant(life.started.execution)
        layout = self._plan.worker_layouts.widest if chosen is None else ExecutionSettings.from_json(chosen)
        kind = self._plan.worker_layouts.kind(layout, variant)
        step_s = self.by.times.expected_s(batch_of(life.started.config), kind)
        return replace(shown, values=(*shown.values, life.reports[-1][0].step * step_s))

    def result(self, life: TrialSummary, ended: JobEvent) -> TrialFinished:
        calibrates = life.started.phase in TIMED
        return judge(life, ended, replace(self._pricing, constraints=()) if calibrates else self._pricing)

    def for_search(self, life: TrialSummary) -> TrialFinished:
        assert life.finished is not None
        if life.started.phase in TIMED:
            return life.finished
        return self._seen_by_search(training_of(life))

    def _seen_by_search(self, training: Training) -> TrialFinished:
        result = training.result
        if training.run is None or self.by is None:
            return result
        seconds, _ = self.by.seconds(training, self._plan.kind_for_search(training))
        name = self._plan.quality.name
        return replace(result, values={name: result.metrics[name], "seconds": seconds})

    def _searching(self, layout: ExecutionSettings, variant: Variant) -> ExecutionSettings:
        execution, bounds = variant.trainer(layout), self._request.trial_workers
        return execution if bounds is None else replace(execution, workers=bounds[0])

    def _spec(self, started: TrialStarted, execution: ExecutionSettings) -> RunSpec:
        """A training that can go on after its controller ended; one that only measures times cannot."""
        calibrates, bounds = started.phase in TIMED, self._request.trial_workers
        _, variant = read_variant(started.execution)
        elastic = Elastic(collective_timeout_s=self._request.collective_timeout_s)
        if not calibrates:
            elastic = replace(elastic, grace_s=self._request.grace_s)
        if bounds is not None and started.phase == "search":
            elastic = replace(elastic, low=bounds[0], high=bounds[1])
        if variant.policies:  # the row holds for exactly these workers
            elastic = replace(elastic, low=execution.workers)
        monitors = (NOISE_SCALE,) if not calibrates and _compares(execution, variant) else ()
        return RunSpec(
            self._request.program,
            self._request.out / "trials" / f"{started.trial:05d}",
            started.config,
            started.seed,
            execution,
            variant.agreed.sync,
            epochs=self._request.epochs,
            checkpoint_every_steps=0 if calibrates else None,
            keep_checkpoints=self._keep_checkpoints,
            elastic=elastic,
            adapt=Adapt(variant.policies, monitors),
            divergence=Divergence(self._request.divergence),
            source=self._plan.source,
            accept_changes=self._request.accept_changes,
        )


def _compares(execution: ExecutionSettings, variant: Variant) -> bool:
    """Whether the noise scale can be measured, which takes several gradients of one step to compare.

    A batch of one part, divided layers, learners that do not sum gradients, and compression that keeps a residual for
    later steps do not give them.
    """
    whole = not execution.parts.tensor and mechanism_for(execution).capabilities.measures
    later = execution.compression is not None and execution.compression.keeps_residual
    return whole and execution.num_slots > 1 and not variant.agreed.sync.in_rounds and not later
