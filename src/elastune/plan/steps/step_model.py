"""Seconds of any plan's step with an interval, from a few measured ones.

How wrong the physical form is cannot be told for certain from a few: every size of error that is looked at has its
say, as far as the measured steps make it likely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elastune.plan.steps.posterior import Discrepancy, FittedForm, fit_form
from elastune.plan.steps.splits import StepSplits
from elastune.plan.steps.terms import CONSTANTS, Constant
from elastune.plan.steps.work import Floats, StepWork

SHAPES = (0.03, 0.06, 0.12, 0.24)
UNMEASURED = 0.12  # before there is anything to judge by
LIKELY = 0.05  # what is less likely has no say
NORMAL_80 = 1.2815515655446004


@dataclass(frozen=True)
class Estimates:
    """Seconds of many plans; what is measured lies between ``low_s`` and ``high_s`` in 80 % of cases."""

    step_s: Floats
    low_s: Floats
    high_s: Floats


@dataclass(frozen=True)
class StepModel:
    """Forms under several sizes of error, the likeliest first, and how likely each is."""

    forms: tuple[FittedForm, ...]
    likely: tuple[float, ...]

    @property
    def best(self) -> FittedForm:
        """The likeliest."""
        return self.forms[0]

    def constants(self) -> dict[str, float]:
        """Each by its name, in seconds, of the likeliest form."""
        return dict(zip(CONSTANTS, np.exp(self.best.log_constants).tolist(), strict=True))

    def estimate(self, work: StepWork, splits: StepSplits) -> Estimates:
        """Seconds of a step of every plan."""
        told = [form.log_seconds(work, splits) for form in self.forms]
        mean = sum((part * each for part, (each, _) in zip(self.likely, told, strict=True)), np.zeros(len(splits)))
        variance = np.zeros(len(splits))
        for part, (each, unsure) in zip(self.likely, told, strict=True):
            variance += part * (unsure + (each - mean) ** 2)
        spread = NORMAL_80 * np.sqrt(variance)
        return Estimates(np.exp(mean), np.exp(mean - spread), np.exp(mean + spread))


def fit_machine(
    prior: Sequence[Constant], work: StepWork, splits: StepSplits, step_s: Floats, noise: float
) -> StepModel:
    """What measured steps tell of a machine.

    Args:
        prior: One for each name in ``CONSTANTS``, in order.
        work: What the measured steps computed.
        splits: How they were split.
        step_s: Their seconds.
        noise: Of a measured step, relative.

    Raises:
        ValueError: For other constants, and for times that are no times.
    """
    if [constant.name for constant in prior] != list(CONSTANTS):
        raise ValueError(f"the constants are {', '.join(CONSTANTS)}, in this order")
    if len(step_s) != len(splits) or not (np.isfinite(step_s).all() and (step_s > 0).all()):
        raise ValueError("each measured plan has a positive number of seconds")
    start, forms = np.log([constant.prior for constant in prior]), list[FittedForm]()
    for shape in SHAPES:
        forms.append(fit_form(prior, Discrepancy(shape, noise), work, splits, step_s, start))
        start = forms[-1].log_constants
    forms.sort(key=lambda form: -form.evidence)
    weights = np.exp([form.evidence - forms[0].evidence for form in forms])
    weights = weights[weights / weights.sum() >= LIKELY]
    return StepModel(tuple(forms[: len(weights)]), tuple((weights / weights.sum()).tolist()))


def prior_model(prior: Sequence[Constant], work: StepWork, splits: StepSplits, noise: float) -> StepModel:
    """What is known before anything is measured."""
    none = slice(0, 0)
    start = np.log([constant.prior for constant in prior])
    kind = Discrepancy(UNMEASURED, noise)
    return StepModel((fit_form(prior, kind, work.take(none), splits.take(none), np.empty(0), start),), (1.0,))
