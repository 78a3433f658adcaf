"""Where a command trains otherwise on several processes than on one, from what both runs did.

Each check is a function of two observations, ``one`` (one process) and ``many``, and gives a ``Difference`` or None.
``differences`` calls them in the order in which things happen in a step, so the first one is the cause of later ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastune.runtime.observe.observations import Forward, ObservedCommand, Process, SamplerIterated, Sketch, mean

PAGE = "docs/commands-as-programs.md#is-a-script-right-on-several-processes"
ROUNDING = 2e-3  # of sums in another order, relative to the largest number of a sketch
LOSS_ROUNDING = 1e-3
SAMPLING = 0.15  # by which mean losses of other samples may differ, relative


@dataclass(frozen=True)
class Difference:
    """One thing that training on several processes does otherwise.

    Attributes:
        kind: "branch", "weights", "batch", "overlap", "missing", "order", "set_epoch", "seeds", "rate", "loss",
            "BatchNorm", "not reduced", "sum", "averaged twice", "gradient", "buffers", "drift" or "evaluation".
        step: The first step that shows it, from 0; None: no step of training does.
        line: ``FILE:LINE`` of the user's code that brings it; may be empty.
        finding: What was seen.
        fix: What to change.
        note: It need not be a mistake.
    """

    kind: str
    step: int | None
    line: str
    finding: str
    fix: str
    note: bool = False

    def as_line(self) -> str:
        """In one line."""
        at = f"{self.line}: " if self.line else ""
        when = f"step {self.step}: " if self.step is not None else ""
        return f"{at}{when}{'note: ' if self.note else ''}{self.finding}. {self.fix}. See {PAGE}"


def differences(one: ObservedCommand, many: ObservedCommand) -> list[Difference]:
    """Everything that ``many`` does otherwise than ``one``, at most one of a kind.

    Example:
        >>> [each.kind for each in differences(read_observation(a), read_observation(b))]
        ['overlap', 'gradient']
    """
    seen = [each for check in CHECKS if (each := check(one, many)) is not None]
    kinds = {each.kind for each in seen}
    return [each for each in seen if not kinds & CAUSES.get(each.kind, set())]


def branch(one: ObservedCommand, many: ObservedCommand) -> Difference | None:
    """The ranks do not do the same: one has more steps, passes or backward passes, or other lines."""
    head = many.processes[0]
    for process in many.processes[1:]:
        for step in range(many.steps + 1):
            begun = step == many.steps  # but perhaps not done: what one of them lacks may have been yet to come
            different = _first_other(_path(head, step), _path(process, step), begun=begun)
            if different is not None:
                what, line = different
                return Difference(
                    "branch",
                    step,
                    line,
                    f"rank {process.rank} does otherwise than rank 0: {what}",
                    "Let all ranks take the same passes and steps",
                )
        if many.ended and len(head.steps) != len(process.steps):
            return Difference(
                "branch",
                many.steps,
                _step_line(head) or _step_line(process),
                f"rank {process.rank} takes {len(process.steps)} steps and rank 0 {len(head.steps)}",
                "Give all ranks the same number of batches",
            )
    return None


def _path(process: Process, step: int) -> list[tuple[str, str]]:
    forwards = [("calls the model", each.line) for each in process.forwards(step)]
    backwards = [("computes gradients", each.line) for each in process.backwards(step)]
    taken = process.steps.get(step)
    return [*forwards, *backwards, *([("takes the step", taken.line)] if taken else [])]


def _first_other(mine: list[tuple[str, str]], others: list[tuple[str, str]], *, begun: bool) -> tuple[str, str] | None:
    """What the second does first that the first one does not, and its line."""
    for left, right in zip(mine, others, strict=False):
        if left != right:
            return f"it {right[0]} at {right[1]}, where rank 0 {left[0]} at {left[1]}", right[1]
    if begun or len(mine) == len(others):
        return None
    longer, sign = (others, "also") if len(others) > len(mine) else (mine, "never")
    what, line = longer[min(len(mine), len(others))]
    return f"it {sign} {what} at {line}", line


def weights(one: ObservedCommand, many: ObservedCommand) -> Difference | None:
    """The ranks begin with other weights. (``DistributedDataParallel`` sends rank 0's to all.)"""
    firsts = list(many.each_first())
    if len({str(first.weights) for first in firsts}) < 2:
        return None
    head = many.processes[0]
    return Difference(
        "weights",
        0,
        head.line_of("seed") or head.line_of("optimizer"),
        "the ranks begin with different weights",
        "Seed all ranks alike before the model is made, or broadcast its weights",
    )


def batch(one: ObservedCommand, many: ObservedCommand) -> Difference | None:
    """The global batch has another size."""
    sizes = one.rows(0).total(), many.rows(0).total()
    if sizes[0] == sizes[1] or not all(sizes):
        return None
    return Difference(
        "batch",
        0,
        many.processes[0].line_of("loader"),
        f"the global batch has {sizes[0]} rows on 1 process and {sizes[1]} on {many.world}",
        f"Give each process its share: {{batch_per_worker}} in the command, and --set batch_size={sizes[0]}",
    )


def overlap(one: ObservedCommand, many: ObservedCommand) -> Difference | None:
    """Two ranks train on one sample in the same step, which no step of one process does."""
    for step in range(min(one.steps, many.steps)):
        twice = [row for row, times in many.rows(step).items() if times > max(1, one.rows(step)[row])]
        if twice:
            total = many.rows(step).total()
            return Difference(
                "overlap",
                step,
                many.processes[0].line_of("loader"),
                f"{len(twice)} samples are trained on by several ranks at once (of {total} rows)",
                "Give the DataLoader a DistributedSampler",
            )
    return None


def missing(one: ObservedCommand, many: ObservedCommand) -> Difference | None:
    """Samples on which one process trains, and no rank does."""
    mine, others = one.all_rows(), many.all_rows()
    if not (one.whole and many.whole and _comparable_rows(mine, others)):
        return None
    gone = mine.keys() - others.keys()
    dropped = one.rows(0).total() if _orders_differ(one, many) else 1  # drop_last leaves out others in another order
    if len(gone) < dropped:
        return None
    return Difference(
        "missing",
        None,
        many.processes[0].line_of("loader"),
        f"{len(gone)} of {len(mine)} samples are trained on by 1 process and by no rank",
        "Let the ranks' samples together be all samples",
    )


def _orders_differ(one: ObservedCommand, many: ObservedCommand) -> bool:
    """Whether even the first step has other rows: the two shuffle differently, so a cut run has other samples."""
    return bool(one.rows(0)) and one.rows(0).keys() != many.rows(0).keys()


def _comparable_rows(mine: Counter[str], others: Counter[str]) -> bool:
    """Whether inputs are the same numbers at all: random augmentation makes each row another one."""
    return bool(mine.keys() & others.keys())


def order(one: ObservedCommand, many: ObservedCommand) -> Difference | None:
    """A global step has other samples, though none is lost or read twice."""
    for step in range(min(one.steps, many.steps)):
        mine, others = one.rows(step), many.rows(step)
        if mine.total() == others.total() and mine != others and max(others.values(), default=0) == 1:
            what = (
                "a global step has other samples"
                if _comparable_rows(one.all_rows(), many.all_rows())
                else "inputs are random, or other ones"
            )
            return Difference(
                "order",
                step,
                many.processes[0].line_of("loader"),
                f"{what}, so losses and gradients of 1 process and {many.world} cannot be compared",
                "Use a DistributedSampler on 1 process, too, and seed it and the augmentation alike",
                note=True,
            )
    return None


def set_epoch(one: ObservedCommand, many: ObservedCommand) -> Difference | None:
    """A ``DistributedSampler`` shuffles each pass from the same epoch number."""
    for process in many.processes:
        seen: set[tuple[int, int]] = set()
        for event in process.events:
            if isinstance(event, SamplerIterated) and event.shuffles:
                if (event.key, event.epoch) in seen:
                    return Difference(
                        "set_epoch",
                        None,
                        event.line,
                        f"a shuffling DistributedSampler has the order of epoch {event.epoch} in two passes",
                        "Call sampler.set_epoch(epoch) before each pass",
                    )
                seen.add((event.key, event.epoch))
    return None


def seeds(one: ObservedCommand, many: ObservedCommand) -> Difference | None:
    """All ranks draw the same random numbers, and the model has dropout."""
    firsts = list(many.each_first())
    if len(firsts) < 2 or not any(first.dropout for first in firsts):
        return None
    if len({first.random for first in firsts}) == len(firsts):
        return None
    line = many.processes[0].line_of("seed")
    return Difference(
        "seeds",
        firsts[0].step,
        line or firsts[0].line,
        "several ranks draw the same dropout masks",
        "Add the rank to the seed after the model is made",
    )


def rate(one: ObservedCommand, many: ObservedCommand) -> Difference | None:
    """The learning rate is another one."""
    for step in range(min(one.steps, many.steps)):
        mine, others = one.processes[0].steps[step].rates, many.processes[0].steps[step].rates
        pairs = [(a, b) for a, b in zip(mine, others, strict=False) if not math.isclose(a, b, rel_tol=1e-6)]
        if pairs:
            a, b = pairs[0]
            times = f" ({b / a:.3g} times)" if a else ""
            return Difference(
                "rate",
                step,
                many.processes[0].line_of("optimizer") or _step_line(many.processes[0]),
                f"the learning rate is {a:g} on 1 process and {b:g} on {many.world}{times}",
                "The global batch is the same, so leave the rate as it is",
            )
    return None


def loss(one: ObservedCommand, many: ObservedCommand) -> Difference | None:
    """The mean of the ranks' losses is not one process's loss."""
    step = _comparable_step(one, many)
    same_rows = step is not None
    steps = [step] if step is not None else list(range(min(one.steps, many.steps)))
    mine, others = _mean_loss(one, steps), _mean_loss(many, steps)
    if mine is None or others is None or not mine:
        return None
    if math.isclose(mine, others, rel_tol=LOSS_ROUNDING, abs_tol=1e-6):
        return None
    factor = others / mine
    scaled = any(math.isclose(factor, by, rel_tol=SAMPLING) for by in (many.world, 1 / many.world))
    if not same_rows and not scaled:  # other samples have other losses
        return None
    by = _named(factor, many.world) if same_rows else f"about {_named(factor, many.world, SAMPLING)}"
    return Difference(
        "loss",
        steps[0],
        many.processes[0].backwards(steps[0])[0].line,
        f"the mean of the ranks' losses is {by} that of 1 process ({others:.6g}, {mine:.6g})",
        "Let each rank compute the mean over its own samples: DistributedDataParallel averages over ranks",
    )


def _mean_loss(observation: ObservedCommand, steps: Sequence[int]) -> float | None:
    """The mean over ranks and steps; None where a step has not one loss on each rank."""
    losses = [[b.loss for b in process.backwards(step)] for process in observation.processes for step in steps]
    values = [each[0] for each in losses if len(each) == 1 and each[0] is not None]
    return sum(values) / len(values) if values and len(values) == len(losses) else None


def batch_norm(one: ObservedCommand, many: ObservedCommand) -> Difference | None:
    """Each rank normalises by its own share of the batch."""
    first = many.processes[0].first
    if first is None or not first.batch_norms:
        return None
    return Difference(
        "BatchNorm",
        0,
        first.line,
        f"{first.batch_norms} BatchNorm layers normalise by each rank's own rows, not by the global batch",
        "Convert the model by torch.nn.SyncBatchNorm.convert_sync_batchnorm, or accept smaller batches in them",
    )


def reduction(one: ObservedCommand, many: ObservedCommand) -> Difference | None:
    """The gradient of the step is not the mean of the ranks' gradients."""
    for step in range(many.steps):
        taken = [process.steps[step] for process in many.processes]
        count = len(taken[0].reduced)
        if any(len(each.reduced) != count or len(each.local) != count for each in taken):
            return None
        for at in range(count):
            local = [each.local[at] for each in taken]
            reduced = [each.reduced[at] for each in taken]
            average = mean(local)
            if not average or _close(local[0], local[-1]) or not all(map(math.isfinite, average)):
                continue
            line = many.processes[0].backwards(step)[0].line if many.processes[0].backwards(step) else ""
            if not all(_close(each, reduced[0]) for each in reduced):
                return Difference(
                    "not reduced",
                    step,
                    taken[0].line or line,
                    "each rank steps with its own gradients",
                    "Wrap the model in DistributedDataParallel and call the wrapper, or average the gradients",
                )
            factor = _ratio(reduced[0], average)
            if factor is None or math.isclose(factor, 1.0, rel_tol=0.02):
                continue
            if math.isclose(factor, many.world, rel_tol=0.02):
                return Difference(
                    "sum",
                    step,
                    taken[0].line or line,
                    f"gradients are summed over ranks, not averaged: {many.world} times those of 1 process",
                    "Divide by the number of processes",
                )
            if math.isclose(factor, 1 / many.world, rel_tol=0.02):
                return Difference(
                    "averaged twice",
                    step,
                    taken[0].line or line,
                    f"gradients are averaged twice: 1/{many.world} of those of 1 process",
                    "Leave out one of the two divisions; DistributedDataParallel averages by itself",
                )
            return None  # clipped or unscaled: compared with one process below
    return None


def gradient(one: ObservedCommand, many: ObservedCommand) -> Difference | None:
    """The gradient is another one than that of one process, on the same samples."""
    step = _comparable_step(one, many)
    if step is None:
        return None
    mine, others = one.processes[0].steps[step], many.processes[0].steps[step]
    if len(mine.reduced) != len(others.reduced):
        finding = f"{len(others.reduced)} parameters have gradients on {many.world} processes, {len(mine.reduced)} on 1"
        return Difference("gradient", step, others.line, finding, "Let all parameters take part on every rank")
    wrong = [at for at, (a, b) in enumerate(zip(mine.reduced, others.reduced, strict=True)) if not _close(a, b)]
    if not wrong:
        return None
    factor = _ratio(others.reduced[wrong[0]], mine.reduced[wrong[0]])
    by = _named(factor, many.world) if factor is not None else ""
    return Difference(
        "gradient",
        step,
        others.line,
        f"gradients of {len(wrong)} of {len(mine.reduced)} parameters differ from those of 1 process"
        + (f": {by} those" if by else ""),
        "Look at what is computed between the loss and the step on several processes",
    )


def buffers(one: ObservedCommand, many: ObservedCommand) -> Difference | None:
    """Buffers other than BatchNorm's differ between ranks after a step."""
    for step in range(many.steps):
        head = many.processes[0].done[step].buffers
        for process in many.processes[1:]:
            other = process.done[step].buffers
            names = [n for n in head if n in other and not _close(head[n], other[n]) and not _of_batch_norm(n, head)]
            if names:
                return Difference(
                    "buffers",
                    step,
                    many.processes[0].first.line if many.processes[0].first else "",
                    f"the buffer {names[0]!r} differs between rank 0 and rank {process.rank}",
                    "Compute it from what all ranks share, or average it over ranks",
                )
    return None


def _of_batch_norm(name: str, names: dict[str, Sketch]) -> bool:
    stem = name.rpartition(".")[0]
    return f"{stem}.running_mean".lstrip(".") in names


def drift(one: ObservedCommand, many: ObservedCommand) -> Difference | None:
    """Weights differ between ranks after a step."""
    for step in range(many.steps):
        head = many.processes[0].done[step].weights
        for process in many.processes[1:]:
            other = process.done[step].weights
            apart = [at for at, (a, b) in enumerate(zip(head, other, strict=False)) if not _close(a, b)]
            if apart:
                return Difference(
                    "drift",
                    step,
                    many.processes[0].steps[step].line,
                    f"after the step {len(apart)} of {len(head)} parameters differ between rank 0 and {process.rank}",
                    "Let every rank apply the same update",
                )
    return None


def evaluation(one: ObservedCommand, many: ObservedCommand) -> Difference | None:
    """Rows are evaluated more often than on one process (padding), by all ranks, or not at all."""
    mine, others = one.evaluated(), many.evaluated()
    if not mine or not others or mine == others or not _comparable_rows(mine, others):
        return None
    first = next(f for p in many.processes for f in p.forwards(trains=False))
    more = sum((others - mine).values())
    gone = sum((mine - others).values())
    if more and more % mine.total() == 0 and not gone:
        what = f"each row is evaluated {others.total() // mine.total()} times, by all ranks"
        return Difference("evaluation", None, first.line, what, "Divide the rows over ranks, or leave it so", note=True)
    if not more and not gone:
        return None
    what = f"{more} rows are evaluated too often" if more else f"{gone} rows are not evaluated"
    return Difference(
        "evaluation",
        None,
        first.line,
        f"{what} (1 process: {mine.total()} rows, {many.world}: {others.total()})",
        "A DistributedSampler repeats rows so that ranks have equally many: count each row once",
    )


Check = Callable[[ObservedCommand, ObservedCommand], Difference | None]
CHECKS: Sequence[Check] = (
    weights,
    batch,
    overlap,
    missing,
    order,
    set_epoch,
    branch,
    seeds,
    batch_norm,
    loss,
    reduction,
    gradient,
    rate,
    buffers,
    drift,
    evaluation,
)
CAUSES = {
    "loss": {"overlap"},
    "missing": {"overlap"},
    "order": {"missing", "overlap"},
    "gradient": {"weights", "overlap", "loss", "not reduced", "sum", "averaged twice", "branch"},
    "drift": {"weights", "not reduced", "branch"},
    "buffers": {"weights"},
    "not reduced": {"weights", "branch"},
}
"""Kinds that say no more than their cause, where that is known."""


def _comparable_step(one: ObservedCommand, many: ObservedCommand) -> int | None:
    """The first step, if one process and many must agree in it: same rows, same weights, no BatchNorm or dropout."""
    firsts: list[Forward] = [*one.each_first(), *many.each_first()]
    if not firsts or any(first.batch_norms or first.dropout for first in firsts):
        return None
    if not one.steps or not many.steps or one.rows(0).keys() != many.rows(0).keys():
        return None
    if any(_unlike(first.weights, firsts[0].weights) for first in firsts):
        return None
    return 0


def _unlike(mine: list[Sketch] | None, others: list[Sketch] | None) -> bool:
    pairs = zip(mine or [], others or [], strict=False)
    return len(mine or []) != len(others or []) or not all(_close(a, b) for a, b in pairs)


def _step_line(process: Process) -> str:
    return next((each.line for each in process.steps.values()), "")


def _close(mine: Sketch, others: Sketch) -> bool:
    """Whether two sketches are of the same numbers, but for rounding."""
    if len(mine) != len(others):
        return False
    size = max((abs(x) for x in (*mine, *others)), default=0.0)
    return all(abs(a - b) <= ROUNDING * size + 1e-9 or a == b for a, b in zip(mine, others, strict=True))


def _ratio(mine: Sketch, others: Sketch) -> float | None:
    """How many times ``others`` is ``mine``; None if it is no multiple of it."""
    largest = max(range(len(others)), key=lambda at: abs(others[at]), default=None)
    if largest is None or not others[largest]:
        return None
    factor = mine[largest] / others[largest]
    return factor if _close(mine, [factor * x for x in others]) else None


def _named(factor: float, world: int, rel_tol: float = 0.01) -> str:
    if math.isclose(factor, world, rel_tol=rel_tol):
        return f"{world} times"
    if math.isclose(factor, 1 / world, rel_tol=rel_tol):
        return f"1/{world} of"
    return f"{factor:.3g} times" if math.isfinite(factor) else ""
