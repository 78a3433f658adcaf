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
from elastune.tuning.frontier.trainings import StepKind, Variant

LayoutKey = tuple[Mesh, str, str]
"""Two layouts are the same if their mesh, mechanism and topology are."""


class WorkerLayouts:
    """All worker layouts of a frontier, fewest workers first, and their fastest execution settings.

    ``requested``: the layouts that the question is about; ``join`` adds those that the search finds. ``base``: the
    execution settings that were asked for; differences from them name variants and kinds of steps.
    """

    def __init__(self, requested: Sequence[ExecutionSettings], base: ExecutionSettings) -> None:
        self.requested = tuple(requested)
        self.variant = Variant.of(base)
        self._base = base
        self._joined: list[ExecutionSettings] = []
        self._faster: dict[LayoutKey, ExecutionSettings] = {}

    @property
    def layouts(self) -> tuple[ExecutionSettings, ...]:
        """All layouts; of equal worker counts the requested ones first."""
        return tuple(sorted((*self.requested, *self._joined), key=lambda layout: layout.workers))

    @property
    def parts(self) -> tuple[int, ...]:
        """Into how many parts the layouts cut a batch, ascending. Quality depends on nothing else of a layout."""
        return tuple(sorted({layout.num_slots for layout in self.layouts}))

    @property
    def widest(self) -> ExecutionSettings:
        """The requested layout with the most workers."""
        return self.requested[-1]

    def first(self, parts: int) -> ExecutionSettings:
        """The first layout that cuts a batch into so many parts; it is trained, or at least timed, for all of them."""
        return first_of((*self.requested, *self._joined), parts)

    def join(self, layout: ExecutionSettings) -> None:
        """Add ``layout``, unless it is there already."""
        if layout_key(layout) not in map(layout_key, self.layouts):
            self._joined.append(layout)

    def without(self, parts: Collection[int]) -> WorkerLayouts:
        """A copy without the requested layouts that cut a batch into so many ``parts``; at least one must be left."""
        left = WorkerLayouts([layout for layout in self.requested if layout.num_slots not in parts], self._base)
        left._joined, left._faster = list(self._joined), dict(self._faster)
        return left

    def speed_up(self, layout: ExecutionSettings, execution: ExecutionSettings) -> None:
        """Run ``layout`` with the faster ``execution`` from now on, in the variant that was asked for.

        ``execution`` must give the same bits.
        """
        self._faster[layout_key(layout)] = execution

    def by(self, layout: ExecutionSettings, variant: Variant) -> ExecutionSettings:
        """The execution settings of ``layout`` in ``variant``."""
        faster = self._faster.get(layout_key(layout)) if variant == self.variant else None
        return variant.on(layout) if faster is None else faster

    def kind(self, layout: ExecutionSettings, variant: Variant) -> StepKind:
        """The kind of steps of ``layout`` in ``variant``."""
        return self.kind_of(self.by(layout, variant), variant.agreed)

    def kind_of(self, execution: ExecutionSettings, agreed: SyncChoice | None = None) -> StepKind:
        """The kind of steps with ``execution``."""
        sync = (agreed or SyncChoice()).sync
        words = [*self._words(execution), *([str(sync)] if sync.in_rounds else [])]
        passes = -(-sync.learners // execution.first_mesh.batch)
        return StepKind(execution.first_mesh, ", ".join(words), _every(sync), passes)

    def differences(self, layout: ExecutionSettings, variant: Variant) -> str:
        """How ``layout`` in ``variant`` differs from the execution settings that were asked for, in words."""
        words = [self.kind(layout, variant).apart, *(f"policy {text}" for text in variant.policies)]
        return ", ".join(word for word in words if word)

    def _words(self, execution: ExecutionSettings) -> list[str]:
        base, mesh = self._base, execution.first_mesh
        mechanisms = [layout.mechanism for layout in self.requested if layout.first_mesh == mesh]
        plain = mechanisms[0] if mechanisms else str(MechanismName.minimal_for(mesh, execution.virtual_tensor))
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


def layouts_of(
    execution: ExecutionSettings, counts: Sequence[int], meshes: Sequence[Mesh]
) -> tuple[ExecutionSettings, ...]:
    """The layouts of a request: one for each worker count, along the mechanism's axis, and one for each mesh.

    A mesh has the mechanism of ``execution`` or, if that is "replicated", the simplest one that it needs. If one layout
    divides layers, all layouts have as many virtual blocks, because these decide how sums are added.

    Returns:
        The layouts, fewest workers first.

    Raises:
        UserError: If two layouts are the same, or if a frontier cannot compare a mesh.
    """
    requested: list[tuple[int, Mesh | None]] = [*((count, None) for count in counts), *((m.workers, m) for m in meshes)]
    blocks = execution.virtual_tensor if execution.virtual_tensor > 1 else None
    made = [_layout(execution, workers, mesh, blocks) for workers, mesh in requested]
    if (most := max((layout.virtual_tensor for layout in made), default=1)) > 1:
        made = [_layout(execution, workers, mesh, most) for workers, mesh in requested]
    for mesh in (first_meshes := [layout.first_mesh for layout in made]):
        if first_meshes.count(mesh) > 1:
            raise UserError("a frontier asks about each mesh once", mesh, "leave out one of --workers and --mesh")
        _check_stages(mesh)
    return tuple(sorted(made, key=lambda layout: layout.workers))


def chosen_layout(
    layouts: Sequence[ExecutionSettings], base: ExecutionSettings, like: ExecutionSettings, choices: Mapping[str, Any]
) -> ExecutionSettings:
    """The layout that a space chooses.

    Args:
        layouts: The layouts asked about.
        base: The execution settings asked for.
        like: The layout that gives all settings that the space does not choose.
        choices: The execution settings that the space chose.

    Raises:
        UserError: If no training of this frontier could be for such a layout.
    """
    settings, workers = {**like.to_json(), **choices}, choices.get("workers", 1)
    if isinstance(workers, bool) or not isinstance(workers, int):
        raise UserError("workers must be a whole number, at least one", repr(workers)[:100], "change space(trial)")
    if "workers" in choices or "mesh" in choices:
        settings = {name: value for name, value in settings.items() if name not in {"workers", "mesh"} - set(choices)}
        if "mechanism" not in choices:
            settings["mechanism"] = None if base.mechanism == "replicated" else base.mechanism
    elif "mechanism" in choices:
        settings.pop("mesh", None)
    layout = ExecutionSettings.from_json(settings)
    _check_stages(layout.first_mesh)
    if layout.virtual_tensor != like.virtual_tensor:
        rule = "blocks of divided layers show in a result, so all worker layouts have as many"
        raise UserError(rule, f"{layout.first_mesh}, {layout.mechanism}", "ask about such a mesh, with --mesh tensor=2")
    if layout.workers > layouts[-1].workers:
        rule = f"a frontier's space chooses among up to as many workers as are asked about, {layouts[-1].workers}"
        raise UserError(rule, layout.workers, "use larger --workers, or fewer in space(trial)")
    routes = layout.topology if layout.workers > 1 else Topology()
    return replace(layout, num_slots=layout.first_mesh.batch, topology=routes)


def timed_with(layouts: Sequence[ExecutionSettings], workers: int) -> ExecutionSettings:
    """The layout of one or two workers that is timed for the step model: for computation, or for the link."""
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
    settings = {
        **execution.to_json(),
        "workers": workers,
        "mesh": None if mesh is None else str(mesh),
        "mechanism": None if execution.mechanism == "replicated" else execution.mechanism,
        "virtual_tensor": blocks,
    }
    layout = ExecutionSettings.from_json(settings)
    return replace(layout, num_slots=layout.first_mesh.batch)


def layout_key(layout: ExecutionSettings) -> LayoutKey:
    """The key that is equal for equal layouts."""
    return layout.first_mesh, layout.mechanism, str(layout.topology)


def _every(sync: SyncPlan) -> int:
    """One of so many steps exchanges. A mix, and the fragments of a cycle, count as one whole exchange."""
    if not sync.in_rounds:
        return 1
    return sync.mix if sync.mixes and not sync.streams else max(1, sync.every // sync.cycles)
