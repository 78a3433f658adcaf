"""Whether workers take a step alike: marks that ride in its reduction, and who differs where these do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from elastune.core.errors import UserError
from elastune.elastic.worker.group import WorkerGroup
from elastune.train.data.content import CHANGES, MORE_READS, content
from elastune.train.data.source import StepPlan, StepSource
from elastune.train.progress import Progress
from elastune.train.step_facts import NO_MARKS, Settings, StepFacts, differences, marks, steps_differ
from elastune.train.training_state import TrainingState


class StepCheck:
    """What this worker knows of that. ``content``: of the data of this pass; None before they were looked at."""

    def __init__(self, workers: WorkerGroup, progress: Progress) -> None:
        self._workers = workers
        self._progress = progress
        self._settings = Settings()
        self.content: int | None = None
        self._reread: Callable[[], list[Any]] = list

    def begin_pass(self, source: StepSource) -> None:
        """Through ``source``."""
        self.content = None
        self._reread = lambda: list(source.fetch(iter([source.probe()] * MORE_READS)))

    @property
    def probes(self) -> bool:
        """Whether the data are still to be looked at."""
        return self._workers.size > 1 and self.content is None

    def marks(self, plan: StepPlan, trained: TrainingState) -> Sequence[float]:
        """This worker's, of the step that it is about to take."""
        if self._workers.size == 1:
            return NO_MARKS
        at, settings = self._progress.position, self._settings.checksum(trained.optimizer)
        return marks(
            hash((at.epoch, at.step, *plan.taken, self.content or CHANGES, settings, trained.flags.checksum()))
        )

    def difference(self, plan: StepPlan, trained: TrainingState) -> UserError | None:
        """In what workers took the step differently, as an error; None where only data change by themselves.

        All workers call it alike, where marks were not.
        """
        workers, at, step = self._workers, self._progress.position, self._progress.position.step + 1
        settings, line = Settings.told(trained.optimizer), workers.where()
        settings["frozen parameters"] = ", ".join(trained.flags.frozen) or "none"
        own = StepFacts(at.epoch, *plan.taken, self.content or CHANGES, settings, line)
        rows = workers.gather_bytes(own.encode(), "what the step is made of")
        found = differences(rows)
        if list(found) == ["content"]:
            again = {content([batch]) for batch in self._reread()}
            same = float(again == {self.content})  # so it was read ten times alike, here
            if not all(told for (told,) in workers.gather([same], "data that are read again")):
                self.content = CHANGES
                return None
        return steps_differ(step, found, rows)
