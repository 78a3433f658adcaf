"""What ``exact`` mode costs a program: its steps beside those of one pass a batch, as a plain loop makes them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from elastune.cluster.local import LocalCluster
from elastune.core.errors import UserError
from elastune.core.run import Config, Means, Mode, Program, RunSpec
from elastune.job.run import run_job
from elastune.journal.records import RunFinished

SLOTS = 4
MODES: tuple[Mode, Mode] = ("exact", "fast")
ROUNDS = 2  # of both, in turn: what a machine does besides then meets both
APART = 1e-3  # metrics that differ by more, relatively, differ by more than rounding


@dataclass(frozen=True)
class ExactCost:
    """Both measured here, on one worker, in ``steps`` steps each.

    Attributes:
        exact_s: Median seconds of a step that runs each of ``SLOTS`` slots by itself.
        plain_s: The same of one pass a batch.
        apart: Metrics that differ by more than rounding: by name, in exact mode and in one pass.
    """

    steps: int
    exact_s: float
    plain_s: float
    apart: dict[str, tuple[float, float]]

    def told(self) -> list[str]:
        """In lines."""
        times = f"{self.exact_s * 1e3:.3g} ms a step in {SLOTS} slots, {self.plain_s * 1e3:.3g} ms in one pass"
        found = [f"exact mode: {times} (x{self.exact_s / self.plain_s:.2f}; medians of {self.steps} steps, one worker)"]
        for name, (exact, plain) in sorted(self.apart.items()):
            why = "batches are normalised, or compared within, a slot at a time"
            found.append(
                f"{name}: {exact:.6g} in exact mode, {plain:.6g} in one pass: {why}, or dropout draws otherwise"
            )
        return found


def exact_cost(program: Program, config: Config, *, steps: int, seed: int = 0) -> ExactCost:
    """Train ``steps`` steps of ``program`` in each mode, in turn.

    Raises:
        UserError: Where there are too few steps to time.
        JobFailed: Where it does not train.

    Example:
        >>> exact_cost(Program(Path("train.py")), {}, steps=50).told()
    """
    runs: dict[Mode, list[RunFinished]] = {mode: [] for mode in MODES}
    with LocalCluster(capacity=1) as cluster, tempfile.TemporaryDirectory(prefix="elastune-check-") as place:
        for nth in range(ROUNDS):
            for mode in MODES:
                means, out = Means(mode=mode, num_slots=SLOTS), Path(place) / f"{mode}{nth}"
                spec = RunSpec(program, out, config, seed=seed, means=means, max_steps=steps)
                runs[mode].append(run_job(spec, cluster=cluster))
    times = {mode: [run.step_s for run in done if run.step_s is not None] for mode, done in runs.items()}
    exact, plain = runs["exact"][0], runs["fast"][0]
    if not all(times.values()):
        raise UserError("a few steps are needed to time them", f"{exact.steps}", "such as --time 20, and more epochs")
    apart = {
        name: (value, plain.metrics[name])
        for name, value in exact.metrics.items()
        if name in plain.metrics and abs(value - plain.metrics[name]) > APART * max(abs(value), APART)
    }
    return ExactCost(exact.steps, min(times["exact"]), min(times["fast"]), apart)
