"""How to split a cluster: every division judged by time, cost and memory, and the best of them. Pure.

The time of a search is that of its rounds (``plan.search_time``), each training's step that of the step model
(``plan.steps``). Its interval is the step's: what is not known of the search itself is not in it.
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
from elastune.plan.divisions import Allowed, Divisions, Nodes, divisions
from elastune.plan.search_time import SearchModel
from elastune.plan.steps.memory import HeldAlone, peak_bytes
from elastune.plan.steps.splits import StepSplits
from elastune.plan.steps.step_model import NORMAL_80, Estimates, StepModel
from elastune.plan.steps.terms import parts
from elastune.plan.steps.work import Floats, StepWork

CLOSE = 2_000  # plans whose intervals are looked at: the best by the physical form alone
GATHERED = 0.5  # of the traffic of gradients: what ``sharded`` gathers of parameters beside it
AXES = ("width", "data", "tensor", "pipeline")


@dataclass(frozen=True)
class ProgramForecast:
    """What is known of a program and the machine that it runs on."""

    model: StepModel
    work: StepWork
    held: HeldAlone
    search: SearchModel


@dataclass(frozen=True)
class PlanBounds:
    """What is asked for. ``memory_bytes``: of a worker; None: no bound. ``deadline_s``: until all is tuned; it counts
    as kept where the upper end of the time's interval is within it: in nine cases of ten."""

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
    """One way to split a cluster: ``width`` trainings at once, each on ``mesh``. Intervals are of 80 %.

    ``limits``: the part of a step that is largest, and its share of it. ``noise_ratio``: the global batch over the
    gradient noise scale; infinite where that is 0.
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

    @property
    def workers(self) -> int:
        """All that it uses."""
        return self.width * self.mesh.workers

    def odds(self, deadline_s: float) -> float:
        """How likely all is tuned by then: of the interval's Gaussian, of logarithms."""
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
    rough_s, _ = _steps(forecast, all_plans.splits.take(fits), sharded[fits])
    rough = forecast.search.seconds(all_plans.width[fits], all_plans.splits.batch[fits], rough_s)
    by_time, by_cost = np.argsort(rough)[:CLOSE], np.argsort(rough * all_plans.workers[fits])[:CLOSE]
    close = fits[np.unique(np.concatenate([by_time, by_cost]))]
    plans, sharded, memory = all_plans.take(close), sharded[close], memory[close]
    told = _judged(forecast, plans, sharded, memory, wanted.price_per_worker_hour)
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


def doublings(forecast: ProgramForecast, plan: ClusterPlan, nodes: Nodes, allowed: Allowed) -> dict[str, float]:
    """By what factor twice the workers along each axis would shorten ``plan``; what ``allowed`` forbids is left out."""
    bounds = {"width": allowed.width, "data": plan.batch, "tensor": allowed.tensor, "pipeline": allowed.pipeline}
    found = {}
    for axis in AXES:
        mesh, width = plan.mesh, plan.width
        size = width if axis == "width" else mesh.batch if axis == "data" else getattr(mesh, axis)
        if 2 * size > bounds[axis]:
            continue
        if axis == "width":
            width *= 2
        else:
            mesh = replace(mesh, **{axis: 2 * getattr(mesh, axis)})
        splits = _column(plan, mesh, nodes)
        step_s, _ = _steps(forecast, splits, np.array([plan.sharded]))
        before, _ = _steps(forecast, _column(plan, plan.mesh, nodes), np.array([plan.sharded]))
        rounds = forecast.search.rounds(np.array([plan.width, width], float))
        found[axis] = float(rounds[0] * before[0] / (rounds[1] * step_s[0]))
    return found


def _column(plan: ClusterPlan, mesh: Mesh, nodes: Nodes) -> StepSplits:
    micro = min(plan.micro, -(-plan.batch // mesh.batch))
    told = (plan.batch, micro, mesh.data, mesh.shard, mesh.tensor, mesh.pipeline, nodes.workers_each)
    return StepSplits(*(np.array([number], float) for number in told))


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


def _steps(
    forecast: ProgramForecast, splits: StepSplits, sharded: NDArray[np.bool_]
) -> tuple[Floats, dict[str, Floats]]:
    """Seconds of a step by the physical form, and what they are made of."""
    told = parts(np.exp(forecast.model.best.log_constants), forecast.work, splits)
    told["gradients"] = told["gradients"] * np.where(sharded, 1 + GATHERED, 1.0)
    return np.sum(list(told.values()), axis=0), told


def step_estimates(forecast: ProgramForecast, splits: StepSplits, sharded: NDArray[np.bool_]) -> Estimates:
    """Seconds of a step of plans, of which some are ``sharded``."""
    told = forecast.model.estimate(forecast.work, splits)
    more = _steps(forecast, splits, sharded)[0] / _steps(forecast, splits, np.zeros_like(sharded))[0]
    return Estimates(told.step_s * more, told.low_s * more, told.high_s * more)


def _judged(
    forecast: ProgramForecast, plans: Divisions, sharded: NDArray[np.bool_], memory: Floats, price: float
) -> list[ClusterPlan]:
    splits, search = plans.splits, forecast.search
    estimated = step_estimates(forecast, splits, sharded)
    rough_s, told = _steps(forecast, splits, sharded)
    names, shares = list(told), np.stack(list(told.values())) / rough_s
    largest = shares.argmax(axis=0)
    steps = estimated.step_s, estimated.low_s, estimated.high_s
    middle, low, high = (search.seconds(plans.width, splits.batch, step_s) for step_s in steps)
    noise = search.noise_scale
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
