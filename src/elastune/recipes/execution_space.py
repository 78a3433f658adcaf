"""A ready part of a search space: how a trial is executed, as far as the chosen mechanism has settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from elastune.core.communication import Compression, Topology
from elastune.core.errors import UserError
from elastune.core.mesh import AXES, INSTALLED, STAGED, MechanismName, Mesh
from elastune.core.options import split
from elastune.core.run import ExecutionSettings, Schedule
from elastune.core.slots import Mode
from elastune.parallel.mechanisms.registry import DIVIDES, MECHANISMS, STATES
from elastune.recipes.settings import choice
from elastune.recipes.spaces import WholeBounds, choose_from, draw_int


def suggest_execution(
    trial: Any,
    *,
    workers: WholeBounds | None = None,
    modes: Sequence[str] = (),
    mechanisms: Sequence[str] = (),
    meshes: Sequence[str] = (),
    micro_batches: Sequence[int | None] = (),
    copies: Sequence[int] = (),
    virtual_tensor: Sequence[int] = (),
    schedules: Sequence[str] = (),
    zero_stages: Sequence[int] = (),
    policies: Sequence[str] = (),
    compressions: Sequence[str] = (),
    topologies: Sequence[str] = (),
) -> dict[str, Any]:
    """Choose the execution settings of a trial. A setting that is left out stays as in the study.

    The mesh is one of those along whose axes the chosen mechanism divides a replica. If these are not all of
    ``meshes``, the parameter is called "mesh of tensor+zero" (with the mechanism's name), because its choices differ.
    Copies, virtual blocks, schedules and ZeRO stages are parameters only with a mechanism that has them. Compressions
    are a parameter only in "fast" mode (or without ``modes``), and if no mechanism divides a replica.

    Args:
        trial: The argument of ``space(trial)``.
        workers: The number of workers that the trial begins with, drawn on a log scale; leave it out where the mesh
            sets it.
        modes: Any of "exact", "fast".
        mechanisms: Any of elastune's mechanisms, "tensor+zero" and the like; without them each mesh has the
            simplest one that serves it.
        meshes: Texts as for ``--mesh``: "data=2,shard=2".
        micro_batches: The most samples of one forward pass; None for no bound.
        copies: Numbers of copies of divided state.
        virtual_tensor: Numbers of blocks of divided layers.
        schedules: Schedules of a pipeline.
        zero_stages: Stages of DeepSpeed and FairScale.
        policies: Texts as for ``--policy``; "none" for no policy.
        compressions: Texts as for ``--compress``; "none" for none.
        topologies: Texts as for ``--topology``; asked for where no mechanism divides a replica.

    Returns:
        The chosen execution settings.

    Raises:
        UserError: For an unknown mode, mechanism, compression, topology or schedule, a text that is no mesh or policy,
            ``workers`` together with ``meshes``, and a mechanism that none of the meshes fits.

    Example:
        >>> elastune.suggest_execution(trial, workers=(1, 4), policies=("none", "gns:max_batch=1024"))
        >>> elastune.suggest_execution(trial, mechanisms=("zero", "sharded", "tensor"), meshes=("shard=4", "tensor=4"))
    """
    if workers is not None and meshes:
        raise UserError("a mesh says how many workers there are", f"workers={workers}", "give workers or meshes")
    chosen: dict[str, Any] = {} if workers is None else {"workers": draw_int(trial, "workers", workers, log=True)}
    if modes:
        chosen["mode"] = choose_from(trial, "mode", modes, get_args(Mode))
    chosen |= _suggest_division(trial, mechanisms, meshes)
    name = ExecutionSettings.from_json({key: chosen.get(key) for key in ("mechanism", "mesh")}).parts
    for policy in policies:
        split(policy, "a policy", "gns:max_batch=2048,lr=sqrt")
    for compression in compressions:
        Compression.parse(compression)
    for topology in topologies:
        Topology.parse(topology)
    compresses = chosen.get("mode", "fast") == "fast" and name == MechanismName()
    questions: list[tuple[str, Sequence[Any], bool, tuple[str, ...] | None]] = [
        ("micro_batch", micro_batches, True, None),
        ("copies", copies, name != MechanismName() and not name.foreign, None),
        ("virtual_tensor", virtual_tensor, name.tensor, None),
        ("schedule", schedules, name.pipeline, get_args(Schedule)),
        ("zero_stage", zero_stages, name.foreign in STAGED, None),
        ("policy", policies, True, None),
        ("compress", compressions, compresses, None),
        ("topology", topologies, name == MechanismName() and chosen.get("compress", "none") == "none", None),
    ]
    for key, choices, applies, allowed in questions:
        if choices and applies:
            chosen[key] = choose_from(trial, key, choices, allowed)
    return chosen


def _suggest_division(trial: Any, mechanisms: Sequence[str], meshes: Sequence[str]) -> dict[str, Any]:
    """Choose a mechanism and a mesh that fits it, among those of the caller."""
    grids = {mesh: Mesh.parse(mesh) for mesh in meshes}
    names = {text: _mechanism_name(text) for text in mechanisms}
    for text, name in names.items():
        if grids and not _fitting(name, grids):
            raise UserError("each mechanism must fit one of the meshes", f"{text}; {', '.join(grids)}", "add one")
    chosen: dict[str, Any] = {}
    if names:
        chosen["mechanism"] = choose_from(trial, "mechanism", [str(name) for name in names.values()])
    if grids:
        fitting = _fitting(MechanismName.parse(chosen["mechanism"]), grids) if names else list(meshes)
        parameter = "mesh" if len(fitting) == len(meshes) else f"mesh of {chosen['mechanism']}"
        chosen["mesh"] = choose_from(trial, parameter, fitting)
    return chosen


def _mechanism_name(text: str) -> MechanismName:
    name = MechanismName.parse(text)
    for word in name.words:
        choice("mechanism", word, (*MECHANISMS, *STATES, *DIVIDES, *INSTALLED.names()))
    return name


def _fitting(name: MechanismName, grids: dict[str, Mesh]) -> list[str]:
    """The meshes that the mechanism ``name`` can serve."""
    return [
        text
        for text, mesh in grids.items()
        if all(axis == "data" or mesh.size(axis) == 1 or axis in name.dividing for axis in AXES)
    ]
