"""What a study loop tries: how a trial is run, and what its results are worth to the search. A contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from elastune.core.run import RunSpec
from elastune.job.pool import JobEvent
from elastune.journal.records import TrialFinished, TrialResumed, TrialStarted
from elastune.journal.trials import TrialLife
from elastune.search.samplers.suggest import Suggestion
from elastune.search.space.objective import Objective
from elastune.search.stopping.schedule import FixedTrial, IntermediateResult


@dataclass(frozen=True)
class PreparedTrial:
    """A trial that is to start, or to go on, as soon as there is room for it.

    ``refused``: why it cannot run as it is meant to, known before a worker starts; "" where it can. ``last``: it is
    held back, and goes on with idle workers only.
    """

    number: int
    spec: RunSpec
    record: TrialStarted | TrialResumed
    refused: str = ""
    last: bool = False

    @property
    def is_new(self) -> bool:
        return isinstance(self.record, TrialStarted)

    def on(self, workers: int) -> PreparedTrial:
        """The same on ``workers`` workers."""
        spec = replace(self.spec, means=self.spec.means.on(workers))
        if isinstance(self.record, TrialResumed):
            return PreparedTrial(self.number, spec, replace(self.record, workers=workers))
        means = {**self.record.means, **spec.means.to_json()}
        return PreparedTrial(self.number, spec, replace(self.record, means=means))


class Experiment(Protocol):
    """How trials are run and judged. ``objectives``: what the search sees."""

    @property
    def objectives(self) -> Sequence[Objective]: ...

    def new(
        self, suggestion: Suggestion, until_epoch: int | None, parent: int | None = None
    ) -> PreparedTrial | TrialFinished:
        """A trial of what the search proposed, begun with the newest checkpoint of ``parent`` if there is one.

        Or its result, where the same was trained already.
        """
        ...

    def fixed(self, number: int, trial: FixedTrial) -> PreparedTrial:
        """A trial that no search proposed."""
        ...

    def again(
        self, life: TrialLife, reason: str, until_epoch: int | None = None, cut_off: bool = False
    ) -> PreparedTrial:
        """A trial that goes on from its last checkpoint, or from its beginning where it has none."""
        ...

    def left(self, life: TrialLife) -> RunSpec | None:
        """The run of a trial whose workers may have outlived its controller; None where none can have."""
        ...

    def intermediate(self, life: TrialLife) -> IntermediateResult | None:
        """What early stopping may see of a trial's newest report; None: nothing."""
        ...

    def result(self, life: TrialLife, ended: JobEvent) -> TrialFinished:
        """The result of a trial whose job has ended. Raises ``UserError`` where no trial could succeed."""
        ...

    def for_search(self, life: TrialLife) -> TrialFinished:
        """What the search learns of a trial that is over."""
        ...
