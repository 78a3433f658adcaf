"""Sums of one flat vector along the routes of a topology, chunk behind chunk.

A thread does this worker's part while training goes on. If the order of additions matters, the routes do not decide
it: a worker adds only what the canonical tree over slots allows, and passes on several partial sums (``RouteNodes``).
Before a step uses new routes, all workers compare their routes (``known``, ``unlike``) and check one small sum
(``adds_up``). Without this check a worker could wait for a message that no other worker sends.
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

ENDS_S = 0.05  # a thread that has not ended within this after its group was given up may never end
NUMBER = 1 << 19  # of the sum of a check, above the numbers of all vectors that a step sums
DIGEST_BYTES = 6  # exact as a floating-point number
Nodes = tuple[range, ...]
AnyOrder: Nodes = (range(1),)


class Relay:
    """This worker's part in the sums of one vector along the group's routes, step after step.

    Args:
        group: The workers; its ``routes`` must not be empty.
        like: Gives size and dtype of the vector.
        number: Identifies this vector within the group; equal on all workers.
        runs: The slots of each worker, for sums in the order of the canonical tree; empty: in any order.
        num_slots: The number of all slots, with ``runs``.

    Example::

        relay = Relay(group, vector, number=0)
        relay.start([vector], total)  # returns at once
        relay.wait()  # ``total`` now has the sum
    """

    def __init__(
        self, group: Group, like: torch.Tensor, number: int, runs: Sequence[range] = (), num_slots: int = 0
    ) -> None:
        self._group, self._number, self._routes = group, number, group.routes
        chunks = chunks_of(like.numel(), like.element_size(), len(group.routes), group.chunk_kib)
        self._stops = relay_steps(group.routes, chunks, group.rank)
        used = group.routes[: min(chunks, len(group.routes))]
        by_route = [passing(route, group.rank, runs, num_slots) for route in used]
        self._nodes = [by_route[chunk % len(by_route)] for chunk in range(chunks)]
        self._edges = cut(like.numel(), chunks)
        self._dtype = like.dtype
        hops = [hop for stop in self._stops for hop in stop.leaves]
        rows = sum(len(self._edges[hop.chunk]) * (len(self._nodes[hop.chunk].sums) if hop.up else 1) for hop in hops)
        self._sent_bytes = rows * like.element_size()
        self._room = self._new_room()
        self._ended = threading.Event()
        self._why = ""
        self._running = False

    def _new_room(self) -> dict[Hop, list[torch.Tensor]]:
        """Memory: a row for each node of each chunk that will arrive."""
        rows_of = {}
        for stop in self._stops:
            if (hop := stop.arrives) is not None and hop.up:
                rows, edge = len(self._nodes[hop.chunk].brought[hop.source]), self._edges[hop.chunk]
                room = torch.zeros(rows * len(edge), dtype=self._dtype)
                rows_of[hop] = list(room.view(rows, len(edge)).unbind(0)) if rows else []
        return rows_of

    def start(self, parts: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """Start to sum ``parts``, one vector for each node of this worker, over all workers into ``total``.

        All tensors are on the CPU. Until ``wait`` returns they belong to this relay, which changes ``parts``.
        """
        if self._routes is not self._group.routes and self._routes != self._group.routes:
            raise RuntimeError(
                "the routes of the group have changed since this sum was prepared: regroup its reducer first"
            )
        self._group.count_sent(self._sent_bytes)
        self._running, self._why, self._ended = True, "", threading.Event()
        act = _Act(self._group, self._number, self._nodes, self._edges, self._room, parts, total)

        def run() -> None:
            # Only the text of the error is kept. The error itself would keep all unfinished operations alive. To let go
            # of these can take seconds, so only this thread may do it.
            try:
                act.run(self._stops)
            except GroupBroken as error:
                self._why = str(error)
            except Exception as error:  # noqa: BLE001 - ``wait`` raises it
                self._why = f"a relay failed: {type(error).__name__}: {error}"
                self._group.abandon(self._why)
            self._ended.set()

        threading.Thread(target=run, name=f"relay {self._number}", daemon=True).start()

    def wait(self) -> None:
        """Wait until the total is complete, and the arguments of ``start`` are not read or written any more.

        Raises ``GroupBroken`` if the total will not arrive.
        """
        while not self._ended.wait(LOOK.total_seconds()):
            if self._group.given_up:
                raise GroupBroken(self._group.why)
        if self._why:
            raise GroupBroken(self._why)
        self._running = False

    def settle(self) -> bool:
        """Give up the unfinished sum, and the group with it. False if its memory must never be used again."""
        if not self._running:
            return True
        self._group.abandon()
        self._ended.wait(ENDS_S)
        self._running = False
        if self._why or not self._ended.is_set():  # messages that have not arrived yet may still write to it
            self._room = self._new_room()
            return False
        return True


class _Act:
    """One sum, on the thread of a relay."""

    def __init__(
        self,
        group: Group,
        number: int,
        nodes: Sequence[RouteNodes],
        edges: Sequence[range],
        room: Mapping[Hop, list[torch.Tensor]],
        parts: Sequence[torch.Tensor],
        total: torch.Tensor,
    ) -> None:
        self._group, self._number, self._nodes, self._edges, self._room = group, number, nodes, edges, room
        self._parts, self._total = parts, total
        self._sent: list[PendingMessage] = []

    def run(self, stops: Sequence[RelayStep]) -> None:
        """Do every step of this worker. Raises ``GroupBroken``."""
        arriving = {stop.arrives: self._receive(stop.arrives) for stop in stops if stop.arrives is not None}
        for stop in stops:
            if stop.arrives is not None:
                for message in arriving.pop(stop.arrives):
                    message.wait_blocking()
            sums = self._sums(stop) if stop.completes else []
            for hop in stop.leaves:
                self._send(hop, sums)
        for message in self._sent:
            message.wait_blocking()

    def _sums(self, stop: RelayStep) -> list[torch.Tensor]:
        """Add the received rows of a chunk to this worker's own rows. At the root the sum is the total."""
        chunk, up = stop.leaves[0].chunk, stop.leaves[0].up
        route_nodes, edge = self._nodes[chunk], self._edges[chunk]
        rows = list(zip(route_nodes.own_nodes, (part[edge.start : edge.stop] for part in self._parts), strict=True))
        for source, nodes in route_nodes.brought.items():
            rows += zip(nodes, self._room[Hop(chunk, True, source, self._group.rank)], strict=True)
        sums = route_nodes.add(rows)
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


@dataclass(frozen=True)
class RouteNodes:
    """The nodes of the canonical tree whose sums pass through one worker on one route.

    Attributes:
        own_nodes: The nodes of this worker's own slots.
        brought: By rank, the nodes that other workers send to it.
        sums: The nodes whose sums it sends on.
        ordered: Sums follow the tree. If False, each worker sends on one sum, added in order of arrival.
    """

    own_nodes: Nodes
    brought: Mapping[int, Nodes]
    sums: Nodes
    ordered: bool

    def add(self, rows: Sequence[tuple[range, torch.Tensor]]) -> list[torch.Tensor]:
        """The sums of ``rows``: first the own ones, then in the order of ``brought``. Their memory is used again."""
        if self.ordered:
            return [node_sum([row for row in rows if row[0].start in node], node, _add) for node in self.sums]
        total = rows[0][1]
        for _, row in rows[1:]:
            total.add_(row)
        return [total]


def passing(route: Route, rank: int, runs: Sequence[range] = (), num_slots: int = 0) -> RouteNodes:
    """The nodes that pass through ``rank``; ``runs``: the slots of each worker; empty: sums in any order."""
    children = route.children(rank)
    if not runs:
        return RouteNodes(AnyOrder, dict.fromkeys(children, AnyOrder), AnyOrder, ordered=False)

    def nodes(ranks: Sequence[int]) -> Nodes:
        return tuple(subtrees({slot for other in ranks for slot in runs[other]}, num_slots))

    brought = {giver: nodes(sorted(route.below(giver))) for giver in children}
    return RouteNodes(nodes([rank]), brought, nodes(sorted(route.below(rank))), ordered=True)


def _add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.add_(b)


# --- the check before new routes are used -----------------------------------------------------------------------------


class RouteMismatch(Exception):
    """Workers would not have summed along the same routes, or a sum along the routes was wrong."""


def known(group: Group) -> list[float]:
    """This worker's view of its ``group``, to compare with others: rank, size, and a digest of the routes."""
    text = repr((group.chunk_kib, [(route.up, route.down) for route in group.routes])).encode()
    digest = int.from_bytes(blake2b(text, digest_size=DIGEST_BYTES).digest(), "big")
    return [float(group.rank), float(group.size), float(digest)]


def unlike(rows: Sequence[Sequence[float]]) -> Mapping[int, str]:
    """Each rank's view of the group, in words, if the views differ; empty if they agree.

    ``rows``: the results of ``known``, by rank.
    """
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
    values = torch.arange(1, 1 + max(1, len(group.routes)), dtype=torch.int64)  # one for each route
    total = torch.zeros_like(values)
    relay = Relay(group, values, NUMBER)
    relay.start([values * (group.rank + 1)], total)
    try:
        relay.wait()
    finally:
        relay.settle()
    return torch.equal(total, values * (group.size * (group.size + 1) // 2))
