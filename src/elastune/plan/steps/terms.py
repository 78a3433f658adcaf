"""Seconds of a step as a few named physical terms, each with one constant of the machine.

A block of one pass takes what its arithmetic, its memory traffic and its sums along ``tensor`` take, but no less than
the launching of its kernels; the passes of a step flow through the stages of a pipeline; then gradients are summed
along ``data`` and ``shard``, and the optimizer writes. What is begun between nodes takes what it takes within one, and
the link's latency. All constants are positive.

For programs whose work is known (``work``). What is left of this for one that was only timed is ``data_parallel``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from elastune.plan.links import summed_s
from elastune.plan.steps.splits import StepSplits
from elastune.plan.steps.work import Floats, StepWork

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
    link they share. Where state is divided, everybody sends to everybody (``comm.owned``): nothing is summed within a
    node before it leaves, so that each of its workers sends as much over the link as one would of their sum."""
    neighbours = np.minimum(splits.inner, splits.per_node)
    senders = neighbours * np.where(splits.shard * splits.inner > 1, np.ceil(splits.parts / splits.nodes), 1.0)
    near = sums * c["gradient_hop_s"], c["gradient_byte_s"]
    far = sums * (c["gradient_hop_s"] + c["across_hop_s"]), senders * c["across_byte_s"]
    summed = summed_s(near, far, gradients, splits.parts, splits.nodes)
    # Both edges of a pipeline's chain have one table, whose gradients they sum.
    tied = np.where(splits.pipeline > 1, work.edge_bytes / splits.tensor * c["gradient_byte_s"], 0.0)
    return np.asarray(summed + tied, dtype=np.float64)


def _longer(first: Floats, second: Floats) -> Floats:
    """The longer of two times, rounded off where they are near one another."""
    most = np.maximum(first, second)
    return most * ((first / most) ** SHARPNESS + (second / most) ** SHARPNESS) ** (1 / SHARPNESS)
