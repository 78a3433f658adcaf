"""From what was trained and timed to the answer: the rows, the front, the pick and its command. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from elastune.core.errors import UserError
from elastune.core.run import Means
from elastune.frontier.advice import Advice
from elastune.frontier.answer import answer_of, pick_row
from elastune.frontier.choice import Choice
from elastune.frontier.criteria import FrontierCriteria, batch_of
from elastune.frontier.plan import FrontierPlan
from elastune.frontier.rows import mark_front, row
from elastune.frontier.throughput import in_words
from elastune.frontier.trainings import Training, name_of
from elastune.frontier.volumes import SEARCH, Side, volumes
from elastune.frontier.ways import Recipe, StepKind
from elastune.job.validate_adapt import policies_of
from elastune.journal.records import (
    FrontierAnswer,
    FrontierFound,
    FrontierReason,
    FrontierRow,
    OwnMachine,
    ThroughputTuned,
)
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
    if plan.request.means.device.startswith("cuda"):
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
    tried = {r.means.get("policy") for r in rows}
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

    def add(role: Literal["naive", "tuned"], crew: Means, recipe: Recipe, trainings: list[Training]) -> None:
        lineup, way = plan.lineup, recipe.way
        rule = "linear" if role == "naive" else rules.get(name_of(recipe.config), "linear")
        kind, ways, others = lineup.kind(crew, way), lineup.ways(crew, way), _kinds(plan, recipe)
        made = row(role, lineup.by(crew, way), recipe, rule, trainings, by, baseline, kind, ways, others)
        if made is not None:
            found.append((made, trainings))

    for crew in plan.crews:
        add("naive", crew, plan.naive_recipe(crew.num_slots), choice.with_own_seeds(crew.num_slots))
    for crew in plan.lineup.crews:
        for recipe in tuned.get(crew.num_slots, ()):
            if plan.goes(crew, recipe.way) and not (crew in plan.crews and recipe == plan.naive_recipe(crew.num_slots)):
                add("tuned", crew, recipe, choice.tried(recipe, crew.num_slots))
    if not found:
        raise UserError("some training must succeed", "all diverged or failed", "lower the program's lr")
    return found


def _kinds(plan: FrontierPlan, recipe: Recipe) -> dict[int, StepKind]:
    """Of steps with ``recipe`` on each number of workers that was asked about, where that can train it.

    What divides layers is left out: its time is measured where it is a row's own, and not modelled.
    """
    lineup, batch = plan.lineup, batch_of(recipe.config)
    able = [crew for crew in lineup.asked if crew.num_slots <= batch and plan.goes(crew, recipe.way)]
    kinds = {crew.workers: lineup.kind(crew, recipe.way) for crew in reversed(able)}
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
    means = {**chosen.means, "num_slots": repeated.slots}
    if "policy" in means and "mesh" not in means:
        means["workers"] = f"{chosen.workers}:{chosen.workers}"  # a row is that of its workers
    asked = repeated.seed, request.epochs
    data = request.program.data
    return run_command(request.program.path, chosen.config, means, *asked, divergence=request.divergence, data=data)
