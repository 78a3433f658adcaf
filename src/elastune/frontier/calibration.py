"""Measure step times here: one worker on several batch sizes, and the crews that this machine has cores for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import Means
from elastune.frontier.criteria import Times, batch_of
from elastune.frontier.plan import FrontierPlan
from elastune.journal.records import LinkMeasured, TimesFitted
from elastune.journal.trials import TrialLife, TrialTable
from elastune.plan.step_time import Fit, Observation, fit
from elastune.search.stopping.schedule import FixedTrial, Next
from elastune.study.loop.fixed_trials import FixedTrials

STEPS = 25
Timing = tuple[int, Means]
"""A global batch, and the crew whose step of it is timed."""


class Calibration:
    """The steps of one program as this controller measured them, and the model fitted to them.

    ``before``: the trials of earlier controllers, whose machine may have been another one.
    """

    def __init__(self, plan: FrontierPlan, table: TrialTable) -> None:
        self.links: list[LinkMeasured] = []
        self._plan = plan
        self._table = table
        self._before = set(table.trials)
        self._asked: set[Timing] = set()
        self._grad_bytes = 0

    def schedule(self, wanted: Iterable[Timing]) -> FixedTrials:
        """Time a few steps of each that is wanted, alone on the machine, once only.

        Where training diverges at a batch size, or the program takes too few steps to time, nothing is learned.
        """
        new = [timing for timing in dict.fromkeys(wanted) if timing not in self._asked]
        self._asked |= set(new)
        return _OneByOne([self._trial(batch, crew) for batch, crew in new], self._refuse_failures)

    def fit(self) -> tuple[Times, TimesFitted]:
        """The model from what was measured so far; steps of several workers that share batches check it."""
        timed = self._timed()
        gradients = [(step.batch, step.step_s) for (_, mesh), step in timed.items() if mesh.workers == 1]
        several = {key: step for key, step in timed.items() if key[1].workers > 1}
        plain = [step for (_, mesh), step in several.items() if mesh.replica == 1]
        found: Fit = fit(gradients, self._grad_bytes, links=self.links, held_out=plain)
        errors, factors = dict(found.errors), defaultdict[Mesh, list[float]](list)
        for (_, mesh), step in several.items():
            ratio = found.model.step_s(step.batch, mesh.batch) / step.step_s
            if mesh.tensor > 1:
                factors[mesh].append(1 / ratio)
            elif mesh.replica > 1:
                errors[f"batch {step.batch} on {mesh}"] = ratio
        found = replace(found, errors=errors)
        measured = {key: step.step_s for key, step in timed.items()}
        slower = {mesh: median(each) for mesh, each in factors.items()}
        return Times(found.model, measured, errors, slower), found.to_record()

    def _timed(self) -> dict[tuple[int, Mesh], Observation]:
        """(batch, mesh) -> the step that was measured."""
        found: dict[tuple[int, Mesh], Observation] = {}
        for life in self._ended():
            run = life.finished.run if life.finished is not None else None
            if run is not None and run.step_s is not None:
                batch = batch_of(life.started.config)
                mean = min(batch, -(-run.samples // run.steps))  # a batch may exceed the data
                mesh = Means.from_json(life.started.means).first_mesh
                found[batch, mesh] = Observation(mesh.workers, mean, run.step_s)
                if mesh.workers == 1:
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

    def _trial(self, batch: int, crew: Means) -> FixedTrial:
        config = {**self._plan.config, "batch_size": batch}
        return FixedTrial(config, self._plan.request.seed, crew, "calibrate", STEPS)


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
