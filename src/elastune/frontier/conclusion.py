"""From what was trained and timed to the answer: the rows, the front, the pick and its command. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from elastune.core.errors import UserError
from elastune.core.run import Config
from elastune.frontier.choice import Choice
from elastune.frontier.plan import FrontierPlan
from elastune.frontier.rows import FrontierCriteria, answer, hypervolumes, mark_front, row, support
from elastune.frontier.trainings import Training, name_of
from elastune.journal.records import FrontierFound, FrontierRow
from elastune.search.analysis.front import pick
from elastune.study.results.command import run_command


def conclude(
    plan: FrontierPlan, choice: Choice, tuned: Mapping[int, Config], rules: Mapping[str, str], by: FrontierCriteria
) -> FrontierFound:
    """The answer. ``tuned``: worker count -> configuration; ``rules``: by ``name_of(config)``, its learning rate's.

    Raises ``UserError`` where no training succeeded.
    """
    counts = list(plan.request.workers)
    rows = mark_front(_rows(plan, choice, tuned, rules, by), by)
    naive_volume, volume = hypervolumes(rows, by)
    chosen = _pick(plan, rows, by)
    shown = None if chosen is None else _repeated(choice, rows[chosen])
    words, supported = support(rows[0] if chosen is None else rows[chosen], by.times.model)
    return FrontierFound(
        quality=by.quality.name,
        direction=by.quality.direction,
        target=by.target,
        price_per_worker_hour=by.price_per_worker_hour,
        rows=rows,
        hypervolume_naive=naive_volume,
        hypervolume_tuned=volume,
        answer=answer(rows, counts, by),
        pick=chosen,
        command="" if chosen is None or shown is None else _command(plan, rows[chosen], shown),
        command_trial=None if shown is None else shown.trial,
        command_metrics={} if shown is None or shown.run is None else dict(shown.run.metrics),
        command_note="" if chosen is None or shown is None else _note(plan, rows[chosen], shown),
        support=words,
        supported_workers=supported,
    )


def _rows(
    plan: FrontierPlan, choice: Choice, tuned: Mapping[int, Config], rules: Mapping[str, str], by: FrontierCriteria
) -> list[FrontierRow]:
    means, made = plan.request.means, list[FrontierRow | None]()
    for workers in plan.request.workers:
        naive = plan.naive(workers)
        made.append(row("naive", workers, naive, "linear", choice.with_own_seeds(workers), by, means))
    for workers, config in tuned.items():
        rule = rules.get(name_of(config), "linear")
        made.append(row("tuned", workers, config, rule, choice.tried(config, workers), by, means))
    rows = [each for each in made if each is not None]
    if not rows:
        raise UserError("some training must succeed", "all diverged or failed", "lower the program's lr")
    return rows


def _pick(plan: FrontierPlan, rows: Sequence[FrontierRow], by: FrontierCriteria) -> int | None:
    """The fastest row that reaches the target; without a target the knee. None where the target is out of reach."""
    on_front = [i for i, r in enumerate(rows) if r.on_front]
    values = [{by.quality.name: rows[i].validation, "seconds": rows[i].seconds, "cost": rows[i].cost} for i in on_front]
    if by.target is None:
        return on_front[pick(values, plan.axes).index]
    if not any(by.reaches(v[by.quality.name]) for v in values):
        return None
    return on_front[pick(values, plan.axes, targets={by.quality.name: by.target}).index]


def _repeated(choice: Choice, chosen: FrontierRow) -> Training:
    """The training of a row that its command repeats: the first of those that ended well."""
    naive = chosen.role == "naive"
    trainings = choice.with_own_seeds(chosen.workers) if naive else choice.tried(chosen.config, chosen.workers)
    return next(t for t in trainings if t.run is not None)


def _note(plan: FrontierPlan, chosen: FrontierRow, repeated: Training) -> str:
    """What the command gives, digit by digit."""
    name = f"test_{plan.quality.name}" if chosen.held_out else plan.quality.name
    value, others = repeated.result.metrics[name], chosen.seeds - 1
    mean = f"; with {others} other seed{'s' if others > 1 else ''} the mean is the row's" if others else ""
    return f"seed {repeated.seed}: it gives {name} {value!r} again{mean}"


def _command(plan: FrontierPlan, chosen: FrontierRow, repeated: Training) -> str:
    """Trains as ``repeated`` was, slot by slot, on the row's workers."""
    request, means = plan.request, {**asdict(plan.means(repeated.slots)), "workers": chosen.workers}
    asked = repeated.seed, request.epochs
    return run_command(request.program.path, chosen.config, means, *asked, divergence=request.divergence)
