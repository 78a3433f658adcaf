"""What a change of workers has cost, to be told once the first step among the new ones is complete."""

from __future__ import annotations

from elastune.elastic.worker.group import WorkerGroup
from elastune.journal.records import Regrouped
from elastune.train.progress import Progress


def regrouped(workers: WorkerGroup, progress: Progress, pause_s: float, discarded: int, steps: int) -> Regrouped:
    """The record of it.

    Args:
        workers: As they are now.
        progress: At the step whose sum has just come.
        pause_s: From the step before that to this one, in seconds.
        discarded: Steps that were begun in between and are done again.
        steps: How many steps that is which has just come: a round has several.
    """
    median_s, _ = progress.times.medians()
    return Regrouped(
        version=workers.view,
        members=list(workers.members),
        planned=workers.planned,
        step=progress.position.step + 1,
        pause_s=max(0.0, pause_s - (median_s or 0.0) * steps),
        discarded=discarded,
        mesh="" if workers.comms.mesh.replica == 1 else str(workers.comms.mesh),
    )
