"""The worker layouts that a frontier answers for: how many workers, on which mesh, by which mechanism. Pure.

A layout is the execution settings of its workers. Into how many parts it cuts a batch belongs to the settings that
decide the result. The other axes of its mesh do not show in a result, so layouts of equal parts share trainings.
A search may add layouts to those that were asked for, and the throughput phase may find faster execution for one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastune.core.communication import Topology
from elastune.core.errors import UserError
from elastune.core.formatting import byte_count
from elastune.core.mesh import MechanismName, Mesh
from elastune.core.run import Means
from elastune.core.sync_plan import SyncChoice, SyncPlan
from elastune.tune.frontier.trainings import StepKind, Way

# [crews] The workers that a frontier asks about: how many, how they stand, and by which mechanism. Pure.
#
# A crew is the ``Means`` of its workers. How many parts it cuts a batch into, one slot each, belongs to the settings;
# along which other axes its workers stand does not show in a result, so that crews of equal parts share their trainings.

COUNTS = (1, 2, 4, 8)
"""Worker counts that are asked about where nobody says."""


def crews_of(means: Means, counts: Sequence[int], meshes: Sequence[Mesh]) -> tuple[Means, ...]:
    """So many workers along the mechanism's axis, and those of each mesh; fewest first.

    A mesh has the mechanism of ``means`` or, where that is "replicated", the least that it needs. Where one of them
    divides layers all do, into as many virtual blocks: these decide how sums are added.

    Raises:
        UserError: Where two are the same, and for a mesh whose axes a frontier cannot speak of.
    """
    asked: list[tuple[int, Mesh | None]] = [*((count, None) for count in counts), *((m.workers, m) for m in meshes)]
    blocks = means.virtual_tensor if means.virtual_tensor > 1 else None
    made = [_crew(means, workers, mesh, blocks) for workers, mesh in asked]
    if (most := max((crew.virtual_tensor for crew in made), default=1)) > 1:
        made = [_crew(means, workers, mesh, most) for workers, mesh in asked]
    for mesh in (found := [crew.first_mesh for crew in made]):
        if found.count(mesh) > 1:
            raise UserError("a frontier asks about each mesh once", mesh, "leave out one of --workers and --mesh")
        _check_stages(mesh)
    return tuple(sorted(made, key=lambda crew: crew.workers))


def chosen_crew(crews: Sequence[Means], base: Means, like: Means, told: Mapping[str, Any]) -> Means:
    """The crew that a space chooses by ``told`` of its means; what it does not say is that of ``like``.

    ``crews``: those asked about, with the means ``base``.

    Raises:
        UserError: For one that no training of such a frontier could speak for.
    """
    said, workers = {**like.to_json(), **told}, told.get("workers", 1)
    if isinstance(workers, bool) or not isinstance(workers, int):
        raise UserError("workers must be a whole number, at least one", repr(workers)[:100], "change space(trial)")
    if "workers" in told or "mesh" in told:
        said = {name: value for name, value in said.items() if name not in {"workers", "mesh"} - set(told)}
        if "mechanism" not in told:
            said["mechanism"] = None if base.mechanism == "replicated" else base.mechanism
    elif "mechanism" in told:
        said.pop("mesh", None)
    crew = Means.from_json(said)
    _check_stages(crew.first_mesh)
    if crew.virtual_tensor != like.virtual_tensor:
        rule = "blocks of divided layers show in a result, so that all crews have as many"
        raise UserError(rule, f"{crew.first_mesh}, {crew.mechanism}", "ask about such a mesh, with --mesh tensor=2")
    if crew.workers > crews[-1].workers:
        rule = f"a frontier's space chooses among up to as many workers as are asked about, {crews[-1].workers}"
        raise UserError(rule, crew.workers, "use larger --workers, or fewer in space(trial)")
    routes = crew.topology if crew.workers > 1 else Topology()
    return replace(crew, num_slots=crew.first_mesh.batch, topology=routes)


def timed_with(crews: Sequence[Means], workers: int) -> Means:
    """Who is timed for the model, of whatever a worker does by itself and of the link: one worker, or two."""
    first = first_of(crews, min(crew.num_slots for crew in crews))
    least = Way.of(first).trainer(first)
    mesh = None if workers == 1 or least.parts.foreign else Mesh(data=workers)
    return replace(least, workers=workers, mesh=mesh, num_slots=workers)


def first_of(crews: Sequence[Means], parts: int) -> Means:
    """The first of ``crews`` that cuts a batch into so many ``parts``."""
    return next(crew for crew in crews if crew.num_slots == parts)


def _check_stages(mesh: Mesh) -> None:
    if mesh.pipeline > 1:
        rule = "a frontier compares meshes that cut a batch into as many parts as they have workers for"
        raise UserError(f"{rule}; stages need more", mesh, "use data, shard or tensor")


def _crew(means: Means, workers: int, mesh: Mesh | None, blocks: int | None) -> Means:
    said = {
        **means.to_json(),
        "workers": workers,
        "mesh": None if mesh is None else str(mesh),
        "mechanism": None if means.mechanism == "replicated" else means.mechanism,
        "virtual_tensor": blocks,
    }
    crew = Means.from_json(said)
    return replace(crew, num_slots=crew.first_mesh.batch)


# [lineup] For whom a frontier speaks: crews asked about, those that its search found, and by which means each goes fastest.

Standing = tuple[Mesh, str, str]
"""What makes two crews the same: their mesh, their mechanism, and by which routes their sums travel."""


class Lineup:
    """Crews, fewest workers first. ``asked``: those that the question is about; others join as the search finds them.

    ``base``: the means that were asked for, from which ways and kinds of steps are told apart.
    """

    def __init__(self, asked: Sequence[Means], base: Means) -> None:
        self.asked = tuple(asked)
        self.way = Way.of(base)
        self._base = base
        self._found: list[Means] = []
        self._faster: dict[Standing, Means] = {}

    @property
    def crews(self) -> tuple[Means, ...]:
        """All of them; of equal workers those asked about first."""
        return tuple(sorted((*self.asked, *self._found), key=lambda crew: crew.workers))

    @property
    def parts(self) -> tuple[int, ...]:
        """Into how many parts they cut a batch, ascending: quality depends on no more of a crew."""
        return tuple(sorted({crew.num_slots for crew in self.crews}))

    @property
    def widest(self) -> Means:
        """That of the most workers asked about."""
        return self.asked[-1]

    def first(self, parts: int) -> Means:
        """Who is trained, or at least timed, where a batch is cut into so many parts."""
        return first_of((*self.asked, *self._found), parts)

    def join(self, crew: Means) -> None:
        """Speak for ``crew``, too."""
        if standing_of(crew) not in map(standing_of, self.crews):
            self._found.append(crew)

    def without(self, parts: Collection[int]) -> Lineup:
        """The same without those asked about who cut a batch into so many ``parts``; one at least must be left."""
        left = Lineup([crew for crew in self.asked if crew.num_slots not in parts], self._base)
        left._found, left._faster = list(self._found), dict(self._faster)
        return left

    def speed_up(self, crew: Means, means: Means) -> None:
        """Run ``crew`` by ``means`` from now on, which give the same bits sooner, where it goes the way asked for."""
        self._faster[standing_of(crew)] = means

    def by(self, crew: Means, way: Way) -> Means:
        """The means of ``crew`` going ``way``."""
        faster = self._faster.get(standing_of(crew)) if way == self.way else None
        return way.on(crew) if faster is None else faster

    def kind(self, crew: Means, way: Way) -> StepKind:
        """What a step of it takes the time of."""
        return self.kind_of(self.by(crew, way), way.agreed)

    def kind_of(self, means: Means, agreed: SyncChoice | None = None) -> StepKind:
        """The same of means, whoever has them."""
        sync = (agreed or SyncChoice()).sync
        words = [*self._words(means), *([str(sync)] if sync.in_rounds else [])]
        passes = -(-sync.learners // means.first_mesh.batch)
        return StepKind(means.first_mesh, ", ".join(words), _every(sync), passes)

    def ways(self, crew: Means, way: Way) -> str:
        """What of the means is not as it was asked for, in words."""
        words = [self.kind(crew, way).apart, *(f"policy {text}" for text in way.policies)]
        return ", ".join(word for word in words if word)

    def _words(self, means: Means) -> list[str]:
        base, mesh = self._base, means.first_mesh
        asked = [crew.mechanism for crew in self.asked if crew.first_mesh == mesh]
        plain = asked[0] if asked else str(MechanismName.least_for(mesh, means.virtual_tensor))
        words = [means.mechanism] if means.mechanism != plain else []
        words += [means.mode] if means.mode != base.mode else []
        words += [means.compress or "not compressed"] if means.compress != base.compress else []
        words += [f"micro-batch {means.micro_batch or 'unbounded'}"] if means.micro_batch != base.micro_batch else []
        words += [f"{means.threads} threads"] if means.threads != base.threads else []
        words += [str(means.topology)] if means.workers > 1 and means.topology != base.topology else []
        words += [f"buckets of {byte_count(means.bucket_bytes)}"] if means.bucket_bytes != base.bucket_bytes else []
        words += [f"{means.copies} copies"] if means.copies not in (None, base.copies) else []
        words += [f"stage {means.zero_stage}"] if means.zero_stage not in (None, base.zero_stage) else []
        return [*words, *(["offload"] if means.offload and not base.offload else [])]


def standing_of(crew: Means) -> Standing:
    """What makes two crews the same."""
    return crew.first_mesh, crew.mechanism, str(crew.topology)


def _every(sync: SyncPlan) -> int:
    """Of how many steps one brings learners together: mixes count as whole exchanges, so do a cycle's fragments."""
    if not sync.in_rounds:
        return 1
    return sync.mix if sync.mixes and not sync.streams else max(1, sync.every // sync.cycles)
