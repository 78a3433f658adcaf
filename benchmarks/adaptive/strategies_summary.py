"""What the rows of ``strategies.py`` come to: times to the target, and the two goals."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.common.kept import Row

FEWER_BYTES, SHORTER = 20.0, 5.0
SLOWEST = "50mbit"


def times_to_target(result: Row) -> list[Row]:
    """Steps of the accuracy runs (median over seeds, None where not all reach it) times the time of a step.

    ``learners``: of the section of paces, in which ``allreduce`` was timed beside the others.
    """
    results = []
    paced = [pace for section in result.get("links", {}).values() for pace in section["rows"]]
    for row in result.get("accuracy", {}).get("rows", []):
        steps, task = row["steps_to_target"], row["task"]
        for pace in paced:
            if pace["sync"] == row["sync"] and pace["task"] == task.removesuffix("_long") and None not in steps:
                seconds = round(statistics.median(steps) * pace["step_ms"] / 1e3, 1)
                place = {"task": task, "link": pace["link"], "learners": pace.get("learners", 8)}
                results.append({**place, "strategy": row["strategy"], "seconds": seconds})
    first = {
        (row["task"], row["link"], row["learners"]): row["seconds"] for row in results if row["strategy"] == "allreduce"
    }
    for row in results:
        base = first.get((row["task"], row["link"], row["learners"]))
        row["shorter"] = round(base / row["seconds"], 2) if base else None
    return results


def goals(result: Row, seldom: Sequence[str]) -> list[str]:
    """The two goals, task by task, in words, of the strategies that meet ``seldom``."""
    said = []
    rows = result.get("accuracy", {}).get("rows", [])
    fewer = {
        (p["task"], p["sync"]): p["fewer_bytes"]
        for section in result.get("links", {}).values()
        for p in section["rows"]
    }
    for row in (r for r in rows if r["strategy"] in seldom):
        times = fewer.get((row["task"].removesuffix("_long"), row["sync"]))
        if times is not None:
            met = "met" if row["equal"] and times >= FEWER_BYTES else "MISSED"
            gap = " ± ".join("none" if value is None else f"{100 * value:.2f}" for value in row["gap"])
            equal = f"{'' if row['equal'] else 'NOT '}equal in accuracy ({gap})"
            said.append(f"{row['task']}, {row['sync']}: {times} x fewer bytes, {equal}: {met}")
    for row in (r for r in rows if r["strategy"] in seldom and None in r["steps_to_target"]):
        told_of = f"{row['task']}, {row['strategy']}, {row['learners']} learners"
        said.append(f"{told_of}: not every seed reaches the target: time MISSED")
    for row in (r for r in result["times"] if r["link"] == SLOWEST and r["strategy"] in seldom):
        met = "met" if row["shorter"] and row["shorter"] >= SHORTER else "MISSED"
        said.append(
            f"{row['task']}, {row['strategy']}, {row['learners']} learners at {row['link']}: "
            f"{row['shorter']} x shorter to the target: {met}"
        )
    return said
