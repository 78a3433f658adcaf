"""The seconds of a training step as a few physical terms, each with one constant of the machine.

A model is a chain of equal *blocks* between two *edges* (the input and the output layers). ``StepWork`` holds the
arithmetic, memory traffic and parameters of a model, without a machine. ``StepSplits`` holds the ways to divide one
step over workers. All fields are columns with one entry a plan, so that many plans are computed in one call.

A block of one pass takes as long as its arithmetic, its memory traffic and its sums along ``tensor``, but no less than
the launch of its kernels. The passes of a step flow through the stages of a pipeline. Then gradients are summed along
``data`` and ``shard``, and the optimizer writes. Transfers between nodes take the time of those within a node plus the
latency of the link. All constants are positive. ``step_model`` fits them to measured steps. ``data_parallel`` is the
form for programs whose work was not counted.

A journal keeps the constants of a plan. From these, ``predicted_step`` gives the time of a step for other settings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from elastune.core.errors import UserError
from elastune.core.journal.records import Entry, PlanMade
from elastune.core.plan.links import allreduce_s
from elastune.core.run import ExecutionSettings

# What one model asks of the machine in one step, told without a machine: arithmetic, traffic and parameters.
#
# A model is a chain of like *blocks* between two *edges* (what reads the samples, and what makes outputs of the last
# block's). Every field is a number or an array with one entry a plan, so that plans of several models stand in one
# call.

Floats = NDArray[np.float64]
HALF = 2  # bytes of a number
TENSOR_SUMS = 4  # of one block and pass: two forward, two backward (Shoeybi et al., "Megatron-LM", 2019)
PASSES = 3  # a backward pass has twice the arithmetic of the forward pass


@dataclass(frozen=True)
class StepWork:
    """Of one sample, forward and backward together, where nothing else is said.

    Attributes:
        blocks: How many there are.
        block_flops: Arithmetic of one block.
        split_bytes: Memory traffic of one block that is divided with its layers.
        boundary_bytes: One tensor between two blocks: what a pipeline sends, and what tensor parallelism sums.
        block_bytes: Gradients of one block's parameters, as they are summed; not of a sample.
        edge_flops: Arithmetic of the last edge.
        edge_bytes: Gradients of one edge's parameters; not of a sample.
        whole_flops: That part of ``block_flops`` which ``tensor`` does not divide.
        tensor_sums: Of one block along ``tensor``, forward and backward; not of a sample.
        summed_bytes: What all of these sum; None: one tensor between two blocks each.
        gathered: In how many parts the whole model's parameters are gathered, where they lie in shares.
        whole_bytes: That part of ``block_bytes`` which ``tensor`` does not divide.
        fullest: Of all plans: by the number of stages, from one on, the share of arithmetic in the stage that has most;
            more are as uneven as the last. Without it all have as much.
        fullest_bytes: The same of parameters.
    """

    blocks: Floats
    block_flops: Floats
    split_bytes: Floats
    boundary_bytes: Floats
    block_bytes: Floats
    edge_flops: Floats
    edge_bytes: Floats
    whole_flops: Floats = field(default_factory=lambda: np.array(0.0))
    tensor_sums: Floats = field(default_factory=lambda: np.array(float(TENSOR_SUMS)))
    summed_bytes: Floats | None = None
    gathered: Floats = field(default_factory=lambda: np.array(1.0))
    whole_bytes: Floats = field(default_factory=lambda: np.array(0.0))
    fullest: tuple[float, ...] = ()
    fullest_bytes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, told in self._told().items():
            values = np.asarray(told, dtype=np.float64)
            object.__setattr__(self, name, values)
            low = 1.0 if name == "blocks" else 0.0
            if not (np.isfinite(values).all() and (values >= low).all()):
                raise ValueError(f"{name} of a model are finite and at least {low:g}")
        for part, of in (("whole_flops", self.block_flops), ("whole_bytes", self.block_bytes)):
            if (getattr(self, part) > of * (1 + 1e-9)).any():
                raise ValueError(f"{part} of a model are a part of all")

    @property
    def tensor_bytes(self) -> Floats:
        """What all of a block's sums along ``tensor`` sum."""
        return self.tensor_sums * self.boundary_bytes if self.summed_bytes is None else self.summed_bytes

    def stage_blocks(self, stages: Floats) -> Floats:
        """How many blocks' arithmetic the fullest of so many stages has."""
        return np.asarray(self.blocks * _of_fullest(self.fullest, stages), dtype=np.float64)

    def stage_share(self, stages: Floats, tensor: Floats) -> Floats:
        """The share of all parameters that one worker along ``tensor`` has of the stage that has most of them."""
        held = self.blocks * _of_fullest(self.fullest_bytes, stages)
        divided = held * (self.block_bytes - self.whole_bytes) + self.edge_bytes
        whole = np.maximum(self.blocks * self.block_bytes + self.edge_bytes, np.finfo(float).tiny)
        share = (divided / tensor + held * self.whole_bytes) / whole
        return np.where(whole > 1, share, 1 / (stages * tensor))  # nothing is known of blocks: evenly

    def _told(self) -> dict[str, Floats]:
        """All that is said, by its name."""
        told = {f.name: getattr(self, f.name) for f in fields(self) if not f.name.startswith("fullest")}
        return {name: each for name, each in told.items() if each is not None}

    def take(self, index: NDArray[np.intp] | slice) -> Self:
        """Of some plans alone; what is one number for all plans stays one."""
        told: dict[str, Any] = {n: each if each.ndim == 0 else each[index] for n, each in self._told().items()}
        return replace(self, **told)


def _of_fullest(shares: Sequence[float], stages: Floats) -> Floats:
    """Of as many stages as ``shares`` tells, theirs; more are as uneven as the most that it tells of."""
    known = np.array(shares or (1.0,))
    share = known[np.minimum(stages, len(known)).astype(np.intp) - 1]
    return np.asarray(share * np.minimum(1.0, len(known) / stages), dtype=np.float64)


def transformer(
    width: Floats, blocks: Floats, heads: Floats, length: Floats, vocabulary: float, *, number_bytes: int = HALF
) -> StepWork:
    """A GPT: attention and a four times wider feed-forward layer in every block, one table of words at both edges.

    Arithmetic as in Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021, appendix, without recomputation.

    Args:
        width: Of the hidden state.
        blocks: How many.
        heads: Of the attention.
        length: Of a sample, in words.
        vocabulary: Words there are.
        number_bytes: Of an activation and a gradient.
    """
    width, heads, length = (np.asarray(each, dtype=np.float64) for each in (width, heads, length))
    tensor = length * width * number_bytes
    scores = heads * length * length * number_bytes
    return StepWork(
        blocks=blocks,
        block_flops=PASSES * (24 * length * width * width + 4 * length * length * width),
        split_bytes=PASSES * (8 * tensor + 3 * scores),
        boundary_bytes=tensor,
        block_bytes=12 * width * width * number_bytes,
        edge_flops=PASSES * 2 * length * width * np.float64(vocabulary),
        edge_bytes=width * np.float64(vocabulary * number_bytes),
    )


def chain_of(
    layers: float,
    flops: float,
    kept_bytes: float,
    gradient_bytes: float,
    *,
    whole_flops: float = 0.0,
    tensor_sums: float | None = None,
    summed_bytes: float = 0.0,
    gathered: float = 1.0,
    divided: float = 1.0,
    fullest: Sequence[float] = (),
    fullest_bytes: Sequence[float] = (),
) -> StepWork:
    """A model of so many like layers without edges, by the sums of all: of one sample, and of gradients.

    ``tensor_sums``: how many there are in a pass, of ``summed_bytes``; None: as many as a transformer's blocks have.
    ``gathered``: as in ``StepWork``. ``divided``: the share of gradients in layers that ``tensor`` divides.
    ``fullest`` and ``fullest_bytes``: as in ``StepWork``.
    """
    kept, none = np.array(kept_bytes / layers), np.array(0.0)
    sums, summed = (
        (TENSOR_SUMS, None) if tensor_sums is None else (tensor_sums / layers, np.array(summed_bytes / layers))
    )
    return StepWork(
        blocks=np.array(float(layers)),
        block_flops=np.array(flops / layers),
        split_bytes=kept,
        boundary_bytes=kept,
        block_bytes=np.array(gradient_bytes / layers),
        edge_flops=none,
        edge_bytes=none,
        whole_flops=np.array(whole_flops / layers),
        tensor_sums=np.array(float(sums)),
        summed_bytes=summed,
        gathered=np.array(float(gathered)),
        whole_bytes=np.array(gradient_bytes / layers * (1 - divided)),
        fullest=tuple(fullest),
        fullest_bytes=tuple(fullest_bytes),
    )


# Ways to split one training step over workers, as columns: one entry a plan.


@dataclass(frozen=True)
class StepSplits:
    """Whole numbers, all at least 1. ``batch`` and ``micro`` are samples: of a step, and of one pass of one replica.

    ``data`` and ``shard`` cut the samples, ``tensor`` the layers, ``pipeline`` the chain of blocks, as the axes of
    ``core.mesh.Mesh``. ``per_node``: how many workers have the fast link in common.
    """

    batch: Floats
    micro: Floats
    data: Floats
    shard: Floats
    tensor: Floats
    pipeline: Floats
    per_node: Floats

    def __post_init__(self) -> None:
        columns = np.broadcast_arrays(*(np.asarray(getattr(self, f.name), dtype=np.float64) for f in fields(self)))
        for column, values in zip(fields(self), columns, strict=True):
            if values.ndim != 1 or not (np.isfinite(values).all() and (values >= 1).all()):
                raise ValueError(f"{column.name} of plans is a column of numbers of at least 1")
            object.__setattr__(self, column.name, values)

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def parts(self) -> Floats:
        """Into how many parts the samples are cut."""
        return self.data * self.shard

    @property
    def workers(self) -> Floats:
        """All of a plan."""
        return self.parts * self.tensor * self.pipeline

    @property
    def passes(self) -> Floats:
        """How often the busiest worker runs its part of the model, forward and backward, in one step."""
        return np.ceil(self.batch / (self.parts * self.micro))

    @property
    def inner(self) -> Floats:
        """Workers that run the same samples together."""
        return self.tensor * self.pipeline

    @property
    def nodes(self) -> Floats:
        """On how many nodes those stand that sum their gradients together: as few as it takes, of those there are."""
        apart = np.ceil(self.parts / np.maximum(1.0, np.floor(self.per_node / self.inner)))
        return np.minimum(apart, np.ceil(self.workers / self.per_node))

    def across(self, neighbours: Floats) -> NDArray[np.bool_]:
        """Whether some of every so many ``neighbours`` in the order of ranks, which stand node by node, are on another
        node than the first of them."""
        cut = (self.workers > self.per_node) & (self.per_node % neighbours > 0)
        return np.asarray((neighbours > self.per_node) | cut, dtype=np.bool_)

    def take(self, index: NDArray[np.intp] | slice) -> Self:
        """Some of the plans."""
        return replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)})


def coordinates(work: StepWork, splits: StepSplits) -> Floats:
    """Where each plan stands, in doublings: plans near one another have like errors. One row a plan.

    The first ``SHAPE`` of them are the shape of a pass's matrices: plans that share it run the same kernels.
    """
    told = (splits.micro, splits.tensor, work.block_flops, splits.passes, splits.parts, splits.pipeline, work.blocks)
    return np.log2(np.maximum(np.stack(np.broadcast_arrays(*told), axis=1).astype(np.float64), 1.0))


SHAPE = 3


# Seconds of a step as a few named physical terms, each with one constant of the machine.
#
# A block of one pass takes what its arithmetic, its memory traffic and its sums along ``tensor`` take, but no less than
# the launching of its kernels; the passes of a step flow through the stages of a pipeline; then gradients are summed
# along ``data`` and ``shard``, and the optimizer writes. What is begun between nodes takes what it takes within one,
# and the link's latency. All constants are positive.
#
# For programs whose work is known (``work``). What is left of this for one that was only timed is ``data_parallel``.

SHARPNESS = 4.0  # of the passage from launching to computing: the norm that joins both


@dataclass(frozen=True)
class Constant:
    """One of ``CONSTANTS``: what is taken for it before any measurement, and by what factor that may be off."""

    name: str
    prior: float
    factor: float

    def __post_init__(self) -> None:
        if not (0 < self.prior < np.inf and 1 < self.factor < np.inf):
            raise ValueError(f"a constant is positive and its factor above 1, not {self.prior} and {self.factor}")


CONSTANTS: Mapping[str, str] = MappingProxyType(
    {
        "flop_s": "seconds of one floating-point operation in a matrix product",
        "edge_flop_s": "the same in the last edge, whose products may have another precision",
        "split_byte_s": "seconds of one byte of memory traffic that is divided with the layers",
        "whole_byte_s": "seconds of one byte between blocks, in all that is not divided with the layers",
        "launch_s": "seconds to launch the kernels of one block, forward and backward",
        "tensor_begin_s": "seconds to begin a sum along tensor, however many take part",
        "tensor_sum_s": "seconds of a sum along tensor, a hop",
        "tensor_byte_s": "seconds of one byte of a sum along tensor",
        "send_s": "seconds to begin a send between two stages",
        "send_byte_s": "seconds of one byte between two stages",
        "gradient_hop_s": "seconds to begin a sum of gradients, a hop",
        "gradient_byte_s": "seconds of one byte of a sum of gradients within a node",
        "across_hop_s": "seconds that a hop between nodes takes beside what one within a node does",
        "across_byte_s": "seconds of one byte between nodes",
        "update_byte_s": "seconds of the optimizer for one byte of gradients",
        "pass_s": "seconds of one pass, whatever is in it",
        "fixed_s": "seconds of one step, whatever is in it",
    }
)
"""Name -> what it is. A vector of constants has them in this order."""


def seconds(constants: Floats, work: StepWork, splits: StepSplits, sharded: NDArray[np.bool_] | None = None) -> Floats:
    """Of one step of every plan.

    Args:
        constants: In the order of ``CONSTANTS``.
        work: What is computed.
        splits: The plans.
        sharded: Of which plans ``shard`` divides parameters, too; None: of none.
    """
    whole: Floats = np.sum(list(parts(constants, work, splits, sharded).values()), axis=0)
    return whole


def parts(
    constants: Floats, work: StepWork, splits: StepSplits, sharded: NDArray[np.bool_] | None = None
) -> dict[str, Floats]:
    """The same, told apart: what limits a plan is the largest of them."""
    c = dict(zip(CONSTANTS, constants, strict=True))
    micro, tensor, stages, passes = splits.micro, splits.tensor, splits.pipeline, splits.passes
    computing = micro * (
        ((work.block_flops - work.whole_flops) / tensor + work.whole_flops) * c["flop_s"]
        + work.split_bytes / tensor * c["split_byte_s"]
        + work.boundary_bytes * c["whole_byte_s"]
    )
    across = splits.across(tensor)
    first = c["tensor_sum_s"] + np.where(across, c["across_hop_s"], 0.0)
    hops = 2 * (tensor - 1)
    begun = np.where(tensor > 1, c["tensor_begin_s"], 0.0)
    meeting, moving = work.tensor_sums * (begun + hops * first), micro * work.tensor_bytes * _tensor_byte_s(c, splits)
    busy = computing + moving
    launched = _longer(busy, c["launch_s"])
    block = launched + meeting  # whoever is early at a sum waits, however much there is to launch
    edge = micro * work.edge_flops / tensor * c["edge_flop_s"]
    held = work.stage_blocks(stages)
    sending = _sending(c, work, splits)
    gradients = _gradients(work, splits)
    return {
        "compute": passes * (held * computing + edge),
        "launch": passes * (held * (launched - busy) + c["pass_s"]),
        "tensor": passes * held * (meeting + moving),
        "pipeline": (work.blocks - held) * block + (stages - 1) * c["pass_s"] + (passes + stages - 2) * sending,
        "gradients": _summing(c, work, splits, gradients) if sharded is None else _shared(c, work, splits, sharded),
        "update": gradients / splits.shard * c["update_byte_s"],
        "fixed": np.broadcast_to(c["fixed_s"], block.shape),
    }


def _shared(c: Mapping[str, float], work: StepWork, splits: StepSplits, sharded: NDArray[np.bool_]) -> Floats:
    """Sums of gradients where some plans are ``sharded``: in every pass of these each part's values are gathered twice
    and its gradients leave once, which is half a sum each."""
    gradients = _gradients(work, splits)
    gathering = splits.passes * 1.5 * _summing(c, work, splits, gradients, work.gathered)
    return np.where(sharded, gathering, _summing(c, work, splits, gradients))


def _tensor_byte_s(c: Mapping[str, float], splits: StepSplits) -> Floats:
    """Seconds of a byte that workers along ``tensor`` sum: each sends its part to each, there and back. Between nodes
    those of one node share its link."""
    tensor, near = splits.tensor, np.minimum(splits.tensor, splits.per_node)
    among = 2 * near * np.maximum(tensor - near, 1) / tensor * c["across_byte_s"]
    return np.asarray(np.where(splits.across(tensor), among, 2 * (tensor - 1) / tensor * c["tensor_byte_s"]))


def _gradients(work: StepWork, splits: StepSplits) -> Floats:
    """Bytes of one worker: those of layers that ``tensor`` leaves whole, every worker along it has."""
    divided = work.blocks / splits.pipeline * (work.block_bytes - work.whole_bytes) + work.edge_bytes
    return divided / splits.tensor + work.blocks / splits.pipeline * work.whole_bytes


def _sending(c: Mapping[str, float], work: StepWork, splits: StepSplits) -> Floats:
    """Of one pass from a stage to the next, there and back; 0 where there is one stage. Each worker along ``tensor``
    sends all of it to its like: between nodes over one link."""
    across = splits.across(splits.inner)
    begin = c["send_s"] + np.where(across, c["across_hop_s"], 0.0)
    byte = np.where(across, np.minimum(splits.tensor, splits.per_node) * c["across_byte_s"], c["send_byte_s"])
    return np.where(splits.pipeline > 1, 2 * (begin + splits.micro * work.boundary_bytes * byte), 0.0)


def _summing(
    c: Mapping[str, float], work: StepWork, splits: StepSplits, gradients: Floats, sums: Floats | float = 1.0
) -> Floats:
    """Of ``gradients``, bytes of a worker, in so many ``sums``: a ring within each node, then one among nodes, whose
    link they share. Where state is divided, everybody sends to everybody (``parallel.comm.owned``): nothing is summed
    within a node before it leaves, so that each of its workers sends as much over the link as one would of their
    sum."""
    neighbours = np.minimum(splits.inner, splits.per_node)
    senders = neighbours * np.where(splits.shard * splits.inner > 1, np.ceil(splits.parts / splits.nodes), 1.0)
    near = sums * c["gradient_hop_s"], c["gradient_byte_s"]
    far = sums * (c["gradient_hop_s"] + c["across_hop_s"]), senders * c["across_byte_s"]
    summed = allreduce_s(near, far, gradients, splits.parts, splits.nodes)
    # Both edges of a pipeline's chain have one table, whose gradients they sum.
    tied = np.where(splits.pipeline > 1, work.edge_bytes / splits.tensor * c["gradient_byte_s"], 0.0)
    return np.asarray(summed + tied, dtype=np.float64)


def _longer(first: Floats, second: Floats) -> Floats:
    """The longer of two times, rounded off where they are near one another."""
    most = np.maximum(first, second)
    return most * ((first / most) ** SHARPNESS + (second / most) ** SHARPNESS) ** (1 / SHARPNESS)


# What the record of a cluster's plan says of steps, of any means and batch: its constants, in the physical form.

MODELLED_MECHANISMS = (
    "replicated",
    "zero",
    "sharded",
    "tensor",
    "pipeline",
)  # parts of mechanisms that the step model speaks of
NEGLIGIBLE_S = 1e-12  # seconds of a constant that plans of before did not have


def last_plan(entries: Sequence[Entry]) -> PlanMade | None:
    """The last plan that a journal tells of."""
    made = [entry.record for entry in entries if isinstance(entry.record, PlanMade)]
    return made[-1] if made else None


def predicted_step(made: PlanMade, execution: ExecutionSettings, batch: int) -> float | None:
    """Seconds by the plan's physical form; None for mechanisms that it does not speak of."""
    if any(part not in MODELLED_MECHANISMS for part in execution.mechanism.split("+")):
        return None
    size, mesh = made.found["size"], execution.first_mesh
    micro = min(execution.micro_batch or batch, math.ceil(batch / mesh.batch))
    columns = (batch, micro, mesh.data, mesh.shard, mesh.tensor, mesh.pipeline, made.asked["workers_per_node"])
    splits = StepSplits(*(np.array([each], float) for each in columns))
    known = {
        name: size[name]
        for name in ("whole_flops", "tensor_sums", "summed_bytes", "gathered", "divided", "fullest", "fullest_bytes")
        if name in size
    }
    work = chain_of(size["layers"], size["flops"], size["kept_bytes"], size["gradient_bytes"], **known)
    sharded = np.array(["sharded" in execution.mechanism.split("+")])
    constants = np.array([made.constants.get(name, NEGLIGIBLE_S) for name in CONSTANTS])
    return float(seconds(constants, work, splits, sharded)[0])


def check_program(made: PlanMade, program: object) -> None:
    """Raise ``UserError`` where ``made`` is of another program than ``program``: its path, or a mapping that has it."""
    path = str(program.get("path", "")) if isinstance(program, Mapping) else str(program)
    if Path(path).resolve() != Path(made.program).resolve():
        raise UserError("a plan must be of the program that ran", f"{made.program}, not {path}", "use another --plan")
