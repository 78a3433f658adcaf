"""What further holders of divided state cost, and what ``tensor`` leaves whole: in shares, before anything runs. Pure.

Where workers may be lost, a run keeps two holders of each part of what it divides (``--copies``). On a mesh without
replicas (``data=1``) the second one lies on a worker of the same replica, and takes back what dividing has saved.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from elastune.core.mesh import Mesh
from elastune.core.run import Means

Floats = NDArray[np.float64]
ELASTIC_COPIES = 2
"""Holders where nothing is said and workers may be lost, as ``sync.registry.sync_for`` has them."""
LITTLE = 0.01
LEAST_TOLD = 0.01  # of the whole: what a copy takes beyond it is worth a line


def further_parts(data: Floats, shard: Floats, inner: Floats, copies: float) -> tuple[Floats, Floats]:
    """How many parts the fullest worker holds beside its own, as ``core.ownership.holders`` deals them on one host.

    Args:
        data: Workers along that axis, who hold the same.
        shard: Workers along that axis.
        inner: Workers along tensor and pipeline.
        copies: Holders of each part.

    Returns:
        Parts of what it computes with (those of other workers along ``shard``), and parts of what others compute with.

    Example:
        >>> further_parts(np.ones(1), np.ones(1), np.full(1, 2.0), 2)
        (array([0.]), array([1.]))
    """
    lacking = np.maximum(0.0, np.minimum(copies, data * shard * inner) - data)  # holders of each part
    more = np.ceil(lacking / data)
    own = np.minimum(more, shard - 1)
    return own, more - own


def copies_text(means: Means, *, elastic: bool = True) -> str:
    """What the holders of ``means`` take of a worker's memory, in one sentence; "" where they take nothing.

    Args:
        means: How a run is executed.
        elastic: Whether workers may be lost, which is so but under torchrun and its like.

    Returns:
        The sentence, for the first lines of a run.

    Example:
        >>> copies_text(Means(mesh=Mesh(tensor=2)))
        'each part of the divided state has 2 holders (the default): a worker holds 100 % of ...'
    """
    name, mesh = means.parts, means.first_mesh
    copies = means.copies or (ELASTIC_COPIES if elastic else 1)
    if not name.dividing or name.foreign or mesh.workers == 1 or copies == 1:
        return ""
    (values, state), (least_values, least) = (_shares(mesh, each, name.state == "sharded") for each in (copies, 1))
    if state - least < LEAST_TOLD:
        return ""
    default = " (the default)" if means.copies is None else ""
    saved = " (dividing saves no memory)" if min(values, state) > 1 - LEAST_TOLD else ""
    return (
        f"each part of the divided state has {copies} holders{default}, so that a lost worker costs no progress: a "
        f"worker holds {values:.0%} of parameters, {state:.0%} of gradients and optimizer state{saved}. With "
        f"--copies 1: {least_values:.0%} and {least:.0%}, if all layers divide"
    )


def _shares(mesh: Mesh, copies: int, sharded: bool) -> tuple[float, float]:
    """What the fullest worker holds of parameters, and of gradients and optimizer state, if all divides evenly."""
    data, shard, inner = (np.array([float(each)]) for each in (mesh.data, mesh.shard, mesh.tensor * mesh.pipeline))
    own, others = (float(each[0]) for each in further_parts(data, shard, inner, copies))
    parts = mesh.shard * mesh.tensor * mesh.pipeline
    state = (1 + own + others) / parts
    return (state if sharded else mesh.shard / parts + others / parts), state


def serial_text(parameters: float, compute: float | None, mesh: Mesh | None = None) -> str:
    """What ``tensor`` leaves whole of a model, and what that bounds (Amdahl, 1967), in one sentence.

    Args:
        parameters: The share of parameters in layers that are not divided.
        compute: The share of a step's arithmetic in them; None: not known.
        mesh: How workers stand, if they do.

    Returns:
        The sentence.

    Example:
        >>> serial_text(0.25, 0.5)
        'tensor leaves 25% of parameters and 50% of arithmetic whole on each worker (the serial share): ...'
    """
    if parameters >= 1:
        return "tensor divides no layer of this model: all of it would lie whole on each worker along it"
    if max(parameters, compute or 0.0) < LITTLE:
        little = f"less than {LITTLE:.0%} is whole on each worker (the serial share)"
        return f"tensor divides nearly all of this model: {little}"
    also = "" if compute is None else f" and {compute:.0%} of arithmetic"
    line = f"tensor leaves {parameters:.0%} of parameters{also} whole on each worker (the serial share)"
    sizes = [2, 4, 8] if mesh is None or mesh.tensor == 1 else [mesh.tensor]
    held = ", ".join(f"{parameters + (1 - parameters) / size:.0%} on tensor={size}" for size in sizes)
    line += f": of the parameters a worker computes with {held}"
    if compute is None:
        return line
    bound = f", at most {1 / compute:.3g} x on any" if compute else ""
    faster = ", ".join(f"{1 / (compute + (1 - compute) / size):.3g} x on tensor={size}" for size in sizes)
    return f"{line}; its arithmetic is at most so much faster: {faster}{bound}"
