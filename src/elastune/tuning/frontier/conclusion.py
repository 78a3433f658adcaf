"""The result of a frontier, from trainings and step times: rows, front, command, worth of the search. Pure.

The worth of the search is a hypervolume: what the search found, beside what the naive rule found at equal budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from elastune.adapt.policies.library.registry import policies_of
from elastune.core.errors import UserError
from elastune.core.formatting import count, duration
from elastune.core.journal.records import (
    FrontierAnswer,
    FrontierFound,
    FrontierReason,
    FrontierRow,
    FrontierVolumes,
    OwnMachine,
    ReferencePoint,
    SideVolume,
    ThroughputTuned,
    TrialStarted,
)
from elastune.core.mesh import Mesh
from elastune.core.plan.confidence_intervals import bounded_ci
from elastune.core.run import ExecutionSettings
from elastune.tuning.frontier.answer import Advice, answer_of, pick_row
from elastune.tuning.frontier.checked_request import CheckedFrontier
from elastune.tuning.frontier.choice import FRESH_SEEDS, Cell, Choice
from elastune.tuning.frontier.criteria import FrontierCriteria, batch_of, mark_front, row
from elastune.tuning.frontier.short_runs import in_words
from elastune.tuning.frontier.trainings import FOR_WORKERS, Recipe, Spent, StepKind, Training, name_of, read_variant
from elastune.tuning.search.front import hypervolume, nondominated
from elastune.tuning.study.run_command import run_command

NAIVE, TUNED, SEARCH = "naive rule", "naive rule, tuned", "search"
ENOUGH = 0.95
"""A side that used this part of the budget counts as having had an equal budget: trainings differ in time."""
TimedTraining = tuple[Training, StepKind]
"""A training, and the kind of steps that gives its time."""
TimedTrainings = Mapping[int, Sequence[TimedTraining]]
"""For each seed, the training of every setting with that seed."""


# --- the worth of the search ---


@dataclass(frozen=True)
class Side:
    """The settings that one method of search found with a budget, as one side of a comparison.

    Attributes:
        name: The name of the side.
        spots: The trainings of its settings, by seed.
        inside: The trials that fit into the budget.
        of: The number of all its trials.
        spent_s: Worker-seconds of the trials inside.
        had_s: Worker-seconds of all its trials.
        cells: Settings that were chosen by one seed, so that only fresh seeds give their worth.
    """

    name: str
    spots: TimedTrainings
    inside: frozenset[int]
    of: int
    spent_s: float
    had_s: float
    cells: Sequence[Cell] = ()


def sides(plan: CheckedFrontier, choice: Choice, searched: Sequence[Spent], by: FrontierCriteria) -> list[Side]:
    """The sides that are compared: the naive rule, the rule under each given policy, the rule tuned, and the search.

    The budget is the worker-seconds that the naive rule's trainings took here. Of any other side the first trainings
    count, in the order in which they ended or paused, until they have used the budget. The settings of a search are
    its front by validation. The tuned rule is the part of the search that follows the rule (``follows_rule``).
    """
    naive = _of_rule(NAIVE, plan, choice, (), None)
    compared = [naive]
    for text in plan.request.policies:
        compared.append(_of_rule(f"{NAIVE}, policy {text}", plan, choice, policies_of(text), naive.had_s))
    ruled = [each for each in searched if follows_rule(plan, each.started)]
    return [*compared, *(_of_search(*each, plan, by, naive.had_s) for each in ((TUNED, ruled), (SEARCH, searched)))]


def follows_rule(plan: CheckedFrontier, started: TrialStarted) -> bool:
    """Whether a trial of the search scales batch and learning rate by its workers, as the naive rule does.

    The unscaled values and all other settings may be tuned. The variant must be the one asked for.
    """
    execution, variant = read_variant(started.execution)
    batch = batch_of(started.config)
    scaled = batch == plan.base_batch or started.tags.get("lr_rule") == "linear"
    return (
        variant == plan.variant
        and scaled
        and batch == plan.naive_batch(started.tags.get(FOR_WORKERS, execution.num_slots))
    )


def volumes(compared: Sequence[Side], choice: Choice, by: FrontierCriteria) -> FrontierVolumes:
    """The hypervolume of each side's settings, as the mean over seeds, by held-out data if the program has any.

    The seeds are fresh ones if all settings of a side were trained with them.
    """
    scored = [_scored(side, choice) for side in compared]
    tables = [{seed: _points(spots, by) for seed, spots in each.items()} for each in scored]
    every = np.concatenate([np.zeros((0, 3)), *(table for each in tables for table in each.values())])
    budget_s = compared[0].had_s
    low, high = (every.min(axis=0), every.max(axis=0)) if len(every) else (np.zeros(3), np.ones(3))
    span = np.where(high > low, high - low, 1.0)
    records = []
    for side, spots, by_seed in zip(compared, scored, tables, strict=True):
        parts = [_part((table - low) / span) for table in by_seed.values()]
        more = {t.trial: t.worker_seconds for each in spots.values() for t, _ in each if t.trial not in side.inside}
        volume = SideVolume(
            side=side.name,
            volume=fmean(parts) if parts else 0.0,
            ci=bounded_ci(parts, 0.0, 1.0) if parts else None,
            seeds=len(parts),
            points=max((len(table) for table in by_seed.values()), default=0),
            trainings=len(side.inside),
            of=side.of,
            spent_s=side.spent_s,
            equal=side.had_s >= ENOUGH * budget_s,
            scoring_s=sum(more.values()),
        )
        records.append(volume)
    worst = low + 1.1 * span
    corner = ReferencePoint(_sign(by) * float(worst[0]), *(float(np.exp(value)) for value in worst[1:]))
    records = [each if i == 0 else replace(each, against=against(each, records[0])) for i, each in enumerate(records)]
    return FrontierVolumes(budget_s, corner if len(every) else None, records)


def against(side: SideVolume, naive: SideVolume) -> str:
    """The result of comparing ``side`` with the naive rule by their intervals, in words.

    Without an equal budget and equally many seeds there is no claim.
    """
    if not side.equal:
        return f"no claim: it had {duration(side.spent_s)} of {duration(naive.spent_s)}"
    if side.ci is None or naive.ci is None or side.seeds != naive.seeds:
        return f"no claim: {count(side.seeds, 'seed')}, where the rule has {naive.seeds}"
    if side.ci[0] > naive.ci[1]:
        return "shown to be better"
    return "shown to be worse" if side.ci[1] < naive.ci[0] else "not shown to be better"


def _of_rule(
    name: str, plan: CheckedFrontier, choice: Choice, policies: tuple[str, ...], budget_s: float | None
) -> Side:
    """The naive rule for all layouts that were asked about. ``budget_s``: None: all its trainings count."""
    variant = plan.naive_recipe(1, policies).variant
    made = [t for parts in plan.parts for t in choice.with_own_seeds(parts, policies)]
    seconds = [t.worker_seconds for t in made]
    inside = made[: len(made) if budget_s is None else _affordable(seconds, budget_s)]
    of = {parts: {t.seed: t for t in inside if t.parts == parts} for parts in plan.parts}
    reached = [layout for layout in plan.layouts if of[layout.num_slots]]
    seeds = [seed for seed in choice.seeds() if reached and all(seed in of[layout.num_slots] for layout in reached)]
    spots = {
        seed: [(of[layout.num_slots][seed], plan.worker_layouts.kind(layout, variant)) for layout in reached]
        for seed in seeds
    }
    trials = frozenset(t.trial for t in inside)
    return Side(name, spots, trials, len(made), sum(seconds[: len(inside)]), sum(seconds))


def _of_search(
    name: str, searched: Sequence[Spent], plan: CheckedFrontier, by: FrontierCriteria, budget_s: float
) -> Side:
    """The front of a search by validation, which is all that the search sees."""
    seconds = [each.worker_seconds for each in searched]
    inside = searched[: _affordable(seconds, budget_s)]
    ended = [each.training for each in inside if each.training is not None]
    spots = [(t, plan.kind_of(t)) for t in ended if t.run is not None and t.result.state == "complete"]
    if spots:
        table = np.array([_point(spot, by, spot[0].result.metrics[by.quality.name]) for spot in spots])
        spots = [spot for spot, keeps in zip(spots, nondominated(table), strict=True) if keeps]
    all_requested = all(
        t.parts in plan.worker_layouts.parts for t, _ in spots
    )  # otherwise some are for layouts that are no longer asked about
    cells = [(t.recipe, t.parts) for t, _ in spots] if all_requested else []
    trials = frozenset(each.started.trial for each in inside)
    by_seed = {plan.request.seed: spots} if spots else {}
    return Side(name, by_seed, trials, len(searched), sum(seconds[: len(inside)]), sum(seconds), cells)


def _affordable(seconds: Sequence[float], budget_s: float) -> int:
    """How many of the first trainings fit into the budget together."""
    return int(np.searchsorted(np.cumsum(seconds), budget_s, side="right"))


def _scored(side: Side, choice: Choice) -> TimedTrainings:
    """The trainings of a side's settings by fresh seeds that all settings have, or else by their first seed."""
    if not side.cells:
        return side.spots
    (spots,) = side.spots.values()
    fresh: dict[int, list[TimedTraining]] = {}
    for seed in choice.seeds(FRESH_SEEDS):
        again = [choice.of_seed(*cell, seed) for cell in side.cells]
        trained = [(t, kind) for t, (_, kind) in zip(again, spots, strict=True) if t is not None]
        if len(trained) == len(spots):
            fresh[seed] = trained
    return fresh or side.spots


def _points(spots: Sequence[TimedTraining], by: FrontierCriteria) -> NDArray[np.float64]:
    """Quality (on held-out data if there are any) and the logarithms of time and cost, without diverged trainings."""
    rows = []
    for training, kind in spots:
        if training.run is not None:
            metrics = training.result.metrics
            rows.append(_point((training, kind), by, metrics.get(f"test_{by.quality.name}", metrics[by.quality.name])))
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    table[:, 1:] = np.log(table[:, 1:])
    return table


def _point(spot: TimedTraining, by: FrontierCriteria, quality: float) -> list[float]:
    seconds, _ = by.seconds(*spot)
    return [_sign(by) * quality, seconds, by.cost(spot[1].workers, seconds)]


def _part(scaled: NDArray[np.float64]) -> float:
    """The part of the box, up to a tenth beyond all points, that ``scaled`` points cover."""
    reference = np.full(3, 1.1)
    return min(1.0, hypervolume(scaled, reference) / float(np.prod(reference)))


def _sign(by: FrontierCriteria) -> float:
    return -1.0 if by.quality.direction == "max" else 1.0


# --- the answer ---


def conclude(
    plan: CheckedFrontier,
    choice: Choice,
    tuned: Mapping[int, Sequence[Recipe]],
    rules: Mapping[str, str],
    by: FrontierCriteria,
    compared: Sequence[Side],
    throughput: Sequence[ThroughputTuned] = (),
    untimed: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> FrontierFound:
    """Build the result of a frontier from its trainings and step times.

    Args:
        plan: The checked request.
        choice: The trainings, ranked.
        tuned: The recipes shown as tuned, by parts of a batch.
        rules: The rule of each configuration's learning rate, by ``name_of(config)``.
        by: How rows are judged.
        compared: The sides that are compared at equal budget.
        throughput: The results of the throughput phase.
        untimed: The layouts whose steps could not be timed here, and why.
        left_out: Whatever else was asked for and not done, and why.

    Returns:
        The rows with the front, the answer and its reasons.

    Raises:
        UserError: If no training succeeded.
    """
    made = _rows(plan, choice, tuned, rules, by)
    rows = mark_front([each for each, _ in made], by)
    absent = [*left_out, *_not_done(plan, rows, compared, untimed)]
    answer = answer_of(rows, by, plan.parts, _this_machine(plan), absent)
    picked = pick_row(rows, by)
    advice = Advice(by, plan.parts, tuple(rows), answer.pick, picked.faster)
    timed = in_words(throughput) if answer.pick is not None else ""
    failed = [FrontierReason("hint", f"time: modelled, since no step could be timed of {each}") for each in untimed]
    return FrontierFound(
        quality=by.quality.name,
        direction=by.quality.direction,
        target=by.target,
        price_per_worker_hour=by.price_per_worker_hour,
        prices_change=by.prices is not None,
        rows=rows,
        volumes=volumes(compared, choice, by),
        answer=_with_commands(plan, answer, rows, [trainings for _, trainings in made]),
        reasons=[*advice.reasons(), *([FrontierReason("decides", timed)] if timed else []), *failed],
        model_errors=dict(by.times.errors),
        links=by.times.links,
    )


def _with_commands(
    plan: CheckedFrontier, answer: FrontierAnswer, rows: Sequence[FrontierRow], trainings: Sequence[Sequence[Training]]
) -> FrontierAnswer:
    """``answer`` with the commands that train its rows."""

    def repeated(row: int) -> Training:
        return next(t for t in trainings[row] if t.run is not None)

    def command(row: int | None) -> str:
        return "" if row is None else _command(plan, rows[row], repeated(row))

    answer = replace(answer, fastest_command=command(answer.fastest_row))
    if (machine := answer.this_machine) is not None:
        answer = replace(answer, this_machine=replace(machine, command=command(machine.row)))
    if answer.pick is None:
        return answer
    shown = repeated(answer.pick)
    return replace(
        answer,
        command=command(answer.pick),
        command_trial=shown.trial,
        command_metrics={} if shown.run is None else dict(shown.run.metrics),
        command_note=_note(plan, rows[answer.pick], shown),
    )


def _this_machine(plan: CheckedFrontier) -> OwnMachine | None:
    """The cores and GPUs of this machine; None if the trainings run on other hosts."""
    if plan.timeable is None:
        return None
    gpus = 0
    if plan.request.execution.device.startswith("cuda"):
        import torch

        gpus = torch.cuda.device_count()
    return OwnMachine(plan.timeable, gpus)


def _not_done(
    plan: CheckedFrontier, rows: Sequence[FrontierRow], compared: Sequence[Side], untimed: Sequence[str]
) -> list[str]:
    """The parts of the request that no training, or no measured time, covers."""
    missing = [f"{SEARCH}: none of its trainings ended" for side in compared if side.name == SEARCH and not side.of]
    searched = not missing
    untuned = [n for n in plan.parts if not any(r.role == "tuned" and r.num_slots == n for r in rows)]
    if untuned and searched:
        counts = ", ".join(map(str, untuned))
        missing.append(f"other settings than the naive rule's for {counts} workers: none was confirmed as better")
    tried = {r.execution.get("policy") for r in rows}
    for text in plan.request.policies:
        if not any(policy in tried for policy in policies_of(text)):
            missing.append(f"policy {text}: no training with it is in the table")
    return [*missing, *(f"timing the steps of {each}" for each in untimed)]


def _rows(
    plan: CheckedFrontier,
    choice: Choice,
    tuned: Mapping[int, Sequence[Recipe]],
    rules: Mapping[str, str],
    by: FrontierCriteria,
) -> list[tuple[FrontierRow, list[Training]]]:
    """Each row with its trainings: first the naive rule's, then the tuned rows of each layout, policies included."""
    baseline, rows = choice.baseline(), list[tuple[FrontierRow, list[Training]]]()

    def add(
        role: Literal["naive", "tuned"], layout: ExecutionSettings, recipe: Recipe, trainings: list[Training]
    ) -> None:
        worker_layouts, variant = plan.worker_layouts, recipe.variant
        rule = "linear" if role == "naive" else rules.get(name_of(recipe.config), "linear")
        kind, differences, others = (
            worker_layouts.kind(layout, variant),
            worker_layouts.differences(layout, variant),
            _kinds(plan, recipe),
        )
        made = row(
            role, worker_layouts.by(layout, variant), recipe, rule, trainings, by, baseline, kind, differences, others
        )
        if made is not None:
            rows.append((made, trainings))

    for layout in plan.layouts:
        add("naive", layout, plan.naive_recipe(layout.num_slots), choice.with_own_seeds(layout.num_slots))
    for layout in plan.worker_layouts.layouts:
        for recipe in tuned.get(layout.num_slots, ()):
            if plan.is_possible(layout, recipe.variant) and not (
                layout in plan.layouts and recipe == plan.naive_recipe(layout.num_slots)
            ):
                add("tuned", layout, recipe, choice.tried(recipe, layout.num_slots))
    if not rows:
        raise UserError("some training must succeed", "all diverged or failed", "lower the program's lr")
    return rows


def _kinds(plan: CheckedFrontier, recipe: Recipe) -> dict[int, StepKind]:
    """The kind of steps of ``recipe`` on each worker count asked about that can train it.

    Meshes that divide layers are left out: their times are measured for their own rows, and never modelled.
    """
    worker_layouts, batch = plan.worker_layouts, batch_of(recipe.config)
    able = [
        layout
        for layout in worker_layouts.requested
        if layout.num_slots <= batch and plan.is_possible(layout, recipe.variant)
    ]
    kinds = {layout.workers: worker_layouts.kind(layout, recipe.variant) for layout in reversed(able)}
    kinds |= {workers: StepKind(Mesh(data=workers)) for workers in plan.beyond if workers <= batch}
    return {workers: kind for workers, kind in kinds.items() if kind.mesh.tensor == 1}


def _note(plan: CheckedFrontier, chosen: FrontierRow, repeated: Training) -> str:
    """The exact result of the command, in words."""
    name = f"test_{plan.quality.name}" if chosen.held_out else plan.quality.name
    value, others = repeated.result.metrics[name], chosen.seeds - 1
    mean = f"; with {others} other seed{'s' if others > 1 else ''} the mean is the row's" if others else ""
    return f"seed {repeated.seed}: it gives {name} {value!r} again{mean}"


def _command(plan: CheckedFrontier, chosen: FrontierRow, repeated: Training) -> str:
    """The command that repeats ``repeated``, slot by slot, on the row's workers."""
    request = plan.request
    execution = {**chosen.execution, "num_slots": repeated.slots}
    if "policy" in execution and "mesh" not in execution:
        execution["workers"] = f"{chosen.workers}:{chosen.workers}"  # the row holds for exactly these workers
    seed_and_epochs = repeated.seed, request.epochs
    program = request.program
    return run_command(
        program.path,
        chosen.config,
        execution,
        *seed_and_epochs,
        divergence=request.divergence,
        data=program.data,
        arguments=program.arguments,
        training_command=program.command,
    )
