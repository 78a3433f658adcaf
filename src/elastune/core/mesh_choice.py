"""Which mesh a changed number of workers gets, and which worker gets which rank in it.

Axes may grow and shrink while a run goes on. In ``exact`` mode the result does not depend on that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log
from types import MappingProxyType
from typing import Any

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings

UNBOUNDED = 1 << 30
_ONE_HOST: Mapping[int, str] = MappingProxyType({})
WEIGHTS = {"data": 1.0, "shard": 1.5, "pipeline": 2.5, "tensor": 3.0}
"""The cost of another size than the wanted one, by axis. Another number of replicas is the smallest change, another
width of layers the largest."""


@dataclass(frozen=True)
class MeshChoice:
    """The mesh that a run should have, and the meshes that it may have.

    Attributes:
        wanted: The mesh that the user requested.
        shard: The most workers along this axis; 1 where the mechanism does not divide along it.
        tensor: Likewise.
        pipeline: Likewise.
        slots: The most parts that a batch can be cut into.
        fixed: The mesh stays the wanted one, because the mechanism cannot reshape a run.
        owes: Each worker keeps the parts of its gradients that it has not sent yet.

    Example:
        >>> MeshChoice.of(ExecutionSettings(mesh=Mesh(data=2, tensor=2))).for_workers(2)
        Mesh(data=1, shard=1, tensor=2, pipeline=1)
    """

    wanted: Mesh = field(default_factory=Mesh)
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    slots: int = UNBOUNDED
    fixed: bool = False
    keeps_residual: bool = False

    @classmethod
    def of(cls, execution: ExecutionSettings) -> MeshChoice:
        """The mesh that ``execution`` begins with, and the meshes that its mechanism allows.

        Only workers know how many layers a pipeline can divide (``LayersFound``). Until they report it, the pipeline
        has at most as many stages as at the beginning. With an installed mechanism, each axis that divides a replica
        has at most as many workers as at the beginning: nothing here knows more of such a mechanism.
        """
        wanted, axes, compression = execution.first_mesh, execution.parts.dividing, execution.compression
        if execution.parts.installed:
            return cls(wanted, wanted.shard, wanted.tensor, wanted.pipeline, execution.num_slots)
        return cls(
            wanted,
            shard=UNBOUNDED if "shard" in axes else 1,
            tensor=max(1, execution.virtual_tensor) if "tensor" in axes else 1,  # no blocks: a check refuses that
            pipeline=wanted.pipeline if "pipeline" in axes else 1,
            slots=execution.num_slots,
            keeps_residual=compression is not None and compression.keeps_residual,
        )

    def widened(self, layers: int) -> MeshChoice:
        """Return this choice with a pipeline of up to ``layers`` stages, where there is a pipeline."""
        return replace(self, pipeline=max(layers, self.wanted.pipeline)) if self.pipeline > 1 and layers else self

    @property
    def divides(self) -> bool:
        """Whether workers may hold different state."""
        return max(self.shard, self.tensor, self.pipeline) > 1

    @property
    def leavers_send_state(self) -> bool:
        """Whether a worker that leaves must send state to the workers that stay."""
        return self.divides or self.keeps_residual

    def for_workers(self, workers: int) -> Mesh:
        """Return the mesh of ``workers`` workers, or of as many of them as have a place.

        A replica is divided among at least as many workers as in the wanted mesh, if possible, because each has the
        memory for its part only. Then as many workers as possible get a place. Then the mesh is the nearest to the
        wanted one.
        """
        return min(self._possible(workers), key=lambda mesh: self._cost(mesh, workers))

    def most_parts(self, workers: int) -> int:
        """Return the most parts into which up to so many ``workers`` may cut a batch. Each part is at least one slot.

        A mesh of one more worker may cut the batch into fewer parts, where it divides a replica among more workers.
        """
        inner = self.wanted.tensor * self.wanted.pipeline
        return max(self.for_workers(n).batch for n in range(max(1, workers - inner), workers + 1))

    def refuse(self, mesh: Mesh) -> None:
        """Raise ``UserError`` where the run cannot have ``mesh``."""
        if self.fixed and mesh != self.wanted:
            fix = f"go on from its newest checkpoint under it: --resume --mesh {mesh}"
            raise UserError(f"the mechanism of this run keeps the mesh that it began with, {self.wanted}", mesh, fix)
        for axis, most in (("shard", self.shard), ("tensor", self.tensor), ("pipeline", self.pipeline)):
            size = getattr(mesh, axis)
            if size > most and most == 1:
                fix = f"begin the run with a mechanism that divides along it, or use {axis}=1"
                raise UserError(
                    f"a run's mechanism must divide along the axes of its mesh: not along {axis}", mesh, fix
                )
            if size > most:
                raise UserError(f"this run has at most {most} workers along {axis}", mesh, f"use {axis}={most}")
        if mesh.batch > self.slots:
            rule = f"this run cuts a batch into {self.slots} slots, one at least for each part"
            raise UserError(rule, f"{mesh}: {mesh.batch} parts", "use fewer workers along data and shard")

    def meshes(self, low: int, high: int) -> list[Mesh]:
        """Return every mesh of ``low`` to ``high`` workers that the run can have."""
        meshes = {
            replace(mesh, data=data)
            for mesh in self._possible(high)
            for data in range(1, mesh.data + 1)
            if data * mesh.replica >= low and data * mesh.shard <= self.slots
        }
        return sorted(meshes, key=str)

    def _possible(self, workers: int) -> list[Mesh]:
        """Every mesh of at most ``workers`` with as many replicas as fit."""
        meshes = []
        for tensor in range(1, min(self.tensor, workers) + 1):
            for pipeline in range(1, min(self.pipeline, workers // tensor) + 1):
                left = workers // (tensor * pipeline)
                for shard in range(1, min(self.shard, left) + 1):
                    meshes.append(Mesh(left // shard, shard, tensor, pipeline))
        return meshes

    def _cost(self, mesh: Mesh, workers: int) -> tuple[int, int, float, str]:
        """The lower the better; the text breaks ties."""
        distance = sum(
            weight * abs(log(getattr(mesh, axis) / getattr(self.wanted, axis))) for axis, weight in WEIGHTS.items()
        )
        return -min(mesh.replica, self.wanted.replica), workers - mesh.workers, round(distance, 9), str(mesh)


def least_slots(execution: ExecutionSettings, most_workers: int) -> int:
    """The slots of ``execution``, or as many more as up to ``most_workers`` workers need: one for each part of a batch.

    Raises:
        UserError: Where the mechanism divides along several axes, and no mesh says how.
    """
    return max(execution.num_slots, MeshChoice.of(execution).most_parts(max(1, most_workers)))


def settled(
    chosen: Mapping[str, Any], workers: int | None, most_workers: int | None = None, learners: int = 1
) -> ExecutionSettings:
    """Return the execution settings ``chosen`` with, where these name no number, as many slots as the training needs.

    Args:
        chosen: The values of settings by name. What is left out, others decide.
        workers: The number of workers at the beginning; None: as ``chosen``, or those of the mesh.
        most_workers: The number of workers that the training may have later.
        learners: The number of learners; each has equally many slots.

    Raises:
        UserError: Where the mechanism divides along several axes, and no mesh says how.

    Example:
        >>> settled({"mode": "exact"}, workers=1, most_workers=4).num_slots
        4
    """
    execution = ExecutionSettings(**{**chosen, "workers": workers or chosen.get("workers", 0)})
    if "num_slots" in chosen:
        return execution
    least = least_slots(execution, max(execution.workers, most_workers or 0))
    return replace(execution, num_slots=-(-least // learners) * learners)


def assign_ranks(
    staying: tuple[int, ...],
    joiners: tuple[int, ...],
    before: Mesh | None,
    ranks: Mapping[int, int],
    mesh: Mesh,
    hosts: Mapping[int, str] = _ONE_HOST,
) -> tuple[int, ...]:
    """Return the workers in the order of their ranks in ``mesh``.

    A worker that carries a part of the model keeps that part if possible. Other ranks go host by host, so that the
    workers of a replica are neighbours and a reduction has the fewest hops between hosts. The first rank is never a
    joiner's, because it must report the change.

    Args:
        before: The mesh until now.
        ranks: The rank in it of each worker that stays.
        hosts: The host of each worker.
    """
    inner = mesh.tensor * mesh.pipeline
    if before is None or inner == 1 or (before.tensor, before.pipeline) != (mesh.tensor, mesh.pipeline):
        return by_host((*staying, *joiners)[: mesh.workers], hosts)
    queues: list[list[int]] = [[] for _ in range(inner)]
    for worker in by_host(staying, hosts):
        queues[ranks[worker] % inner].append(worker)
    places: list[int | None] = []
    for later in reversed(range(mesh.batch)):
        host = _fullest(queues if places or not queues[0] else queues[:1], queues, hosts)
        places += [_next(queue, later, host, hosts) for queue in queues]
    left = [worker for queue in queues for worker in queue]
    if places[0] is None:  # by one of a part that several carry
        left.sort(key=lambda worker: -sum(ranks[other] % inner == ranks[worker] % inner for other in staying))
        places[0] = left.pop(0) if left else _taken(places)
    rest = [*left, *joiners]
    for i in [i for i, worker in enumerate(places) if worker is None]:
        row = places[i - i % inner : i - i % inner + inner]
        near = {hosts.get(other) for other in row if other is not None}
        places[i] = rest.pop(next((j for j, other in enumerate(rest) if hosts.get(other) in near), 0))
    return tuple(worker for worker in places if worker is not None)


def by_host(workers: Sequence[int], hosts: Mapping[int, str]) -> tuple[int, ...]:
    """Return ``workers`` host by host. Hosts, and the workers of each, keep the order of their first appearance."""
    order = {host: at for at, host in enumerate(dict.fromkeys(hosts.get(worker) for worker in workers))}
    return tuple(sorted(workers, key=lambda worker: order[hosts.get(worker)]))


def _fullest(of: Sequence[Sequence[int]], queues: Sequence[Sequence[int]], hosts: Mapping[int, str]) -> str | None:
    """The host of a worker in ``of`` that has the next workers of the most parts."""
    candidates = [hosts.get(worker) for queue in of for worker in queue]
    return max(candidates, key=lambda host: sum(any(hosts.get(w) == host for w in q) for q in queues), default=None)


def _next(queue: list[int], later: int, host: str | None, hosts: Mapping[int, str]) -> int | None:
    """Take the first worker of ``queue`` on ``host``; of all where ``later`` rows have no place for everyone."""
    at = next((i for i, worker in enumerate(queue) if hosts.get(worker) == host), None)
    if at is None and len(queue) <= later:
        return None
    return queue.pop(at or 0)


def _taken(places: list[int | None]) -> int:
    """Move the last worker with a place to the first place."""
    last = max(i for i, worker in enumerate(places) if worker is not None)
    worker, places[last] = places[last], None
    assert worker is not None
    return worker


def fitting_workers(
    members: tuple[int, ...], before: Mesh | None, ranks: Mapping[int, int], places: int
) -> tuple[int, ...]:
    """Return ``members`` without those for whom there are no ``places``: the last carriers of the most common parts."""
    staying = list(members)
    inner = 1 if before is None else before.tensor * before.pipeline
    while len(staying) > places:
        parts = [ranks.get(worker, 0) % inner for worker in staying]
        most = max(parts, key=lambda part: (parts.count(part), part))
        del staying[max(i for i, part in enumerate(parts) if part == most)]
    return tuple(staying)
