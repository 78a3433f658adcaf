"""What a worker holds of a model's state, by mechanism and mesh: modelled, not measured.

Everything that a mechanism divides is taken to divide evenly: parameters among the blocks of layers, stages, and shares
of optimizer state. What does not (layers that stay whole under ``tensor``, stages of unequal size, buffers) makes the
fullest worker's share larger. docs/meshes.md has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastune.core.mechanism_name import MechanismName
from elastune.core.mesh import Mesh
from elastune.core.ownership import holders


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a worker, or of the whole. ``copies``: what of ``optimizer`` is there in case another worker dies."""

    parameters: float
    gradients: float
    optimizer: float
    copies: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer


def state_of_worker(whole: StateBytes, name: MechanismName, mesh: Mesh, copies: int) -> StateBytes:
    """Of the fullest worker of ``mesh``, where a model has ``whole`` in one process and parts have ``copies`` holders.

    Between two steps, gradients being there: a block that ``sharded`` has gathered for a moment is not in it.

    Args:
        whole: Of one worker that holds everything.
        name: One of elastune's own mechanisms.
        mesh: How workers stand.
        copies: Holders of each part, as ``--copies``.
    """
    if not name.dividing:
        return whole
    inner = mesh.tensor * mesh.pipeline
    parts = mesh.shard * inner  # those that differ in the data axis alone hold the same
    by_worker = holders(mesh, copies)
    held: list[set[int]] = [set() for _ in range(mesh.workers)]
    for part in range(parts):
        for rank in by_worker[part]:
            held[rank].add(part)
    fullest = max(range(mesh.workers), key=lambda rank: len(held[rank]))
    share = len(held[fullest]) / parts
    # Values of what it computes with, which it may hold only in part, and those that it holds for others beside.
    wards = sum(part % inner != fullest % inner for part in held[fullest]) / parts
    values = share if name.state == "sharded" else 1 / inner + wards
    optimizer = whole.optimizer * share
    kept_for_others = optimizer - whole.optimizer / mesh.workers
    return StateBytes(whole.parameters * values, whole.gradients * share, optimizer, kept_for_others)


def ideal_share(whole: int, copies: int, workers: int) -> float:
    """Bytes of each of ``workers``, where ``whole`` bytes lie with ``copies`` holders each, in shares of equal size.

    With the replicated state of plain data parallelism, ``copies`` are the ``workers``.
    """
    return whole * min(copies, workers) / workers
