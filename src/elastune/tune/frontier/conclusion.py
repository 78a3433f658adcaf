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
from elastune.core.plan.confidence_intervals import bounded_ci
from elastune.core.run import ExecutionSettings
from elastune.runtime.job.validation import policies_of
from elastune.tune.frontier.answer import Advice, answer_of, pick_row
from elastune.tune.frontier.checked_request import FrontierPlan
from elastune.tune.frontier.choice import FRESH_SEEDS, Cell, Choice
from elastune.tune.frontier.criteria import FrontierCriteria, batch_of, mark_front, row
from elastune.tune.frontier.short_runs import in_words
from elastune.tune.frontier.trainings import FOR_WORKERS, Recipe, Spent, StepKind, Training, name_of, read_variant
from elastune.tune.search.front import hypervolume, nondominated
from elastune.tune.study.run_command import run_command

# [volumes] What the search is worth against the naive rule: hypervolumes of what each has found at equal budget. Pure.

NAIVE, TUNED, SEARCH = "naive rule", "naive rule, tuned", "search"
ENOUGH = 0.95  # of the budget: trainings differ in time from one to the next
TimedTraining = tuple[Training, StepKind]
"""A training, and by whose steps it is timed."""
TimedTrainings = Mapping[int, Sequence[TimedTraining]]
"""By seed: every settings' training with it."""


@dataclass(frozen=True)
class Side:
    """What one manner of finding settings has found with a budget. ``spots``: by the seeds that they were found with.

    ``inside``: the trials that count of ``of``: they took ``spent_s``, in worker-seconds, of ``had_s`` that all took.
    ``cells``: settings that are worth what they reach with fresh seeds: they were chosen by how they did with one.
    """

    name: str
    spots: TimedTrainings
    inside: frozenset[int]
    of: int
    spent_s: float
    had_s: float
    cells: Sequence[Cell] = ()


def sides(plan: FrontierPlan, choice: Choice, searched: Sequence[Spent], by: FrontierCriteria) -> list[Side]:
    """The naive rule, the same under each policy that was given, the same with settings tuned, and the whole search.

    The budget is what the naive rule's trainings took, in worker-seconds as they were spent here. Of others the first
    trainings count, as they ended or paused, until they have used it. Of a search that is its front by validation, each
    settings judged by the steps of those that it was trained for; nothing of the naive rule's is among them. Those of
    the rule, tuned, are of the search's that follow its batch and its learning rate (``follows_rule``).
    """
    naive = _of_rule(NAIVE, plan, choice, (), None)
    found = [naive]
    for text in plan.request.policies:
        found.append(_of_rule(f"{NAIVE}, policy {text}", plan, choice, policies_of(text), naive.had_s))
    ruled = [each for each in searched if follows_rule(plan, each.started)]
    return [*found, *(_found(*each, plan, by, naive.had_s) for each in ((TUNED, ruled), (SEARCH, searched)))]


def follows_rule(plan: FrontierPlan, started: TrialStarted) -> bool:
    """Whether a trial of the search scales batch and learning rate by the workers that it is for, as the rule does.

    What they are scaled from is tuned, and so are the other settings; the way is that which was asked for.
    """
    execution, variant = read_variant(started.execution)
    batch = batch_of(started.config)
    scaled = batch == plan.base_batch or started.tags.get("lr_rule") == "linear"
    return (
        variant == plan.variant
        and scaled
        and batch == plan.naive_batch(started.tags.get(FOR_WORKERS, execution.num_slots))
    )


def volumes(found: Sequence[Side], choice: Choice, by: FrontierCriteria) -> FrontierVolumes:
    """What each side's settings cover, by held-out data, in the mean over seeds: fresh ones where all have them."""
    known = [_scored(side, choice) for side in found]
    tables = [{seed: _points(spots, by) for seed, spots in each.items()} for each in known]
    every = np.concatenate([np.zeros((0, 3)), *(table for each in tables for table in each.values())])
    budget_s = found[0].had_s
    low, high = (every.min(axis=0), every.max(axis=0)) if len(every) else (np.zeros(3), np.ones(3))
    span = np.where(high > low, high - low, 1.0)
    told = []
    for side, spots, by_seed in zip(found, known, tables, strict=True):
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
        told.append(volume)
    worst = low + 1.1 * span
    corner = ReferencePoint(_sign(by) * float(worst[0]), *(float(np.exp(value)) for value in worst[1:]))
    told = [each if i == 0 else replace(each, against=against(each, told[0])) for i, each in enumerate(told)]
    return FrontierVolumes(budget_s, corner if len(every) else None, told)


def against(side: SideVolume, naive: SideVolume) -> str:
    """What the intervals say of ``side`` and the naive rule; no claim without as much to spend and as many seeds."""
    if not side.equal:
        return f"no claim: it had {duration(side.spent_s)} of {duration(naive.spent_s)}"
    if side.ci is None or naive.ci is None or side.seeds != naive.seeds:
        return f"no claim: {count(side.seeds, 'seed')}, where the rule has {naive.seeds}"
    if side.ci[0] > naive.ci[1]:
        return "shown to be better"
    return "shown to be worse" if side.ci[1] < naive.ci[0] else "not shown to be better"


def _of_rule(name: str, plan: FrontierPlan, choice: Choice, policies: tuple[str, ...], budget_s: float | None) -> Side:
    """The rule's settings for all crews that were asked about. ``budget_s``: None: whatever they took."""
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


def _found(name: str, searched: Sequence[Spent], plan: FrontierPlan, by: FrontierCriteria, budget_s: float) -> Side:
    """The search's own choice: by validation, which is all that it sees."""
    seconds = [each.worker_seconds for each in searched]
    inside = searched[: _affordable(seconds, budget_s)]
    ended = [each.training for each in inside if each.training is not None]
    spots = [(t, plan.kind_of(t)) for t in ended if t.run is not None and t.result.state == "complete"]
    if spots:
        table = np.array([_point(spot, by, spot[0].result.metrics[by.quality.name]) for spot in spots])
        spots = [spot for spot, keeps in zip(spots, nondominated(table), strict=True) if keeps]
    known = all(
        t.parts in plan.worker_layouts.parts for t, _ in spots
    )  # else some are for workers that nobody speaks of
    cells = [(t.recipe, t.parts) for t, _ in spots] if known else []
    trials = frozenset(each.started.trial for each in inside)
    own = {plan.request.seed: spots} if spots else {}
    return Side(name, own, trials, len(searched), sum(seconds[: len(inside)]), sum(seconds), cells)


def _affordable(seconds: Sequence[float], budget_s: float) -> int:
    """How many of the first ones have taken no more, all together."""
    return int(np.searchsorted(np.cumsum(seconds), budget_s, side="right"))


def _scored(side: Side, choice: Choice) -> TimedTrainings:
    """By fresh seeds, of which those count that all settings have; else by those that they were found with."""
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
    """Quality on held-out data where there are any, and logarithms of time and cost; those that diverged have none."""
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
    """Of the box up to a tenth beyond all, what these points cover."""
    reference = np.full(3, 1.1)
    return min(1.0, hypervolume(scaled, reference) / float(np.prod(reference)))


def _sign(by: FrontierCriteria) -> float:
    return -1.0 if by.quality.direction == "max" else 1.0


# [conclusion] From what was trained and timed to the answer: the rows, the front, the pick and its command. Pure.


def conclude(
    plan: FrontierPlan,
    choice: Choice,
    tuned: Mapping[int, Sequence[Recipe]],
    rules: Mapping[str, str],
    by: FrontierCriteria,
    found: Sequence[Side],
    throughput: Sequence[ThroughputTuned] = (),
    untimed: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> FrontierFound:
    """The answer. ``tuned``: parts of a batch -> recipes; ``rules``: by ``name_of(config)``, its learning rate's.
    ``found``: what is compared at equal budget; ``throughput``: what the phase of that name found; ``untimed``: whose
    steps could not be timed here, and why; ``left_out``: what else was asked for and not done, and why.

    Raises ``UserError`` where no training succeeded.
    """
    made = _rows(plan, choice, tuned, rules, by)
    rows = mark_front([each for each, _ in made], by)
    absent = [*left_out, *_not_done(plan, rows, found, untimed)]
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
        volumes=volumes(found, choice, by),
        answer=_with_commands(plan, answer, rows, [trainings for _, trainings in made]),
        reasons=[*advice.reasons(), *([FrontierReason("decides", timed)] if timed else []), *failed],
        model_errors=dict(by.times.errors),
        links=by.times.links,
    )


def _with_commands(
    plan: FrontierPlan, answer: FrontierAnswer, rows: Sequence[FrontierRow], trainings: Sequence[Sequence[Training]]
) -> FrontierAnswer:
    """``answer`` with the commands that train the rows that it names."""

    def repeated(row: int) -> Training:
        return next(t for t in trainings[row] if t.run is not None)

    def command(row: int | None) -> str:
        return "" if row is None else _command(plan, rows[row], repeated(row))

    answer = replace(answer, fastest_command=command(answer.fastest_row))
    if (here := answer.this_machine) is not None:
        answer = replace(answer, this_machine=replace(here, command=command(here.row)))
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


def _this_machine(plan: FrontierPlan) -> OwnMachine | None:
    """What it has room for; None where the trainings run on other hosts."""
    if plan.timeable is None:
        return None
    gpus = 0
    if plan.request.execution.device.startswith("cuda"):
        import torch

        gpus = torch.cuda.device_count()
    return OwnMachine(plan.timeable, gpus)


def _not_done(
    plan: FrontierPlan, rows: Sequence[FrontierRow], found: Sequence[Side], untimed: Sequence[str]
) -> list[str]:
    """What was asked for and has no training, or no time, behind it."""
    missing = [f"{SEARCH}: none of its trainings ended" for side in found if side.name == SEARCH and not side.of]
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
    plan: FrontierPlan,
    choice: Choice,
    tuned: Mapping[int, Sequence[Recipe]],
    rules: Mapping[str, str],
    by: FrontierCriteria,
) -> list[tuple[FrontierRow, list[Training]]]:
    """Each with its trainings: the naive rule's, then for each crew the best static settings and those of policies."""
    baseline, found = choice.baseline(), list[tuple[FrontierRow, list[Training]]]()

    def add(
        role: Literal["naive", "tuned"], layout: ExecutionSettings, recipe: Recipe, trainings: list[Training]
    ) -> None:
        worker_layouts, variant = plan.worker_layouts, recipe.variant
        rule = "linear" if role == "naive" else rules.get(name_of(recipe.config), "linear")
        kind, ways, others = (
            worker_layouts.kind(layout, variant),
            worker_layouts.ways(layout, variant),
            _kinds(plan, recipe),
        )
        made = row(role, worker_layouts.by(layout, variant), recipe, rule, trainings, by, baseline, kind, ways, others)
        if made is not None:
            found.append((made, trainings))

    for layout in plan.layouts:
        add("naive", layout, plan.naive_recipe(layout.num_slots), choice.with_own_seeds(layout.num_slots))
    for layout in plan.worker_layouts.layouts:
        for recipe in tuned.get(layout.num_slots, ()):
            if plan.is_possible(layout, recipe.variant) and not (
                layout in plan.layouts and recipe == plan.naive_recipe(layout.num_slots)
            ):
                add("tuned", layout, recipe, choice.tried(recipe, layout.num_slots))
    if not found:
        raise UserError("some training must succeed", "all diverged or failed", "lower the program's lr")
    return found


def _kinds(plan: FrontierPlan, recipe: Recipe) -> dict[int, StepKind]:
    """Of steps with ``recipe`` on each number of workers that was asked about, where that can train it.

    What divides layers is left out: its time is measured where it is a row's own, and not modelled.
    """
    worker_layouts, batch = plan.worker_layouts, batch_of(recipe.config)
    able = [
        layout
        for layout in worker_layouts.asked
        if layout.num_slots <= batch and plan.is_possible(layout, recipe.variant)
    ]
    kinds = {layout.workers: worker_layouts.kind(layout, recipe.variant) for layout in reversed(able)}
    return {workers: kind for workers, kind in kinds.items() if kind.mesh.tensor == 1}


def _note(plan: FrontierPlan, chosen: FrontierRow, repeated: Training) -> str:
    """What the command gives, digit by digit."""
    name = f"test_{plan.quality.name}" if chosen.held_out else plan.quality.name
    value, others = repeated.result.metrics[name], chosen.seeds - 1
    mean = f"; with {others} other seed{'s' if others > 1 else ''} the mean is the row's" if others else ""
    return f"seed {repeated.seed}: it gives {name} {value!r} again{mean}"


def _command(plan: FrontierPlan, chosen: FrontierRow, repeated: Training) -> str:
    """Trains as ``repeated`` was, slot by slot, on the row's workers."""
    request = plan.request
    execution = {**chosen.execution, "num_slots": repeated.slots}
    if "policy" in execution and "mesh" not in execution:
        execution["workers"] = f"{chosen.workers}:{chosen.workers}"  # a row is that of its workers
    asked = repeated.seed, request.epochs
    data = request.program.data
    return run_command(request.program.path, chosen.config, execution, *asked, divergence=request.divergence, data=data)
