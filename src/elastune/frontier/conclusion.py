"""From what was trained and timed to the answer: the rows, the front, the pick and its command. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from elastune.core.errors import UserError
from elastune.core.run import Means
from elastune.frontier.advice import Advice
from elastune.frontier.choice import Choice
from elastune.frontier.criteria import FrontierCriteria
from elastune.frontier.plan import FrontierPlan
from elastune.frontier.rows import mark_front, row, with_efficiency
from elastune.frontier.throughput import in_words
from elastune.frontier.trainings import Training, name_of
from elastune.frontier.volumes import Side, volumes
from elastune.frontier.ways import Recipe
from elastune.journal.records import FrontierFound, FrontierReason, FrontierRow, ThroughputTuned
from elastune.search.analysis.front import pick
from elastune.search.space.objective import Objective
from elastune.study.results.command import run_command


def conclude(
    plan: FrontierPlan,
    choice: Choice,
    tuned: Mapping[int, Sequence[Recipe]],
    rules: Mapping[str, str],
    by: FrontierCriteria,
    found: Sequence[Side],
    throughput: Sequence[ThroughputTuned] = (),
    untimed: Sequence[str] = (),
) -> FrontierFound:
    """The answer. ``tuned``: parts of a batch -> recipes; ``rules``: by ``name_of(config)``, its learning rate's.
    ``found``: what is compared at equal budget; ``throughput``: what the phase of that name found; ``untimed``: whose
    steps could not be timed here, and why.

    Raises ``UserError`` where no training succeeded.
    """
    made = _rows(plan, choice, tuned, rules, by)
    rows = with_efficiency(mark_front([each for each, _ in made], by))
    chosen, faster = pick_row(plan.axes, rows, by)
    shown = None if chosen is None else next(t for t in made[chosen][1] if t.run is not None)
    advice = Advice(by, plan.parts, tuple(rows), chosen, faster)
    timed = in_words(throughput) if chosen is not None else ""
    failed = [FrontierReason("hint", f"time: modelled, since no step could be timed of {each}") for each in untimed]
    return FrontierFound(
        quality=by.quality.name,
        direction=by.quality.direction,
        target=by.target,
        price_per_worker_hour=by.price_per_worker_hour,
        prices_change=by.prices is not None,
        rows=rows,
        volumes=volumes(found, choice, by),
        answer=advice.answer(),
        reasons=[*advice.reasons(), *([FrontierReason("decides", timed)] if timed else []), *failed],
        model_errors=dict(by.times.errors),
        links=by.times.links,
        pick=chosen,
        command="" if chosen is None or shown is None else _command(plan, rows[chosen], shown),
        command_trial=None if shown is None else shown.trial,
        command_metrics={} if shown is None or shown.run is None else dict(shown.run.metrics),
        command_note="" if chosen is None or shown is None else _note(plan, rows[chosen], shown),
    )


def pick_row(
    axes: Sequence[Objective], rows: Sequence[FrontierRow], by: FrontierCriteria
) -> tuple[int | None, int | None]:
    """The row to use and, where one is faster by no more than the step-time model's own error, that one.

    Of the rows that are shown to hold: the fastest, without a target the fastest within 1 % of the best. Where none is
    shown to hold: of those that may, the one whose interval comes nearest to the target, or whose loss is bound lowest.
    None where all of them fall.
    """
    holding = [i for i, r in enumerate(rows) if r.verdict == "holds"]
    if not holding:
        open_ones = [i for i, r in enumerate(rows) if r.verdict == "not shown"]
        return min(open_ones, key=lambda i: _doubt(rows[i], by), default=None), None
    if by.target is None:
        held = [rows[i] for i in holding]
        values = [{by.quality.name: r.validation, "seconds": r.seconds, "cost": r.cost} for r in held]
        first = holding[pick(values, axes).index]
    else:
        first = min(holding, key=lambda i: (rows[i].seconds, rows[i].workers))
    tied = [i for i in holding if rows[i].workers < rows[first].workers and _tie(rows[i], rows[first])]
    best = min([first, *tied], key=lambda i: (rows[i].workers, rows[i].seconds))
    return best, None if best == first else first


def _tie(fewer: FrontierRow, more: FrontierRow) -> bool:
    """Whether more workers are not shown to be faster: nothing but the model says so, within its own error."""
    if fewer.seconds <= more.seconds:
        return True
    factors = [r.seconds_factor for r in (fewer, more) if r.seconds_label == "modelled"]
    return bool(factors) and fewer.seconds <= more.seconds * max(math.inf if f is None else f for f in factors)


def _doubt(r: FrontierRow, by: FrontierCriteria) -> float:
    """How far what is shown of a row is from what it should be."""
    if by.target is not None:
        return max((by.loss(end, by.target) for end in r.ci), default=math.inf) if r.ci else math.inf
    return math.inf if r.loss_bound is None else r.loss_bound


def _rows(
    plan: FrontierPlan,
    choice: Choice,
    tuned: Mapping[int, Sequence[Recipe]],
    rules: Mapping[str, str],
    by: FrontierCriteria,
) -> list[tuple[FrontierRow, list[Training]]]:
    """Each with its trainings: the naive rule's, then for each crew the best static settings and those of policies."""
    baseline, found = choice.baseline(), list[tuple[FrontierRow, list[Training]]]()

    def add(role: Literal["naive", "tuned"], crew: Means, recipe: Recipe, trainings: list[Training]) -> None:
        lineup, way = plan.lineup, recipe.way
        rule = "linear" if role == "naive" else rules.get(name_of(recipe.config), "linear")
        kind, ways = lineup.kind(crew, way), lineup.ways(crew, way)
        made = row(role, lineup.by(crew, way), recipe, rule, trainings, by, baseline, kind, ways)
        if made is not None:
            found.append((made, trainings))

    for crew in plan.crews:
        add("naive", crew, plan.naive_recipe(crew.num_slots), choice.with_own_seeds(crew.num_slots))
    for crew in plan.lineup.crews:
        for recipe in tuned.get(crew.num_slots, ()):
            if plan.goes(crew, recipe.way):
                add("tuned", crew, recipe, choice.tried(recipe, crew.num_slots))
    if not found:
        raise UserError("some training must succeed", "all diverged or failed", "lower the program's lr")
    return found


def _note(plan: FrontierPlan, chosen: FrontierRow, repeated: Training) -> str:
    """What the command gives, digit by digit."""
    name = f"test_{plan.quality.name}" if chosen.held_out else plan.quality.name
    value, others = repeated.result.metrics[name], chosen.seeds - 1
    mean = f"; with {others} other seed{'s' if others > 1 else ''} the mean is the row's" if others else ""
    return f"seed {repeated.seed}: it gives {name} {value!r} again{mean}"


def _command(plan: FrontierPlan, chosen: FrontierRow, repeated: Training) -> str:
    """Trains as ``repeated`` was, slot by slot, on the row's workers."""
    request = plan.request
    means = {**chosen.means, "num_slots": repeated.slots}
    if "policy" in means and "mesh" not in means:
        means["workers"] = f"{chosen.workers}:{chosen.workers}"  # a row is that of its workers
    asked = repeated.seed, request.epochs
    data = request.program.data
    return run_command(request.program.path, chosen.config, means, *asked, divergence=request.divergence, data=data)
