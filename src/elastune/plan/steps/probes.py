"""Which plans to measure: one after another, each where it tells most about all plans that may be chosen.

Nothing of a plan's time is looked at before it is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from elastune.plan.steps.splits import StepSplits
from elastune.plan.steps.step_model import StepModel, fit_machine, prior_model
from elastune.plan.steps.terms import Constant
from elastune.plan.steps.work import StepWork

CONSIDERED = 2_000  # plans at most, evenly taken of all: their covariance is a square
"""What is told of the whole is told of these."""

Measure = Callable[[int], float]


def probe(
    prior: Sequence[Constant],
    work: StepWork,
    splits: StepSplits,
    most: int,
    measure: Measure,
    noise: float,
    first: Sequence[int] = (),
    go_on: Callable[[], bool] = lambda: True,
) -> tuple[StepModel, tuple[int, ...]]:
    """Measure ``most`` plans at most, and give the model fitted to them.

    The next plan is the one that lowers the mean variance of all plans' logarithms most (Cohn, Ghahramani and Jordan,
    "Active Learning with Statistical Models", JAIR 1996, section 4). None is measured twice.

    Args:
        prior: What is known of the machine.
        work: Of every plan, or of all alike.
        splits: All plans that may be chosen.
        most: How many may be measured.
        measure: Seconds of a step of the plan with this index.
        noise: Of a measured step, relative.
        first: Plans that are measured in any case, before others.
        go_on: Asked before each further one.

    Returns:
        The model, and the plans that were measured, in order.
    """
    if not (len(splits) and most >= 1):
        raise ValueError("there must be plans, and one of them measured")
    few = np.linspace(0, len(splits) - 1, min(CONSIDERED, len(splits))).round().astype(np.intp)
    few = np.unique(np.concatenate([few, np.array(first, dtype=np.intp)]))
    work, splits = work.take(few), splits.take(few)
    wanted = [int(np.searchsorted(few, each)) for each in first]
    model, chosen, measured = prior_model(prior, work, splits, noise), list[int](), list[float]()
    while len(chosen) < min(most, len(few)) and (len(chosen) < len(wanted) or go_on()):
        at = len(chosen)
        chosen.append(wanted[at] if at < len(wanted) else _most_telling(model, work, splits, chosen))
        measured.append(measure(int(few[chosen[-1]])))
        index = np.array(chosen, dtype=np.intp)
        model = fit_machine(prior, work.take(index), splits.take(index), np.array(measured), noise)
    return model, tuple(int(few[each]) for each in chosen)


def _most_telling(model: StepModel, work: StepWork, splits: StepSplits, chosen: Sequence[int]) -> int:
    unknown = model.best.covariance(work, splits)
    gain = (unknown**2).mean(axis=0) / (np.diag(unknown) + model.best.discrepancy.noise**2)
    gain[list(chosen)] = -np.inf
    return int(np.argmax(gain))
