"""Who beats whom, by pairs of equal instance and seed and by medians of instances; and that as a Markdown table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Reached = Mapping[str, Mapping[str, Mapping[int, float]]]
"""instance -> what searched there -> the hypervolume of each seed."""

TIE = 0.01  # of the hypervolume: closer is level
AHEAD = 0.03  # the goal for the mean over instances


def reached_at(cells: Mapping[str, Mapping[str, Any]], budget: int) -> Reached:
    """What was reached by the rows that go so far; their keys are "instance sampler ... seed"."""
    results: dict[str, dict[str, dict[int, float]]] = {}
    for key, row in cells.items():
        instance, *by, seed = key.split()
        if goes_to(budget, row):
            at = results.setdefault(instance, {}).setdefault(" ".join(by), {})
            at[int(seed)] = row["hypervolume_at"][str(budget)]
    return results


def goes_to(budget: int, row: Mapping[str, Any]) -> bool:
    """Whether a study went on so far, or further."""
    return str(budget) in row["hypervolume_at"]


def judged(reached: Reached, ours: str, goal: float = AHEAD) -> dict[str, Any]:
    """``ours`` against every other over the seeds that both have, and what that says of goals.

    By instance: medians over seeds, their difference (the gain, by which an instance is won, tied within ``TIE`` or
    lost), and the gains of pairs of equal seed: least, median, most. ``pairs``: the same of all pairs at once.
    ``goal`` is how far ``ours`` is to be ahead of the best other in the mean.
    """
    others = sorted({name for row in reached.values() for name in row} - {ours})
    results = {other: _against(reached, ours, other) for other in others}
    results = {other: result for other, result in results.items() if result["by_instance"]}
    never = all(one["gain"] >= -TIE for result in results.values() for one in result["by_instance"].values())
    ahead = min((result["mean_gain"] for result in results.values()), default=0.0)
    return {
        "of": ours,
        "a_tie_is_within": TIE,
        "medians": {instance: _median(row[ours].values()) for instance, row in reached.items() if ours in row},
        "against": results,
        "goals": {
            f"never behind by more than {TIE} in the median of an instance": "met" if never else "MISSED",
            f"ahead of the best other by {goal} in the mean over instances": "met" if ahead >= goal else "MISSED",
        },
        "ahead_of_the_best_other": ahead,
    }


def ranks(reached: Reached, draws: int = 2000) -> dict[str, dict[str, float]]:
    """The mean rank of each searcher over the studies that all have (1 is best; equals share their mean rank).

    ``low`` and ``high`` bound the middle 95 % of means over ``draws`` of so many instances, with repetition.
    """
    names = sorted({name for row in reached.values() for name in row})
    by_instance = []
    for row in reached.values():
        seeds = set.intersection(*(set(row.get(name, {})) for name in names))
        values = [[row[name][seed] for name in names] for seed in sorted(seeds)]
        if values:
            by_instance.append(np.mean([_ranked(each) for each in values], axis=0))
    if not by_instance:
        return {}
    each = np.array(by_instance)
    drawn = np.random.default_rng(0).integers(len(each), size=(draws, len(each)))
    low, high = np.percentile(each[drawn].mean(axis=1), [2.5, 97.5], axis=0)
    rows = zip(names, each.mean(axis=0), low, high, strict=True)
    found = {name: {"mean": float(m), "low": float(a), "high": float(b)} for name, m, a, b in rows}
    return {
        name: {key: round(value, 2) for key, value in row.items()}
        for name, row in sorted(found.items(), key=lambda item: item[1]["mean"])
    }


def _ranked(values: Sequence[float]) -> list[float]:
    """The rank of each value, the largest first."""
    return [sum(other > one for other in values) + (sum(other == one for other in values) + 1) / 2 for one in values]


def _against(reached: Reached, ours: str, other: str) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {}
    every: list[float] = []
    for instance, row in reached.items():
        mine, theirs = row.get(ours, {}), row.get(other, {})
        seeds = sorted(mine.keys() & theirs.keys())
        if seeds:
            gains = [mine[seed] - theirs[seed] for seed in seeds]
            every += gains
            a, b = _median(mine[seed] for seed in seeds), _median(theirs[seed] for seed in seeds)
            rows[instance] = {"seeds": len(seeds), "ours": a, "other": b, "gain": round(a - b, 4)}
            rows[instance] |= {"paired": _range(gains)}
    gains = [row["gain"] for row in rows.values()]
    mean = round(statistics.mean(gains), 4) if gains else 0.0
    pairs = _counts(every) | {"gain": _range(every)} if every else {}
    return _counts(gains) | {"mean_gain": mean, "pairs": pairs, "by_instance": rows}


def _counts(gains: Sequence[float]) -> dict[str, int]:
    won, lost = sum(gain > TIE for gain in gains), sum(gain < -TIE for gain in gains)
    return {"wins": won, "ties": len(gains) - won - lost, "losses": lost}


def _range(gains: Sequence[float]) -> list[float]:
    return [round(one, 4) for one in (min(gains), statistics.median(gains), max(gains))]


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 4)


def markdown(verdict: Mapping[str, Any]) -> str:
    """The table of what ``judged`` found: a row for each instance, then sums and goals."""
    return "\n".join(_lines(verdict)) + "\n"


def _lines(verdict: Mapping[str, Any]) -> Iterator[str]:
    against: Mapping[str, Any] = verdict["against"]
    yield _line("instance", verdict["of"], *(cell for other in against for cell in (other, "gain of pairs")))
    yield "|---" * (2 + 2 * len(against)) + "|"
    for instance, ours in verdict["medians"].items():
        rows = [outcome["by_instance"].get(instance) for outcome in against.values()]
        cells = (cell for row in rows for cell in ((f"{row['other']:.3f}", _gain(row["paired"])) if row else ("", "")))
        yield _line(instance, f"{ours:.3f}", *cells)
    every = against.values()
    yield _line("seeds", "", *(cell for outcome in every for cell in (_seeds(outcome), "")))
    yield _line(
        "mean gain of medians", "", *(cell for outcome in every for cell in (f"{outcome['mean_gain']:+.3f}", ""))
    )
    counts = (_won(part) for outcome in every for part in (outcome, outcome["pairs"]))
    yield _line("won / tied / lost: medians, pairs", "", *counts)
    yield ""
    yield from (f"- {goal}: {result}" for goal, result in verdict["goals"].items())


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _gain(paired: Sequence[float]) -> str:
    least, median, most = paired
    return f"{median:+.3f} [{least:+.3f}, {most:+.3f}]"


def _won(part: Mapping[str, Any]) -> str:
    return f"{part['wins']} / {part['ties']} / {part['losses']}"


def _seeds(results: Mapping[str, Any]) -> str:
    counts = {row["seeds"] for row in results["by_instance"].values()}
    return str(max(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
