"""Measure step times here: one worker on several batch sizes, and as many workers as this machine has cores for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from elastune.core.errors import UserError
from elastune.core.run import Config
from elastune.frontier.criteria import Times, batch_of
from elastune.journal.records import LinkMeasured, TimesFitted
from elastune.journal.trials import TrialLife, TrialTable
from elastune.plan.step_time import Fit, Observation, fit
from elastune.search.stopping.schedule import FixedTrial, Next
from elastune.study.loop.fixed_trials import FixedTrials
from elastune.study.request import FrontierRequest

STEPS = 25


class Calibration:
    """The steps of one program as this controller measured them, and the model fitted to them.

    ``before``: the trials of earlier controllers, whose machine may have been another one.
    """

    def __init__(self, request: FrontierRequest, table: TrialTable) -> None:
        self.links: list[LinkMeasured] = []
        self._request = request
        self._table = table
        self._before = set(table.trials)
        self._asked: set[tuple[int, int]] = set()
        self._grad_bytes = 0

    def schedule(self, config: Config, wanted: Iterable[tuple[int, int]]) -> FixedTrials:
        """Time a few steps of each wanted (batch, workers), alone on the machine, once only.

        Where training diverges at a batch size, or the program takes too few steps to time, nothing is learned.
        """
        new = [pair for pair in dict.fromkeys(wanted) if pair not in self._asked]
        self._asked |= set(new)
        return _OneByOne([self._trial(config, batch, workers) for batch, workers in new], self._refuse_failures)

    def fit(self) -> tuple[Times, TimesFitted]:
        """The model from what was measured so far; steps on several workers check it."""
        timed = self._timed()
        gradients = [(step.batch, step.step_s) for step in timed.values() if step.workers == 1]
        checked = [step for step in timed.values() if step.workers > 1]
        found: Fit = fit(gradients, self._grad_bytes, links=self.links, held_out=checked)
        return Times(found.model, {key: step.step_s for key, step in timed.items()}, found.errors), found.to_record()

    def _timed(self) -> dict[tuple[int, int], Observation]:
        """(batch, workers) -> the step that was measured."""
        found: dict[tuple[int, int], Observation] = {}
        for life in self._ended():
            run = life.finished.run if life.finished is not None else None
            if run is not None and run.step_s is not None:
                batch = batch_of(life.started.config)
                mean = min(batch, -(-run.samples // run.steps))  # a batch may exceed the data
                found[batch, life.first_workers] = Observation(life.first_workers, mean, run.step_s)
                self._grad_bytes = run.grad_bytes
        return found

    def _ended(self) -> list[TrialLife]:
        ended = (self._table.trials[number] for number in self._table.ended if number not in self._before)
        return [life for life in ended if life.started.phase == "calibrate"]

    def _refuse_failures(self) -> None:
        """Raise ``UserError`` where a program fails by itself: no scaling would help it."""
        for life in self._ended():
            assert life.finished is not None
            if life.finished.run is None and not life.finished.reason.startswith("diverged"):
                fix = "fix the program's own settings before scaling them"
                raise UserError("the program must train with its own settings", life.finished.reason, fix)

    def _trial(self, config: Config, batch: int, workers: int) -> FixedTrial:
        means = replace(self._request.means, workers=workers, num_slots=workers)
        return FixedTrial({**config, "batch_size": batch}, self._request.seed, means, "calibrate", STEPS)


class _OneByOne(FixedTrials):
    """Each when the one before has ended, ``check``ed by then."""

    def __init__(self, trials: Sequence[FixedTrial], check: Callable[[], None]) -> None:
        super().__init__("calibrate", trials, at_once=1)
        self._check = check

    def next(self, fresh: bool) -> Next:
        self._check()
        return super().next(fresh)


def batches_to_measure(base: int, counts: Sequence[int]) -> list[int]:
    """Shares of one worker from the smallest to the largest that any worker count may get, about four of them."""
    largest = base * max(counts)
    smallest = max(1, base // max(counts))
    middle = [base, round((base * largest) ** 0.5)]
    return sorted({smallest, *middle, largest})
