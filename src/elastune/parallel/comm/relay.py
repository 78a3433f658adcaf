"""Sums of one flat vector along the routes of a topology, chunk behind chunk.

A thread does this worker's part while training goes on. Routes do not decide the order of additions where that
order matters: a worker then adds only what the canonical tree allows, and passes on several partial sums.
Before a step uses new routes, all workers compare their routes and check one small sum. Nobody could wait for a
message that another worker does not send.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from elastune.core.communication import MOST_CHUNKS, Hop, RelayStep, Route, chunks_of, relay_steps
from elastune.core.slots import cut, node_sum, subtrees
from elastune.parallel.comm.group import FIRST_ROUTE_TAG, LOOK, Group, GroupBroken, PendingMessage

# [relay] Sums of one flat vector over the workers of a group, along the routes of a topology, chunk behind chunk.
#
# A thread does this worker's part while training goes on. In what order numbers are added is not the route's to say where
# it matters: then a worker adds only what the canonical tree over slots lets it, and passes on the sums of several nodes
# of that tree side by side (``RouteNodes``).

ENDS_S = 0.05  # after its group was given up, a thread that has not ended within this may never
Nodes = tuple[range, ...]
AnyOrder: Nodes = (range(1),)


@dataclass(frozen=True)
class RouteNodes:
    """The nodes of the canonical tree whose sums pass through one worker on one route.

    Attributes:
        own: Those that this worker has by itself.
        brought: By rank, those that others give it.
        sums: What becomes of them: what it gives on.
        ordered: Sums follow the tree; else each worker gives on one sum, added up as it comes.
    """

    own: Nodes
    brought: Mapping[int, Nodes]
    sums: Nodes
    ordered: bool

    def add(self, rows: Sequence[tuple[range, torch.Tensor]]) -> list[torch.Tensor]:
        """The sums of ``rows``, own ones first, then as ``brought`` has them. Their memory is used again."""
        if self.ordered:
            return [node_sum([row for row in rows if row[0].start in node], node, _add) for node in self.sums]
        total = rows[0][1]
        for _, row in rows[1:]:
            total.add_(row)
        return [total]


def _add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.add_(b)


def passing(route: Route, rank: int, runs: Sequence[range] = (), num_slots: int = 0) -> RouteNodes:
    """What passes through ``rank``; ``runs``: the slots that each worker has; none: sums in any order."""
    children = route.children(rank)
    if not runs:
        return RouteNodes(AnyOrder, dict.fromkeys(children, AnyOrder), AnyOrder, ordered=False)

    def nodes(ranks: Sequence[int]) -> Nodes:
        return tuple(subtrees({slot for other in ranks for slot in runs[other]}, num_slots))

    brought = {giver: nodes(sorted(route.below(giver))) for giver in children}
    return RouteNodes(nodes([rank]), brought, nodes(sorted(route.below(rank))), ordered=True)


class Relay:
    """This worker's part in the sums of one vector, step after step.

    ``number``: tells this vector from others of the group; equal on all workers. ``runs`` and ``num_slots``: in the
    order of the canonical tree over slots, see ``passing``.
    """

    def __init__(
        self, group: Group, like: torch.Tensor, number: int, runs: Sequence[range] = (), num_slots: int = 0
    ) -> None:
        self._group, self._number, self._routes = group, number, group.routes
        chunks = chunks_of(like.numel(), like.element_size(), len(group.routes), group.chunk_kib)
        self._stops = relay_steps(group.routes, chunks, group.rank)
        used = group.routes[: min(chunks, len(group.routes))]
        ways = [passing(route, group.rank, runs, num_slots) for route in used]
        self._ways = [ways[chunk % len(ways)] for chunk in range(chunks)]
        self._edges = cut(like.numel(), chunks)
        self._dtype = like.dtype
        hops = [hop for stop in self._stops for hop in stop.leaves]
        rows = sum(len(self._edges[hop.chunk]) * (len(self._ways[hop.chunk].sums) if hop.up else 1) for hop in hops)
        self._sent_bytes = rows * like.element_size()
        self._room = self._new_room()
        self._ended = threading.Event()
        self._why = ""
        self._under_way = False

    def _new_room(self) -> dict[Hop, list[torch.Tensor]]:
        """A row for each node of each part that will arrive."""
        found = {}
        for stop in self._stops:
            if (hop := stop.arrives) is not None and hop.up:
                rows, edge = len(self._ways[hop.chunk].brought[hop.source]), self._edges[hop.chunk]
                room = torch.zeros(rows * len(edge), dtype=self._dtype)
                found[hop] = list(room.view(rows, len(edge)).unbind(0)) if rows else []
        return found

    def start(self, parts: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """Sum ``parts``, a vector for each node that this worker has, over all workers into ``total``.

        All are on the CPU, and this relay's until ``wait`` is over; parts are changed.
        """
        if self._routes is not self._group.routes and self._routes != self._group.routes:
            raise RuntimeError("a sum would go by routes that are laid no more: regroup what sums")
        self._group.count_sent(self._sent_bytes)
        self._under_way, self._why, self._ended = True, "", threading.Event()
        act = _Act(self._group, self._number, self._ways, self._edges, self._room, parts, total)

        def run() -> None:
            # The error itself is not kept: it holds on to all that was under way, which nobody but this thread may let
            # go of, since that can take seconds.
            try:
                act.run(self._stops)
            except GroupBroken as error:
                self._why = str(error)
            except Exception as error:  # noqa: BLE001 - it is told where the sums are waited for
                self._why = f"a relay failed: {type(error).__name__}: {error}"
                self._group.abandon(self._why)
            self._ended.set()

        threading.Thread(target=run, name=f"relay {self._number}", daemon=True).start()

    def wait(self) -> None:
        """Until the total is here, and nothing that was given to ``start`` is read or written any more.

        Raises ``GroupBroken`` where it will not come.
        """
        while not self._ended.wait(LOOK.total_seconds()):
            if self._group.given_up:
                raise GroupBroken(self._group.why)
        if self._why:
            raise GroupBroken(self._why)
        self._under_way = False

    def settle(self) -> bool:
        """Give up what is under way, and the group with it. False where its memory must never be used again."""
        if not self._under_way:
            return True
        self._group.abandon()
        self._ended.wait(ENDS_S)
        self._under_way = False
        if self._why or not self._ended.is_set():  # what has not arrived yet may still be written to
            self._room = self._new_room()
            return False
        return True


class _Act:
    """One sum, as the thread makes it."""

    def __init__(
        self,
        group: Group,
        number: int,
        ways: Sequence[RouteNodes],
        edges: Sequence[range],
        room: Mapping[Hop, list[torch.Tensor]],
        parts: Sequence[torch.Tensor],
        total: torch.Tensor,
    ) -> None:
        self._group, self._number, self._ways, self._edges, self._room = group, number, ways, edges, room
        self._parts, self._total = parts, total
        self._sent: list[PendingMessage] = []

    def run(self, stops: Sequence[RelayStep]) -> None:
        """All of it. Raises ``GroupBroken``."""
        arriving = {stop.arrives: self._receive(stop.arrives) for stop in stops if stop.arrives is not None}
        for stop in stops:
            if stop.arrives is not None:
                for each in arriving.pop(stop.arrives):
                    each.wait_blocking()
            sums = self._sums(stop) if stop.completes else []
            for hop in stop.leaves:
                self._send(hop, sums)
        for sent in self._sent:
            sent.wait_blocking()

    def _sums(self, stop: RelayStep) -> list[torch.Tensor]:
        """Add all that came of a chunk to this worker's own. At the root that is the total."""
        chunk, up = stop.leaves[0].chunk, stop.leaves[0].up
        way, edge = self._ways[chunk], self._edges[chunk]
        rows = list(zip(way.own, (part[edge.start : edge.stop] for part in self._parts), strict=True))
        for source, nodes in way.brought.items():
            rows += zip(nodes, self._room[Hop(chunk, True, source, self._group.rank)], strict=True)
        sums = way.add(rows)
        if not up and sums[0].data_ptr() != self._piece(chunk).data_ptr():
            self._piece(chunk).copy_(sums[0])
        return sums

    def _receive(self, hop: Hop) -> list[PendingMessage]:
        rows = self._room[hop] if hop.up else [self._piece(hop.chunk)]
        return [self._group.begin_receive(row, hop.source, self._tag(hop)) for row in rows if row.numel()]

    def _send(self, hop: Hop, sums: Sequence[torch.Tensor]) -> None:
        rows = sums if hop.up else [self._piece(hop.chunk)]
        self._sent += [self._group.begin_send(row, hop.to, self._tag(hop)) for row in rows if row.numel()]

    def _piece(self, chunk: int) -> torch.Tensor:
        edge = self._edges[chunk]
        return self._total[edge.start : edge.stop]

    def _tag(self, hop: Hop) -> int:
        return FIRST_ROUTE_TAG + 2 * (self._number * MOST_CHUNKS + hop.chunk) + hop.up


# [route check] Whether all workers that sum along routes mean the same ones, and whether sums along them come out right.
#
# For where routes or workers change, between two steps: what each worker takes itself and the others for is compared
# before anything travels, since nobody can wait for a message that another one does not send; then one small sum takes
# all routes.

NUMBER = 1 << 19  # of the sum, above those of all vectors that a step sums
DIGEST_BYTES = 6  # exact as a floating-point number


class RouteMismatch(Exception):
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
