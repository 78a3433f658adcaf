"""The experiment of ``elastune tune``: trials with the settings that a search proposes, judged by their objectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from elastune.cluster.run_files import RunFiles
from elastune.core.divergence import Divergence
from elastune.core.errors import UserError
from elastune.core.run import Elastic, RunSpec
from elastune.job.pool import JobEvent
from elastune.job.validate_adapt import check_adapt
from elastune.job.validate_means import why_impossible
from elastune.journal.records import TrialFinished, TrialResumed, TrialStarted
from elastune.journal.trials import TrialLife
from elastune.search.samplers.suggest import Suggestion
from elastune.search.space.objective import Objective
from elastune.search.stopping.schedule import FixedTrial, IntermediateResult
from elastune.study.loop.experiment import PreparedTrial
from elastune.study.trial_results import intermediate_result, judge, known, settings
from elastune.study.validate import Plan


class Tuning:
    """The trials of ``plan``. ``pauses``: trials may be paused, so they need checkpoints."""

    def __init__(self, plan: Plan, files: RunFiles, *, pauses: bool) -> None:
        self._plan = plan
        self._files = files
        self._pauses = pauses

    @property
    def objectives(self) -> Sequence[Objective]:
        return self._plan.pricing.objectives

    def new(self, suggestion: Suggestion, until_epoch: int | None, parent: int | None = None) -> PreparedTrial:
        spec = self._spec(suggestion.number, suggestion.values)
        chosen = {**spec.means.to_json(), "policy": suggestion.values["policy"]}
        record = TrialStarted(
            trial=suggestion.number,
            config=spec.config,
            means=chosen,
            seed=spec.seed,
            params=suggestion.params,
            distributions=suggestion.distributions,
            parent=parent,
            until_epoch=until_epoch,
        )
        folder = None if parent is None else self._folder(parent)
        spec = replace(spec, until_epoch=until_epoch, parent=folder)
        return PreparedTrial(suggestion.number, spec, record, self._refused(spec))

    def _refused(self, spec: RunSpec) -> str:
        """Why it cannot run as it is meant to; "" where it can."""
        impossible = why_impossible(spec)
        if impossible is None:
            try:
                check_adapt(spec.adapt, self._plan.program, spec.means)
            except UserError as error:
                impossible = error
        return "" if impossible is None else str(impossible)

    def fixed(self, number: int, trial: FixedTrial) -> PreparedTrial:
        spec = RunSpec(
            self._plan.request.program,
            self._folder(number),
            trial.config,
            trial.seed,
            trial.means,
            epochs=self._plan.request.epochs,
            max_steps=trial.max_steps,
            checkpoint_every_steps=0,
            divergence=self._divergence,
        )
        record = TrialStarted(number, trial.config, trial.means.to_json(), trial.seed, trial.phase)
        return PreparedTrial(number, spec, record)

    def again(
        self, life: TrialLife, reason: str, until_epoch: int | None = None, cut_off: bool = False
    ) -> PreparedTrial:
        folder = self._folder(life.number)
        self._files.set_aside(folder, self._files.damaged(folder))
        spec = replace(self._spec(life.number, known(life.started)), resume=True, until_epoch=until_epoch)
        parent = life.started.parent
        spec = replace(spec, parent=None if parent is None else self._folder(parent))
        record = TrialResumed(life.number, spec.means.workers, reason, until_epoch, cut_off)
        return PreparedTrial(life.number, spec, record)

    def intermediate(self, life: TrialLife) -> IntermediateResult | None:
        return intermediate_result(life, self._plan.pricing)

    def result(self, life: TrialLife, ended: JobEvent) -> TrialFinished:
        return judge(life, ended, self._plan.pricing)

    def for_search(self, life: TrialLife) -> TrialFinished:
        assert life.finished is not None
        return life.finished

    def _spec(self, number: int, values: Mapping[str, object]) -> RunSpec:
        request, bounds = self._plan.request, self._plan.request.trial_workers
        config, means, adapt = settings(values, self._plan.config, request.means, request.workers)
        check_adapt(adapt, self._plan.program)
        elastic = Elastic()
        if bounds is not None:
            means = replace(means.on(bounds[0]), num_slots=max(means.num_slots, bounds[1]))
            elastic = Elastic(bounds[0], bounds[1])
        return RunSpec(
            program=request.program,
            out=self._folder(number),
            config=config,
            seed=request.seed,
            means=means,
            epochs=request.epochs,
            checkpoint_every_steps=None if self._pauses else 0,
            elastic=elastic,
            adapt=adapt,
            divergence=self._divergence,
        )

    @property
    def _divergence(self) -> Divergence:
        """Metrics that should go down may explode as the training loss does."""
        falling = [o.name for o in self.objectives if o.direction == "min" and o.clock is None]
        return Divergence(self._plan.request.divergence, tuple(falling))

    def _folder(self, number: int) -> Path:
        return self._plan.request.out / "trials" / f"{number:05d}"
