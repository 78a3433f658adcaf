"""From what was trained and timed to the answer: the rows, the front, the pick and its command. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from elastune.core.errors import UserError
from elastune.core.run import Config
from elastune.frontier.advice import Advice
from elastune.frontier.choice import Choice
from elastune.frontier.criteria import FrontierCriteria
from elastune.frontier.plan import FrontierPlan
from elastune.frontier.rows import mark_front, row
from elastune.frontier.trainings import Training, Trainings, name_of
from elastune.frontier.volumes import volumes
from elastune.journal.records import FrontierFound, FrontierRow
from elastune.search.analysis.front import pick
from elastune.search.space.objective import Objective
from elastune.study.results.command import run_command


def conclude(
    plan: FrontierPlan,
    choice: Choice,
    trainings: Trainings,
    tuned: Mapping[int, Config],
    rules: Mapping[str, str],
    by: FrontierCriteria,
) -> FrontierFound:
    """The answer. ``tuned``: parts of a batch -> configuration; ``rules``: by ``name_of(config)``, its learning rate's.

    Raises ``UserError`` where no training succeeded.
    """
    rows = mark_front(_rows(plan, choice, tuned, rules, by), by)
    naive = [t for parts in plan.parts for t in choice.with_own_seeds(parts)]
    volume = volumes(rows, naive, trainings.searched, by, plan.mesh)
    chosen, faster = pick_row(plan.axes, rows, by)
    shown = None if chosen is None else _repeated(choice, rows[chosen])
    advice = Advice(by, plan.parts, tuple(rows), chosen, faster)
    return FrontierFound(
        quality=by.quality.name,
        direction=by.quality.direction,
        target=by.target,
        price_per_worker_hour=by.price_per_worker_hour,
        prices_change=by.prices is not None,
        rows=rows,
        hypervolume_naive=volume.naive,
        hypervolume_tuned=volume.tuned,
        hypervolume_note=volume.note,
        answer=advice.answer(),
        reasons=advice.reasons(),
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

    Of the rows that are shown to hold: the fastest, without a target the knee of their front. Where none is shown to
    hold: of those that may, the one whose interval comes nearest to the target, or whose loss is bound lowest. None
    where all of them fall.
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
    plan: FrontierPlan, choice: Choice, tuned: Mapping[int, Config], rules: Mapping[str, str], by: FrontierCriteria
) -> list[FrontierRow]:
    baseline, made = choice.baseline(), list[FrontierRow | None]()
    for crew in plan.crews:
        naive, trainings = plan.naive(crew.num_slots), choice.with_own_seeds(crew.num_slots)
        made.append(row("naive", crew, naive, "linear", trainings, by, baseline))
    for crew in plan.crews:
        if config := tuned.get(crew.num_slots):
            rule = rules.get(name_of(config), "linear")
            made.append(row("tuned", crew, config, rule, choice.tried(config, crew.num_slots), by, baseline))
    rows = [each for each in made if each is not None]
    if not rows:
        raise UserError("some training must succeed", "all diverged or failed", "lower the program's lr")
    return rows


def _repeated(choice: Choice, chosen: FrontierRow) -> Training:
    """The training of a row that its command repeats: the first of those that ended well."""
    naive = chosen.role == "naive"
    trainings = choice.with_own_seeds(chosen.num_slots) if naive else choice.tried(chosen.config, chosen.num_slots)
    return next(t for t in trainings if t.run is not None)


def _note(plan: FrontierPlan, chosen: FrontierRow, repeated: Training) -> str:
    """What the command gives, digit by digit."""
    name = f"test_{plan.quality.name}" if chosen.held_out else plan.quality.name
    value, others = repeated.result.metrics[name], chosen.seeds - 1
    mean = f"; with {others} other seed{'s' if others > 1 else ''} the mean is the row's" if others else ""
    return f"seed {repeated.seed}: it gives {name} {value!r} again{mean}"


def _command(plan: FrontierPlan, chosen: FrontierRow, repeated: Training) -> str:
    """Trains as ``repeated`` was, slot by slot, on the row's workers."""
    request = plan.request
    crew = next(c for c in plan.crews if (str(c.first_mesh), c.mechanism) == (chosen.mesh, chosen.mechanism))
    means = replace(crew, num_slots=repeated.slots).to_json()
    asked = repeated.seed, request.epochs
    data = request.program.data
    return run_command(request.program.path, chosen.config, means, *asked, divergence=request.divergence, data=data)
