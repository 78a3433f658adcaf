"""What one model asks of the machine in one step, told without a machine: arithmetic, traffic and parameters.

A model is a chain of like *blocks* between two *edges* (what reads the samples, and what makes outputs of the last
block's). Every field is a number or an array with one entry a plan, so that plans of several models stand in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

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
