"""Records of a run's steps as plain values, and the one comparison of them: bits, gradients, and what differs.

``first_difference`` compares two runs that should do the same. ``explain_slots`` compares a step of the whole batch
in one pass with the same step in several, and says what kind of loss makes them differ. Everything here is a pure
function of records.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

# What the steps of a run did, as plain values: samples, losses, gradients leaf by leaf, settings and weights.
#
# A worker writes one line of JSON for each step (``recorder``). ``read_run`` puts the lines of all workers together,
# and ``compare`` finds the first difference between two runs.

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


# The one comparison of steps: bits, gradients leaf by leaf, and what makes the difference.

SAME = 1e-4  # gradients that differ by less, relatively, differ by rounding
COARSE = 5e-2  # likewise under autocast
FITS = 5e-3  # a combination of gradients that comes as near explains the other gradient
MOST_NAMED = 3
What = Literal["steps", "beginning", "samples", "content", "settings", "loss", "gradient", "weights"]


@dataclass(frozen=True)
class StepDifference:
    """Where two runs first differ.

    Attributes:
        step: The number of the step, from 1.
        what: The first of the step's values that differs, in the order in which they come about.
        detail: Both values, or how far apart they are.
        passes: The passes of both runs that differ first, if it is theirs.
        apart: The relative difference, of values that have one.
    """

    step: int
    what: What
    detail: str
    passes: tuple[PassRecord, PassRecord] | None = None
    apart: float = 0.0


def first_difference(one: RunRecord, other: RunRecord, *, most: float = 0.0) -> StepDifference | None:
    """The first difference between two runs that should be the same; None where there is none.

    Args:
        one: The run to compare with.
        other: The run that is compared.
        most: The relative difference that counts as none; 0: all bits must be equal.
    """
    for mine, theirs in zip(one.steps, other.steps, strict=False):
        difference = _step_difference(mine, theirs, most)
        if difference is not None:
            return difference
    if len(one.steps) != len(other.steps):
        short = min(len(one.steps), len(other.steps))
        return StepDifference(short + 1, "steps", f"{len(one.steps)} steps, and {len(other.steps)}")
    return None


def _step_difference(mine: StepRecord, theirs: StepRecord, most: float) -> StepDifference | None:
    step = mine.step
    if theirs.step != step:
        return StepDifference(step, "steps", f"step {step}, and step {theirs.step}")
    if mine.before is not None and theirs.before is not None and (apart := distance(mine.before, theirs.before)) > most:
        return StepDifference(step, "beginning", named_leaves(mine.before, theirs.before, most), apart=apart)
    if mine.numbers != theirs.numbers:
        return StepDifference(step, "samples", f"{_few(mine.numbers)}, and {_few(theirs.numbers)}")
    same_cut = [each.numbers for each in mine.passes] == [each.numbers for each in theirs.passes]
    pairs = list(zip(mine.passes, theirs.passes, strict=True)) if same_cut else []
    for first, second in pairs:
        if first.content != second.content:
            return StepDifference(step, "content", f"the batch of samples {_few(first.numbers)}", (first, second))
    for first, second in pairs:
        if (apart := _numbers_apart(first.losses, second.losses)) > most:
            detail = f"{sum(first.losses):.6g}, and {sum(second.losses):.6g}"
            return StepDifference(step, "loss", detail, (first, second), apart)
    if (apart := distance(mine.gradient, theirs.gradient)) > most:
        return StepDifference(step, "gradient", named_leaves(mine.gradient, theirs.gradient, most), apart=apart)
    if changed := [name for name, value in mine.settings.items() if theirs.settings.get(name) != value]:
        texts = [f"{name} {mine.settings[name]}, and {theirs.settings.get(name, 'none')}" for name in changed]
        return StepDifference(step, "settings", "; ".join(texts[:MOST_NAMED]))
    if (apart := distance(mine.weights, theirs.weights)) > most:
        return StepDifference(step, "weights", named_leaves(mine.weights, theirs.weights, most), apart=apart)
    return None


def changed_variables(one: RunRecord, other: RunRecord, *, kinds: tuple[type, ...] = ()) -> dict[str, tuple[str, str]]:
    """The program's own variables that differ after the same step, with both values at the first such step.

    Args:
        one: A run.
        other: A run that should have the same values after the same steps.
        kinds: Only values of these types; empty: all that were recorded.
    """
    changes: dict[str, tuple[str, str]] = {}
    theirs = {step.step: step.variables for step in other.steps}
    for step in one.steps:
        values = theirs.get(step.step, {})
        for name in step.variables.keys() & values.keys():
            mine, its = step.variables[name], values[name]
            if mine != its and (not kinds or type(mine) in kinds):
                changes.setdefault(name, (str(mine), str(its)))
    return dict(sorted(changes.items()))


def distance(one: Leaves, other: Leaves) -> float:
    """The relative distance of two sets of leaves; 0 only where all bits are equal."""
    if one.keys() == other.keys() and all(one[name].digest == other[name].digest for name in one):
        return 0.0
    a, b = _vectors([one, other])
    largest = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
    apart = float(np.linalg.norm(a - b))
    # Bits differ, perhaps not in the elements that were recorded.
    return max(apart / largest if largest else 0.0, math.ulp(0.0))


def named_leaves(one: Leaves, other: Leaves, most: float = 0.0) -> str:
    """How many leaves differ, and in which the difference is largest."""
    empty = Leaf(0.0, (), "")
    apart = {
        name: distance({name: one.get(name, empty)}, {name: other.get(name, empty)})
        for name in dict.fromkeys([*one, *other])
    }
    differing = sorted((name for name, far in apart.items() if far > most), key=lambda name: -apart[name])
    largest = ", ".join(f"{name} by {apart[name]:.2g}" for name in differing[:MOST_NAMED])
    return f"{len(differing)} of {len(apart)} tensors: {largest}"


# --- one pass and several passes of the same batch ---
Cause = Literal["same", "sum", "unequal mean", "samples"]


@dataclass(frozen=True)
class SlotsExplained:
    """How a step in several passes differs from one of the whole batch.

    Attributes:
        cause: "same"; "sum": the loss adds samples up; "unequal mean": its mean is over a number of elements that
            differs from pass to pass; "samples": a pass's gradient depends on which samples are in it together.
        apart: The relative distance of the two gradients.
        ratio: The gradient of the whole batch over that of the passes.
        lines: The lines of the program that reduce to the loss.
        shares: The parts of the whole gradient that the passes make up, where it is their combination.
    """

    cause: Cause
    apart: float
    ratio: float = 1.0
    lines: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()


def explain_slots(whole: StepRecord, slots: StepRecord) -> SlotsExplained:
    """Compare a step that was taken in one pass with the same step in several.

    Args:
        whole: The step of the whole batch in one pass.
        slots: The step in several passes, each with its gradient.
    """
    coarse = any(each.coarse for each in (*whole.passes, *slots.passes))
    apart = distance(whole.gradient, slots.gradient)
    if apart <= (COARSE if coarse else SAME):
        return SlotsExplained("same", apart)
    gradients = [each.gradient for each in slots.passes]
    if not all(gradients):
        return SlotsExplained("samples", apart, lines=_lines(slots.passes))
    target, mean, *columns = _vectors([whole.gradient, slots.gradient, *(each or {} for each in gradients)])
    matrix = np.stack(columns, axis=1)
    scale = max(float(np.linalg.norm(target)), 1e-30)
    enough = COARSE if coarse else FITS
    ratio = float(np.dot(target, mean) / max(float(np.dot(mean, mean)), 1e-30))
    several = int((np.linalg.norm(matrix, axis=0) / scale > enough).sum()) > 1  # else it may be a mean over that pass
    if several and float(np.linalg.norm(matrix.sum(axis=1) - target)) / scale <= enough:
        lines = _lines(slots.passes, SUM)
        return SlotsExplained("sum", apart, ratio, lines, (1.0,) * len(columns))
    shares = np.linalg.lstsq(matrix, target, rcond=None)[0]
    fits = float(np.linalg.norm(matrix @ shares - target)) / scale <= enough
    # With as many passes as recorded elements any target fits.
    if fits and len(target) > len(columns) and abs(float(shares.sum()) - 1) <= 10 * enough and (shares > -enough).all():
        return SlotsExplained("unequal mean", apart, ratio, _lines(slots.passes), tuple(map(float, shares)))
    return SlotsExplained("samples", apart, ratio, _lines(slots.passes))


def _lines(passes: Sequence[PassRecord], kind: str | None = None) -> tuple[int, ...]:
    """The lines that reduce to the loss, of ``kind`` where there is one; else those that call ``session.backward``."""
    parts = {part.line for each in passes for part in each.parts if kind in (None, part.kind)}
    return tuple(sorted(parts or {each.line for each in passes if each.line}))


def _vectors(sets: Sequence[Leaves]) -> list[np.ndarray]:
    """The recorded elements of each set in one row, in one order; a missing leaf has zeros."""
    lengths: dict[str, int] = {}
    for leaves in sets:
        for name, leaf in leaves.items():
            lengths[name] = max(lengths.get(name, 0), len(leaf.values))
    return [
        np.array([value for name, count in lengths.items() for value in _row(leaves, name, count)]) for leaves in sets
    ]


def _row(leaves: Mapping[str, Leaf], name: str, count: int) -> Sequence[float]:
    leaf = leaves.get(name)
    values = leaf.values if leaf is not None else ()
    return (*values, *(0.0,) * (count - len(values)))


def _numbers_apart(one: Sequence[float], other: Sequence[float]) -> float:
    if len(one) != len(other):
        return math.inf
    return max((abs(a - b) / max(abs(a), abs(b)) for a, b in zip(one, other, strict=True) if a != b), default=0.0)


def _few(numbers: Sequence[int]) -> str:
    more = ", ..." if len(numbers) > MOST_NAMED else ""
    return f"{', '.join(map(str, numbers[:MOST_NAMED]))}{more} ({len(numbers)})"
