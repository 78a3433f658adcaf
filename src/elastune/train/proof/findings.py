"""What the short runs of a check have shown, in the program's own terms: kinds of differences, each with its lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from elastune.train.program.source import of_workers, unseeded
from elastune.train.proof.compare import (
    BATCH_NORM,
    DROPOUT,
    SCHEDULE,
    RunRecord,
    SlotsExplained,
    StepDifference,
    StepRecord,
    changed_variables,
    explain_slots,
    first_difference,
)

# Lines of a program that may make its runs differ, by their syntax: candidates for a difference that was seen.

_SCHEDULERS = {"ReduceLROnPlateau", "LambdaLR", "SequentialLR"}
_SPLITS = ("random_split", "train_test_split", "randperm", "permutation", "shuffle")
_SEEDS = ("manual_seed", "manual_seed_all", "seed", "seed_everything", "set_seed")


def schedulers(text: str) -> list[int]:
    """The lines that make a learning-rate scheduler."""
    return [call.lineno for call in _calls(text) if (name := _last(call)).endswith("LR") or name in _SCHEDULERS]


def splits(text: str) -> list[int]:
    """The lines that divide or shuffle data at random."""
    return [call.lineno for call in _calls(text) if _last(call) in _SPLITS]


def seeds(text: str) -> list[int]:
    """The lines that seed a random stream."""
    return [call.lineno for call in _calls(text) if _last(call) in _SEEDS]


def distributed_samplers(text: str) -> list[int]:
    """The lines that make a ``DistributedSampler``, which pads the data of an evaluation."""
    return [call.lineno for call in _calls(text) if _last(call) == "DistributedSampler"]


def counters(text: str) -> list[int]:
    """The lines in loops that change a name by its own value, or under a comparison: counters and best-so-far."""
    lines: set[int] = set()
    for loop in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.For | ast.While)):
        for node in ast.walk(loop):
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name | ast.Attribute):
                lines.add(node.lineno)
            elif isinstance(node, ast.If) and any(isinstance(each, ast.Compare) for each in ast.walk(node.test)):
                tested = {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)}
                lines |= {each.lineno for each in node.body if isinstance(each, ast.Assign) and tested & _stored(each)}
    return sorted(lines)


def _stored(statement: ast.Assign) -> set[str]:
    return {each.id for target in statement.targets for each in ast.walk(target) if isinstance(each, ast.Name)}


def _calls(text: str) -> Iterator[ast.Call]:
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return iter(sorted(calls, key=lambda call: call.lineno))


def _last(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


PAGE = "docs/programs.md#what-elastune-check-finds"
MOST_LINES = 6
MOST_VARIABLES = 3
ROUNDING = 1e-3  # of a few steps with the same gradients


@dataclass(frozen=True)
class TrainingProblem:
    """One thing that makes a program train otherwise than its plain loop, or otherwise somewhere.

    Attributes:
        kind: "fails", "fails on two workers", "fails when resumed", "random", "sum", "unequal mean", "samples",
            "passes", "workers", "data", "metric", "files", "resume"; of notes "BatchNorm", "dropout", "draws",
            "variables".
        lines: Of the program: where it is, or may be.
        finding: What was seen.
        fix: What to change.
        note: It is no mistake.
    """

    kind: str
    lines: tuple[int, ...]
    finding: str
    fix: str
    note: bool = False

    def as_line(self, name: str) -> str:
        """In one line; ``name``: the file's."""
        at = f"{name}:{','.join(map(str, self.lines[:MOST_LINES]))}: " if self.lines else f"{name}: "
        return f"{at}{'note: ' if self.note else ''}{self.finding}. {self.fix}. See {PAGE}"


@dataclass(frozen=True)
class ShortRun:
    """What a short run came to: the hash of its state, its steps, and their records."""

    sha256: str
    steps: int = 0
    record: RunRecord = field(default_factory=lambda: RunRecord(()))


class RunsOfCheck(Protocol):
    """The short runs of a check; a text stands for a run that failed, and says why."""

    num_slots: int

    @property
    def slots(self) -> ShortRun | str:
        """In slots, on one worker."""
        ...

    @property
    def whole(self) -> ShortRun | str:
        """In one pass a batch."""
        ...

    @property
    def again(self) -> ShortRun | str:
        """In slots once more, in a fresh process."""
        ...

    @property
    def workers(self) -> ShortRun | str:
        """On two workers."""
        ...

    @property
    def files(self) -> Mapping[str, int]:
        """The files that both workers wrote, with the lines."""
        ...

    @property
    def resumed(self) -> ShortRun | str:
        """Cut and resumed."""
        ...

    def quiet(self, *, whole: bool, salt: int = 0) -> ShortRun | str:
        """The first step without dropout, noise and statistics of batches."""
        ...


def judge(text: str, runs: RunsOfCheck) -> Iterator[TrainingProblem]:
    """What a program of ``text`` has shown in its short runs."""
    one = runs.slots
    if isinstance(one, str):
        yield TrainingProblem("fails", (), f"it does not train: {one}", "Mend that first: 'elastune run' shows its log")
        return
    again = runs.again
    repeats = isinstance(again, ShortRun) and again.sha256 == one.sha256
    if repeats:
        yield from _of_slots(one, runs)
    else:  # other differences would be of chance
        yield _random(text, one, again)
    yield from _of_workers(text, one, again if isinstance(again, ShortRun) else one, runs, repeats=repeats)
    if repeats and isinstance(again, ShortRun):
        yield from _of_resume(text, one, again, runs)


# --- a fresh process ---
def _random(text: str, one: ShortRun, again: ShortRun | str) -> TrainingProblem:
    fix = "Draw from the generators of torch, numpy and Python, which the run seeds, or seed yours by session.seed"
    if isinstance(again, str):
        return TrainingProblem("random", (), f"it trains once, and not again: {again}", fix)
    apart = first_difference(one.record, again.record)
    what = "" if apart is None else f" ({_first(apart)})"
    finding = f"two equal runs end with different weights{what}: something random has no seed"
    return TrainingProblem("random", tuple(unseeded(text)), finding, fix)


def _first(apart: StepDifference) -> str:
    """The first difference, in words."""
    words = {
        "steps": "one stops earlier",
        "beginning": "the initial weights differ",
        "samples": "other samples",
        "content": "other values of the same samples",
        "settings": "other settings of the optimizer",
        "loss": "another loss of the same samples",
        "gradient": "another gradient",
        "weights": "another update of the weights",
    }
    return f"first in step {apart.step}: {words[apart.what]}, {apart.detail}"


# --- one pass a batch, and slots ---
def _of_slots(one: ShortRun, runs: RunsOfCheck) -> Iterator[TrainingProblem]:
    whole = runs.whole
    if runs.num_slots == 1:
        return
    if isinstance(whole, str):
        finding = f"it trains in {runs.num_slots} slots and not in one pass a batch: {whole}"
        yield TrainingProblem("passes", (), finding, "Mend that first: 'elastune run --slots 1' shows its log")
        return
    if not one.record.steps or not whole.record.steps:
        return
    first, mine = whole.record.steps[0], one.record.steps[0]
    if first.numbers != mine.numbers:
        fix = "Let data and batch size follow from config, seed and session.epoch alone"
        yield TrainingProblem("passes", (), f"a batch has other samples in {runs.num_slots} slots", fix)
        return
    explained = explain_slots(first, mine)
    if explained.cause == "same":
        yield from _counted(whole, one, runs)
        return
    quiet, in_slots = runs.quiet(whole=True), runs.quiet(whole=False)
    layers = {*first.layers, *mine.layers}
    if isinstance(quiet, str) or isinstance(in_slots, str) or not (quiet.record.steps and in_slots.record.steps):
        yield _of_loss(explained, runs.num_slots)
        return
    calm = explain_slots(quiet.record.steps[0], in_slots.record.steps[0])
    if calm.cause == "same":
        yield from _of_layers(explained, layers, runs.num_slots)
    elif _draws(quiet.record.steps[0], runs):
        finding = f"the program draws random numbers for a batch, each of {runs.num_slots} slots its own"
        fix = "Nothing to mend; whether its loss is a mean was not compared"
        yield TrainingProblem("draws", calm.lines, finding, fix, note=True)
    else:
        yield _of_loss(calm, runs.num_slots)
    yield from _counted(whole, one, runs)


def _draws(quiet: StepRecord, runs: RunsOfCheck) -> bool:
    """Whether a pass over the same samples, with other random numbers, has another gradient."""
    other = runs.quiet(whole=True, salt=1)
    if isinstance(other, str) or not other.record.steps:
        return False
    return explain_slots(quiet, other.record.steps[0]).cause != "same"


def _of_loss(explained: SlotsExplained, slots: int) -> TrainingProblem:
    apart = f"the gradient of {slots} slots differs from that of the whole batch"
    match explained.cause:
        case "sum":
            finding = f"{apart}: it is 1/{explained.ratio:.3g} of it, since the loss is a sum over samples"
            fix = "Give the mean over the batch, or say session.backward(loss, reduction='sum'); or use --slots 1"
            return TrainingProblem("sum", explained.lines, finding, fix)
        case "unequal mean":
            parts = ", ".join(f"{share:.3f}" for share in explained.shares)
            finding = (
                f"{apart} by {explained.apart:.2g}: its mean is over unequal numbers of elements (slots weigh {parts})"
            )
            fix = "Say how many elements the mean was over, session.backward(loss, count=...); or use --slots 1"
            return TrainingProblem("unequal mean", explained.lines, finding, fix)
    finding = f"{apart} by {explained.apart:.2g}: the loss of a sample depends on the others that are with it"
    fix = "Compare samples of all slots, session.backward_global(loss, encode, ...); or use --slots 1"
    return TrainingProblem("samples", explained.lines, finding, fix)


def _of_layers(explained: SlotsExplained, layers: set[str], slots: int) -> Iterator[TrainingProblem]:
    if BATCH_NORM in layers:
        finding = (
            f"BatchNorm normalises each of {slots} slots by itself: the first gradient differs by {explained.apart:.2g}"
        )
        yield TrainingProblem(
            BATCH_NORM, (), finding, "Nothing to mend; --slots 1 normalises over the whole batch", note=True
        )
    if DROPOUT in layers or BATCH_NORM not in layers:
        what = "dropout" if DROPOUT in layers else "noise"
        finding = f"each of {slots} slots draws {what} of its own"
        yield TrainingProblem(DROPOUT, (), finding, "Nothing to mend; --slots 1 draws once a batch", note=True)


def _counted(whole: ShortRun, one: ShortRun, runs: RunsOfCheck) -> Iterator[TrainingProblem]:
    """Whole numbers of the program that grow with each slot instead of each batch: a mistake where steps differ."""
    changed = changed_variables(whole.record, one.record, kinds=(int,))
    names = list(changed)[:MOST_VARIABLES]
    differs = whole.steps != one.steps or not _steps_alike(whole, one)
    if names:
        values = ", ".join(f"{name.partition('.')[2]} is {changed[name][1]} for {changed[name][0]}" for name in names)
        finding = f"it counts slots where its plain loop counts batches: {values} after the same step"
        fix = "Put what counts, breaks or reports under 'if session.ends_step:', or use --slots 1"
        yield TrainingProblem("passes", (), finding, fix, note=not differs)
    elif whole.steps != one.steps:
        finding = f"it takes {one.steps} steps in {runs.num_slots} slots, and {whole.steps} in one pass a batch"
        fix = "Put what ends the loop under 'if session.ends_step:'"
        yield TrainingProblem("passes", (), finding, fix)


def _steps_alike(whole: ShortRun, one: ShortRun) -> bool:
    """Whether the steps after the first one differ by rounding only, as far as they can be compared."""
    apart = first_difference(whole.record, one.record, most=ROUNDING)
    return apart is None or apart.step == 1


# --- several workers ---
def _of_workers(
    text: str, one: ShortRun, again: ShortRun, runs: RunsOfCheck, *, repeats: bool
) -> Iterator[TrainingProblem]:
    two = runs.workers
    if isinstance(two, str):
        fix = "Let all workers call the same lines of session; what depends on the rank belongs under session.leader"
        yield TrainingProblem("fails on two workers", (), f"it trains on one worker and not on two: {two}", fix)
        return
    if repeats and two.sha256 != one.sha256:
        yield _other_weights(text, one, two)
    yield from _of_metrics(text, one, again, two)
    for path, line in sorted(runs.files.items()):
        fix = "Write it under 'if session.leader:', or give each worker a name of its own"
        yield TrainingProblem("files", (line,), f"all workers write {path}", fix)


def _other_weights(text: str, one: ShortRun, two: ShortRun) -> TrainingProblem:
    finding = "two workers end with other weights than one"
    fix = "Let data, model and rates depend on neither session.rank nor session.size"
    apart = first_difference(one.record, two.record)
    if apart is None:
        return TrainingProblem(
            "workers", tuple(of_workers(text)), f"{finding}: buffers or the optimizer's state differ", fix
        )
    if apart.passes is not None:
        mine, theirs = apart.passes
        worker = f"slot {theirs.slot} on worker {theirs.rank}"
        if apart.what == "content":
            fix = "Let a sample follow from its number, the run's seed and the epoch alone"
            return TrainingProblem(
                "data", tuple(of_workers(text)), f"{finding}: {worker} has other values of its samples", fix
            )
        ratio = sum(theirs.losses) / sum(mine.losses) if sum(mine.losses) else float("nan")
        finding = f"{finding}: in step {apart.step} the loss of {worker} is {ratio:.4g} times as large"
        where = {*of_workers(text), *seeds(text)}
        return TrainingProblem("workers", tuple(sorted(where)), finding, fix)
    where = {*of_workers(text), *seeds(text)}
    return TrainingProblem("workers", tuple(sorted(where)), f"{finding}: {_first(apart)}", fix)


def _of_metrics(text: str, one: ShortRun, again: ShortRun, two: ShortRun) -> Iterator[TrainingProblem]:
    named: set[str] = set()
    for (_, first), (_, second), (_, other) in zip(
        one.record.reports, again.record.reports, two.record.reports, strict=False
    ):
        for name in sorted(first.keys() - named):
            if first[name] == second.get(name) and first[name] != other.get(name):
                named.add(name)
                finding = f"the metric {name!r} is {first[name]:g} on one worker, {other.get(name)} on two"
                padded = distributed_samplers(text)
                fix = "Add it up over workers by session.sum or session.mean, and report that"
                if padded:
                    fix = "Give session.batches(train=False) the data set itself: a DistributedSampler pads it"
                yield TrainingProblem("metric", tuple(padded), finding, fix)


# --- cut and resumed ---
def _of_resume(text: str, one: ShortRun, again: ShortRun, runs: RunsOfCheck) -> Iterator[TrainingProblem]:
    resumed = runs.resumed
    if isinstance(resumed, str):
        fix = "Let a resumed run build the same model, data and optimizer as the first"
        yield TrainingProblem("fails when resumed", (), f"it trains, and does not go on when resumed: {resumed}", fix)
        return
    volatile = changed_variables(one.record, again.record)
    changed = {
        name: both for name, both in changed_variables(one.record, resumed.record).items() if name not in volatile
    }
    names = ", ".join(f"{name.partition('.')[2]} {mine} for {its}" for name, (mine, its) in list(changed.items())[:3])
    apart = first_difference(one.record, resumed.record)
    if apart is None and resumed.sha256 == one.sha256:
        if any(name.endswith(SCHEDULE) for name in changed):
            fix = "Give the scheduler to session.prepare(model, optimizer, scheduler)"
            finding = f"a resumed run begins its learning-rate scheduler anew: {names}"
            yield TrainingProblem("resume", tuple(schedulers(text)), finding, fix)
        elif changed:
            fix = "If it decides something, give it to session.track"
            finding = f"a resumed run begins variables of the program anew: {names}"
            yield TrainingProblem("variables", tuple(counters(text)), finding, fix, note=True)
        return
    what = "" if apart is None else apart.what
    detail = "buffers or the optimizer's state differ" if apart is None else _first(apart)
    finding = f"a run that was cut and resumed trains otherwise: {detail}"
    match what:
        case "settings":
            fix = "Give the scheduler to session.prepare(model, optimizer, scheduler)"
            yield TrainingProblem("resume", tuple(schedulers(text)), finding, fix)
        case "samples" | "content":
            fix = "Let splits and orders follow from the run's seed: a torch.Generator with session.seed"
            yield TrainingProblem("resume", tuple(splits(text)), finding, fix)
        case _:
            fix = "Give what the program keeps over steps to session.track"
            more = f"; its own variables: {names}" if changed else ""
            yield TrainingProblem("resume", tuple(counters(text)), f"{finding}{more}", fix)
