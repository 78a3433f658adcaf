"""Tables of a study: its trials, its front, what decided it."""

from __future__ import annotations

from collections.abc import Sequence

from elastune.core.text import duration, number, plain, settings_text, value_text
from elastune.report.gather import StudyStory, TrialStory, mechanism_text, told_settings
from elastune.report.tables.tables import Table
from elastune.search.analysis.importance import Importance
from elastune.search.space.objective import oriented, valued
from elastune.study.results.assets import INFERENCE, TRAINING, AssetPoint, Assets
from elastune.study.results.eligible import task_of
from elastune.study.results.study import Picked, Study
from elastune.study.results.trials import Trial


def trials_table(study: StudyStory) -> Table:
    """Every trial in the order they started; of paused ones what their last report told."""
    names = list(study.objectives)
    header = ("trial", "phase", "state", *(plain(name, 30) for name in names), "wall time", "workers", "mechanism")
    header = (*header, "seed", "settings", "why")
    rows = tuple(_trial_cells(trial, names, study.price) for trial in study.trials)
    return Table(f"Trials ({len(rows)})", header, rows, frozenset({0, *range(3, 5 + len(names)), 6 + len(names)}))


def front_table(study: StudyStory, best: Sequence[int], choices: Sequence[Picked] = ()) -> Table:
    """The non-dominated trials ``best`` and the ``choices``, best first objective first. It names the pick."""
    names = list(study.objectives)
    taken = {choice.trial.number: choice for choice in choices}
    chosen = [trial for trial in study.trials if trial.trial in {*best, *taken}]
    if names:
        sign = -1.0 if study.objectives[names[0]] == "max" else 1.0
        chosen.sort(key=lambda trial: sign * (trial.value(names[0]) or 0.0))
    header = ("trial", *(f"{plain(name, 30)} ({study.objectives[name]})" for name in names), "workers", "mechanism")
    header = (*header, "settings", *(["choice"] if choices else []))
    rows = tuple(
        (
            str(trial.trial),
            *(valued(name, trial.value(name), study.price) for name in names),
            trial.workers or "–",
            trial.mechanism,
            _settings_of(trial),
            *([_role(trial.trial, choices)] if choices else []),
        )
        for trial in chosen
    )
    title = "The front" if len(names) > 1 else "Best trial"
    return Table(title, header, rows, frozenset(range(2 + len(names))))


def _role(trial: int, choices: Sequence[Picked]) -> str:
    """What a trial is chosen for: the first of ``choices`` is the pick."""
    for place, choice in enumerate(choices):
        if choice.trial.number == trial:
            return "or" if place else "pick"
    return ""


def choices_table(study: Study, choices: Sequence[Picked]) -> Table:
    """The trials to choose from, the pick first, each with the command that trains it."""
    names = [objective.name for objective in study.objectives]
    rows = tuple(
        (
            "or" if place else "pick",
            str(choice.trial.number),
            plain(choice.reason, 300),
            *(valued(name, choice.trial.values.get(name), study.price_per_worker_hour) for name in names),
            choice.command,
        )
        for place, choice in enumerate(choices)
    )
    header = ("", "trial", "why", *(plain(name, 30) for name in names), "command")
    return Table("Which trial to take", header, rows, frozenset({1, *range(3, 3 + len(names))}))


def tasks_table(study: Study) -> Table:
    """What the trials have reached that have different tasks, in the order they ended."""
    names = [objective.name for objective in study.objectives]
    rows = tuple(
        (
            task_of(trial.config),
            str(trial.number),
            trial.state,
            *(valued(name, trial.values.get(name), study.price_per_worker_hour) for name in names),
        )
        for trial in study.trials
    )
    header = ("part", "trial", "state", *(plain(name, 30) for name in names))
    return Table("The parts of the tree of classes", header, rows, frozenset({1, *range(3, 3 + len(names))}))


def failures_table(study: StudyStory) -> Table:
    """Trials that were rejected, crashed, diverged or broke a constraint, each with its reason."""
    rows = tuple(
        (
            str(trial.trial),
            trial.phase,
            trial.finished.state,
            trial.workers or "–",
            _settings_of(trial),
            _reason(trial),
        )
        for trial in study.trials
        if trial.finished and trial.finished.state != "complete"
    )
    header = ("trial", "phase", "state", "workers", "settings", "why")
    return Table(f"Trials without a result ({len(rows)})", header, rows, frozenset({0, 3}))


def subset_table(study: Study, chosen: Sequence[tuple[Trial, str]]) -> Table:
    """Trials that stand for the front, the most important first, and why each."""
    names = [objective.name for objective in study.objectives]
    header = ("trial", *(plain(name, 30) for name in names), "workers", "mechanism", "settings", "why")
    rows = tuple(
        (
            str(trial.number),
            *(valued(name, trial.values.get(name), study.price_per_worker_hour) for name in names),
            value_text(trial.means.get("workers", "–")),
            mechanism_text(trial.means),
            settings_text(told_settings(trial.config, trial.means)),
            reason,
        )
        for trial, reason in chosen
    )
    return Table("A subset that stands for the front", header, rows, frozenset(range(2 + len(names))))


def assets_table(found: Assets, picked: AssetPoint | None = None) -> Table:
    """What can be used of a study; the points of the front stand out, and so does the one that was ``picked``."""
    score, best = found.objectives[0], found.front()
    header = (
        "what",
        "trials",
        f"{plain(score.name, 30)} ({score.direction})",
        "training",
        "parameters",
        "front",
        "test",
    )
    rows = tuple(
        (
            f"{plain(point.form)} {plain(point.method, 20)}".strip(),
            plain(point.whom, 200),
            number(point.values[score.name]),
            duration(point.values[TRAINING]),
            f"{point.values[INFERENCE]:,.0f}",
            "pick" if point is picked else "front" if any(point is other for other in best) else point.trouble,
            "–" if point.test is None else number(point.test),
        )
        for point in sorted(found.points, key=lambda point: tuple(oriented(point.values, found.objectives)))
    )
    note = (
        f"By the predictions {plain(found.data, 40)}, by which soups and ensembles were chosen, too. Training: "
        "worker-time of these trials and of what they began with, the rest of the search left out. Parameters: that "
        "one inference goes through. Nothing is picked by the test."
    )
    if any(point.trouble for point in found.points):
        note += " Gone or changed: the file is not what was written, so it cannot be used."
    if untold := dict.fromkeys(source for point in found.points for source in point.untold):
        note += f" Nobody tells how long {', '.join(plain(source, 80) for source in untold)} trained: not counted."
    return Table("Single trials, soups, ensembles, joined models", header, rows, frozenset({2, 3, 4, 6}), note)


def importance_table(found: Importance) -> Table:
    """The share of each parameter in what decides an objective."""
    rows = tuple((plain(p.name, 60), f"{100 * p.share:.1f}", str(p.trials)) for p in found.parameters)
    note = (
        f"By {found.trials} trials: how far a parameter's values among the best quarter differ from those among all "
        "that have it (PED-ANOVA)."
    )
    header = ("parameter", "share (%)", "trials that have it")
    return Table(f"What decides {plain(found.objective, 40)}", header, rows, frozenset({1, 2}), note=note)


def _trial_cells(trial: TrialStory, names: Sequence[str], price: float) -> tuple[str, ...]:
    end, rest = trial.finished, trial.paused
    state = f"paused after epoch {rest.epochs}" if rest else end.state if end else "unfinished"
    values = (rest.values.get(name) if rest else trial.value(name) for name in names)
    return (
        str(trial.trial),
        trial.phase,
        state,
        *(valued(name, value, price) for name, value in zip(names, values, strict=True)),
        duration(end.seconds if end else rest.seconds if rest else None),
        trial.workers or "–",
        trial.mechanism,
        str(trial.started.seed) if trial.started else "–",
        _settings_of(trial),
        _reason(trial),
    )


def _settings_of(trial: TrialStory) -> str:
    return settings_text(trial.settings) if trial.started else "–"


def _reason(trial: TrialStory) -> str:
    """The reason told, else the constraints that were broken."""
    if trial.finished is None:
        return plain(trial.paused.reason, 300) if trial.paused else ""
    broken = [f"{plain(name)} by {number(by)}" for name, by in trial.finished.violations.items() if by > 0]
    return plain(trial.finished.reason, 300) or "; ".join(f"breaks {what}" for what in broken)
