"""Routes: on whose way each chunk of a sum comes together and goes out again, and what one worker does for it. Pure.

A chunk goes *up* from worker to worker, each adding what it has, until the root of its route has all, and *down* from
there to everybody. Chunks follow each other, so that links of different workers are busy at the same time. A topology
is a list of routes that chunks take in turn: a tree is one route, a ring has one for each worker.

Nobody waits for anybody in a circle: each hop has a time stamp (its chunk's start, and how many hops come before it),
every worker waits for what arrives in the order of stamps, and a hop's stamp is above those of all that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from elastune.core.topology import Topology

MOST_CHUNKS = 1_024


@dataclass(frozen=True)
class Route:
    """By rank: ``up``, to whom it gives its sums, and ``down``, from whom it has the total. The root names itself."""

    up: tuple[int, ...]
    down: tuple[int, ...]

    @property
    def root(self) -> int:
        """Who has the total first."""
        return next(rank for rank, parent in enumerate(self.up) if parent == rank)

    def givers(self, rank: int) -> tuple[int, ...]:
        """Who gives ``rank`` its sums."""
        return tuple(other for other, parent in enumerate(self.up) if parent == rank != other)

    def below(self, rank: int) -> frozenset[int]:
        """Whose numbers are in what ``rank`` gives, itself included."""
        found, more = {rank}, [rank]
        while more:
            more = [child for at in more for child in self.givers(at)]
            found.update(more)
        return frozenset(found)


@dataclass(frozen=True)
class Hop:
    """One chunk's way from one worker to another: ``up``, a part of its sum, or the total."""

    chunk: int
    up: bool
    source: int
    to: int


@dataclass(frozen=True)
class PortCall:
    """What one worker waits for, and what it sends then. ``arrives``: None for what it can send at once."""

    arrives: Hop | None
    leaves: tuple[Hop, ...]

    @property
    def completes(self) -> bool:
        """Whether all parts of the chunk's sum that come here are here with it: it is time to add them."""
        return bool(self.leaves) and (self.arrives is None or self.arrives.up)


def routes_of(topology: Topology, workers: int, hosts: Sequence[str] = ()) -> tuple[Route, ...]:
    """The routes of ``topology`` among ``workers``; none where sums go in the backend's own way.

    ``hosts``: where each worker runs, by rank; empty where that is one machine or nobody knows. Parents that are too
    many or too few have no routes either.
    """
    if workers < 2 or not topology.routed or not topology.fits(workers):
        return ()
    ranks = range(workers)
    if topology.shape == "ring":
        return tuple(_ring(root, workers) for root in ranks)
    if topology.shape == "hierarchical":
        return _by_hosts(hosts or ("",) * workers)
    parents = {
        "star": lambda: (0,) * workers,
        "tree": lambda: tuple(rank & (rank - 1) for rank in ranks),
        "binary_tree": lambda: _binary(workers),
        "parents": lambda: topology.parents,
    }[topology.shape]()
    return (Route(parents, parents),)


def _ring(root: int, workers: int) -> Route:
    """Once around to ``root``, and from there around again."""
    up = tuple(rank if rank == root else (rank + 1) % workers for rank in range(workers))
    down = tuple(rank if rank == root else (rank - 1) % workers for rank in range(workers))
    return Route(up, down)


def _binary(workers: int) -> tuple[int, ...]:
    """Two children each, whose ranks are consecutive: neighbours' slots are, too, and their sums merge early."""
    parents = [0] * workers

    def place(ranks: range) -> None:
        rest = ranks[1:]
        half = len(rest) // 2
        for part in (rest[:half], rest[half:]):
            if part:
                parents[part[0]] = ranks[0]
                place(part)

    place(range(workers))
    return tuple(parents)


def _by_hosts(hosts: Sequence[str]) -> tuple[Route, ...]:
    """Within each host to one of its workers, and from there to one of all; these take turns from chunk to chunk."""
    ranks: dict[str, list[int]] = {}
    for host, found in groupby(range(len(hosts)), key=lambda rank: hosts[rank]):
        ranks.setdefault(host, []).extend(found)
    each = list(ranks.values())
    routes = []
    for turn in range(max(map(len, each)) * len(each)):
        at, top = divmod(turn, len(each))
        gathers = [own[at % len(own)] for own in each]
        root = gathers[top]
        parents = [0] * len(hosts)
        for own, first in zip(each, gathers, strict=True):
            for rank in own:
                parents[rank] = root if rank == first else first
        routes.append(Route(tuple(parents), tuple(parents)))
    return tuple(routes)


def chunks_of(numel: int, item_bytes: int, routes: int, chunk_kib: int) -> int:
    """Into how many chunks a vector of ``numel`` numbers is cut: a whole number of turns through all routes."""
    wanted = -(-numel * item_bytes // (chunk_kib << 10))
    turns = max(1, -(-wanted // routes))
    return max(1, min(turns * routes, MOST_CHUNKS, numel))


@lru_cache(maxsize=256)
def itinerary(routes: tuple[Route, ...], chunks: int, rank: int) -> tuple[PortCall, ...]:
    """All that ``rank`` does for ``chunks`` chunks, in order; chunk c takes route c modulo their number."""
    ways = [_Way(route, rank) for route in routes[: min(chunks, len(routes))]]
    at_once: list[PortCall] = []  # whatever its stamp: what needs nothing is under way before anything is waited for
    later: list[tuple[int, int, bool, int, PortCall]] = []
    for chunk in range(chunks):
        start, way = chunk // len(routes), ways[chunk % len(routes)]
        for stamp, stop in way.stops(chunk):
            if stop.arrives is None:
                at_once.append(stop)
            else:
                later.append((start + stamp, chunk, not stop.arrives.up, stop.arrives.source, stop))
    return (*at_once, *(stop for *_, stop in sorted(later, key=lambda found: found[:-1])))


class _Way:
    """One route as one of its workers sees it: who is before and behind it, and how many hops away."""

    def __init__(self, route: Route, rank: int) -> None:
        self._route, self._rank = route, rank
        heights = _heights(route.up)
        self._givers = sorted((heights[giver] + 1, giver) for giver in route.givers(rank))
        self._takers = [other for other, source in enumerate(route.down) if source == rank != other]
        depth, at = 0, rank
        while route.down[at] != at:
            depth, at = depth + 1, route.down[at]
        self._told_at = heights[route.root] + depth

    def stops(self, chunk: int) -> list[tuple[int, PortCall]]:
        """What there is to do, by the stamp of what arrives."""
        rank, route = self._rank, self._route
        is_root = route.root == rank
        down = tuple(Hop(chunk, False, rank, taker) for taker in self._takers)
        up = down if is_root else (Hop(chunk, True, rank, route.up[rank]),)
        if not self._givers:
            found = [(0, PortCall(None, up))]
        else:
            *others, (last, giver) = self._givers
            found = [(stamp, PortCall(Hop(chunk, True, other, rank), ())) for stamp, other in others]
            found.append((last, PortCall(Hop(chunk, True, giver, rank), up)))
        if not is_root:
            found.append((self._told_at, PortCall(Hop(chunk, False, route.down[rank], rank), down)))
        return found


def _heights(up: Sequence[int]) -> list[int]:
    """How many hops come before what each rank gives, on the longest way to it."""
    heights = [0] * len(up)
    waiting = [0] * len(up)
    for rank, parent in enumerate(up):
        waiting[parent] += parent != rank
    ready: list[int] = [rank for rank, count in enumerate(waiting) if not count]
    while ready:
        rank = ready.pop()
        parent = up[rank]
        if parent != rank:
            heights[parent] = max(heights[parent], heights[rank] + 1)
            waiting[parent] -= 1
            if not waiting[parent]:
                ready.append(parent)
    return heights
