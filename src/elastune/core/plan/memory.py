"""The memory of a worker by mechanism, mesh and number of copies: modelled, before anything is launched.

State is taken to divide evenly: parameters among blocks of layers and stages, optimizer state among its owners. Stages
of unequal size, buffers and layers that stay whole under ``tensor`` make the share of the fullest worker larger. The
first stage of a pipeline holds an edge of the model beside its blocks. docs/meshes.md has the formulas.

Activations of a transformer are as in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", MLSys 2023, section 4: the first stage of a pipeline keeps those of as many passes as there are stages.

Where workers may be lost, a run keeps two copies of each part of what it divides (``--copies``). On a mesh without
replicas (``data=1``) the second copy lies on a worker of the same replica, and takes back what the division has saved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from elastune.core.formatting import byte_count, count
from elastune.core.layout import owners
from elastune.core.mesh import MechanismName, Mesh
from elastune.core.plan.step_time import Floats, StepSplits, StepWork
from elastune.core.run import ExecutionSettings

# The cost of further owners, and of layers that ``tensor`` leaves whole, as shares.

Shares = NDArray[np.float64]
ELASTIC_COPIES = 2
"""The default number of owners where workers may be lost (``parallel.sync.registry.sync_for``)."""
NEGLIGIBLE_SHARE = 0.01
SHOWN_FROM_SHARE = 0.01  # of the whole: what a copy takes beyond it is worth a line


def further_parts(data: Shares, shard: Shares, inner: Shares, copies: float) -> tuple[Shares, Shares]:
    """Return how many parts the fullest worker holds beside its own, as ``core.layout.owners`` deals them
    on one host.

    Args:
        data: Workers along that axis, who hold the same.
        shard: Workers along that axis.
        inner: Workers along tensor and pipeline.
        copies: Owners of each part.

    Returns:
        Parts of what it computes with (those of other workers along ``shard``), and parts of what others compute with.

    Example:
        >>> further_parts(np.ones(1), np.ones(1), np.full(1, 2.0), 2)
        (array([0.]), array([1.]))
    """
    lacking = np.maximum(0.0, np.minimum(copies, data * shard * inner) - data)  # holders of each part
    more = np.ceil(lacking / data)
    inside = np.minimum(more, shard - 1)
    return inside, more - inside


def copies_text(execution: ExecutionSettings, *, elastic: bool = True) -> str:
    """Return how much of a worker's memory the copies of ``execution`` take, in one sentence; "" where they
    take none.

    Args:
        execution: The execution settings of a run.
        elastic: Whether workers may be lost, which is so except under torchrun and similar launchers.

    Returns:
        The sentence, for the first lines of a run.

    Example:
        >>> copies_text(ExecutionSettings(mesh=Mesh(tensor=2)))
        'each part of the divided state has 2 holders (the default): a worker holds 100 % of ...'
    """
    name, mesh = execution.parts, execution.first_mesh
    copies = execution.copies or (ELASTIC_COPIES if elastic else 1)
    if not name.dividing or name.foreign or mesh.workers == 1 or copies == 1:
        return ""
    (values, state), (least_values, least) = (_shares(mesh, each, name.state == "sharded") for each in (copies, 1))
    if state - least < SHOWN_FROM_SHARE:
        return ""
    default = " (the default)" if execution.copies is None else ""
    saved = " (dividing saves no memory)" if min(values, state) > 1 - SHOWN_FROM_SHARE else ""
    return (
        f"each part of the divided state has {copies} holders{default}, so that a lost worker costs no progress: a "
        f"worker holds {values:.0%} of parameters, {state:.0%} of gradients and optimizer state{saved}. With "
        f"--copies 1: {least_values:.0%} and {least:.0%}, if all layers divide"
    )


def _shares(mesh: Mesh, copies: int, sharded: bool) -> tuple[float, float]:
    """The shares of parameters, and of gradients and optimizer state, on the fullest worker, if all divides evenly."""
    data, shard, inner = (np.array([float(each)]) for each in (mesh.data, mesh.shard, mesh.tensor * mesh.pipeline))
    inside, others = (float(each[0]) for each in further_parts(data, shard, inner, copies))
    parts = mesh.shard * mesh.tensor * mesh.pipeline
    state = (1 + inside + others) / parts
    return (state if sharded else mesh.shard / parts + others / parts), state


def serial_share_text(parameters: float, compute: float | None, mesh: Mesh | None = None) -> str:
    """Return in one sentence what ``tensor`` leaves whole of a model, and the bound that follows (Amdahl, 1967).

    Args:
        parameters: The share of parameters in layers that are not divided.
        compute: The share of a step's arithmetic in them; None: not known.
        mesh: The mesh of the workers, if there is one.

    Returns:
        The sentence.

    Example:
        >>> serial_share_text(0.25, 0.5)
        'tensor leaves 25% of parameters and 50% of arithmetic whole on each worker (the serial share): ...'
    """
    if parameters >= 1:
        return "tensor divides no layer of this model: all of it would lie whole on each worker along it"
    if max(parameters, compute or 0.0) < NEGLIGIBLE_SHARE:
        little = f"less than {NEGLIGIBLE_SHARE:.0%} is whole on each worker (the serial share)"
        return f"tensor divides nearly all of this model: {little}"
    also = "" if compute is None else f" and {compute:.0%} of arithmetic"
    line = f"tensor leaves {parameters:.0%} of parameters{also} whole on each worker (the serial share)"
    sizes = [2, 4, 8] if mesh is None or mesh.tensor == 1 else [mesh.tensor]
    held = ", ".join(f"{parameters + (1 - parameters) / size:.0%} on tensor={size}" for size in sizes)
    line += f": of the parameters a worker computes with {held}"
    if compute is None:
        return line
    bound = f", at most {1 / compute:.3g} x on any" if compute else ""
    faster = ", ".join(f"{1 / (compute + (1 - compute) / size):.3g} x on tensor={size}" for size in sizes)
    return f"{line}; its arithmetic is at most so much faster: {faster}{bound}"


# The state of one worker, by mechanism and mesh.


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a worker, or of the whole model. ``copies``: the part of ``optimizer`` that is a reserve for a lost
    worker.
    """

    parameters: float
    gradients: float
    optimizer: float
    copies: float = 0.0

    @property
    def total(self) -> float:
        """The sum of parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer


def state_of_worker(
    whole: StateBytes, name: MechanismName, mesh: Mesh, copies: int, undivided: float = 0.0
) -> StateBytes:
    """Return the bytes of the fullest worker of ``mesh``, where one process alone holds ``whole``.

    The bytes are those between two steps, gradients included. A block that ``sharded`` has gathered for a moment is not
    counted.

    Args:
        whole: The bytes of one worker that holds everything.
        name: One of elastune's own mechanisms.
        mesh: The mesh of the workers.
        copies: Owners of each part, as ``--copies``.
        undivided: The part of the model that ``tensor`` leaves whole. Every worker along that axis computes with it,
            and ``shard`` divides its state.
    """
    if not name.dividing:
        return whole
    left = undivided if mesh.tensor > 1 else 0.0
    inner = mesh.tensor * mesh.pipeline
    parts = mesh.shard * inner  # those that differ in the data axis alone hold the same
    by_worker = owners(mesh, copies)
    held: list[set[int]] = [set() for _ in range(mesh.workers)]
    for part in range(parts):
        for rank in by_worker[part]:
            held[rank].add(part)
    fullest = max(range(mesh.workers), key=lambda rank: len(held[rank]))
    # It may hold only a part of what it computes with. What it holds for others comes in addition.
    computed_parts = sum(part % inner == fullest % inner for part in held[fullest]) / mesh.shard
    remote_owners = (len(held[fullest]) - computed_parts * mesh.shard) / parts * (1 - left)
    computed = (1 - left) / inner + left / mesh.pipeline
    share = computed_parts * computed + remote_owners
    values = share if name.state == "sharded" else computed + remote_owners
    optimizer = whole.optimizer * share
    kept_for_others = optimizer - whole.optimizer * computed / mesh.batch
    return StateBytes(whole.parameters * values, whole.gradients * share, optimizer, kept_for_others)


def ideal_share(whole: int, copies: int, workers: int) -> float:
    """Return the bytes of each of ``workers``, where ``whole`` bytes have ``copies`` owners each, in equal shares.

    With the replicated state of plain data parallelism, ``copies`` are the ``workers``.
    """
    return whole * min(copies, workers) / workers


# The fullest worker of many plans at once.

BUFFERS = 3  # of sums that survive a loss (comm.reducer.Bucket): two that take turns, and what was given out
DIVIDED_BUFFERS = 2  # of sums that stop at their holders (comm.owned.OwnedBucket): what is sent, and what is received


@dataclass(frozen=True)
class HeldAlone:
    """The bytes that a worker holds which trains alone.

    Attributes:
        kept_split, kept_whole: The activations of one sample until its backward pass: those that are divided with the
            layers, and the others.
        fixed: What a pass needs for any number of samples, such as a gradient in flight.
        buffer: One of the buffers through which gradients are summed.
        copies: Owners of each part of divided state, on any number of workers.
    """

    parameters: float
    gradients: float
    optimizer: float
    kept_split: float
    kept_whole: float
    fixed: float = 0.0
    buffer: float = 0.0
    copies: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < np.inf:
                raise ValueError(f"{name} is a number of bytes, not {value}")


def peak_bytes(held: HeldAlone, work: StepWork, splits: StepSplits, sharded: bool = False) -> Floats:
    """Return the bytes of the fullest worker of every plan.

    Args:
        held: The bytes of one worker alone.
        work: How parameters lie in blocks and edges.
        splits: The plans.
        sharded: Whether ``shard`` divides parameters too, not only gradients and optimizer state.
    """
    share = work.stage_share(splits.pipeline, splits.tensor)
    inside, others = further_parts(splits.data, splits.shard, splits.inner, held.copies)
    # What ``tensor`` leaves whole has as many holders as workers along it.
    whole = np.where(splits.tensor > 1, work.stage_share(splits.pipeline, np.full_like(splits.tensor, np.inf)), 0.0)
    remote_owners = others * (share - whole) / splits.shard  # parts that it holds for others, and does not compute with
    owned = share * (1 + inside) / splits.shard + remote_owners
    parameters = held.parameters * (owned if sharded else share + remote_owners)
    state = (held.gradients + held.optimizer) * owned
    in_flight = np.minimum(splits.passes, splits.pipeline)
    kept = (held.kept_split / splits.tensor + held.kept_whole) / splits.pipeline
    divided = np.where(splits.parts > 1, DIVIDED_BUFFERS, 0)  # one worker's sums are its gradients
    buffers = np.where(splits.shard * splits.inner > 1, divided, BUFFERS) * held.buffer * share
    moment = held.fixed * (2 if sharded else 1)  # as much as a layer's gradient is what is gathered of its parameters
    return parameters + state + buffers + in_flight * splits.micro * kept + moment


def held_most(held: HeldAlone, work: StepWork, splits: StepSplits, sharded: NDArray[np.bool_], most: float) -> Floats:
    """Return the bytes of parameters of the largest model, so that the fullest worker of each plan holds ``most``.

    Everything that grows with parameters grows in proportion; activations stay as they are.
    """
    light = replace(held, parameters=0.0, gradients=0.0, optimizer=0.0, fixed=0.0, buffer=0.0)
    passes = peak_bytes(light, work, splits)
    state = np.where(sharded, peak_bytes(held, work, splits, True), peak_bytes(held, work, splits)) - passes
    return np.asarray(held.parameters * np.maximum(0.0, most - passes) / np.maximum(state, 1.0), dtype=np.float64)


# Whether a worker can hold a program, in words.


def fit_text(
    held: HeldAlone, work: StepWork, memory_bytes: float, micro: int, most_workers: int, of: str = "a worker"
) -> str:
    """Return "fits: 10 GiB of 24 GiB a worker" or "does not fit: 31 GiB of 24 GiB a worker; 'sharded' on 2 would".

    Args:
        held: The bytes of a worker that trains alone.
        work: How parameters lie in blocks.
        memory_bytes: The memory of a worker.
        micro: The samples of a pass.
        most_workers: The most workers of one training; 1 leaves out what more workers would do.
        of: The owner of the memory, for the text.
    """
    counts = np.arange(1, most_workers + 1, dtype=np.float64)
    ones = np.ones_like(counts)
    splits = StepSplits(micro * counts, ones * micro, ones, counts, ones, ones, counts)
    alone = peak_bytes(held, work, splits.take(slice(0, 1)))[0]
    sizes = f"{byte_count(round(alone))} of {byte_count(round(memory_bytes))} {of}"
    if alone <= memory_bytes:
        return f"fits: {sizes}"
    if most_workers == 1:
        return f"does not fit: {sizes}"
    for name, sharded in (("zero", False), ("sharded", True)):
        enough = np.flatnonzero(peak_bytes(held, work, splits, sharded) <= memory_bytes)
        if len(enough):
            return f"does not fit: {sizes}; '{name}' on {int(counts[enough[0]])} would"
    return f"does not fit: {sizes}; nor does 'sharded' on {count(most_workers, 'worker')}: a pass alone is too large"
