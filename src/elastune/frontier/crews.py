"""The workers that a frontier asks about: how many, how they stand, and by which mechanism. Pure.

A crew is the ``Means`` of its workers. How many parts it cuts a batch into, one slot each, belongs to the settings;
along which other axes its workers stand does not show in a result, so that crews of equal parts share their trainings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import Means
from elastune.core.topology import Topology
from elastune.frontier.ways import Way

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
