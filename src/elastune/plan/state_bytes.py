"""What a worker holds of a model's state, by mechanism and mesh: modelled, not measured.

Everything that a mechanism divides is taken to divide evenly: parameters among the blocks of layers, stages, and shares
of optimizer state. What does not (stages of unequal size, buffers) makes the fullest worker's share larger; so do
layers that stay whole under ``tensor``, where it is not known which do. docs/meshes.md has the formulas.
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


def state_of_worker(
    whole: StateBytes, name: MechanismName, mesh: Mesh, copies: int, undivided: float = 0.0
) -> StateBytes:
    """Of the fullest worker of ``mesh``, where a model has ``whole`` in one process and parts have ``copies`` holders.

    Between two steps, gradients being there: a block that ``sharded`` has gathered for a moment is not in it.

    Args:
        whole: Of one worker that holds everything.
        name: One of elastune's own mechanisms.
        mesh: How workers stand.
        copies: Holders of each part, as ``--copies``.
        undivided: The part of the model that ``tensor`` leaves whole: every worker along that axis computes with it,
            and has its state as those along ``shard`` divide it.
    """
    if not name.dividing:
        return whole
    left = undivided if mesh.tensor > 1 else 0.0
    inner = mesh.tensor * mesh.pipeline
    parts = mesh.shard * inner  # those that differ in the data axis alone hold the same
    by_worker = holders(mesh, copies)
    held: list[set[int]] = [set() for _ in range(mesh.workers)]
    for part in range(parts):
        for rank in by_worker[part]:
            held[rank].add(part)
    fullest = max(range(mesh.workers), key=lambda rank: len(held[rank]))
    # Of what it computes with it may hold only a part; what it holds for others (wards) lies there beside that.
    own = sum(part % inner == fullest % inner for part in held[fullest]) / mesh.shard
    wards = (len(held[fullest]) - own * mesh.shard) / parts * (1 - left)
    computed = (1 - left) / inner + left / mesh.pipeline
    share = own * computed + wards
    values = share if name.state == "sharded" else computed + wards
    optimizer = whole.optimizer * share
    kept_for_others = optimizer - whole.optimizer * computed / mesh.batch
    return StateBytes(whole.parameters * values, whole.gradients * share, optimizer, kept_for_others)


def ideal_share(whole: int, copies: int, workers: int) -> float:
    """Bytes of each of ``workers``, where ``whole`` bytes lie with ``copies`` holders each, in shares of equal size.

    With the replicated state of plain data parallelism, ``copies`` are the ``workers``.
    """
    return whole * min(copies, workers) / workers
