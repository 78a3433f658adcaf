"""A frontier in words, from its journal alone: the answer, what each worker count reaches, and how that was found."""

from __future__ import annotations

from collections import Counter

from elastune.core.text import count, duration, estimate, modelled, plain
from elastune.journal.records import FrontierFound, FrontierRow
from elastune.report.explain import Explanation, Part
from elastune.report.gather import StudyStory
from elastune.report.tables.frontier_answer import answer_lines

PHASES = {
    "calibrate": "to calibrate the clock",
    "throughput": "short, for means that are faster",
    "naive": "by the naive rule",
    "policy": "by it under policies",
    "search": "of the search",
    "confirm": "to confirm",
}
MOST_REASONS = 5


def explain_frontier(story: StudyStory) -> Explanation:
    """Put a frontier into words, finished or not."""
    parts = (
        Part("The answer", _answer(story)),
        Part("What each number of workers reaches", () if story.found is None else _rows(story.found)),
        Part("At equal budget", () if story.found is None else _volumes(story.found)),
        Part("How it was found", _how(story)),
        Part("What failed", _failed(story)),
    )
    return Explanation(tuple(part for part in parts if part.lines))


def _answer(story: StudyStory) -> tuple[str, ...]:
    found = story.found
    if found is None:
        return (f"There is no answer yet: {count(len(story.ended), 'training')} ended so far.",)
    trained = f"This trains the pick: {plain(found.command, 4000)}" if found.command else ""
    reasons = (f"{each.weight}: {plain(each.text, 2000)}." for each in found.reasons)
    lines = (f"{_capital(name)}: {line}." for name, line in answer_lines(found))
    return tuple(line for line in (plain(found.answer.sentence, 2000), *lines, *reasons, trained) if line)


def _rows(found: FrontierFound) -> tuple[str, ...]:
    """One sentence for each number of workers and each way to stand."""
    lines = []
    for workers, division in dict.fromkeys((row.workers, row.division) for row in found.rows):
        same = [row for row in found.rows if (row.workers, row.division) == (workers, division)]
        told = "; ".join(f"{row.role}{_by(row)} {_row(found, row)}" for row in same)
        divided = f" ({plain(division, 80)})" if division else ""
        lines.append(f"{count(workers, 'worker')}{divided}: {told}.")
    return tuple(lines)


def _by(row: FrontierRow) -> str:
    return f" ({plain(row.ways, 200)})" if row.ways else ""


def _row(found: FrontierFound, row: FrontierRow) -> str:
    diverged = f", {row.diverged} of {row.diverged + row.seeds} seeds diverged" if row.diverged else ""
    label = "" if row.seconds_label == "measured" else f" ({modelled(row.seconds_factor)})"
    emulated = " emulated" if row.quality_label == "emulated" else ""
    value = f"{plain(found.quality, 40)} {estimate(row.quality, row.ci)}{emulated} ({row.verdict})"
    return f"{value} in {duration(row.seconds)}{label}{diverged}"


def _volumes(found: FrontierFound) -> tuple[str, ...]:
    """One line for each side."""
    lines = [f"The budget is {duration(found.volumes.budget_s)} of one worker, as the naive rule's trainings took."]
    for each in found.volumes.sides:
        spent = f"{count(each.trainings, 'training')} in {duration(each.spent_s)}"
        less = "" if each.equal else ", all there was"
        covers = f"covers {estimate(each.volume, each.ci)} by {count(each.seeds, 'seed')}"
        says = f" Against the naive rule: {plain(each.against, 200)}." if each.against else ""
        lines.append(f"{plain(each.side, 200)}: {covers} ({spent}{less}).{says}")
    return tuple(lines)


def _how(story: StudyStory) -> tuple[str, ...]:
    phases = Counter(trial.phase for trial in story.trials)
    told = [f"{phases[phase]} {words}" for phase, words in PHASES.items() if phases[phase]]
    lines = [f"Trainings: {', '.join(told)}."] if told else []
    if story.finished is not None:
        lines.append(f"It ended after {duration(story.finished.seconds)}: {plain(story.finished.reason, 200)}.")
    return tuple(lines)


def _failed(story: StudyStory) -> tuple[str, ...]:
    ends = [trial.finished for trial in story.ended if trial.finished is not None]
    failed = [end for end in ends if end.state != "complete"]
    if not failed:
        return ()
    reasons = Counter(plain(end.reason, 200) or "no reason told" for end in failed).most_common(MOST_REASONS)
    whole = f"{len(failed)} of {count(len(ends), 'training')} gave no result."
    return (whole, *(f"{times} x {reason}" for reason, times in reasons))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
