"""Which mesh a changed number of workers gets, and which worker gets which rank in it.

Axes may grow and shrink while a run goes on. In ``exact`` mode the result does not depend on that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log
from types import MappingProxyType

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings

UNBOUNDED = 1 << 30
_ONE_HOST: Mapping[int, str] = MappingProxyType({})
WEIGHTS = {"data": 1.0, "shard": 1.5, "pipeline": 2.5, "tensor": 3.0}
"""How much it costs to leave the wanted size of an axis: another number of replicas is the smallest change, another
width of layers the largest."""


@dataclass(frozen=True)
class MeshChoice:
    """What a run's mesh should be, and what it may be.

    Attributes:
        wanted: The mesh that was asked for.
        shard: The most workers along this axis; 1 where the mechanism does not divide along it.
        tensor: Likewise.
        pipeline: Likewise.
        slots: The most parts that a batch can be cut into.
        fixed: It stays the wanted one: the mechanism cannot reshape a run.
        owes: Each worker keeps what it has not sent yet of its gradients.
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
        """What ``execution`` begin with, and what their mechanism allows. How many layers a pipeline could divide is
        known to workers alone (``LayersFound``): until they tell, it has no more stages than it is to begin with.
        """
        wanted, axes, compression = execution.first_mesh, execution.parts.dividing, execution.compression
        return cls(
            wanted,
            shard=UNBOUNDED if "shard" in axes else 1,
            tensor=max(1, execution.virtual_tensor) if "tensor" in axes else 1,  # no blocks: a check refuses that
            pipeline=wanted.pipeline if "pipeline" in axes else 1,
            slots=execution.num_slots,
            keeps_residual=compression is not None and compression.keeps_residual,
        )

    def widened(self, layers: int) -> MeshChoice:
        """As this, with a pipeline of as many stages as there are ``layers``, where there is a pipeline."""
        return replace(self, pipeline=max(layers, self.wanted.pipeline)) if self.pipeline > 1 and layers else self

    @property
    def divides(self) -> bool:
        """Whether workers may hold different state."""
        return max(self.shard, self.tensor, self.pipeline) > 1

    @property
    def leavers_send_state(self) -> bool:
        """Whether a worker that leaves has something for those that stay."""
        return self.divides or self.keeps_residual

    def for_workers(self, workers: int) -> Mesh:
        """The mesh of ``workers`` workers, or of as many of them as it has places for.

        A replica is divided by no fewer workers than was asked for, as far as there are so many: each has the memory
        for its part. Then as many workers as possible have a place; then the mesh is the nearest to the wanted one.
        """
        return min(self._possible(workers), key=lambda mesh: self._cost(mesh, workers))

    def most_parts(self, workers: int) -> int:
        """Into how many parts up to so many ``workers`` may cut a batch, each at least one slot.

        One worker more may stand as a mesh with fewer parts, where a replica is divided by more of them; with as many
        more as carry a part there are more parts again.
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
        """Every mesh of ``low`` to ``high`` workers that the run can have."""
        found = {
            replace(mesh, data=data)
            for mesh in self._possible(high)
            for data in range(1, mesh.data + 1)
            if data * mesh.replica >= low and data * mesh.shard <= self.slots
        }
        return sorted(found, key=str)

    def _possible(self, workers: int) -> list[Mesh]:
        """Every mesh of at most ``workers`` with as many replicas as fit."""
        found = []
        for tensor in range(1, min(self.tensor, workers) + 1):
            for pipeline in range(1, min(self.pipeline, workers // tensor) + 1):
                left = workers // (tensor * pipeline)
                for shard in range(1, min(self.shard, left) + 1):
                    found.append(Mesh(left // shard, shard, tensor, pipeline))
        return found

    def _cost(self, mesh: Mesh, workers: int) -> tuple[int, int, float, str]:
        """The lower the better; the text makes it one order."""
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


def assign_ranks(
    staying: tuple[int, ...],
    joiners: tuple[int, ...],
    before: Mesh | None,
    ranks: Mapping[int, int],
    mesh: Mesh,
    hosts: Mapping[int, str] = _ONE_HOST,
) -> tuple[int, ...]:
    """Workers in the order of their ranks in ``mesh``: who carries a part of the model goes on with it, if it can.

    ``before``: the mesh until now; ``ranks``: the rank in it of each that stays; ``hosts``: where each worker runs.
    Otherwise ranks go host by host, as far as nobody has to change its part for it: those who carry a replica together
    are neighbours then, and a reduction has the fewest hops across. No joiner is the first: somebody has to tell of
    the change.
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
    """``workers`` host by host, hosts in the order in which they come first, and each host's workers as they come."""
    order = {host: at for at, host in enumerate(dict.fromkeys(hosts.get(worker) for worker in workers))}
    return tuple(sorted(workers, key=lambda worker: order[hosts.get(worker)]))


def _fullest(of: Sequence[Sequence[int]], queues: Sequence[Sequence[int]], hosts: Mapping[int, str]) -> str | None:
    """The host, of those of the workers in ``of``, that has the next workers of the most parts."""
    told = [hosts.get(worker) for queue in of for worker in queue]
    return max(told, key=lambda host: sum(any(hosts.get(w) == host for w in q) for q in queues), default=None)


def _next(queue: list[int], later: int, host: str | None, hosts: Mapping[int, str]) -> int | None:
    """Take the first worker of ``queue`` that is on ``host``, or any where ``later`` rows have no place for all."""
    at = next((i for i, worker in enumerate(queue) if hosts.get(worker) == host), None)
    if at is None and len(queue) <= later:
        return None
    return queue.pop(at or 0)


def _taken(places: list[int | None]) -> int:
    """The last worker that has a place gives it up for the first."""
    last = max(i for i, worker in enumerate(places) if worker is not None)
    worker, places[last] = places[last], None
    assert worker is not None
    return worker


def fitting_workers(
    members: tuple[int, ...], before: Mesh | None, ranks: Mapping[int, int], places: int
) -> tuple[int, ...]:
    """``members`` less those that there are no ``places`` for: of the parts that most of them carry, the last go."""
    staying = list(members)
    inner = 1 if before is None else before.tensor * before.pipeline
    while len(staying) > places:
        parts = [ranks.get(worker, 0) % inner for worker in staying]
        most = max(parts, key=lambda part: (parts.count(part), part))
        del staying[max(i for i, part in enumerate(parts) if part == most)]
    return tuple(staying)
