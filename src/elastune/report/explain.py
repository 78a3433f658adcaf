"""A study, a frontier or a run in words, from its journal alone.

Of a study: what was found and at what cost, what decided it, and what to try next. Of a frontier: the answer, and what
each worker count reaches. Of a run: whether its batch was too large, how its model lay on workers, and what that took.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from elastune.core.formatting import byte_count, count, duration, estimate, modelled, number, plain
from elastune.core.journal.records import (
    Compiled,
    Entry,
    FrontierFound,
    FrontierRow,
    LayersDivided,
    Regrouped,
    RunStarted,
    StagesDivided,
    WorkerMemory,
)
from elastune.core.mesh import MechanismName, Mesh
from elastune.core.plan.memory import StateBytes, state_of_worker
from elastune.core.run import ExecutionSettings
from elastune.report.adaptation import batch_line, gather_adaptation, gather_sync, trial_batch_line
from elastune.report.frontier import answer_lines
from elastune.report.lines import accepted_lines, stages_line
from elastune.report.overviews import RunOverview, StudyOverview, config_and_sync
from elastune.report.tables import divided_lines
from elastune.report.worker_changes import change_lines, gather_changes
from elastune.tuning.search.front import nondominated
from elastune.tuning.search.importance import Importance
from elastune.tuning.search.objective import Objective, oriented, valued
from elastune.tuning.study.results import FATES, Study, worker_time
from elastune.tuning.study.trials import Trial

if TYPE_CHECKING:
    from optuna.distributions import FloatDistribution, IntDistribution

MOST_STEPS = 6  # along the front
MOST_REASONS = 5
MOST_PARAMETERS = 5
LEAST_SHARE = 0.02  # parameters with a smaller share are not named
EDGE = 0.05  # the part of a range, on its own scale, that counts as its bound
FEWEST_BEST = 5  # trials that show where the front lies
TIE_SPREADS = 2.0  # two trials that differ by fewer standard errors count as equal

PHASES = {
    "calibrate": "to calibrate the clock",
    "throughput": "short, for faster execution settings",
    "naive": "by the naive rule",
    "policy": "by it under policies",
    "search": "of the search",
    "confirm": "to confirm",
}
"""The phases of a frontier, in words."""

OTHERS = ("replicated", "zero", "sharded", "tensor", "pipeline")
"""Mechanisms whose memory is compared with that of a run's own mechanism."""
MOST_COPIES = 3
"""The most further holders of each part, beyond those along ``data``, that the memory model tries."""


@dataclass(frozen=True)
class Part:
    """One heading and the sentences under it."""

    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """A study in words; ``str`` gives the text for a terminal.

    Attributes:
        parts: The headings and sentences.
        importance: How much each parameter decides each objective.
        worker_time: Shares of worker-seconds that sum to 1 (see ``worker_time``).
    """

    parts: tuple[Part, ...]
    importance: tuple[Importance, ...] = ()
    worker_time: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n\n".join("\n".join([part.title, *(f"  {line}" for line in part.lines)]) for part in self.parts)


def explain(study: Study) -> Explanation:
    """Put a study into words: its front, how sure the pick is, what decides each objective, what to try next.

    Args:
        study: What ``elastune.tune`` returned, or ``Study.load(folder)``.

    Returns:
        The explanation in parts; ``str`` of it is the text for a terminal.

    Example:
        >>> print(elastune.explain(elastune.Study.load("out")))
    """
    importance = study.importance()
    parts = (
        Part("Accepted changes", _accepted(study)),
        Part("The front", _front(study)),
        Part("Which trial to take", _choices(study)),
        Part("How sure the pick is", _sureness(study)),
        Part("What decides each objective", tuple(line for each in importance for line in _importance(each))),
        Part("What was stopped early", _stopped(study)),
        Part("What failed", _failed(study)),
        Part("Where the time went", _times(study)),
        Part("What to try next", _next(study)),
    )
    return Explanation(tuple(part for part in parts if part.lines), importance, worker_time(study))


def _accepted(study: Study) -> tuple[str, ...]:
    """The accepted changes of program, space or data, and from which trial on each holds."""
    lines = tuple(f"{line[:1].upper()}{line[1:]}." for line in accepted_lines(study.accepted))
    earlier = sum(trial.number < study.since for trial in study.trials)
    apart = f"Front and pick are of the trials since; {_trials(earlier)} began before (--across-changes compares all)."
    return (*lines, apart) if earlier else lines


def _front(study: Study) -> tuple[str, ...]:
    if study.tasks:
        return (f"Its trials are for {len(study.tasks)} parts of a tree of classes: they have no front together.",)
    front = study.front()
    if not front:
        return ("No trial has a result yet.",)
    first = study.objectives[0]
    if len(study.objectives) == 1:
        best = front[0]
        return (f"The best {first.name} is {_valued(study, first, best)}, by trial {best.number}. {_when(best)}",)
    reach = "; ".join(
        f"{o.name} from {_valued(study, o, ends[0])} to {_valued(study, o, ends[-1])}"
        for o in study.objectives
        for ends in [sorted(front, key=lambda trial: trial.values[o.name])]
    )
    size = "One trial is best in everything" if len(front) == 1 else f"No trial beats these {len(front)} in everything"
    return (f"{size}: {reach}.", *_steps(study, front))


def _choices(study: Study) -> tuple[str, ...]:
    """The trials to choose from, the pick first, each with the command that trains it."""
    if not study.complete:
        return ()
    if why := study.no_choice_reason():
        return (f"None: {why}.",)
    lines = []
    for place, choice in enumerate(study.choices()):
        trial = choice.trial
        values = ", ".join(_valued(study, o, trial) for o in study.objectives)
        who = f"Or trial {trial.number}" if place else f"The pick is trial {trial.number}"
        lines += [f"{who} ({values}): {choice.reason}.{'' if place else f' {_when(trial)}'}", choice.command]
        lines += [line for line in (trial_batch_line(trial),) if line]
    return tuple(lines)


def _when(trial: Trial) -> str:
    return f"It was there after {duration(trial.ended_s)}, everything before it counted."


def _steps(study: Study, front: Sequence[Trial]) -> list[str]:
    """For neighbours on the front: what a gain in the first objective costs in the others."""
    shown = list(front)
    if len(shown) > MOST_STEPS + 1:
        shown = [shown[i] for i in np.linspace(0, len(shown) - 1, MOST_STEPS + 1).round().astype(int)]
    shown.reverse()  # from the worst in the first objective to the best
    objectives, lines = study.objectives, []
    first = objectives[0]
    for near, far in pairwise(shown):
        if near.values[first.name] == far.values[first.name]:
            continue
        changes = [
            f"{o.name} {'+' if change > 0 else '-'}{valued(o.name, abs(change), study.price_per_worker_hour)} "
            f"({'better' if (change > 0) == (o.direction == 'max') else 'worse'})"
            for o in objectives[1:]
            if (change := far.values[o.name] - near.values[o.name])
        ]
        ends = f"{first.name} {_valued(study, first, near)} -> {_valued(study, first, far)}"
        lines.append(f"{ends} (trial {near.number} -> {far.number}): {', '.join(changes) or 'nothing else changes'}.")
    return lines


def _sureness(study: Study) -> tuple[str, ...]:
    """Whether the pick's lead exceeds the spread between seeds, which is known only if seeds repeat."""
    if not study.complete or study.no_choice_reason():
        return ()
    first, picked = study.objectives[0], study.choices()[0].trial
    by_seed: dict[str, dict[int, float]] = defaultdict(dict)
    for trial in study.complete:
        settings = config_and_sync(trial.config, trial.execution)
        alike = repr((sorted(settings.items(), key=repr), trial.execution.get("workers"), trial.epochs))
        by_seed[alike][trial.seed] = trial.values[first.name]
    groups = [list(values.values()) for values in by_seed.values() if len(values) > 1]
    if not groups:
        seeds = sorted({trial.seed for trial in study.complete})
        which = f"seed {seeds[0]}" if len(seeds) == 1 else "one seed"
        return (
            f"Unknown: each configuration was trained once, with {which}: how much another changes was not seen.",
            "Train the pick and its neighbours with other seeds before relying on small differences.",
        )
    freedom = sum(len(values) - 1 for values in groups)
    spread = math.sqrt(sum((value - fmean(values)) ** 2 for values in groups for value in values) / freedom)
    reach = TIE_SPREADS * math.sqrt(2) * spread
    ties = [
        trial.number
        for trial in study.front()
        if trial.number != picked.number and abs(trial.values[first.name] - picked.values[first.name]) <= reach
    ]
    of = f"(standard deviation, {freedom} degrees of freedom)"
    noise = f"From seed to seed {first.name} varies by {number(spread, 2)} {of}"
    if ties:
        numbers = ", ".join(map(str, ties))
        return (f"{noise}: in {first.name} the pick is no different from trials {numbers} of the front.",)
    return (f"{noise}: in {first.name} the pick stands apart from all others of the front.",)


def _importance(importance: Importance) -> list[str]:
    if importance.why_not:
        return [f"{importance.objective}: not known, {importance.why_not}."]
    main = [each for each in importance.parameters if each.share >= LEAST_SHARE][:MOST_PARAMETERS]
    shares = ", ".join(f"{each.name} {each.share:.0%}" for each in main)
    return [f"{importance.objective}: {shares} of what sets the best quarter of {importance.trials} trials apart."]


def _stopped(study: Study) -> tuple[str, ...]:
    paused = [trial for trial in study.trials if trial.state == "paused"]
    stopped, cut_off = [t for t in paused if not t.cut_off], [t for t in paused if t.cut_off]
    lines = []
    if stopped:
        epochs = sorted(trial.epochs for trial in stopped)
        after = f"after {epochs[0]} to {epochs[-1]} epochs" if epochs[0] < epochs[-1] else f"after epoch {epochs[0]}"
        lines.append(f"{_trials(len(stopped))} paused {after} and did not go on; each can be resumed.")
        lines += _reasons(stopped)
    resumed = {span.trial for span in study.spans if span.began_as == "resumed"}
    ended = {trial.number for trial in study.trials if trial.state == "complete"}
    if resumed & ended:
        lines.append(f"{_trials(len(resumed & ended))} paused, went on later and completed.")
    ran, held = [t for t in cut_off if not t.held], [t for t in cut_off if t.held]
    for trials, did in ((ran, "ran"), (held, "waited for idle workers")):
        if trials:
            numbers = ", ".join(str(trial.number) for trial in trials[:MOST_REASONS])
            more = ", ..." if len(trials) > MOST_REASONS else ""
            text = f"{_trials(len(trials))} {did} when the study ended ({numbers}{more})"
            lines.append(f"{text}; --resume goes on with them.")
    return tuple(lines)


def _failed(study: Study) -> tuple[str, ...]:
    failed = [trial for trial in study.trials if trial.state in ("infeasible", "rejected")]
    if not failed:
        return ()
    return (f"{_trials(len(failed))} of {len(study.trials)} gave no result.", *_reasons(failed))


def _reasons(trials: Sequence[Trial]) -> list[str]:
    """The most frequent reasons first, each with an example. Reasons that differ only in numbers count as one."""
    alike: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for trial in trials:
        reason = " ".join((trial.reason or "no reason given").split())[:200]
        alike[re.sub(r"\d+", "#", reason)].append((trial.number, reason))
    often = sorted(alike.values(), key=lambda each: -len(each))
    lines = [
        f"{len(each)} trials, such as trial {each[0][0]}: {each[0][1]}"
        if len(each) > 1
        else f"trial {each[0][0]}: {each[0][1]}"
        for each in often[:MOST_REASONS]
    ]
    rest = len(often) - MOST_REASONS
    return [*lines, f"and {rest} other {'reason' if rest == 1 else 'reasons'}"] if rest > 0 else lines


def _times(study: Study) -> tuple[str, ...]:
    """Shares of worker-seconds by what became of their trial; workers without a trial were waiting."""
    shares = worker_time(study)
    if not shares:
        return ()
    shares_text = ", ".join(
        f"{share:.0%} {FATES[fate]}" for fate, share in shares.items() if share > 0 or fate == "waiting"
    )
    moved = sum(span.ended == "regrouped" for span in study.spans)
    had = study.worker_seconds / study.seconds if study.seconds else float(study.workers)
    on = count(study.workers, "worker") if abs(had - study.workers) < 1e-6 else f"{had:.3g} workers on average"
    lines = [f"{duration(study.seconds)} on {on}: {shares_text}."]
    if moved:
        lines.append(f"While trials ran, their workers changed {moved} {'time' if moved == 1 else 'times'}.")
    if study.ending:
        lines.append(f"The study ended: {' '.join(study.ending.split())[:300]}.")
    return tuple(lines)


def _next(study: Study) -> tuple[str, ...]:
    """Bounds of the space at which the best trials lie: the search did not look beyond them."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution  # here: few reports

    from elastune.train.program.space import from_json

    best = [] if study.tasks else _best(study)
    lines: list[str] = []
    for name in sorted({name for trial in best for name in trial.params}):
        with_it = [trial for trial in best if name in trial.params and name in trial.distributions]
        if len(with_it) < max(3, len(best) / 2):
            continue
        range_ = from_json({name: with_it[-1].distributions[name]})[name]
        values = [trial.params[name] for trial in with_it]
        if isinstance(range_, CategoricalDistribution):
            if len(range_.choices) > 1 and len(set(map(repr, values))) == 1 and len(with_it) >= FEWEST_BEST:
                lines.append(f"All of the best {len(with_it)} trials have {name}={values[0]}: other choices can go.")
        elif isinstance(range_, (FloatDistribution, IntDistribution)) and not range_.single():
            lines += _at_bounds(name, range_, [float(value) for value in values])
    if best and not lines:
        lines.append("The front lies within the space: no bound of it limits the front.")
    return tuple(lines)


def _at_bounds(name: str, range_: FloatDistribution | IntDistribution, values: Sequence[float]) -> list[str]:
    low, high = float(range_.low), float(range_.high)
    scale = math.log if range_.log else float
    places = [(scale(value) - scale(low)) / (scale(high) - scale(low)) for value in values]
    lines = []
    for bound, at_it, word, sizes in (
        (low, [place <= EDGE for place in places], "lower", "smaller"),
        (high, [place >= 1 - EDGE for place in places], "upper", "larger"),
    ):
        if sum(at_it) >= max(3, len(values) / 2):
            whom = f"{sum(at_it)} of the best {len(values)} trials sit at the {word} bound {bound:g} of {name}"
            lines.append(f"{whom}: try {sizes} values, if it may have them.")
    return lines


def _best(study: Study) -> list[Trial]:
    """The trials of the front; if they are few, also those of the fronts behind it."""
    left = study.complete
    best: list[Trial] = []
    while left and len(best) < FEWEST_BEST:
        keep = nondominated(oriented([trial.values for trial in left], study.objectives))
        if not keep.any():
            break
        best += [trial for trial, on in zip(left, keep, strict=True) if on]
        left = [trial for trial, on in zip(left, keep, strict=True) if not on]
    return best


def _trials(n: int) -> str:
    return count(n, "trial")


def _valued(study: Study, objective: Objective, trial: Trial) -> str:
    return valued(objective.name, trial.values[objective.name], study.price_per_worker_hour)


# --- a frontier ---


def explain_frontier(study: StudyOverview) -> Explanation:
    """Put a frontier into words, finished or not."""
    parts = (
        Part("The answer", _answer(study)),
        Part("What each number of workers reaches", () if study.frontier is None else _frontier_rows(study.frontier)),
        Part("At equal budget", () if study.frontier is None else _volumes(study.frontier)),
        Part("How it was found", _how(study)),
        Part("What failed", _failed_trainings(study)),
    )
    return Explanation(tuple(part for part in parts if part.lines))


def _answer(study: StudyOverview) -> tuple[str, ...]:
    frontier = study.frontier
    if frontier is None:
        return (f"There is no answer yet: {count(len(study.ended), 'training')} ended so far.",)
    trained = f"This trains the pick: {plain(frontier.command, 4000)}" if frontier.command else ""
    reasons = (f"{each.weight}: {plain(each.text, 2000)}." for each in frontier.reasons)
    lines = (f"{_capital(name)}: {line}." for name, line in answer_lines(frontier))
    return tuple(line for line in (plain(frontier.answer.sentence, 2000), *lines, *reasons, trained) if line)


def _frontier_rows(frontier: FrontierFound) -> tuple[str, ...]:
    """One sentence for each number of workers and each division of a model's layers."""
    lines = []
    for workers, division in dict.fromkeys((row.workers, row.division) for row in frontier.rows):
        same = [row for row in frontier.rows if (row.workers, row.division) == (workers, division)]
        texts = "; ".join(f"{row.role}{_by(row)} {_frontier_row(frontier, row)}" for row in same)
        divided = f" ({plain(division, 80)})" if division else ""
        lines.append(f"{count(workers, 'worker')}{divided}: {texts}.")
    return tuple(lines)


def _by(row: FrontierRow) -> str:
    return f" ({plain(row.differences, 200)})" if row.differences else ""


def _frontier_row(frontier: FrontierFound, row: FrontierRow) -> str:
    diverged = f", {row.diverged} of {row.diverged + row.seeds} seeds diverged" if row.diverged else ""
    label = "" if row.seconds_label == "measured" else f" ({modelled(row.seconds_factor)})"
    emulated = " emulated" if row.quality_label == "emulated" else ""
    value = f"{plain(frontier.quality, 40)} {estimate(row.quality, row.ci)}{emulated} ({row.verdict})"
    return f"{value} in {duration(row.seconds)}{label}{diverged}"


def _volumes(frontier: FrontierFound) -> tuple[str, ...]:
    """One line for each side."""
    lines = [f"The budget is {duration(frontier.volumes.budget_s)} of one worker, as the naive rule's trainings took."]
    for each in frontier.volumes.sides:
        spent = f"{count(each.trainings, 'training')} in {duration(each.spent_s)}"
        less = "" if each.equal else ", all there was"
        covers = f"covers {estimate(each.volume, each.ci)} by {count(each.seeds, 'seed')}"
        verdict = f" Against the naive rule: {plain(each.against, 200)}." if each.against else ""
        lines.append(f"{plain(each.side, 200)}: {covers} ({spent}{less}).{verdict}")
    return tuple(lines)


def _how(study: StudyOverview) -> tuple[str, ...]:
    phases = Counter(trial.phase for trial in study.trials)
    trainings = [f"{phases[phase]} {words}" for phase, words in PHASES.items() if phases[phase]]
    lines = [f"Trainings: {', '.join(trainings)}."] if trainings else []
    if study.finished is not None:
        lines.append(f"It ended after {duration(study.finished.seconds)}: {plain(study.finished.reason, 200)}.")
    return tuple(lines)


def _failed_trainings(study: StudyOverview) -> tuple[str, ...]:
    ends = [trial.finished for trial in study.ended if trial.finished is not None]
    failed = [end for end in ends if end.state != "complete"]
    if not failed:
        return ()
    reasons = Counter(plain(end.reason, 200) or "no reason given" for end in failed).most_common(MOST_REASONS)
    whole = f"{len(failed)} of {count(len(ends), 'training')} gave no result."
    return (whole, *(f"{times} x {reason}" for reason, times in reasons))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- a run ---


def explain_run(run: RunOverview, entries: Sequence[Entry]) -> Explanation:
    """Put a run into words, finished or not."""
    parts = (
        Part("Accepted changes", tuple(f"{line[:1].upper()}{line[1:]}." for line in accepted_lines(entries))),
        Part("Batch and noise scale", _batch(entries)),
        Part("How workers agreed", _sync(entries)),
        Part(
            "Divided layers",
            divided_lines(run.divided, _last_mesh(ExecutionSettings.from_json(run.started.execution), entries)),
        ),
        Part("Changes of workers", change_lines(gather_changes(entries))),
        Part("Stages", _stages(entries)),
        Part("Compiling", _compiling(entries)),
        Part("Memory of a worker", _memory(run, entries)),
    )
    return Explanation(tuple(part for part in parts if part.lines))


def _batch(entries: Sequence[Entry]) -> tuple[str, ...]:
    """The global batch compared with the noise scale; nothing if no noise scale was measured."""
    line = batch_line(gather_adaptation(entries))
    return (line,) if line else ()


def _sync(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Every strategy and topology; nothing for a plain run."""
    history = gather_sync(entries)
    words = {"strategy": "", "topology": "sums by "}
    return tuple(
        f"From step {each.step} on: {words[each.which]}{plain(each.what, 120)} ({plain(each.why, 300)})."
        for each in (history.all if history.any else ())
    )


def _stages(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Every division into pipeline stages that the run had, in order."""
    cuts = [stages_line(entry.record) for entry in entries if isinstance(entry.record, StagesDivided)]
    return tuple(f"{line}." for line in dict.fromkeys(cuts))


def _compiling(entries: Sequence[Entry]) -> tuple[str, ...]:
    """The time that torch.compile took, worker by worker; nothing if no worker compiled."""
    by_worker: dict[int, list[Compiled]] = {}
    for entry in entries:
        if isinstance(entry.record, Compiled):
            by_worker.setdefault(entry.record.worker, []).append(entry.record)
    return tuple(
        f"Worker {worker} compiled for {duration(sum(each.seconds for each in records))}, the last time up to step "
        f"{records[-1].step}; steps that it did so in are not in the times of steps."
        for worker, records in sorted(by_worker.items())
    )


def _memory(run: RunOverview, entries: Sequence[Entry]) -> tuple[str, ...]:
    """The memory of the fullest worker, measured, modelled, and modelled under the other mechanisms."""
    end, execution = run.finished, ExecutionSettings.from_json(run.started.execution)
    memory = end.memory if end is not None else []
    if end is None or not memory:
        return ("Not known before a run has ended well after three steps: then it is measured, and modelled by that.",)
    name, mesh = execution.parts, _last_mesh(execution, entries)
    undivided = _undivided(run.divided) if name.tensor else 0.0
    once = float(sum(each.optimizer - each.copies for each in memory))
    if not name.dividing:
        once /= len(memory)
    once /= 1 + undivided * (mesh.tensor - 1)  # every worker along that axis counted the undivided part
    parameters = 4.0 * end.context.parameters if end.context is not None else 0.0
    fullest = max(memory, key=lambda each: each.parameters + each.gradients + each.optimizer)
    lines = [
        f"Measured, the fullest of {count(len(memory), 'worker')} ({name}, {mesh}): {_bytes_text(_measured(fullest))}."
    ]
    if name.foreign or not parameters:
        return tuple(lines)
    whole = StateBytes(parameters, parameters, once)
    copies = execution.copies or 1
    if once and name.dividing:  # take the number of copies whose model comes nearest to the measurement

        def missed(copies: int) -> float:
            return abs(state_of_worker(whole, name, mesh, copies, undivided).optimizer - fullest.optimizer)

        copies = min(range(mesh.data, min(mesh.workers, mesh.data + MOST_COPIES) + 1), key=missed)
    evenly = f"if all that is divided divides evenly ({count(copies, 'holder')} of each part)"
    lines.append(f"Modelled, {evenly}: {_bytes_text(state_of_worker(whole, name, mesh, copies, undivided))}.")
    for other in OTHERS if mesh.workers > 1 else ():
        if other != str(name):
            word, grid = MechanismName.parse(other), MechanismName.parse(other).mesh(mesh.workers)
            held = state_of_worker(whole, word, grid, copies, undivided)
            lines.append(f"Modelled under {word} ({grid}): {_bytes_text(held)}.")
    return tuple(lines)


def _undivided(layers: LayersDivided | None) -> float:
    """The part of the model that the tensor axis leaves whole; 0 if the journal has no record of it."""
    return 0.0 if layers is None else layers.whole / max(1, layers.whole + layers.divided)


def _last_mesh(execution: ExecutionSettings, entries: Sequence[Entry]) -> Mesh:
    """The mesh at the end of the run. ``execution``: the settings of its last start."""
    last = execution.first_mesh
    for entry in entries:
        match entry.record:
            case RunStarted():
                last = execution.first_mesh
            case Regrouped(mesh=mesh, members=members):
                last = Mesh.parse(mesh) if mesh else Mesh(data=len(members))
    return last


def _measured(of: WorkerMemory) -> StateBytes:
    return StateBytes(of.parameters, of.gradients, of.optimizer, of.copies)


def _bytes_text(state: StateBytes) -> str:
    copies = f" ({byte_count(round(state.copies))} of it copies)" if state.copies else ""
    return (
        f"{byte_count(round(state.total))}: parameters {byte_count(round(state.parameters))}, gradients "
        f"{byte_count(round(state.gradients))}, optimizer {byte_count(round(state.optimizer))}{copies}"
    )
