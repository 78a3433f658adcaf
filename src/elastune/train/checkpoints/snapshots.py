"""A snapshot's shards as text and tensors, so that they travel and are kept as the rest of a state does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from elastune.core.leaves import Leaf, Split
from elastune.core.ownership import Segment
from elastune.mechanisms.owned.moving import Kept
from elastune.mechanisms.owned.placement import Shard


def packed_shards(kept: Kept) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """``kept`` as a JSON value, and its tensors in the order that it names."""
    rows = [
        [shard.segment.leaf, shard.segment.start, shard.segment.stop, shard.held, list(shard.tensors)]
        for shard in kept.shards
    ]
    leaves = [asdict(leaf) for leaf in kept.split.leaves]
    told = {
        "leaves": leaves,
        "blocks": kept.split.blocks,
        "costs": list(kept.split.costs),
        "copies": kept.copies,
        "frees": kept.frees,
        "version": kept.version,
        "shards": rows,
        "facts": {str(leaf): facts for leaf, facts in kept.facts.items()},
    }
    return told, [tensor for shard in kept.shards for tensor in shard.tensors.values()]


def unpacked_shards(told: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Kept:
    """What ``packed_shards`` was given."""
    left = iter(tensors)
    shards = [
        Shard(Segment(leaf, start, stop), {name: next(left) for name in names}, held)
        for leaf, start, stop, held, names in told["shards"]
    ]
    leaves = [Leaf(**{**leaf, "box": tuple((a, b) for a, b in leaf["box"])}) for leaf in told["leaves"]]
    split = Split(tuple(leaves), told["blocks"], tuple(told["costs"]))
    facts = {int(leaf): facts for leaf, facts in told["facts"].items()}
    return Kept(split, told["copies"], told["frees"], told["version"], tuple(shards), facts)
