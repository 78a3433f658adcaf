"""The seconds of a training step as a few physical terms, each with one constant of the machine.

A model is a chain of equal *blocks* between two *edges* (the input and the output layers). ``StepWork`` holds the
arithmetic, memory traffic and parameters of a model, without a machine. ``StepSplits`` holds divisions of one step
over workers. All fields are columns with one entry a plan, so that many plans are computed in one call.

A block of one pass takes the time of its arithmetic, its memory traffic and its sums along ``tensor``. The launch of
its kernels is a lower bound. The passes of a step flow through the stages of a pipeline. Then gradients are summed
along ``data`` and ``shard``, and the optimizer writes. Transfers between nodes take the time of those within a node
plus the latency of the link. All constants are positive. ``step_model`` fits them to measured steps. ``data_parallel``
is the form for programs whose work was not counted.

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

# The work of one model in one step.

Floats = NDArray[np.float64]
HALF = 2  # bytes of a number
TENSOR_SUMS = 4  # of one block and pass: two forward, two backward (Shoeybi et al., "Megatron-LM", 2019)
PASSES = 3  # a backward pass has twice the arithmetic of the forward pass


@dataclass(frozen=True)
class StepWork:
    """The work of a model: of one sample, forward and backward together, unless an attribute says otherwise.

    Attributes:
        blocks: The number of blocks.
        block_flops: Arithmetic of one block.
        split_bytes: Memory traffic of one block that is divided with its layers.
        boundary_bytes: One tensor between two blocks: what a pipeline sends, and what tensor parallelism sums.
        block_bytes: Gradients of one block's parameters, as they are summed; not of a sample.
        edge_flops: Arithmetic of the last edge.
        edge_bytes: Gradients of one edge's parameters; not of a sample.
        whole_flops: The part of ``block_flops`` that ``tensor`` does not divide.
        tensor_sums: The sums of one block along ``tensor``, forward and backward; not of a sample.
        summed_bytes: The bytes of all these sums; None: one tensor between two blocks each.
        gathered: The number of parts in which the model's parameters are gathered, where they are divided.
        whole_bytes: The part of ``block_bytes`` that ``tensor`` does not divide.
        fullest: By the number of stages, from one on, the share of arithmetic in the largest stage; more stages are as
            uneven as the last entry. Without it all stages are equal.
        fullest_bytes: The same for parameters.
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
        for name, column in self._columns().items():
            values = np.asarray(column, dtype=np.float64)
            object.__setattr__(self, name, values)
            low = 1.0 if name == "blocks" else 0.0
            if not (np.isfinite(values).all() and (values >= low).all()):
                raise ValueError(f"{name} of a model are finite and at least {low:g}")
        for part, of in (("whole_flops", self.block_flops), ("whole_bytes", self.block_bytes)):
            if (getattr(self, part) > of * (1 + 1e-9)).any():
                raise ValueError(f"{part} of a model are a part of all")

    @property
    def tensor_bytes(self) -> Floats:
        """The bytes of all sums of a block along ``tensor``."""
        return self.tensor_sums * self.boundary_bytes if self.summed_bytes is None else self.summed_bytes

    def stage_blocks(self, stages: Floats) -> Floats:
        """Return the number of blocks whose arithmetic equals that of the fullest stage."""
        return np.asarray(self.blocks * _of_fullest(self.fullest, stages), dtype=np.float64)

    def stage_share(self, stages: Floats, tensor: Floats) -> Floats:
        """Return the share of all parameters that one worker along ``tensor`` has in the stage with most of them."""
        held = self.blocks * _of_fullest(self.fullest_bytes, stages)
        divided = held * (self.block_bytes - self.whole_bytes) + self.edge_bytes
        whole = np.maximum(self.blocks * self.block_bytes + self.edge_bytes, np.finfo(float).tiny)
        share = (divided / tensor + held * self.whole_bytes) / whole
        return np.where(whole > 1, share, 1 / (stages * tensor))  # nothing is known of blocks: evenly

    def _columns(self) -> dict[str, Floats]:
        """All columns by name."""
        columns = {f.name: getattr(self, f.name) for f in fields(self) if not f.name.startswith("fullest")}
        return {name: each for name, each in columns.items() if each is not None}

    def take(self, index: NDArray[np.intp] | slice) -> Self:
        """Return the work of some plans; a number for all plans stays one number."""
        columns: dict[str, Any] = {n: each if each.ndim == 0 else each[index] for n, each in self._columns().items()}
        return replace(self, **columns)


def _of_fullest(shares: Sequence[float], stages: Floats) -> Floats:
    """Of as many stages as ``shares`` tells, theirs; more are as uneven as the most that it tells of."""
    known = np.array(shares or (1.0,))
    share = known[np.minimum(stages, len(known)).astype(np.intp) - 1]
    return np.asarray(share * np.minimum(1.0, len(known) / stages), dtype=np.float64)


def transformer(
    width: Floats, blocks: Floats, heads: Floats, length: Floats, vocabulary: float, *, number_bytes: int = HALF
) -> StepWork:
    """Return the work of a GPT: attention and a four times wider feed-forward layer in every block, one table at both
    edges.

    Arithmetic as in Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021, appendix, without recomputation.

    Args:
        width: The width of the hidden state.
        blocks: The number of blocks.
        heads: The heads of the attention.
        length: The length of a sample, in tokens.
        vocabulary: The number of tokens in the vocabulary.
        number_bytes: The bytes of an activation or a gradient.
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
    """Return the work of a model of so many equal layers without edges, from the totals of one sample and
    of gradients.

    Args:
        tensor_sums: The sums of a pass, of ``summed_bytes``; None: as many as in a transformer's blocks.
        gathered: As in ``StepWork``.
        divided: The share of gradients in layers that ``tensor`` divides.
        fullest, fullest_bytes: As in ``StepWork``.
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


# The division of a training step over workers, one entry a plan.


@dataclass(frozen=True)
class StepSplits:
    """How steps are divided over workers: columns of whole numbers, all at least 1, with one entry a plan.

    Attributes:
        batch: The samples of a step.
        micro: The samples of one pass of one replica.
        data, shard: The parts of the samples, as the axes of ``core.mesh.Mesh``.
        tensor: The parts of the layers.
        pipeline: The parts of the chain of blocks.
        per_node: The workers that share the fast link.
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
        """The number of parts that the samples are cut into."""
        return self.data * self.shard

    @property
    def workers(self) -> Floats:
        """The workers of each plan."""
        return self.parts * self.tensor * self.pipeline

    @property
    def passes(self) -> Floats:
        """The passes of the busiest worker, forward and backward, in one step."""
        return np.ceil(self.batch / (self.parts * self.micro))

    @property
    def inner(self) -> Floats:
        """Workers that run the same samples together."""
        return self.tensor * self.pipeline

    @property
    def nodes(self) -> Floats:
        """The number of nodes of the workers that sum their gradients together: as few as possible."""
        apart = np.ceil(self.parts / np.maximum(1.0, np.floor(self.per_node / self.inner)))
        return np.minimum(apart, np.ceil(self.workers / self.per_node))

    def across(self, neighbours: Floats) -> NDArray[np.bool_]:
        """Whether some of every so many ``neighbours`` in the order of ranks are on another node than the first of
        them.
        """
        cut = (self.workers > self.per_node) & (self.per_node % neighbours > 0)
        return np.asarray((neighbours > self.per_node) | cut, dtype=np.bool_)

    def take(self, index: NDArray[np.intp] | slice) -> Self:
        """Return some of the plans."""
        return replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)})


def coordinates(work: StepWork, splits: StepSplits) -> Floats:
    """Return the place of each plan, in doublings: near plans have similar errors. One row a plan.

    The first ``SHAPE`` of them are the shape of a pass's matrices: plans with the same shape run the same kernels.
    """
    terms = (splits.micro, splits.tensor, work.block_flops, splits.passes, splits.parts, splits.pipeline, work.blocks)
    return np.log2(np.maximum(np.stack(np.broadcast_arrays(*terms), axis=1).astype(np.float64), 1.0))


SHAPE = 3


# The physical form.

SHARPNESS = 4.0  # of the passage from launching to computing: the norm that joins both


@dataclass(frozen=True)
class Constant:
    """One of ``CONSTANTS``: its assumed value before any measurement, and the factor by which that may be wrong."""

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
"""Name -> meaning. A vector of constants has them in this order."""


def seconds(constants: Floats, work: StepWork, splits: StepSplits, sharded: NDArray[np.bool_] | None = None) -> Floats:
    """Return the seconds of one step of every plan.

    Args:
        constants: In the order of ``CONSTANTS``.
        work: The work of each plan.
        splits: The plans.
        sharded: The plans in which ``shard`` divides parameters, too; None: none.
    """
    whole: Floats = np.sum(list(parts(constants, work, splits, sharded).values()), axis=0)
    return whole


def parts(
    constants: Floats, work: StepWork, splits: StepSplits, sharded: NDArray[np.bool_] | None = None
) -> dict[str, Floats]:
    """Return the parts of these seconds by name. The largest part limits a plan."""
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
    begin_s = np.where(tensor > 1, c["tensor_begin_s"], 0.0)
    meeting, moving = work.tensor_sums * (begin_s + hops * first), micro * work.tensor_bytes * _tensor_byte_s(c, splits)
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
    """Sums of gradients where some plans are ``sharded``.

    In every pass of these, each part's values are gathered twice and its gradients leave once, which is half a sum
    each.
    """
    gradients = _gradients(work, splits)
    gathering = splits.passes * 1.5 * _summing(c, work, splits, gradients, work.gathered)
    return np.where(sharded, gathering, _summing(c, work, splits, gradients))


def _tensor_byte_s(c: Mapping[str, float], splits: StepSplits) -> Floats:
    """Seconds of a byte that workers along ``tensor`` sum: each sends its part to each, there and back.

    Between nodes, the workers of one node share its link.
    """
    tensor, near = splits.tensor, np.minimum(splits.tensor, splits.per_node)
    among = 2 * near * np.maximum(tensor - near, 1) / tensor * c["across_byte_s"]
    return np.asarray(np.where(splits.across(tensor), among, 2 * (tensor - 1) / tensor * c["tensor_byte_s"]))


def _gradients(work: StepWork, splits: StepSplits) -> Floats:
    """Bytes of one worker's gradients: every worker along ``tensor`` has those of undivided layers."""
    divided = work.blocks / splits.pipeline * (work.block_bytes - work.whole_bytes) + work.edge_bytes
    return divided / splits.tensor + work.blocks / splits.pipeline * work.whole_bytes


def _sending(c: Mapping[str, float], work: StepWork, splits: StepSplits) -> Floats:
    """Seconds of one pass from a stage to the next, there and back; 0 where there is one stage.

    Each worker along ``tensor`` sends all of it to its counterpart: between nodes over one link.
    """
    across = splits.across(splits.inner)
    begin = c["send_s"] + np.where(across, c["across_hop_s"], 0.0)
    byte = np.where(across, np.minimum(splits.tensor, splits.per_node) * c["across_byte_s"], c["send_byte_s"])
    return np.where(splits.pipeline > 1, 2 * (begin + splits.micro * work.boundary_bytes * byte), 0.0)


def _summing(
    c: Mapping[str, float], work: StepWork, splits: StepSplits, gradients: Floats, sums: Floats | float = 1.0
) -> Floats:
    """Seconds of ``gradients``, bytes of a worker, in so many ``sums``: a ring within each node, then one
    among nodes.

    The workers of a node share its link. Where state is divided, everybody sends to everybody
    (``parallel.comm.owned``). Nothing is summed within a node before it leaves, so each worker sends as much over the
    link as one would of their sum.
    """
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


# Predictions from the constants that a journal keeps.

MODELLED_MECHANISMS = (
    "replicated",
    "zero",
    "sharded",
    "tensor",
    "pipeline",
)  # parts of mechanisms that the step model speaks of
NEGLIGIBLE_S = 1e-12  # seconds of a constant that plans of before did not have


def last_plan(entries: Sequence[Entry]) -> PlanMade | None:
    """Return the last plan in a journal."""
    made = [entry.record for entry in entries if isinstance(entry.record, PlanMade)]
    return made[-1] if made else None


def predicted_step(made: PlanMade, execution: ExecutionSettings, batch: int) -> float | None:
    """Return the seconds by the plan's physical form; None for mechanisms outside of it."""
    if any(part not in MODELLED_MECHANISMS for part in execution.mechanism.split("+")):
        return None
    size, mesh = made.answer["size"], execution.first_mesh
    micro = min(execution.micro_batch or batch, math.ceil(batch / mesh.batch))
    columns = (batch, micro, mesh.data, mesh.shard, mesh.tensor, mesh.pipeline, made.request["workers_per_node"])
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
    """Raise ``UserError`` where ``made`` is the plan of another program than ``program``: its path, or a mapping with
    it.
    """
    path = str(program.get("path", "")) if isinstance(program, Mapping) else str(program)
    if Path(path).resolve() != Path(made.program).resolve():
        raise UserError("a plan must be of the program that ran", f"{made.program}, not {path}", "use another --plan")
