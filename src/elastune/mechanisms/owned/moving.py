"""A replica's state on its way: to another mesh, to joiners, from survivors to each other, into a snapshot and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from elastune.comm.comms import Comms
from elastune.comm.group import Group
from elastune.core.leaves import Split
from elastune.core.mesh import Mesh
from elastune.core.ownership import Segment, held
from elastune.mechanisms.owned.facts import decoded, encoded
from elastune.mechanisms.owned.placement import VALUES, Placed, Shard, Wanted, bring, meet
from elastune.mechanisms.owned.replica import OwnedReplica
from elastune.mechanisms.owned.store import Incoming

NOTHING = Wanted((), ())


@dataclass(frozen=True)
class Kept:
    """What one worker has of a model's state of ``version``, and what is needed to place it anew.

    Attributes:
        split: The leaves.
        copies: How many workers hold each share.
        frees: Workers keep no values but those that they hold.
        version: See ``OwnedReplica``; -1: there is nothing.
        shards: What is here.
        facts: By leaf that is held: see ``placement.bring``.
    """

    split: Split
    copies: int
    frees: bool
    version: int
    shards: tuple[Shard, ...]
    facts: dict[int, Any]

    def wanted(self, mesh: Mesh, hosts: Sequence[str], size: int) -> list[Wanted]:
        """What each of ``size`` workers is to have where the first of them stand as ``mesh`` says."""
        found = []
        for rank, holds in enumerate(held(self.split, mesh, self.copies, hosts)):
            computed = () if self.frees else self.split.computed(mesh, rank)
            whole = (Segment(i, 0, self.split.leaves[i].size) for i in computed)
            others = (segment for segment in holds if segment.leaf not in computed)
            found.append(Wanted(holds, (*whole, *others)))
        return found + [NOTHING] * (size - mesh.workers)

    def brought(self, group: Group, mesh: Mesh, hosts: Sequence[str], device: torch.device) -> Placed:
        """``placement.bring`` over ``group``, for the first workers of it to stand as ``mesh`` says."""
        want = self.wanted(mesh, hosts, group.size)
        return bring(group, self.split, self.version, self.shards, self.facts, want, device)

    def copied(self) -> Kept:
        """On the CPU, in memory of its own."""
        shards = [
            replace(shard, tensors={name: t.detach().to("cpu", copy=True) for name, t in shard.tensors.items()})
            for shard in self.shards
        ]
        return replace(self, shards=tuple(shards))


def kept(replica: OwnedReplica) -> Kept:
    """What ``replica`` has now; the tensors are its own."""
    store = replica.store
    shards = []
    for shard in store.shards:
        state = store.optimizer.state.get(shard.parameter, {})
        tensors = {VALUES: shard.parameter.detach()} | {name: state[name] for name in store.names(shard.segment.leaf)}
        shards.append(Shard(shard.segment, tensors, held=True))
    if replica.spread_out:
        shards += [Shard(segment, {VALUES: values}, held=False) for segment, values in store.whole_values()]
    facts = {leaf: encoded(store.scalars(leaf)) for leaf in {shard.segment.leaf for shard in store.shards}}
    everything = (*shards, *replica.brought.shards)
    version = -1 if replica.stranger else replica.version
    return Kept(replica.split, replica.copies, store.frees, version, everything, {**replica.brought.facts, **facts})


def place(replica: OwnedReplica, comms: Comms, group: Group, *, exact: bool) -> Placed:
    """Bring all state to where it belongs in the mesh of ``comms``; all workers of ``group`` call this.

    ``group`` begins with the workers of the mesh; further ones (``hand_over``) have something to give.

    Raises:
        GroupBroken: Nothing has changed, but that what has come may be here twice.
        Unrecoverable: On every worker: nobody has a piece.
        CopiesDiffer: On every worker, where ``exact``: two have not the same bits of a piece.
    """
    if replica.stranger:  # all of it comes anew: since an attempt before this one the others may have taken steps
        replica.brought = Placed()
    found = kept(replica).brought(group, comms.mesh, comms.hosts, replica.store.home)
    # What an attempt before this one has brought was not asked for again.
    found.shards += [shard for shard in replica.brought.shards if VALUES in shard.tensors]
    replica.brought = found
    meet(group, replica.split, found, exact=exact)
    restore(replica, comms, found)
    return found


def hand_over(replica: OwnedReplica, group: Group, mesh: Mesh, hosts: Sequence[str]) -> None:
    """As a worker that leaves: give others what they lack. ``group`` begins with the workers of ``mesh``."""
    found = kept(replica).brought(group, mesh, hosts, replica.store.home)
    meet(group, replica.split, found, exact=False)  # it has nothing of this any more


def restore(replica: OwnedReplica, comms: Comms, found: Placed) -> None:
    """Have what was ``found`` for this worker, and stand where ``comms`` says."""
    store = replica.store
    if replica.stranger or replica.version != found.version:  # what is here was never the run's
        store.optimizer.state.clear()
    incoming = Incoming(
        {(shard.segment, name): tensor for shard in found.shards for name, tensor in shard.tensors.items()},
        {leaf: decoded(facts) for leaf, facts in found.facts.items() if facts},
    )
    store.rebuild(*replica.wanted_in(comms), incoming)
    for shard in found.shards:  # the values here may be older
        if VALUES in shard.tensors:
            store.put_values(shard.segment, shard.tensors[VALUES])
    replica.brought = Placed()
    replica.version, replica.stranger, replica.spread_out = found.version, False, True
    replica.enter(comms)
