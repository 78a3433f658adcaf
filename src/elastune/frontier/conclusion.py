"""From what was trained and timed to the answer: the rows, the front, the pick and its command. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from elastune.core.errors import UserError
from elastune.core.run import Config
from elastune.frontier.choice import Choice
from elastune.frontier.plan import FrontierPlan
from elastune.frontier.rows import FrontierCriteria, answer, hypervolumes, mark_front, row, support
from elastune.frontier.trainings import key
from elastune.journal.records import FrontierFound, FrontierRow
from elastune.search.analysis.front import pick
from elastune.study.results.command import run_command


def conclude(
    plan: FrontierPlan, choice: Choice, tuned: Mapping[int, Config], rules: Mapping[str, str], by: FrontierCriteria
) -> FrontierFound:
    """The answer. ``tuned``: worker count -> configuration; ``rules``: by ``key(config, 0)``, its learning rate's.

    Raises ``UserError`` where no training succeeded.
    """
    counts = list(plan.request.workers)
    rows = mark_front(_rows(plan, choice, tuned, rules, by), by)
    naive_volume, volume = hypervolumes(rows, by)
    chosen = _pick(plan, rows, by)
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
        command="" if chosen is None else _command(plan, rows[chosen]),
        support=words,
        supported_workers=supported,
    )


def _rows(
    plan: FrontierPlan, choice: Choice, tuned: Mapping[int, Config], rules: Mapping[str, str], by: FrontierCriteria
) -> list[FrontierRow]:
    means, made = plan.request.means, list[FrontierRow | None]()
    for workers in plan.request.workers:
        naive = plan.naive(workers)
        made.append(row("naive", workers, naive, "linear", choice.with_own_seeds(naive), by, means))
    for workers, config in tuned.items():
        rule = rules.get(key(config, 0), "linear")
        made.append(row("tuned", workers, config, rule, choice.tried(config), by, means))
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


def _command(plan: FrontierPlan, chosen: FrontierRow) -> str:
    means: dict[str, Any] = {**asdict(plan.request.means), "workers": chosen.workers}
    return run_command(plan.request.program.path, chosen.config, means, plan.request.seed, plan.request.epochs)
