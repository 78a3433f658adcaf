"""What the planner says of the rows of ``combined.py``, before any is measured, and of larger clusters.

It is told the program, the declared link, how often a random configuration reaches the target, and how many trainings a
generation has; short runs on this machine, which it chooses itself, tell it what steps take. It hears nothing of hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from benchmarks.sources.combined_rows import ALONE, Found, Row

from elastune.core.mesh import Mesh
from elastune.core.plan.cluster_plan import (
    GENETIC,
    Allowed,
    ClusterPlan,
    Nodes,
    PlanBounds,
    ProgramForecast,
    SearchModel,
    best_plans,
)
from elastune.core.run import ExecutionSettings, Program
from elastune.train.machine import cores
from elastune.train.rehearsal import rehearse_apart
from elastune.tuning.cluster_plan.probes import MachineProbes, NodeLink, TrainingPlan, held_by, step_work

MOST = 2_000  # plans that are looked through for a row's width
BLOCKS = 8  # that its layers are divided into at most


class Planner:
    """Learns the program here once; ``runs``: trainings that a random search needs one after another."""

    def __init__(self, program: Program, config: dict[str, Any], link_s_a_byte: float, calibrate_s: float) -> None:
        self.size = rehearse_apart(program, config)
        probes = MachineProbes(program, config, self.size, cores(), calibrate_s, wants_noise=False)
        self._model = probes.learn(NodeLink(link_s_a_byte))
        self._held = held_by(self.size, probes.held[ALONE, self.size.batch_size])
        self.beside_s, self.noise = probes.beside_s, probes.noise
        self.probed = {f"{mesh}, {micro} samples a pass": step_s for (mesh, micro), step_s in probes.measured.items()}
        self.refused = dict(probes.refused)

    def plan(self, row: Row, runs: float, generation: int) -> ClusterPlan:
        """The best for the row's mesh and width: what is left to choose are the samples of a pass."""
        forecast = ProgramForecast(self._model, step_work(self.size), self._held, self._search(row, runs, generation))
        batch = self.size.batch_size
        micros = tuple(sorted({max(1, batch // row.mesh.batch // part) for part in (1, 2, 4, 8)}))
        allowed = Allowed((batch,), micros, row.width, BLOCKS, 1, shard=False, mesh=row.mesh)
        plans = best_plans(forecast, Nodes(row.nodes, 1), allowed, PlanBounds(), MOST)
        return next(plan for plan in plans if plan.width == row.width)

    def told(self, row: Row, runs: float, generation: int) -> Found:
        """What is kept of that plan. ``training_s``: of one training, with what it takes beside its steps."""
        plan, search = self.plan(row, runs, generation), self._search(row, runs, generation)
        (training_s,) = search.training_s(np.array([float(plan.batch)]), np.array([plan.step_s]))
        return {
            "runs": search.runs,
            "seconds": round(plan.seconds, 4),
            "interval_s": [round(each, 4) for each in plan.interval_s],
            "training_s": round(float(training_s), 4),
            "step_s": round(plan.step_s, 5),
            "micro": plan.micro,
            "memory_bytes": round(plan.memory_bytes),
            "limits": list(plan.limits),
        }

    def _search(self, row: Row, runs: float, generation: int) -> SearchModel:
        """All trainings are of one length: they differ in settings that change no step's time."""
        needed = max(1, round(runs * (GENETIC if row.genetic else 1.0)))
        bred = generation if row.genetic else 0
        return SearchModel(needed, self.size.steps, self.size.batch_size, 0.0, generation=bred, beside_s=self.beside_s)


def planned(planner: Planner, rows: Sequence[Row], runs: float, generation: int) -> dict[str, Found]:
    """All of ``rows``, and each of their meshes alone, by their keys."""
    return {row.key: planner.told(row, runs, generation) for row in rows}


def means_of(mesh: Mesh, batch: int, micro: int) -> ExecutionSettings:
    """How a training of such a plan runs."""
    return TrainingPlan(mesh, batch, micro).execution
