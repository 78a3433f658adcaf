"""What the fullest worker of a plan holds, for many plans at once; modelled, before anything is launched.

State is divided as ``plan.state_bytes`` says for parts with so many holders, but that the first stage of a
pipeline holds an edge of the model beside its blocks. Activations of a transformer as in Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", MLSys 2023, section 4: a pipeline's first stage keeps those of as
many passes as there are stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from elastune.plan.copies import further_parts
from elastune.plan.steps.splits import StepSplits
from elastune.plan.steps.work import Floats, StepWork

BUFFERS = 3  # of sums that survive a loss (comm.reducer.Bucket): two that take turns, and what was given out
DIVIDED_BUFFERS = 2  # of sums that stop at their holders (comm.owned.OwnedBucket): what is sent, and what is received


@dataclass(frozen=True)
class HeldAlone:
    """What one worker holds that trains alone, in bytes.

    ``kept_split`` and ``kept_whole``: of one sample's activations until its backward pass, those that are divided with
    the layers and the others. ``fixed``: what a pass needs whatever its samples, as
    a gradient on its way. ``buffer``: one of those that gradients are summed through. ``copies``: holders of each part
    of divided state, on however many workers.
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
    """Of the fullest worker of every plan.

    Args:
        held: By one worker alone.
        work: How parameters lie in blocks and edges.
        splits: The plans.
        sharded: Whether ``shard`` divides parameters too, not only gradients and optimizer state.
    """
    share = work.stage_share(splits.pipeline, splits.tensor)
    own, others = further_parts(splits.data, splits.shard, splits.inner, held.copies)
    # What ``tensor`` leaves whole has as many holders as workers along it.
    whole = np.where(splits.tensor > 1, work.stage_share(splits.pipeline, np.full_like(splits.tensor, np.inf)), 0.0)
    wards = others * (share - whole) / splits.shard  # parts that it holds for others, and does not compute with
    owned = share * (1 + own) / splits.shard + wards
    parameters = held.parameters * (owned if sharded else share + wards)
    state = (held.gradients + held.optimizer) * owned
    in_flight = np.minimum(splits.passes, splits.pipeline)
    kept = (held.kept_split / splits.tensor + held.kept_whole) / splits.pipeline
    divided = np.where(splits.parts > 1, DIVIDED_BUFFERS, 0)  # one worker's sums are its gradients
    buffers = np.where(splits.shard * splits.inner > 1, divided, BUFFERS) * held.buffer * share
    moment = held.fixed * (2 if sharded else 1)  # as much as a layer's gradient is what is gathered of its parameters
    return parameters + state + buffers + in_flight * splits.micro * kept + moment


def held_most(held: HeldAlone, work: StepWork, splits: StepSplits, sharded: NDArray[np.bool_], most: float) -> Floats:
    """Bytes of parameters that a model could have, so that the fullest worker of each plan holds ``most``.

    All that grows with parameters is taken to grow as they do; activations stay as they are.
    """
    light = replace(held, parameters=0.0, gradients=0.0, optimizer=0.0, fixed=0.0, buffer=0.0)
    passes = peak_bytes(light, work, splits)
    state = np.where(sharded, peak_bytes(held, work, splits, True), peak_bytes(held, work, splits)) - passes
    return np.asarray(held.parameters * np.maximum(0.0, most - passes) / np.maximum(state, 1.0), dtype=np.float64)
