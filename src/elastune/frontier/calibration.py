"""Measure step times here: one worker on several batch sizes, and as many workers as this machine has cores for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from elastune.core.errors import UserError
from elastune.core.run import Config
from elastune.frontier.rows import Times
from elastune.frontier.trainings import Training, Trainings
from elastune.job.signals import Interrupted
from elastune.journal.records import TimesFitted
from elastune.plan.step_time import Fit, Observation, fit
from elastune.study.request import FrontierRequest
from elastune.train.machine import cores

STEPS = 25


class Calibration:
    """The measured steps of one program, and the model fitted to them."""

    def __init__(
        self,
        request: FrontierRequest,
        trainings: Trainings,
        keep: Callable[[TimesFitted], None],
        interrupted: Callable[[], bool],
    ) -> None:
        self._request = request
        self._trainings = trainings
        self._keep = keep
        self._interrupted = interrupted
        self.steps: dict[tuple[int, int], float] = {}
        self._samples: dict[tuple[int, int], int] = {}
        self.grad_bytes = 0

    def measurable(self, workers: int) -> bool:
        """Whether this machine can show how fast that many workers are: each needs a core to itself."""
        return workers <= cores()

    def measure(self, config: Config, batch: int, workers: int) -> None:
        """Time a few steps of ``batch`` on ``workers``, alone on the machine. Once only.

        Where training diverges at this batch size, or the program takes too few steps to time, nothing is learned.
        """
        if (batch, workers) in self.steps:
            return
        means = replace(self._request.means, workers=workers, num_slots=max(self._request.means.num_slots, workers))
        started = self._trainings.begin({**config, "batch_size": batch}, self._request.seed, "calibrate", {})
        started = replace(started, means={**started.means, "workers": workers})
        self._trainings.start(started, means, max_steps=STEPS, measure_link=workers > 1)
        ended: list[Training] = []
        while not ended:
            ended = self._trainings.pump()
            if self._interrupted():
                self._trainings.abandon()
                raise Interrupted
        run = ended[0].run
        if run is None and not ended[0].result.reason.startswith("diverged"):
            fix = "fix the program's own settings before scaling them"
            raise UserError("the program must train with its own settings", ended[0].result.reason, fix)
        if run is not None and run.step_s is not None:
            self.steps[batch, workers] = run.step_s
            self._samples[batch, workers] = min(batch, -(-run.samples // run.steps))  # a batch may exceed the data
            self.grad_bytes = run.grad_bytes

    def fit(self) -> Times:
        """The model from what was measured so far; steps on several workers check it."""
        timed = [(self._samples[key], key[1], seconds) for key, seconds in self.steps.items()]
        gradients = [(samples, seconds) for samples, workers, seconds in timed if workers == 1]
        checked = [Observation(workers, samples, s) for samples, workers, s in timed if workers > 1]
        links = [link for found in self._trainings.links.values() for link in found]
        found: Fit = fit(gradients, self.grad_bytes, links=links, held_out=checked)
        self._keep(found.to_record())
        return Times(found.model, self.steps)


def batches_to_measure(base: int, counts: Sequence[int]) -> list[int]:
    """Shares of one worker from the smallest to the largest that any worker count may get, about four of them."""
    largest = base * max(counts)
    smallest = max(1, base // max(counts))
    middle = [base, round((base * largest) ** 0.5)]
    return sorted({smallest, *middle, largest})
