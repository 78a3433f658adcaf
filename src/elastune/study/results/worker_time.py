"""Where a study's worker-seconds went: to the front, to what was stopped, to changes of workers, to waiting."""

from __future__ import annotations

from collections import defaultdict

from elastune.study.results.study import Study

FATES = {
    "front": "trials on the final front",
    "complete": "other trials that completed",
    "paused": "trials that were stopped early or paused",
    "infeasible": "trials that failed or broke a constraint",
    "unfinished": "trials that have not ended",
    "resizing": "pauses while workers changed",
    "waiting": "waiting",
}


def worker_time(study: Study) -> dict[str, float]:
    """Return what became of the worker-seconds that ``study`` had, as shares that sum to 1.

    Args:
        study: What ``elastune.tune`` returned, or ``Study.load(folder)``.

    Returns:
        A share for each of ``FATES``. The shares of trials leave out the pauses in which their workers changed. Time
        that no trial had counts as waiting. The result is empty where the study took no time.

    Example:
        >>> worker_time(elastune.Study.load("out"))["front"]
        0.31
    """
    used: dict[int, float] = defaultdict(float)
    paused: dict[int, float] = defaultdict(float)
    for span in study.spans:
        used[span.trial] += span.worker_seconds
        paused[span.trial] += span.pause_s * span.workers
    whole = max(study.worker_seconds, sum(used.values()))
    if whole <= 0:
        return {}
    front = {trial.number for trial in study.front()}
    states = {trial.number: trial.state for trial in study.trials}
    found = dict.fromkeys(FATES, 0.0)
    for number, seconds in used.items():
        resizing = min(paused[number], seconds)
        found["resizing"] += resizing / whole
        fate = "front" if number in front else states.get(number, "unfinished")
        found[fate if fate in FATES else "infeasible"] += (seconds - resizing) / whole
    found["waiting"] = max(0.0, 1.0 - sum(found.values()))
    return found
