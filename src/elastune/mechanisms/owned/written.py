"""What a worker writes of state that lies in shares: each piece of it is written by one worker."""

from __future__ import annotations

from typing import Any

import torch

from elastune.core.leaves import Leaf
from elastune.core.ownership import Segment, written
from elastune.core.stretches import Stretch
from elastune.mechanisms.owned.placement import VALUES
from elastune.mechanisms.owned.replica import OwnedReplica
from elastune.mechanisms.owned.whole import whole_groups
from elastune.mechanisms.scattered import Scattered


def written_state(replica: OwnedReplica) -> dict[str, Any]:
    """This worker's part of ``model``, by the names of the program's model, and of ``optimizer``, by its numbers.

    Buffers are rank 0's to write; numbers that an optimizer keeps of a parameter, that worker's who
    writes its first element.
    """
    comms, store = replica.comms, replica.store
    own: dict[str, list[Segment]] = {}
    for segment in written(replica.split, comms.mesh, comms.rank):
        own.setdefault(replica.split.leaves[segment.leaf].tensor, []).append(segment)
    model: dict[str, Any] = {}
    kept = replica.other_state() if comms.rank == 0 else {}
    for name, tensor in replica.state_names.items():
        if tensor is not None:
            model[name] = _scattered(replica, tensor, VALUES, own.get(tensor, []))
        elif name in kept:
            model[name] = kept[name]
    state: dict[int, dict[str, Any]] = {}
    for tensor, segments in own.items():
        number = store.places.get(tensor)
        if number is None:
            continue
        found = {name: _scattered(replica, tensor, name, segments) for name in store.names(segments[0].leaf)}
        first = next((s for s in segments if s.start == 0 and _is_first(replica.split.leaves[s.leaf])), None)
        scalars = {} if first is None else store.scalars(first.leaf)
        if found or scalars:
            state[number] = found | scalars
    return {"model": model, "optimizer": {"state": state, "param_groups": whole_groups(replica)}}


def _is_first(leaf: Leaf) -> bool:
    return all(start == 0 for start, _ in leaf.box)


def _scattered(replica: OwnedReplica, tensor: str, name: str, segments: list[Segment]) -> Scattered:
    leaves = replica.split.leaves
    pieces = []
    for segment in segments:
        values = replica.store.read(segment, name).reshape(-1)
        pieces.append((Stretch(leaves[segment.leaf].box, segment.start, segment.stop), values))
    dtype = pieces[0][1].dtype if pieces else _dtype(replica, tensor)
    return Scattered(f"{tensor}:{name}", replica.shapes[tensor], dtype, tuple(pieces))


def _dtype(replica: OwnedReplica, tensor: str) -> torch.dtype:
    return replica.store.parameters[replica.leaves_of[tensor][0]].dtype
