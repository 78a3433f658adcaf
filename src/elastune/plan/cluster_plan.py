"""How to split a cluster: every division judged by time, cost and memory, and the best of them. Pure.

The time of a search is that of its rounds (``plan.search_time``), each training's step that of the step model
(``plan.steps``). Its interval has both in it: what is not known of the step, and of the price of parallel proposals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from elastune.core.cost import check_price
from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.text import byte_count, count, duration
from elastune.plan.copies import ELASTIC_COPIES
from elastune.plan.divisions import Allowed, Divisions, Nodes, divisions
from elastune.plan.search_time import SearchModel
from elastune.plan.steps.memory import HeldAlone, held_most, peak_bytes
from elastune.plan.steps.splits import StepSplits
from elastune.plan.steps.step_model import NORMAL_80, Estimates, StepModel
from elastune.plan.steps.terms import parts
from elastune.plan.steps.work import Floats, StepWork

CLOSE = 2_000  # plans whose intervals are looked at: the best by the physical form alone


@dataclass(frozen=True)
class ProgramForecast:
    """What is known of a program and of the machine that it runs on."""

    model: StepModel
    work: StepWork
    held: HeldAlone
    search: SearchModel


@dataclass(frozen=True)
class PlanBounds:
    """What is asked for.

    Attributes:
        memory_bytes: Memory of a worker, in bytes; None: no bound.
        deadline_s: Seconds until the search must be done. It counts as kept where the upper end of the time's interval
            is within it: in nine cases of ten.
        price_per_worker_hour: The unit of costs.
    """

    memory_bytes: float | None = None
    deadline_s: float | None = None
    price_per_worker_hour: float = 1.0

    def __post_init__(self) -> None:
        check_price(self.price_per_worker_hour)
        for name, value, fix in (
            ("the memory of a worker", self.memory_bytes, "such as --memory 24GiB"),
            ("a deadline", self.deadline_s, "such as --deadline 8h"),
        ):
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{name} must be a number above 0", value, fix)


@dataclass(frozen=True)
class ClusterPlan:
    """One way to split a cluster: ``width`` trainings at once, each on ``mesh``. All times are modelled.

    Attributes:
        sharded: Whether the axis ``shard`` divides parameters too, not only gradients and optimizer state.
        batch: The global batch of a training, in samples.
        micro: The most samples of one forward pass.
        step_s, step_interval_s: Seconds of a step, and their 80 % interval.
        seconds, interval_s: Seconds of the whole search, and their 80 % interval.
        cost: The cost of the search.
        memory_bytes: Bytes of the fullest worker.
        noise_ratio: The global batch over the gradient noise scale; infinite where that is 0.
        limits: The largest part of a step, and its share of the step.
        most_parameters: Bytes of parameters that a model could have and fit the memory when split like this, if all its
            state grows alike and its activations stay; infinite where no memory was asked.
        copied_bytes: Bytes of the fullest worker with two holders of each part, which a run has where nothing is said;
            None: as many have been counted in ``memory_bytes``.
    """

    width: int
    mesh: Mesh
    sharded: bool
    batch: int
    micro: int
    step_s: float
    step_interval_s: tuple[float, float]
    seconds: float
    interval_s: tuple[float, float]
    cost: float
    memory_bytes: float
    noise_ratio: float
    limits: tuple[str, float]
    most_parameters: float = math.inf
    copied_bytes: float | None = None

    @property
    def cost_interval(self) -> tuple[float, float]:
        """The 80 % interval of the cost, like that of the time."""
        low, high = self.interval_s
        return self.cost * low / self.seconds, self.cost * high / self.seconds

    @property
    def workers(self) -> int:
        """The number of all workers that it uses."""
        return self.width * self.mesh.workers

    def odds(self, deadline_s: float) -> float:
        """Return how likely the search is done by ``deadline_s``, from the interval's Gaussian of logarithms."""
        spread = math.log(self.interval_s[1] / self.seconds) / NORMAL_80
        if not spread:
            return float(self.seconds <= deadline_s)
        return 0.5 * (1 + math.erf(math.log(deadline_s / self.seconds) / spread / math.sqrt(2)))


def best_plans(
    forecast: ProgramForecast,
    nodes: Nodes,
    allowed: Allowed,
    wanted: PlanBounds,
    most: int,
    *,
    of_a_kind: bool = True,
) -> tuple[ClusterPlan, ...]:
    """The ``most`` best: the fastest, or the cheapest of those that keep the deadline.

    ``of_a_kind``: one of each (width, mesh), whatever its batches.

    Raises:
        UserError: Where no plan fits the memory (with what would), or none keeps the deadline (with what is nearest).
    """
    all_plans = divisions(nodes, allowed)
    sharded, memory = _memory(forecast.held, forecast.work, all_plans.splits, wanted.memory_bytes)
    fits = np.flatnonzero(memory <= (np.inf if wanted.memory_bytes is None else wanted.memory_bytes))
    if not len(fits):
        raise _nothing_fits(all_plans, memory, wanted)
    rough_s, _ = step_parts(forecast, all_plans.splits.take(fits), sharded[fits])
    rough = forecast.search.seconds(all_plans.width[fits], all_plans.splits.batch[fits], rough_s)
    by_time, by_cost = np.argsort(rough)[:CLOSE], np.argsort(rough * all_plans.workers[fits])[:CLOSE]
    close = fits[np.unique(np.concatenate([by_time, by_cost]))]
    plans, sharded, memory = all_plans.take(close), sharded[close], memory[close]
    told = _judged(forecast, plans, sharded, memory, wanted)
    if wanted.deadline_s is not None:
        kept = [plan for plan in told if plan.interval_s[1] <= wanted.deadline_s]  # in nine cases of ten
        if not kept:
            nearest = min(told, key=lambda plan: plan.interval_s[1])
            value = f"{duration(wanted.deadline_s)}; the nearest is {duration(nearest.interval_s[1])}"
            value += f", in 9 cases of 10 ({duration(nearest.seconds)} expected)"
            fix = f"use --deadline above that, more --nodes or fewer --runs ({_short(nearest)})"
            raise UserError("a deadline must be one that a plan can keep", value, fix)
        told = sorted(kept, key=lambda plan: (plan.cost, plan.seconds))
    else:
        told = sorted(told, key=lambda plan: (plan.seconds, plan.workers))
    return _distinct(told, most) if of_a_kind else tuple(told[:most])


def check_fits(held: HeldAlone, work: StepWork, nodes: Nodes, allowed: Allowed, wanted: PlanBounds) -> None:
    """Raise ``UserError`` where no plan fits the memory that is ``wanted``: known before anything is launched."""
    if wanted.memory_bytes is None:
        return
    plans = divisions(nodes, allowed)
    memory = _memory(held, work, plans.splits, wanted.memory_bytes)[1]
    if not (memory <= wanted.memory_bytes).any():
        raise _nothing_fits(plans, memory, wanted)


def _memory(
    held: HeldAlone, work: StepWork, splits: StepSplits, most: float | None
) -> tuple[NDArray[np.bool_], Floats]:
    """Whether parameters are divided, too, because nothing less fits; and the bytes of a worker."""
    whole = peak_bytes(held, work, splits)
    if most is None:
        return np.zeros(len(splits), bool), whole
    divided = peak_bytes(held, work, splits, sharded=True)
    sharded = (whole > most) & (splits.shard > 1) & (splits.pipeline == 1)  # stages keep their parameters
    return sharded, np.where(sharded, divided, whole)


def step_parts(
    forecast: ProgramForecast, splits: StepSplits, sharded: NDArray[np.bool_]
) -> tuple[Floats, dict[str, Floats]]:
    """Seconds of a step by the physical form, and what they are made of."""
    told = parts(np.exp(forecast.model.best.log_constants), forecast.work, splits, sharded)
    return np.sum(list(told.values()), axis=0), told


def step_estimates(forecast: ProgramForecast, splits: StepSplits, sharded: NDArray[np.bool_]) -> Estimates:
    """Seconds of a step of plans, of which some are ``sharded``."""
    told = forecast.model.estimate(forecast.work, splits)
    more = step_parts(forecast, splits, sharded)[0] / step_parts(forecast, splits, np.zeros_like(sharded))[0]
    return Estimates(told.step_s * more, told.low_s * more, told.high_s * more)


def _judged(
    forecast: ProgramForecast, plans: Divisions, sharded: NDArray[np.bool_], memory: Floats, wanted: PlanBounds
) -> list[ClusterPlan]:
    splits, search = plans.splits, forecast.search
    estimated = step_estimates(forecast, splits, sharded)
    rough_s, told = step_parts(forecast, splits, sharded)
    names, shares = list(told), np.stack(list(told.values())) / rough_s
    largest = shares.argmax(axis=0)
    steps = estimated.step_s, estimated.low_s, estimated.high_s
    middle = search.seconds(plans.width, splits.batch, estimated.step_s)
    of_step = np.log(estimated.high_s / estimated.step_s) / NORMAL_80
    apart = np.exp(NORMAL_80 * np.hypot(of_step, search.spread(plans.width)))
    low, high, price = middle / apart, middle * apart, wanted.price_per_worker_hour
    most = np.full(len(splits), np.inf)
    if wanted.memory_bytes is not None:
        most = held_most(forecast.held, forecast.work, splits, sharded, wanted.memory_bytes)
    noise = search.noise_scale
    copied = None
    if forecast.held.copies < ELASTIC_COPIES:
        twice = replace(forecast.held, copies=ELASTIC_COPIES)
        kinds = (peak_bytes(twice, forecast.work, splits, each) for each in (True, False))
        copied = np.where(sharded, *kinds)
    return [
        ClusterPlan(
            width=int(plans.width[i]),
            mesh=Mesh(*(int(axis[i]) for axis in (splits.data, splits.shard, splits.tensor, splits.pipeline))),
            sharded=bool(sharded[i]),
            batch=int(splits.batch[i]),
            micro=int(splits.micro[i]),
            step_s=float(steps[0][i]),
            step_interval_s=(float(steps[1][i]), float(steps[2][i])),
            seconds=float(middle[i]),
            interval_s=(float(low[i]), float(high[i])),
            cost=float(middle[i] * plans.workers[i] / 3600 * price),
            memory_bytes=float(memory[i]),
            noise_ratio=float(splits.batch[i] / noise) if noise else float("inf"),
            limits=(names[largest[i]], float(shares[largest[i], i])),
            most_parameters=float(most[i]),
            copied_bytes=None if copied is None else float(copied[i]),
        )
        for i in range(len(splits))
    ]


def _distinct(plans: Iterable[ClusterPlan], most: int) -> tuple[ClusterPlan, ...]:
    found: dict[tuple[int, Mesh], ClusterPlan] = {}
    for plan in plans:
        found.setdefault((plan.width, plan.mesh), plan)
        if len(found) == most:
            break
    return tuple(found.values())


def _nothing_fits(plans: Divisions, memory: Floats, wanted: PlanBounds) -> UserError:
    assert wanted.memory_bytes is not None
    least = int(np.argmin(memory))
    value = f"at best {byte_count(round(memory[least]))} of {byte_count(round(wanted.memory_bytes))} a worker"
    workers = count(int(plans.splits.workers[least]), "worker")
    return UserError("a worker must hold its part of the program", value, f"that is on {workers}: use more of them")


def _short(plan: ClusterPlan) -> str:
    return f"{plan.width} at once on {plan.mesh}"
