"""How to divide a cluster for a search, and how long the search takes: the best divisions by time, cost and memory.

A division is a number of concurrent trainings and the mesh of each of them. The step model gives the time of a
training; the search model, which stands first, gives the number of trainings and how many rounds they take.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from elastune.core.cost import check_price
from elastune.core.errors import UserError
from elastune.core.formatting import byte_count, count, duration, number
from elastune.core.mesh import MOST_WORKERS, Mesh
from elastune.core.plan.memory import ELASTIC_COPIES, HeldAlone, held_most, peak_bytes
from elastune.core.plan.step_model import NORMAL_80, Estimates, StepModel
from elastune.core.plan.step_time import Floats, StepSplits, StepWork, parts
from elastune.core.slots import MOST_EXACT_WORKERS

# How long a search takes: its trainings in rounds, each with as many steps as its batch needs.
#
# A batch B needs steps in proportion to 1 + B_noise / B (McCandlish et al., "An Empirical Model of Large-Batch
# Training", 2018, section 2.3). With ``width`` concurrent trainings each proposal knows less than in a sequential
# search. The search then needs ``crowding`` x (width - 1) more trainings, relative to ``runs``, up to the number that
# random search needs. Trainings differ in length: at the end, workers wait for the last training, or in a
# generational search for the longest of each generation. ``benchmarks/search/search_model.py`` fits crowding,
# variation and the savings of early stopping to simulated studies.
#
# A genetic search whose generations wait for each other fixes the trainings of a generation (``generation``). Its
# proposals rest on earlier generations alone. So concurrent trainings lose nothing, and more than a generation of
# them gain nothing.

POINTS = 4_000  # of the integral over a training's length
Stopping = Literal["none", "asha"]
# As benchmarks/results/search_model.json has them: simulated studies on the lcbench surrogate.
CROWDING: Mapping[bool, tuple[float, tuple[float, float]]] = MappingProxyType(
    {False: (0.0785, (0.0479, 0.1191)), True: (0.0762, (0.0441, 0.1202))}
)
"""Whether the search waits for generations -> more trainings for each further concurrent one, and the 80 % interval."""
RANDOM_SEARCH_FACTOR = 5.4
"""Random search needs this many times as many trainings: no number of concurrent trainings costs more."""
VARIATION = 0.74
GENETIC = 0.81
"""A genetic search in Cray's manner needs this many times the trainings of a random one for the same result."""
KEPT: Mapping[Stopping, float] = MappingProxyType({"none": 1.0, "asha": 0.66})
"""The share of all steps that remains, by the method of early stopping."""


@dataclass(frozen=True)
class SearchModel:
    """The search whose time is modelled.

    Attributes:
        runs: The trainings that it needs one after another, each of ``steps`` steps at ``base_batch``.
        noise_scale: The gradient noise scale, in samples; 0: a larger batch saves no step.
        variation: The coefficient of variation of trainings' lengths.
        generations: Whether the search waits for each round. If not, a new training replaces each ended one at once.
        kept: The share of all steps that early stopping leaves.
        crowding_within: The ends of crowding's 80 % interval; None: crowding was declared.
        blind: The largest factor of additional trainings, however many run at once: that of random search.
        generation: The trainings of a generation, where the search fixes them and waits for each; 0: it does not.
            Crowding does not count then.
        beside_s: Seconds of each training outside of its steps: its processes, its data, its report.
    """

    runs: int
    steps: float
    base_batch: int
    noise_scale: float
    crowding: float = 0.0
    variation: float = 0.0
    generations: bool = False
    kept: float = 1.0
    crowding_within: tuple[float, float] | None = None
    blind: float = math.inf
    generation: int = 0
    beside_s: float = 0.0

    def __post_init__(self) -> None:
        if self.runs < 1 or self.base_batch < 1 or not 0 < self.steps < math.inf:
            raise ValueError(f"a search has trainings, steps and samples, not {self}")
        others = (self.noise_scale, self.crowding, self.variation, self.generation, self.beside_s)
        if not all(0 <= each < math.inf for each in (*others, *(self.crowding_within or ()))):
            raise ValueError(f"noise scale, crowding, variation and what is beside are not negative, not {self}")
        if not self.blind >= 1:
            raise ValueError(f"random search needs no fewer trainings, not {self}")
        if not 0 < self.kept <= 1:
            raise ValueError(f"early stopping leaves a share of steps above 0 and at most 1, not {self}")

    def needed(self, width: Floats) -> Floats:
        """Return the number of trainings in all, where ``width`` of them run at once."""
        if self.generation:
            return np.full(np.shape(width), float(self.runs))
        return np.asarray(self.runs * np.minimum(1 + self.crowding * (width - 1), self.blind), dtype=np.float64)

    def rounds(self, width: Floats) -> Floats:
        """Return how many trainings of mean length follow one another, where ``width`` of them run at once."""
        if self.generation:
            generations, rest = divmod(self.runs, self.generation)
            return np.asarray(generations * self._waited(self.generation, width) + self._waited(rest, width))
        needed = self.needed(width)
        whole = np.ceil(needed / width)
        if not self.variation:
            return np.asarray(whole, dtype=np.float64)
        at_once = np.minimum(width, needed)
        sizes, back = np.unique(at_once, return_inverse=True)
        longest = np.array([longest_of(float(size), self.variation) for size in sizes])[back]
        if self.generations:
            return np.asarray(whole * longest, dtype=np.float64)
        # All are busy until the last begins; then the longest of those that run is waited for.
        return np.asarray(needed / at_once - 1 + longest, dtype=np.float64)

    def _waited(self, trainings: int, width: Floats) -> Floats:
        """The rounds of so many ``trainings`` where the search waits for all of them at the end."""
        at_once = np.minimum(width, max(trainings, 1))
        if not self.variation or not trainings:
            return np.asarray(np.ceil(trainings / at_once), dtype=np.float64)
        longest = np.array([longest_of(float(size), self.variation) for size in at_once])
        return np.asarray(trainings / at_once - 1 + longest, dtype=np.float64)

    def spread(self, width: Floats) -> Floats:
        """Return the standard deviation of the logarithm of ``rounds`` that comes from the uncertainty of crowding."""
        if self.crowding_within is None:
            return np.zeros(len(width))
        low, high = (replace(self, crowding=each).rounds(width) for each in self.crowding_within)
        return np.asarray(np.log(high / low) / 2 / NORMAL_80, dtype=np.float64)

    def steps_of(self, batch: Floats) -> Floats:
        """Return the steps of one training with a global ``batch`` that reach as far as ``steps`` steps with
        ``base_batch``.
        """
        return self.steps * (1 + self.noise_scale / batch) / (1 + self.noise_scale / self.base_batch)

    def seconds(self, width: Floats, batch: Floats, step_s: Floats) -> Floats:
        """Return the seconds until the search is done."""
        return self.rounds(width) * self.training_s(batch, step_s)

    def training_s(self, batch: Floats, step_s: Floats) -> Floats:
        """Return the mean seconds of one training."""
        return self.kept * self.steps_of(batch) * step_s + self.beside_s


@lru_cache(maxsize=4096)
def longest_of(count: float, variation: float) -> float:
    """Return the expected longest of ``count`` trainings, in mean lengths; lengths are log-normal.

    The integral of 1 - F(t)^count over t.
    """
    if not variation or count <= 1:
        return 1.0
    spread = math.sqrt(math.log(1 + variation**2))
    reach = np.linspace(-8.0, 8.0 + math.sqrt(2 * math.log(count)), POINTS)
    times = np.exp(spread * reach - spread**2 / 2)
    below = 0.5 * (1 + np.array([math.erf(each / math.sqrt(2)) for each in reach]))
    return float(times[0] + np.trapezoid(1 - below**count, times))


# How to divide a cluster: every division is judged by time, cost and memory, and the best plans are returned.
#
# A division is a number of concurrent trainings and the mesh of each of them. The time of a search is that of its
# rounds (``search_time``), the time of a step is that of the step model (``step_model``). The interval of a plan has
# the uncertainty of both: of the step, and of the price of parallel proposals.
#
# The file also explains in words the gain of twice the workers along each axis. And it explains why a training cannot
# use all workers of a cluster.

# All divisions of a cluster, as columns.
Columns = NDArray[np.float64]
MOST_PLANS = 400_000  # before plans with more parts than samples are left out
MOST_BATCH = 2**31


@dataclass(frozen=True)
class Nodes:
    """Equal nodes, each with room for ``workers_each``, which share a faster link."""

    count: int
    workers_each: int

    def __post_init__(self) -> None:
        for name, value, option in (
            ("nodes", self.count, "--nodes"),
            ("workers of a node", self.workers_each, "--gpus-per-node"),
        ):
            if value < 1:
                raise UserError(f"there must be {name}", value, f"use {option} 1 or more")
        if self.workers > MOST_WORKERS:
            raise UserError(f"a cluster has at most {MOST_WORKERS:,} workers", self.workers, "use fewer --nodes")

    @property
    def workers(self) -> int:
        """The workers of all nodes."""
        return self.count * self.workers_each


@dataclass(frozen=True)
class Allowed:
    """The divisions that a program allows.

    Attributes:
        batches: The global batches to consider.
        micros: The most samples of a pass to consider.
        tensor, pipeline: The most parts into which its layers, and its chain of layers, can be divided.
        shard: Whether its state can be divided.
        width: The most concurrent trainings.
        mesh: The only mesh to consider, if any.
    """

    batches: tuple[int, ...]
    micros: tuple[int, ...]
    width: int
    tensor: int = 1
    pipeline: int = 1
    shard: bool = True
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        numbers = (*self.batches, *self.micros, self.width, self.tensor, self.pipeline)
        if not (self.batches and self.micros) or not all(1 <= number <= MOST_BATCH for number in numbers):
            raise ValueError(f"batches, micro-batches and divisions are at least 1, not {self}")


@dataclass(frozen=True)
class Divisions:
    """Plans for a whole cluster: ``width`` concurrent trainings, each split as ``splits``."""

    width: Columns
    splits: StepSplits

    def take(self, index: NDArray[np.intp] | slice) -> Divisions:
        """Return the plans with these indices."""
        return Divisions(self.width[index], self.splits.take(index))

    @property
    def workers(self) -> Columns:
        """The workers of the whole cluster that each plan uses."""
        return self.width * self.splits.workers


def divisions(nodes: Nodes, allowed: Allowed) -> Divisions:
    """Return all plans that ``allowed`` permits: sizes that divide the number of workers, and as many
    trainings as fit. No training has more than ``MOST_EXACT_WORKERS`` workers.

    For numbers with many divisors that would be more than ``MOST_PLANS``. Then some sizes are left out, so that the
    others have about equal ratios.

    Raises:
        UserError: Where the mesh of ``allowed`` does not divide the cluster, the batch or the program.
    """
    total = nodes.workers
    if allowed.mesh is not None:
        check_mesh(allowed.mesh, nodes, allowed)
    sizes = [size for size in range(1, total + 1) if total % size == 0]
    each_row = len(allowed.batches) * len(allowed.micros)
    meshes, apart = _meshes(total, sizes, allowed), 1.0
    while sum(_widths(total, sizes, allowed, mesh)[1] for mesh in meshes) * each_row > MOST_PLANS:
        apart *= 1.1
        sizes = _thinned(sizes, apart)
        meshes = _meshes(total, sizes, allowed)
    rows = []
    for mesh in meshes:
        most, _ = _widths(total, sizes, allowed, mesh)
        widths = {most, *sizes[: bisect_right(sizes, most)]}
        rows += [(width, *mesh) for width in sorted(widths)]
    wide, parts = np.array([row[0] for row in rows], float), np.array([row[1] * row[2] for row in rows], float)
    batch, micro = (np.array(each, float) for each in (allowed.batches, allowed.micros))
    grid = np.stack(np.meshgrid(np.arange(len(rows)), batch, micro, indexing="ij"), axis=-1).reshape(-1, 3)
    row = grid[:, 0].astype(np.intp)
    share = np.ceil(grid[:, 1] / parts[row])
    # A pass of more samples than a worker has is one of as many as it has: that plan stands with its own size.
    kept = (grid[:, 1] >= parts[row]) & ((grid[:, 2] <= share) | (grid[:, 2] == micro.min()))
    row, grid, share = row[kept], grid[kept], share[kept]
    _, data, shard, tensor, pipeline = np.array(rows, float)[row].T
    each = np.full(len(row), float(nodes.workers_each))
    splits = StepSplits(grid[:, 1], np.minimum(grid[:, 2], share), data, shard, tensor, pipeline, each)
    return Divisions(wide[row], splits)


def check_mesh(mesh: Mesh, nodes: Nodes, allowed: Allowed) -> None:
    """Raise ``UserError`` for a mesh that does not divide the workers, the batch or the program evenly."""
    if nodes.workers % mesh.workers:
        value = f"{mesh}: {mesh.workers} of {nodes.workers} workers"
        raise UserError("a mesh must divide the workers of the cluster", value, "use axes whose product divides them")
    if mesh.workers > MOST_EXACT_WORKERS:
        rule = f"one training is planned on at most {MOST_EXACT_WORKERS:,} workers"
        raise UserError(rule, f"{mesh}: {mesh.workers:,} workers", "use a smaller --mesh")
    batches = [batch for batch in allowed.batches if batch % mesh.batch == 0]
    for axis, size, of in (
        ("data x shard", mesh.batch, 0 if batches else max(allowed.batches)),
        ("tensor", mesh.tensor, 0 if mesh.tensor <= allowed.tensor else allowed.tensor),
        ("pipeline", mesh.pipeline, 0 if mesh.pipeline <= allowed.pipeline else allowed.pipeline),
        ("shard", mesh.shard, 0 if mesh.shard == 1 or allowed.shard else 1),
    ):
        if of:
            what = "a batch's samples" if axis == "data x shard" else "the program"
            raise UserError(f"a mesh must divide {what} evenly", f"{axis}={size} of {of}", "use a smaller --mesh")


def _meshes(total: int, sizes: Sequence[int], allowed: Allowed) -> list[tuple[int, int, int, int]]:
    """Every mesh of ``total`` workers with axes of ``sizes``, as data, shard, tensor and pipeline."""
    total, most = min(total, MOST_EXACT_WORKERS), max(allowed.batches)  # no more parts than samples
    if allowed.mesh is not None:
        return [(allowed.mesh.data, allowed.mesh.shard, allowed.mesh.tensor, allowed.mesh.pipeline)]
    return [
        (data, shard, tensor, pipeline)
        for tensor in sizes[: bisect_right(sizes, allowed.tensor)]
        for pipeline in sizes[: bisect_right(sizes, min(allowed.pipeline, total // tensor))]
        for shard in (sizes[: bisect_right(sizes, min(most, total // (tensor * pipeline)))] if allowed.shard else [1])
        for data in sizes[: bisect_right(sizes, min(most, total // (tensor * pipeline)) // shard)]
    ]


def _widths(total: int, sizes: Sequence[int], allowed: Allowed, mesh: tuple[int, int, int, int]) -> tuple[int, int]:
    """The most concurrent trainings on such meshes, and how many numbers of them are considered at most."""
    most = min(total // math.prod(mesh), allowed.width)
    return most, bisect_right(sizes, most) + 1


def _thinned(sizes: Sequence[int], apart: float) -> list[int]:
    """Some of the ascending ``sizes``, each at least ``apart`` times the one before; the first and the last
    are kept.
    """
    kept = [sizes[0]]
    for size in sizes[1:-1]:
        if size >= apart * kept[-1]:
            kept.append(size)
    return [*kept, *sizes[1:][-1:]]


# Every division judged by time, cost and memory.
CLOSE = 2_000  # plans whose intervals are looked at: the best by the physical form alone


@dataclass(frozen=True)
class ProgramForecast:
    """The known properties of a program and of its machine."""

    model: StepModel
    work: StepWork
    held: HeldAlone
    search: SearchModel


@dataclass(frozen=True)
class PlanBounds:
    """The bounds of a requested plan.

    Attributes:
        memory_bytes: Memory of a worker, in bytes; None: no bound.
        deadline_s: Seconds until the search must be done. A plan keeps it where the upper end of its time's interval is
            within it: in nine cases of ten.
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
    """A division of a cluster: ``width`` trainings at once, each on ``mesh``. All times are modelled.

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
        most_parameters: Bytes of parameters of the largest model that fits the memory with this division. Its state
            grows alike, and its activations stay. Infinite without a bound on memory.
        copied_bytes: Bytes of the fullest worker with two owners of each part, the default of a run; None where
            ``memory_bytes`` has as many already.
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
    """Return the ``most`` best plans: the fastest, or the cheapest within the deadline.

    ``of_a_kind``: one of each (width, mesh), whatever its batches.

    Raises:
        UserError: Where no plan fits the memory (the error names one that would), or none keeps the deadline (the error
            names the nearest).
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
    judged = _judged(forecast, plans, sharded, memory, wanted)
    if wanted.deadline_s is not None:
        kept = [plan for plan in judged if plan.interval_s[1] <= wanted.deadline_s]  # in nine cases of ten
        if not kept:
            nearest = min(judged, key=lambda plan: plan.interval_s[1])
            value = f"{duration(wanted.deadline_s)}; the nearest is {duration(nearest.interval_s[1])}"
            value += f", in 9 cases of 10 ({duration(nearest.seconds)} expected)"
            fix = f"use --deadline above that, more --nodes or fewer --runs ({_short(nearest)})"
            raise UserError("a deadline must be one that a plan can keep", value, fix)
        judged = sorted(kept, key=lambda plan: (plan.cost, plan.seconds))
    else:
        judged = sorted(judged, key=lambda plan: (plan.seconds, plan.workers))
    return _distinct(judged, most) if of_a_kind else tuple(judged[:most])


def check_fits(held: HeldAlone, work: StepWork, nodes: Nodes, allowed: Allowed, wanted: PlanBounds) -> None:
    """Raise ``UserError`` where no plan fits the ``wanted`` memory, before anything starts."""
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
    """Return the seconds of a step by the physical form, and the seconds of each of its parts."""
    seconds = parts(np.exp(forecast.model.best.log_constants), forecast.work, splits, sharded)
    return np.sum(list(seconds.values()), axis=0), seconds


def step_estimates(forecast: ProgramForecast, splits: StepSplits, sharded: NDArray[np.bool_]) -> Estimates:
    """Return the seconds of a step of plans, of which some are ``sharded``."""
    estimates = forecast.model.estimate(forecast.work, splits)
    more = step_parts(forecast, splits, sharded)[0] / step_parts(forecast, splits, np.zeros_like(sharded))[0]
    return Estimates(estimates.step_s * more, estimates.low_s * more, estimates.high_s * more)


def _judged(
    forecast: ProgramForecast, plans: Divisions, sharded: NDArray[np.bool_], memory: Floats, wanted: PlanBounds
) -> list[ClusterPlan]:
    splits, search = plans.splits, forecast.search
    estimated = step_estimates(forecast, splits, sharded)
    rough_s, part_s = step_parts(forecast, splits, sharded)
    names, shares = list(part_s), np.stack(list(part_s.values())) / rough_s
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
    best: dict[tuple[int, Mesh], ClusterPlan] = {}
    for plan in plans:
        best.setdefault((plan.width, plan.mesh), plan)
        if len(best) == most:
            break
    return tuple(best.values())


def _nothing_fits(plans: Divisions, memory: Floats, wanted: PlanBounds) -> UserError:
    assert wanted.memory_bytes is not None
    least = int(np.argmin(memory))
    value = f"at best {byte_count(round(memory[least]))} of {byte_count(round(wanted.memory_bytes))} a worker"
    workers = count(int(plans.splits.workers[least]), "worker")
    return UserError("a worker must hold its part of the program", value, f"that is on {workers}: use more of them")


def _short(plan: ClusterPlan) -> str:
    return f"{plan.width} at once on {plan.mesh}"


# The gain of twice the workers along each axis, and its reason in words.
AXES = ("width", "data", "shard", "tensor", "pipeline")
SHOWN_CHANGE = 0.02  # of a step; smaller changes are not mentioned


@dataclass(frozen=True)
class Doubling:
    """The effect of twice the workers along an axis: the plan would be ``factor`` times as fast, and ``why``.

    ``factor`` None: the axis cannot be doubled, for the reason in ``why``.
    """

    factor: float | None
    why: str


def doublings(forecast: ProgramForecast, plan: ClusterPlan, nodes: Nodes, allowed: Allowed) -> dict[str, Doubling]:
    """Return the effect of twice the workers along each axis of ``plan``, the largest first and impossible
    ones last.
    """
    by_axis = {axis: _doubled(axis, forecast, plan, nodes, allowed) for axis in AXES}
    return dict(sorted(by_axis.items(), key=lambda each: -(each[1].factor or 0.0)))


def _doubled(axis: str, forecast: ProgramForecast, plan: ClusterPlan, nodes: Nodes, allowed: Allowed) -> Doubling:
    if (never := _never(axis, plan, allowed)) is not None:
        return Doubling(None, never)
    if axis == "width":
        return _wider(forecast, plan)
    mesh = replace(plan.mesh, **{axis: 2 * plan.mesh.size(axis)})  # type: ignore[arg-type]
    now, then = _column(plan, plan.mesh, nodes), _column(plan, mesh, nodes)
    sharded = np.array([plan.sharded])
    before, after = step_parts(forecast, now, sharded), step_parts(forecast, then, sharded)
    why = _changes(before[1], after[1], float(before[0][0]))
    if axis != "data":
        held = [peak_bytes(forecast.held, forecast.work, each, plan.sharded)[0] for each in (now, then)]
        why += f"; a worker holds {byte_count(round(held[1]))} in place of {byte_count(round(held[0]))}"
    batch, search = np.array([float(plan.batch)]), forecast.search
    factor = search.training_s(batch, before[0]) / search.training_s(batch, after[0])
    return Doubling(float(factor[0]), why)


def _never(axis: str, plan: ClusterPlan, allowed: Allowed) -> str | None:
    """Why an axis cannot be doubled; None where it can."""
    mesh = plan.mesh
    if axis == "width" and 2 * plan.width > allowed.width:
        return f"the search has {count(allowed.width, 'training')} in all"
    if axis != "width" and 2 * mesh.workers > MOST_EXACT_WORKERS:
        return f"one training has at most {MOST_EXACT_WORKERS:,} workers"
    if axis in ("data", "shard") and 2 * mesh.batch > plan.batch:
        return f"a batch of {plan.batch} cannot be cut into more than {mesh.batch} equal parts again"
    if axis == "shard" and not allowed.shard:
        return "the program's state is not divided"
    if axis == "tensor" and 2 * mesh.tensor > allowed.tensor:
        most = f"are divided into {allowed.tensor} at most" if allowed.tensor > 1 else "are not such as can be divided"
        return f"its layers {most}"
    if axis == "pipeline" and 2 * mesh.pipeline > allowed.pipeline:
        return f"its chain of layers is cut into {count(allowed.pipeline, 'stage')} at most"
    return None


def _wider(forecast: ProgramForecast, plan: ClusterPlan) -> Doubling:
    search = forecast.search
    now, then = (float(each) for each in search.rounds(np.array([plan.width, 2.0 * plan.width])))
    why = f"{number(now, 3)} rounds of trainings become {number(then, 3)}"
    if now / then < 2 - SHOWN_CHANGE:
        reasons = ["concurrent proposals know less of each other"] if search.crowding else []
        reasons += ["the search waits for the last trainings"] if search.variation else ["rounds are whole"]
        why += f", not half as many: {' and '.join(reasons)}"
    return Doubling(now / then, why)


def _changes(before: Mapping[str, Floats], after: Mapping[str, Floats], step_s: float) -> str:
    """The part of a step that falls most, and the part that grows most."""
    changes = {name: float(after[name][0] - before[name][0]) for name in before}
    least, most = min(changes, key=changes.__getitem__), max(changes, key=changes.__getitem__)
    words = []
    for name, change, more in ((least, -changes[least], "less"), (most, changes[most], "more")):
        if change > SHOWN_CHANGE * step_s:
            now, then = (duration(float(each[name][0])) for each in (before, after))
            words.append(f"{more} of a step for {name} ({then}, not {now})")
    return ", ".join(words) if words else "next to nothing of a step changes"


def _column(plan: ClusterPlan, mesh: Mesh, nodes: Nodes) -> StepSplits:
    micro = min(plan.micro, -(-plan.batch // mesh.batch))
    values = (plan.batch, micro, mesh.data, mesh.shard, mesh.tensor, mesh.pipeline, nodes.workers_each)
    return StepSplits(*(np.array([each], float) for each in values))


# Why one training cannot use all workers: its computation in a step against its waiting times, both modelled.
LEAST_LOSS = 1.05  # a step on all workers is reported where it is longer by this factor than on fewer


def unused_workers_text(forecast: ProgramForecast, nodes: Nodes, batch: int, parameters: float) -> str:
    """Return why one training cannot use all workers of a cluster, in one sentence; "" where it can.

    Args:
        forecast: The program and the machine, as far as they are known.
        nodes: The cluster.
        batch: The program's own global batch, in samples.
        parameters: The number of the model's parameters.

    Returns:
        The sentence, with what each worker would compute in a step and how long it would wait for gradients.

    Example:
        >>> unused_workers_text(forecast, Nodes(8, 8), 64, 27_700)
        'too small for 64 workers: ...'
    """
    most = min(nodes.workers, batch)
    widths = np.array([*(2.0**power for power in range(most.bit_length()) if 2**power < most), float(most)])
    ones = np.ones_like(widths)
    micro = np.ceil(batch / widths)
    splits = StepSplits(ones * batch, micro, widths, ones, ones, ones, ones * nodes.workers_each)
    none = np.zeros(len(widths), bool)  # of them are sharded
    step_s, parts = step_parts(forecast, splits, none)
    best = int(step_s.argmin())
    if step_s[-1] < LEAST_LOSS * step_s[best]:
        return ""
    nothing = np.array(0.0)
    light = replace(forecast.work, block_bytes=nothing, whole_bytes=nothing, edge_bytes=nothing)
    latency_s = float(step_parts(replace(forecast, work=light), splits, none)[1]["gradients"][-1])
    cause = "too small" if latency_s > parts["gradients"][-1] / 2 else "the links are too slow"
    computing, launching, waiting = (duration(float(parts[name][-1])) for name in ("compute", "launch", "gradients"))
    fastest, factor = int(widths[best]), float(step_s[0] / step_s[best])
    gain = "no more than 1 worker is of use" if fastest == 1 else f"{fastest} are the most that help"
    gain += "" if fastest == 1 else f" ({number(factor, 3)} x as fast as 1)"
    return (
        f"{cause} for one training on {count(nodes.workers, 'worker')} (modelled): {number(parameters, 3)} "
        f"parameters, batch {batch:,}. In each step on {most:,} a worker would compute for {computing}, launch kernels "
        f"for {launching} and wait {waiting} for the sum of gradients ({duration(latency_s)} of it latency); {gain}"
    )
