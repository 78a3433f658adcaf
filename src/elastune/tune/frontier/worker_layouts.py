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
from elastune.core.run import ExecutionSettings
from elastune.core.sync_plan import SyncChoice, SyncPlan
from elastune.tune.frontier.trainings import StepKind, Variant

# [crews] The workers that a frontier asks about: how many, how they stand, and by which mechanism. Pure.
#
# A crew is the ``ExecutionSettings`` of its workers. How many parts it cuts a batch into, one slot each, belongs to the settings;
# along which other axes its workers stand does not show in a result, so that crews of equal parts share their trainings.

COUNTS = (1, 2, 4, 8)
"""Worker counts that are asked about where nobody says."""


def layouts_of(
    execution: ExecutionSettings, counts: Sequence[int], meshes: Sequence[Mesh]
) -> tuple[ExecutionSettings, ...]:
    """So many workers along the mechanism's axis, and those of each mesh; fewest first.

    A mesh has the mechanism of ``execution`` or, where that is "replicated", the least that it needs. Where one of them
    divides layers all do, into as many virtual blocks: these decide how sums are added.

    Raises:
        UserError: Where two are the same, and for a mesh whose axes a frontier cannot speak of.
    """
    asked: list[tuple[int, Mesh | None]] = [*((count, None) for count in counts), *((m.workers, m) for m in meshes)]
    blocks = execution.virtual_tensor if execution.virtual_tensor > 1 else None
    made = [_layout(execution, workers, mesh, blocks) for workers, mesh in asked]
    if (most := max((layout.virtual_tensor for layout in made), default=1)) > 1:
        made = [_layout(execution, workers, mesh, most) for workers, mesh in asked]
    for mesh in (found := [layout.first_mesh for layout in made]):
        if found.count(mesh) > 1:
            raise UserError("a frontier asks about each mesh once", mesh, "leave out one of --workers and --mesh")
        _check_stages(mesh)
    return tuple(sorted(made, key=lambda layout: layout.workers))


def chosen_layout(
    layouts: Sequence[ExecutionSettings], base: ExecutionSettings, like: ExecutionSettings, told: Mapping[str, Any]
) -> ExecutionSettings:
    """The crew that a space chooses by ``told`` of its means; what it does not say is that of ``like``.

    ``layouts``: those asked about, with the means ``base``.

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
    layout = ExecutionSettings.from_json(said)
    _check_stages(layout.first_mesh)
    if layout.virtual_tensor != like.virtual_tensor:
        rule = "blocks of divided layers show in a result, so that all crews have as many"
        raise UserError(rule, f"{layout.first_mesh}, {layout.mechanism}", "ask about such a mesh, with --mesh tensor=2")
    if layout.workers > layouts[-1].workers:
        rule = f"a frontier's space chooses among up to as many workers as are asked about, {layouts[-1].workers}"
        raise UserError(rule, layout.workers, "use larger --workers, or fewer in space(trial)")
    routes = layout.topology if layout.workers > 1 else Topology()
    return replace(layout, num_slots=layout.first_mesh.batch, topology=routes)


def timed_with(layouts: Sequence[ExecutionSettings], workers: int) -> ExecutionSettings:
    """Who is timed for the model, of whatever a worker does by itself and of the link: one worker, or two."""
    first = first_of(layouts, min(layout.num_slots for layout in layouts))
    least = Variant.of(first).trainer(first)
    mesh = None if workers == 1 or least.parts.foreign else Mesh(data=workers)
    return replace(least, workers=workers, mesh=mesh, num_slots=workers)


def first_of(layouts: Sequence[ExecutionSettings], parts: int) -> ExecutionSettings:
    """The first of ``layouts`` that cuts a batch into so many ``parts``."""
    return next(layout for layout in layouts if layout.num_slots == parts)


def _check_stages(mesh: Mesh) -> None:
    if mesh.pipeline > 1:
        rule = "a frontier compares meshes that cut a batch into as many parts as they have workers for"
        raise UserError(f"{rule}; stages need more", mesh, "use data, shard or tensor")


def _layout(execution: ExecutionSettings, workers: int, mesh: Mesh | None, blocks: int | None) -> ExecutionSettings:
    said = {
        **execution.to_json(),
        "workers": workers,
        "mesh": None if mesh is None else str(mesh),
        "mechanism": None if execution.mechanism == "replicated" else execution.mechanism,
        "virtual_tensor": blocks,
    }
    layout = ExecutionSettings.from_json(said)
    return replace(layout, num_slots=layout.first_mesh.batch)


# [lineup] For whom a frontier speaks: crews asked about, those that its search found, and by which means each goes fastest.

LayoutKey = tuple[Mesh, str, str]
"""What makes two crews the same: their mesh, their mechanism, and by which routes their sums travel."""


class WorkerLayouts:
    """Crews, fewest workers first. ``asked``: those that the question is about; others join as the search finds them.

    ``base``: the means that were asked for, from which ways and kinds of steps are told apart.
    """

    def __init__(self, asked: Sequence[ExecutionSettings], base: ExecutionSettings) -> None:
        self.asked = tuple(asked)
        self.variant = Variant.of(base)
        self._base = base
        self._found: list[ExecutionSettings] = []
        self._faster: dict[LayoutKey, ExecutionSettings] = {}

    @property
    def layouts(self) -> tuple[ExecutionSettings, ...]:
        """All of them; of equal workers those asked about first."""
        return tuple(sorted((*self.asked, *self._found), key=lambda layout: layout.workers))

    @property
    def parts(self) -> tuple[int, ...]:
        """Into how many parts they cut a batch, ascending: quality depends on no more of a crew."""
        return tuple(sorted({layout.num_slots for layout in self.layouts}))

    @property
    def widest(self) -> ExecutionSettings:
        """That of the most workers asked about."""
        return self.asked[-1]

    def first(self, parts: int) -> ExecutionSettings:
        """Who is trained, or at least timed, where a batch is cut into so many parts."""
        return first_of((*self.asked, *self._found), parts)

    def join(self, layout: ExecutionSettings) -> None:
        """Speak for ``layout``, too."""
        if layout_key(layout) not in map(layout_key, self.layouts):
            self._found.append(layout)

    def without(self, parts: Collection[int]) -> WorkerLayouts:
        """The same without those asked about who cut a batch into so many ``parts``; one at least must be left."""
        left = WorkerLayouts([layout for layout in self.asked if layout.num_slots not in parts], self._base)
        left._found, left._faster = list(self._found), dict(self._faster)
        return left

    def speed_up(self, layout: ExecutionSettings, execution: ExecutionSettings) -> None:
        """Run ``layout`` by ``execution`` from now on, which give the same bits sooner, where it goes the way asked for."""
        self._faster[layout_key(layout)] = execution

    def by(self, layout: ExecutionSettings, variant: Variant) -> ExecutionSettings:
        """The means of ``layout`` going ``variant``."""
        faster = self._faster.get(layout_key(layout)) if variant == self.variant else None
        return variant.on(layout) if faster is None else faster

    def kind(self, layout: ExecutionSettings, variant: Variant) -> StepKind:
        """What a step of it takes the time of."""
        return self.kind_of(self.by(layout, variant), variant.agreed)

    def kind_of(self, execution: ExecutionSettings, agreed: SyncChoice | None = None) -> StepKind:
        """The same of means, whoever has them."""
        sync = (agreed or SyncChoice()).sync
        words = [*self._words(execution), *([str(sync)] if sync.in_rounds else [])]
        passes = -(-sync.learners // execution.first_mesh.batch)
        return StepKind(execution.first_mesh, ", ".join(words), _every(sync), passes)

    def ways(self, layout: ExecutionSettings, variant: Variant) -> str:
        """What of the means is not as it was asked for, in words."""
        words = [self.kind(layout, variant).apart, *(f"policy {text}" for text in variant.policies)]
        return ", ".join(word for word in words if word)

    def _words(self, execution: ExecutionSettings) -> list[str]:
        base, mesh = self._base, execution.first_mesh
        asked = [layout.mechanism for layout in self.asked if layout.first_mesh == mesh]
        plain = asked[0] if asked else str(MechanismName.minimal_for(mesh, execution.virtual_tensor))
        words = [execution.mechanism] if execution.mechanism != plain else []
        words += [execution.mode] if execution.mode != base.mode else []
        words += [execution.compress or "not compressed"] if execution.compress != base.compress else []
        words += (
            [f"micro-batch {execution.micro_batch or 'unbounded'}"] if execution.micro_batch != base.micro_batch else []
        )
        words += [f"{execution.threads} threads"] if execution.threads != base.threads else []
        words += [str(execution.topology)] if execution.workers > 1 and execution.topology != base.topology else []
        words += (
            [f"buckets of {byte_count(execution.bucket_bytes)}"] if execution.bucket_bytes != base.bucket_bytes else []
        )
        words += [f"{execution.copies} copies"] if execution.copies not in (None, base.copies) else []
        words += [f"stage {execution.zero_stage}"] if execution.zero_stage not in (None, base.zero_stage) else []
        return [*words, *(["offload"] if execution.offload and not base.offload else [])]


def layout_key(layout: ExecutionSettings) -> LayoutKey:
    """What makes two crews the same."""
    return layout.first_mesh, layout.mechanism, str(layout.topology)


def _every(sync: SyncPlan) -> int:
    """Of how many steps one brings learners together: mixes count as whole exchanges, so do a cycle's fragments."""
    if not sync.in_rounds:
        return 1
    return sync.mix if sync.mixes and not sync.streams else max(1, sync.every // sync.cycles)
