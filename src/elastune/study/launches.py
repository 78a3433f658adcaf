"""What a trial needs to start, or to go on: its settings with those of the study, and the record that tells of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from elastune.cluster.run_files import RunFiles
from elastune.core.run import Elastic, RunSpec
from elastune.job.validate_adapt import check_adapt
from elastune.journal.records import TrialResumed, TrialStarted
from elastune.journal.trials import TrialLife
from elastune.search.samplers.suggest import Suggestion
from elastune.study.trial_results import known, settings
from elastune.study.validate import Plan


@dataclass(frozen=True)
class PreparedTrial:
    """A trial that is to start, or to go on, as soon as there is room for it."""

    number: int
    spec: RunSpec
    record: TrialStarted | TrialResumed

    def on(self, workers: int) -> PreparedTrial:
        """The same on so many workers."""
        spec = replace(self.spec, means=replace(self.spec.means, workers=workers))
        if isinstance(self.record, TrialResumed):
            return PreparedTrial(self.number, spec, replace(self.record, workers=workers))
        means = {**self.record.means, "workers": workers}
        return PreparedTrial(self.number, spec, replace(self.record, means=means))


class TrialLaunches:
    """Prepares the trials of ``plan``. ``pauses``: trials may be paused, so they need checkpoints."""

    def __init__(self, plan: Plan, files: RunFiles, *, pauses: bool) -> None:
        self._plan = plan
        self._files = files
        self._pauses = pauses

    def new(self, suggestion: Suggestion, until_epoch: int | None, parent: int | None = None) -> PreparedTrial:
        """A trial that never ran; it begins with the newest checkpoint of ``parent``, if it has one."""
        spec = self._spec(suggestion.number, suggestion.values)
        chosen = {**asdict(spec.means), "policy": suggestion.values["policy"]}
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
        return PreparedTrial(suggestion.number, replace(spec, until_epoch=until_epoch, parent=folder), record)

    def again(
        self, number: int, life: TrialLife, reason: str, until_epoch: int | None, cut_off: bool = False
    ) -> PreparedTrial:
        """A trial that goes on from its last checkpoint, or from its beginning where it has none."""
        self._files.drop_damaged(self._folder(number))
        spec = replace(self._spec(number, known(life.started)), resume=True, until_epoch=until_epoch)
        parent = life.started.parent
        spec = replace(spec, parent=None if parent is None else self._folder(parent))
        return PreparedTrial(number, spec, TrialResumed(number, spec.means.workers, reason, until_epoch, cut_off))

    def _spec(self, number: int, values: Mapping[str, object]) -> RunSpec:
        request, bounds = self._plan.request, self._plan.request.trial_workers
        if bounds is not None:
            values = {**values, "workers": bounds[0]}
        config, means, adapt = settings(values, self._plan.config, request.means, request.workers)
        check_adapt(adapt, self._plan.program)
        elastic = Elastic()
        if bounds is not None:
            means = replace(means, num_slots=max(means.num_slots, bounds[1]))
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
        )

    def _folder(self, number: int) -> Path:
        return self._plan.request.out / "trials" / f"{number:05d}"
