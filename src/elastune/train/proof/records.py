"""What the steps of a run did, as plain values: samples, losses, gradients leaf by leaf, settings and weights.

A worker writes one line of JSON for each step (``recorder``). ``read_run`` puts the lines of all workers together, and
``compare`` finds the first difference between two runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

MOST_VALUES = 256  # of a leaf: evenly spaced; its norm and its digest are of all of it

SUM, MEAN, OTHER = "sum", "mean", "other"
BATCH_NORM, DROPOUT = "BatchNorm", "dropout"
SCHEDULE = ".last_epoch"  # ends the name of a scheduler's counter among a program's variables


@dataclass(frozen=True)
class Leaf:
    """One tensor of a gradient or of the weights.

    Attributes:
        norm: The root of the sum of its squares.
        values: Up to ``MOST_VALUES`` of its elements, evenly spaced.
        digest: Of all of its bytes: equal where the bits are.
    """

    norm: float
    values: tuple[float, ...]
    digest: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Leaf:
        """The leaf of ``tensor``, on any device."""
        flat = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        flat = flat.reshape(-1).cpu()
        picked = flat[:: max(1, flat.numel() // MOST_VALUES)][:MOST_VALUES].double().tolist()
        content = flat.contiguous().view(torch.uint8).numpy().tobytes()
        return cls(float(flat.double().norm()), tuple(picked), hashlib.sha256(content).hexdigest()[:16])


Leaves = Mapping[str, Leaf]


@dataclass(frozen=True)
class LossPart:
    """A line of the program that reduces to a loss: by a sum, by a mean, or otherwise (``kind``)."""

    kind: str
    line: int


@dataclass(frozen=True)
class PassRecord:
    """One pass of a step: the samples of one slot, or of the whole batch.

    Attributes:
        slot: The slot, from 0.
        rank: The worker that ran it.
        weight: The part of the global batch that it stands for.
        numbers: The numbers of its samples in the data set; of a stream their places.
        content: A checksum of the batch that the program was given.
        losses: The values given to ``session.backward``.
        gradient: The gradient of this pass alone; None: not recorded.
        parts: Where the program reduced to the loss, the last such line first; empty: not recorded.
        line: The line that called ``session.backward``; 0: not known.
        coarse: Values were cast on the way to the loss, as under autocast: its gradient rounds coarsely.
    """

    slot: int
    rank: int
    weight: float
    numbers: tuple[int, ...]
    content: int
    losses: tuple[float, ...] = ()
    gradient: Leaves | None = None
    parts: tuple[LossPart, ...] = ()
    line: int = 0
    coarse: bool = False


@dataclass(frozen=True)
class StepRecord:
    """One step, as the workers took it together.

    Attributes:
        step: Its number, from 1.
        epoch: Its epoch, from 0.
        passes: The passes of all workers, by slot.
        settings: The optimizer's settings, by name.
        gradient: The gradient that the optimizer was given.
        weights: The parameters after the step.
        before: The parameters before it; only of the first step of a process.
        samples: Samples in the training set; 0: not known.
        variables: The program's own plain variables as it asked for the next batch, by function and name.
        layers: ``BATCH_NORM`` and ``DROPOUT``, where the model has such layers; only where passes were recorded apart.
    """

    step: int
    epoch: int
    passes: tuple[PassRecord, ...]
    settings: Mapping[str, str]
    gradient: Leaves
    weights: Leaves
    before: Leaves | None = None
    layers: tuple[str, ...] = ()
    samples: int = 0
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The samples of the global batch, in order."""
        return tuple(number for each in self.passes for number in each.numbers)

    @property
    def loss(self) -> float:
        """The mean over passes, by their weights."""
        return sum(each.weight * sum(each.losses) for each in self.passes)


@dataclass(frozen=True)
class RunRecord:
    """The steps of a run in order, and its reports by the step before them."""

    steps: tuple[StepRecord, ...]
    reports: tuple[tuple[int, Mapping[str, float]], ...] = field(default=())

    @property
    def epochs(self) -> int:
        """How many epochs were begun."""
        return len({step.epoch for step in self.steps})

    def joined(self, other: RunRecord) -> RunRecord:
        """This run, gone on with by ``other``."""
        return RunRecord((*self.steps, *other.steps), (*self.reports, *other.reports))


def encode(step: StepRecord) -> str:
    """One line of JSON."""
    return json.dumps(asdict(step))


def read_run(folder: Path, reports: Iterable[tuple[int, Mapping[str, float]]] = ()) -> RunRecord:
    """The run whose workers wrote their steps in ``folder``."""
    by_step: dict[int, list[StepRecord]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            step = _step(json.loads(line))
            by_step.setdefault(step.step, []).append(step)
    return RunRecord(tuple(_together(by_step[number]) for number in sorted(by_step)), tuple(reports))


def _together(parts: list[StepRecord]) -> StepRecord:
    first = min(parts, key=lambda part: min((each.rank for each in part.passes), default=0))
    passes = [each for part in parts for each in part.passes]
    # A worker without samples runs a copy that counts nothing.
    counted = [each for each in passes if each.weight > 0]
    merged = asdict(first) | {"passes": [asdict(each) for each in sorted(counted, key=lambda each: each.slot)]}
    return _step(merged)


def _step(fields: dict[str, Any]) -> StepRecord:
    passes = tuple(
        PassRecord(
            **{
                **each,
                "numbers": tuple(each["numbers"]),
                "losses": tuple(each["losses"]),
                "gradient": _leaves(each["gradient"]),
                "parts": tuple(LossPart(**part) for part in each["parts"]),
            }
        )
        for each in fields["passes"]
    )
    leaves = {name: _leaves(fields[name]) for name in ("gradient", "weights", "before")}
    return StepRecord(**{**fields, "passes": passes, "layers": tuple(fields["layers"]), **leaves})


def _leaves(fields: dict[str, Any] | None) -> dict[str, Leaf] | None:
    if fields is None:
        return None
    return {name: Leaf(**{**leaf, "values": tuple(leaf["values"])}) for name, leaf in fields.items()}
