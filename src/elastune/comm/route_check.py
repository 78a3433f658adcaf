"""Whether all workers that sum along routes mean the same ones, and whether sums along them come out right.

For where routes or workers change, between two steps: what each worker takes itself and the others for is compared
before anything travels, since nobody can wait for a message that another one does not send; then one small sum takes
all routes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import torch

from elastune.comm.group import Group
from elastune.comm.relay import Relay

NUMBER = 1 << 19  # of the sum, above those of all vectors that a step sums
DIGEST_BYTES = 6  # exact as a floating-point number


class RoutesDiffer(Exception):
    """Workers would not have summed along the same routes, or a sum along them did not come out right."""


def known(group: Group) -> list[float]:
    """What this worker takes itself and its ``group`` for: its rank, how many there are, and a digest of the routes."""
    told = repr((group.chunk_kib, [(route.up, route.down) for route in group.routes])).encode()
    digest = int.from_bytes(blake2b(told, digest_size=DIGEST_BYTES).digest(), "big")
    return [float(group.rank), float(group.size), float(digest)]


def unlike(rows: Sequence[Sequence[float]]) -> Mapping[int, str]:
    """What each rank means, in words, if not all mean the same; empty if they do. ``rows``: by rank, ``known``."""
    if all(list(row) == [rank, len(rows), rows[0][2]] for rank, row in enumerate(rows)):
        return {}
    return {
        rank: f"{'' if row[0] == rank else f'as rank {row[0]:.0f} '}of {row[1]:.0f} with routes {int(row[2]):012x}"
        for rank, row in enumerate(rows)
    }


def adds_up(group: Group) -> bool:
    """Whether whole numbers of all workers add up along each of the group's routes. All workers call it.

    Raises ``GroupBroken``.
    """
    own = torch.arange(1, 1 + max(1, len(group.routes)), dtype=torch.int64)  # one for each route
    total = torch.zeros_like(own)
    relay = Relay(group, own, NUMBER)
    relay.start([own * (group.rank + 1)], total)
    try:
        relay.wait()
    finally:
        relay.settle()
    return torch.equal(total, own * (group.size * (group.size + 1) // 2))
