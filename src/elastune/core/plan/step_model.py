"""The step model of a program: what probes measured, with its errors, and what other devices make of it.

The logarithm of a step's time is the physical form (``step_time``), plus errors of that form (a Gaussian process over
``step_time.coordinates``), plus noise. Each constant is known beforehand within a factor. With the form made linear
around the fitted constants, all of it is one Gaussian (Rasmussen and Williams, "Gaussian Processes for Machine
Learning", 2006, sections 2.2 and 2.7). So errors are relative, and plans far from every probe get wide intervals.

A few steps cannot say how wrong the form is. So several sizes of error are tried, weighted by their likelihood.
Probes are chosen one after another, each where it says most about all plans that may be chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from elastune.core.errors import UserError
from elastune.core.formatting import number
from elastune.core.plan.step_time import CONSTANTS, SHAPE, Constant, Floats, StepSplits, StepWork, coordinates, seconds

# The constants of a machine from a few measured steps.
SHAPE_REACH = 0.5  # doublings of a shape: kernels of another one have an efficiency of their own
ERROR, REACH = 0.03, 3.0  # of the form in all else, relative, and the doublings over which it is alike
TURNS, STEP = 30, 1e-4
TRUSTED = 10  # measured steps that the model's own width weighs as much as


@dataclass(frozen=True)
class Discrepancy:
    """Relative errors of the physical form, which plans with one ``shape`` of matrices share, and the ``noise`` of a
    step.
    """

    shape: float
    noise: float

    @property
    def variance(self) -> float:
        """The variance of the form's error at one plan."""
        return self.shape**2 + ERROR**2

    def between(self, first: Floats, second: Floats) -> Floats:
        """Return the covariance of the form's errors at rows of coordinates."""
        shapes = _squares(first[:, :SHAPE], second[:, :SHAPE])
        alike = self.shape**2 * np.exp(-shapes / (2 * SHAPE_REACH**2))
        near: Floats = ERROR**2 * np.exp(-_squares(first, second) / (2 * REACH**2))
        return alike + near


@dataclass(frozen=True)
class FittedForm:
    """The form fitted under one ``discrepancy``.

    Attributes:
        log_constants: The constants' logarithms, in the order of ``CONSTANTS``.
        evidence: The logarithm of the likelihood of the measured steps.
        widened: The factor by which errors of left-out steps exceed the model's own; intervals are as much wider.
    """

    log_constants: Floats
    discrepancy: Discrepancy
    evidence: float
    widened: float
    _points: Floats
    _slopes: Floats
    _weights: Floats
    _inverse: Floats
    _factors: Floats

    def log_seconds(self, work: StepWork, splits: StepSplits) -> tuple[Floats, Floats]:
        """Return mean and variance of the logarithm of every plan's measured step."""
        cross, slopes, points = self._cross(work, splits)
        of_form = self.discrepancy.between(points, self._points)
        mean = np.log(seconds(np.exp(self.log_constants), work, splits)) + of_form @ self._weights
        variance = self.discrepancy.variance + ((slopes * self._factors) ** 2).sum(axis=1)
        unknown = np.maximum(variance - ((cross @ self._inverse) * cross).sum(axis=1), 0.0)
        return mean, self.widened**2 * (unknown + self.discrepancy.noise**2)

    def covariance(self, work: StepWork, splits: StepSplits) -> Floats:
        """Return the covariance of all plans' errors, without noise."""
        cross, slopes, points = self._cross(work, splits)
        scaled = slopes * self._factors
        return self.discrepancy.between(points, points) + scaled @ scaled.T - cross @ self._inverse @ cross.T

    def _cross(self, work: StepWork, splits: StepSplits) -> tuple[Floats, Floats, Floats]:
        points, slopes = coordinates(work, splits), elasticities(self.log_constants, work, splits)
        shared = (slopes * self._factors**2) @ self._slopes.T
        return self.discrepancy.between(points, self._points) + shared, slopes, points


def elasticities(log_constants: Floats, work: StepWork, splits: StepSplits) -> Floats:
    """By which part of itself each plan's time follows each constant: one row a plan."""
    middle = np.log(seconds(np.exp(log_constants), work, splits))
    moved = np.exp(log_constants + STEP * np.eye(len(log_constants)))
    return np.stack([(np.log(seconds(each, work, splits)) - middle) / STEP for each in moved], axis=1)


def fit_form(
    prior: Sequence[Constant], kind: Discrepancy, work: StepWork, splits: StepSplits, step_s: Floats, start: Floats
) -> FittedForm:
    """Return the likeliest constants, from ``start`` on by the Gauss-Newton method; a step is halved where
    it is worse.

    Args:
        prior: The prior of the constants, in the order of ``CONSTANTS``.
        kind: The errors that the form may have.
        work: The work of the measured steps.
        splits: Their division over workers.
        step_s: Their seconds; none of them: the prior alone.
        start: Logarithms of constants.
    """
    centre = np.log([constant.prior for constant in prior])
    factors = np.log([constant.factor for constant in prior])
    points, log_step_s = coordinates(work, splits), np.log(step_s)
    errors = kind.between(points, points) + kind.noise**2 * np.eye(len(log_step_s))

    def cost(at: Floats) -> float:
        left = log_step_s - np.log(seconds(np.exp(at), work, splits))
        return float(left @ np.linalg.solve(errors, left) + (((at - centre) / factors) ** 2).sum())

    at, best = start, cost(start)
    for _ in range(TURNS):
        slopes = elasticities(at, work, splits)
        left = log_step_s - np.log(seconds(np.exp(at), work, splits)) + slopes @ (at - centre)
        scaled = slopes * factors
        move = centre + factors * (scaled.T @ np.linalg.solve(errors + scaled @ scaled.T, left)) - at
        size = 1.0
        while (tried := cost(at + size * move)) > best and size > 1e-3:
            size /= 2
        if best - tried < 1e-6:
            break
        at, best = at + size * move, tried
    slopes = elasticities(at, work, splits)
    left = log_step_s - np.log(seconds(np.exp(at), work, splits)) + slopes @ (at - centre)
    whole = errors + (slopes * factors) @ (slopes * factors).T
    inverse: Floats = np.asarray(np.linalg.inv(whole), dtype=np.float64)
    weights = np.linalg.solve(errors, log_step_s - np.log(seconds(np.exp(at), work, splits)))
    evidence = -0.5 * float(left @ inverse @ left + np.linalg.slogdet(whole)[1])
    return FittedForm(at, kind, evidence, _widened(inverse, left), points, slopes, weights, inverse, factors)


def _widened(inverse: Floats, left: Floats) -> float:
    """The factor by which errors of steps that are left out in turn exceed the model's own, drawn towards 1."""
    scores = (inverse @ left) / np.sqrt(np.diag(inverse))
    return float(np.sqrt((TRUSTED + (scores**2).sum()) / (TRUSTED + len(scores))))


def _squares(first: Floats, second: Floats) -> Floats:
    """Squared distances between rows."""
    lengths = (first**2).sum(axis=1)[:, None] + (second**2).sum(axis=1)[None, :]
    squares: Floats = np.maximum(lengths - 2 * first @ second.T, 0.0)
    return squares


# The step time of any plan, with an interval.
SHAPES = (0.03, 0.06, 0.12, 0.24)
UNMEASURED = 0.12  # before there is anything to judge by
LIKELY = 0.05  # less likely forms are left out
NORMAL_80 = 1.2815515655446004


@dataclass(frozen=True)
class Estimates:
    """The seconds of many plans; a measured time lies between ``low_s`` and ``high_s`` in 80 % of cases."""

    step_s: Floats
    low_s: Floats
    high_s: Floats


@dataclass(frozen=True)
class StepModel:
    """Forms under several sizes of error, the likeliest first, and the weight of each."""

    forms: tuple[FittedForm, ...]
    likely: tuple[float, ...]

    @property
    def best(self) -> FittedForm:
        """The likeliest form."""
        return self.forms[0]

    def constants(self) -> dict[str, float]:
        """The constants of the likeliest form by name, in seconds."""
        return dict(zip(CONSTANTS, np.exp(self.best.log_constants).tolist(), strict=True))

    def estimate(self, work: StepWork, splits: StepSplits) -> Estimates:
        """Return the seconds of a step of every plan."""
        estimates = [form.log_seconds(work, splits) for form in self.forms]
        mean = sum((part * each for part, (each, _) in zip(self.likely, estimates, strict=True)), np.zeros(len(splits)))
        variance = np.zeros(len(splits))
        for part, (each, unsure) in zip(self.likely, estimates, strict=True):
            variance += part * (unsure + (each - mean) ** 2)
        spread = NORMAL_80 * np.sqrt(variance)
        return Estimates(np.exp(mean), np.exp(mean - spread), np.exp(mean + spread))


def fit_machine(
    prior: Sequence[Constant], work: StepWork, splits: StepSplits, step_s: Floats, noise: float
) -> StepModel:
    """Return the model that measured steps give of a machine.

    Args:
        prior: One for each name in ``CONSTANTS``, in order.
        work: The work of the measured steps.
        splits: Their division over workers.
        step_s: Their seconds.
        noise: The relative noise of a measured step.

    Raises:
        ValueError: For other constants, and for impossible times.
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
    """Return the model before any measurement."""
    none = slice(0, 0)
    start = np.log([constant.prior for constant in prior])
    kind = Discrepancy(UNMEASURED, noise)
    return StepModel((fit_form(prior, kind, work.take(none), splits.take(none), np.empty(0), start),), (1.0,))


# The choice of the plans to measure. It reads no plan's time before that plan is measured.
CONSIDERED = 2_000  # plans at most, evenly taken of all: their covariance is a square
"""Beyond so many plans, a sample of them stands for all."""
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
    """Measure at most ``most`` plans, and return the model fitted to them.

    The next plan is the one that lowers the mean variance of all plans' logarithms most (Cohn, Ghahramani and Jordan,
    "Active Learning with Statistical Models", JAIR 1996, section 4). No plan is measured twice.

    Args:
        prior: The prior of the machine.
        work: Of every plan, or of all alike.
        splits: All plans that may be chosen.
        most: The most plans to measure.
        measure: Returns the seconds of a step of the plan with an index.
        noise: The relative noise of a measured step.
        first: Plans that are measured in any case, before others.
        go_on: Called before each further one; False ends the probing.

    Returns:
        The model, and the measured plans, in order.
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
        chosen.append(wanted[at] if at < len(wanted) else _most_informative(model, work, splits, chosen))
        measured.append(measure(int(few[chosen[-1]])))
        index = np.array(chosen, dtype=np.intp)
        model = fit_machine(prior, work.take(index), splits.take(index), np.array(measured), noise)
    return model, tuple(int(few[each]) for each in chosen)


def _most_informative(model: StepModel, work: StepWork, splits: StepSplits, chosen: Sequence[int]) -> int:
    unknown = model.best.covariance(work, splits)
    gain = (unknown**2).mean(axis=0) / (np.diag(unknown) + model.best.discrepancy.noise**2)
    gain[list(chosen)] = -np.inf
    return int(np.argmax(gain))


# Devices that a plan can be made for without having one: vendors' data sheets, and assumptions based on them.
#
# Figures of GPUs are from NVIDIA's data sheets (``Device.source``): float32 arithmetic outside of tensor cores
# (torch's default), memory bandwidth, memory size, and the link within a node. These are peaks: a step reaches an
# assumed part of them. What no data sheet has, such as the time to launch a kernel, is assumed, too.

REACHED = 0.5  # of a published peak, assumed
WITHIN = 3.0  # the true value lies within this factor
UPDATE_TRAFFIC = 7  # bytes read or written for a byte of gradients by an optimizer with two moments
KERNEL_S = 1e-5  # to launch one from Python, assumed
KERNELS = 10  # of a layer, forward and backward, assumed
OPERATION_S = 2e-5  # to begin a collective operation or one hop of it, assumed


@dataclass(frozen=True)
class Device:
    """One worker's device. ``kind``: as ``--device`` of elastune run.

    Attributes:
        name: What the vendor calls it.
        kind: "cuda" or "cpu".
        peak_flop_s: Floating-point operations a second, float32.
        memory_bytes_s: Bytes a second from and to its memory.
        memory_bytes: Its memory; None: nothing is published.
        link_bytes_s: Bytes a second to another one of the same node, in one direction.
        source: Where the figures are from.
    """

    name: str
    kind: str
    peak_flop_s: float
    memory_bytes_s: float
    memory_bytes: float | None
    link_bytes_s: float
    source: str

    @property
    def line(self) -> str:
        """The assumptions, in one line."""
        memory = "" if self.memory_bytes is None else f", {number(self.memory_bytes / 1e9)} GB"
        return (
            f"assumed: {self.name}, {number(self.peak_flop_s / 1e12)} TFLOP/s in float32, "
            f"{number(self.memory_bytes_s / 1e12)} TB/s{memory} ({self.source}); steps reach {REACHED:.0%} of these "
            f"peaks, within a factor of {WITHIN:g}"
        )

    def constants(self) -> tuple[Constant, ...]:
        """Return what the step model assumes of the device before any measurement, without the links between nodes."""
        flop, byte, link = (1 / (REACHED * peak) for peak in (self.peak_flop_s, self.memory_bytes_s, self.link_bytes_s))
        constants = {
            "flop_s": (flop, WITHIN),
            "edge_flop_s": (flop, WITHIN),
            "split_byte_s": (byte, WITHIN),
            "whole_byte_s": (byte, WITHIN),
            "launch_s": (KERNELS * KERNEL_S, WITHIN),
            "tensor_begin_s": (OPERATION_S, WITHIN),
            "tensor_sum_s": (OPERATION_S, WITHIN),
            "tensor_byte_s": (link, WITHIN),
            "send_s": (OPERATION_S, WITHIN),
            "send_byte_s": (link, WITHIN),
            "gradient_hop_s": (OPERATION_S, WITHIN),
            "gradient_byte_s": (link, WITHIN),
            "update_byte_s": (UPDATE_TRAFFIC * byte, WITHIN),
            "pass_s": (1e-3, WITHIN),
            "fixed_s": (1e-3, WITHIN),
        }
        return tuple(Constant(name, *each) for name, each in constants.items())


def _gpu(name: str, tflop_s: float, gb_s: float, gb: float, link_gb_s: float, source: str) -> Device:
    """``link_gb_s``: as data sheets give it, both directions together."""
    return Device(name, "cuda", tflop_s * 1e12, gb_s * 1e9, gb * 1e9, link_gb_s / 2 * 1e9, f"NVIDIA, {source}")


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "h200": _gpu("NVIDIA H200 SXM", 67, 4800, 141, 900, "H200 Tensor Core GPU data sheet"),
        "h100": _gpu("NVIDIA H100 SXM", 67, 3350, 80, 900, "H100 Tensor Core GPU data sheet"),
        "a100": _gpu("NVIDIA A100 80GB SXM", 19.5, 2039, 80, 600, "A100 Tensor Core GPU data sheet"),
        "a100-40gb": _gpu("NVIDIA A100 40GB SXM", 19.5, 1555, 40, 600, "A100 Tensor Core GPU data sheet"),
        "v100": _gpu("NVIDIA V100 SXM2 32GB", 15.7, 900, 32, 300, "V100 Tensor Core GPU data sheet"),
        "l40s": _gpu("NVIDIA L40S", 91.6, 864, 48, 64, "L40S GPU data sheet"),
        "l4": _gpu("NVIDIA L4", 30.3, 300, 24, 64, "L4 Tensor Core GPU data sheet"),
        "a10": _gpu("NVIDIA A10", 31.2, 600, 24, 64, "A10 Tensor Core GPU data sheet"),
        "t4": _gpu("NVIDIA T4", 8.1, 300, 16, 32, "T4 Tensor Core GPU data sheet"),
        "cpu": Device("one core of a CPU", "cpu", 6e10, 1e10, None, 2e9, "of no data sheet: a server's core"),
    }
)
"""By the name that ``elastune plan --device`` takes."""


def device_named(name: str) -> Device:
    """Return the device of that name.

    Args:
        name: A name of ``DEVICES``, in letters of any case.

    Returns:
        Its published figures.

    Raises:
        UserError: For an unknown name.

    Example:
        >>> device_named("h100").memory_bytes
        80000000000.0
    """
    device = DEVICES.get(name.lower())
    if device is None:
        fix = f"use one of {', '.join(DEVICES)}, or --probe on the cluster"
        raise UserError("a plan's device must be one that is known", name[:100], fix)
    return device
