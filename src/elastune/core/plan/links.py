"""How long a sum takes on the network: the formula for rings, and a model of any topology.

A ring all-reduce takes 2(W-1) messages of latency, and 2(W-1)/W of the bytes over its slowest link (Thakur,
Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005). Ranks stand host by
host, so that one hop of a ring over several hosts enters each host and one leaves it: the slowest link is the one
between hosts.

The model of a topology is fitted to the latency and rate of each pair of hosts. A message occupies the path between two
hosts at that pair's rate, and the outgoing and incoming link of the hosts at their own rates. Messages wait for each
other, and a hop begins when everything that it needs has arrived.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elastune.core.communication import Hop, Route, Topology, chunks_of, relay_steps, routes_of
from elastune.core.journal.records import LinkFitted, LinkMeasured
from elastune.core.slots import cut, subtrees

# What a reduction travels on: the link within a host and, where there are several hosts, the one across them. Pure.
#
# A ring all-reduce: 2(W-1) messages of latency and 2(W-1)/W of the bytes over its slowest link (Thakur, Rabenseifner,
# Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005). Ranks stand host by host, so that
# of a ring over several hosts one hop enters each and one leaves it: the slowest link is the one across. All that says
# how long a step takes has its sums from here.

FloatOrArray = float | NDArray[np.float64]


class RingLink(NamedTuple):
    """Seconds of one message, however small, and of each byte."""

    latency_s: float = 0.0
    seconds_per_byte: float = 0.0

    def to_record(self) -> LinkFitted:
        """The serialised form."""
        return LinkFitted(self.latency_s, self.seconds_per_byte)


def ring_allreduce_s(
    link: tuple[FloatOrArray, FloatOrArray], size_bytes: FloatOrArray, workers: FloatOrArray
) -> FloatOrArray:
    """Seconds of a ring all-reduce, or of many, as arrays; 0 for a lone worker. ``link``: as in ``RingLink``."""
    hop_s, seconds_per_byte = link
    return 2 * (workers - 1) * (hop_s + size_bytes * seconds_per_byte / workers)


def allreduce_s(
    within: tuple[FloatOrArray, FloatOrArray],
    across: tuple[FloatOrArray, FloatOrArray],
    size_bytes: FloatOrArray,
    workers: FloatOrArray,
    hosts: FloatOrArray,
) -> FloatOrArray:
    """The same where workers stand on so many ``hosts``: a ring ``within`` the fullest, then one ``across`` them."""
    return ring_allreduce_s(within, size_bytes, np.ceil(workers / hosts)) + ring_allreduce_s(across, size_bytes, hosts)


@dataclass(frozen=True)
class Hosts:
    """Several hosts: what connects them, and how many workers fit each."""

    link: RingLink
    workers_each: int

    def __post_init__(self) -> None:
        if self.workers_each < 1:
            raise ValueError(f"a host has room for at least one worker, not {self.workers_each}")

    def needed(self, workers: int) -> int:
        """On how many of them so many workers stand."""
        return -(-workers // self.workers_each)


def fit_link(measured: Sequence[LinkMeasured]) -> RingLink | None:
    """The median over measured all-reduces, each divided by the ring's share of it; None where nobody measured any.

    What a lone worker measured says nothing and is passed over.
    """
    told = [link for link in measured if link.workers > 1]
    if not told:
        return None
    latency_s = median(max(0.0, link.latency_s) / (2 * (link.workers - 1)) for link in told)
    per_byte = median(max(0.0, link.seconds_per_byte) * link.workers / (2 * (link.workers - 1)) for link in told)
    return RingLink(latency_s, per_byte)


def fit_links(measured: Sequence[LinkMeasured], workers_each: int | None = None) -> tuple[RingLink, Hosts | None]:
    """The link within a host, and the hosts where several of them, with ``workers_each``, were measured across.

    A link that nobody measured is taken to be as the other one; without any, reducing is free.
    """
    within = fit_link([link for link in measured if link.hosts <= 1])
    across = fit_link([link for link in measured if link.hosts > 1])
    hosts = None if across is None or workers_each is None else Hosts(across, workers_each)
    return within or across or RingLink(), hosts


# How long sums take on their routes, by what was measured of the links between hosts, and which routes are best. Pure.
#
# A model, not a measurement: a message keeps busy the way between two hosts at that pair's rate, the one host's link
# out and the other's link in each at its own; one waits behind the other, and a hop begins when all it needs has
# arrived. It is fitted by latency and rate of each pair of hosts.

WITHIN_S, WITHIN_BYTES_S = 5e-5, 2e9  # of two workers on one host: taken, not measured; it is hardly ever what decides
HOP_S = 2e-4  # that a worker spends on each hop, whatever its size
CHUNKS = (8, 16, 32)  # that a vector may be cut into
LEAST_KIB = 64  # of a chunk
LEAST_GAIN_S = 0.002
ALIKE = 2.5  # rates that differ by less than this factor may be one
WORTHWHILE_RATIO = 0.85  # another topology must promise no more than so much of the time that the one in use takes


@dataclass(frozen=True)
class HostLinks:
    """What was measured between ``hosts``, which are in order of their first ranks.

    ``latency_s``, ``bytes_s``: from host i (first index) to host j.
    """

    hosts: tuple[str, ...]
    latency_s: tuple[tuple[float, ...], ...]
    bytes_s: tuple[tuple[float, ...], ...]

    def of(self, source: str, to: str) -> tuple[float, float]:
        """Latency and rate from one host to another, or within one."""
        if source == to:
            return WITHIN_S, WITHIN_BYTES_S
        i, j = self.hosts.index(source), self.hosts.index(to)
        return self.latency_s[i][j], self.bytes_s[i][j]

    def rates(self, host: str) -> tuple[float, float]:
        """Of ``host``'s own link, out and in: those of its best pairs."""
        i = self.hosts.index(host)
        others = [j for j in range(len(self.hosts)) if j != i]
        return max(self.bytes_s[i][j] for j in others), max(self.bytes_s[j][i] for j in others)

    @classmethod
    def steadied(
        cls, hosts: tuple[str, ...], latency_s: Sequence[Sequence[float]], bytes_s: Sequence[Sequence[float]]
    ) -> HostLinks:
        """What was measured, without what is noise: a busy machine makes some of many equal links look slower.

        A host's link has the rate of its best pair; links that differ by less than ``ALIKE`` are taken for equal, and
        so is a pair for what its hosts' links let through. Every pair has the latency of the median.
        """
        count = range(len(hosts))
        pairs = [(i, j) for i in count for j in count if i != j]
        usual_s = median(latency_s[i][j] for i, j in pairs)
        out = _alike([max(bytes_s[i][j] for j in count if j != i) for i in count])
        into = _alike([max(bytes_s[i][j] for i in count if i != j) for j in count])

        def rate(i: int, j: int) -> float:
            most = min(out[i], into[j])
            return 0.0 if i == j else bytes_s[i][j] if bytes_s[i][j] * ALIKE < most else most

        rates = tuple(tuple(rate(i, j) for j in count) for i in count)
        return cls(hosts, tuple((usual_s,) * len(hosts) for _ in count), rates)


def _alike(rates: Sequence[float]) -> list[float]:
    """Each rate, or the median of those that are alike, the fastest ones first."""
    found, left = list(rates), sorted(range(len(rates)), key=lambda i: -rates[i])
    while left:
        near = [i for i in left if rates[i] * ALIKE >= rates[left[0]]]
        for i in near:
            found[i] = median(rates[j] for j in near)
        left = left[len(near) :]
    return found


@dataclass(frozen=True)
class Sums:
    """What is summed: ``numel`` numbers of ``item_bytes`` each, by workers on ``hosts``, by rank.

    ``num_slots``: in the order of the canonical tree over so many; 0: as they come.
    """

    numel: int
    item_bytes: int
    hosts: tuple[str, ...]
    num_slots: int = 0

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self.hosts)

    def rows(self, route: Route) -> list[int]:
        """How many partial sums each rank gives on."""
        if not self.num_slots:
            return [1] * self.workers
        runs = cut(self.num_slots, self.workers)
        below = [{slot for other in route.below(rank) for slot in runs[other]} for rank in range(self.workers)]
        return [len(subtrees(slots, self.num_slots)) for slots in below]


def topology_seconds(topology: Topology, sums: Sums, links: HostLinks) -> float:
    """How long ``topology`` takes, as modelled; ``native`` is taken for the routes that it is most like."""
    routes = routes_of(_like(topology, sums), sums.workers, sums.hosts)
    if not routes:
        return 0.0
    size_kib = max(1, sums.numel * sums.item_bytes >> 10)
    kib = -(-size_kib // len(routes)) if topology.shape == "native" else topology.chunk_kib
    return _Flow(routes, chunks_of(sums.numel, sums.item_bytes, len(routes), kib), sums, links).end_s()


def _like(topology: Topology, sums: Sums) -> Topology:
    if topology.shape != "native":
        return topology
    return Topology("hierarchical") if sums.num_slots else Topology("ring")


class _Flow:
    """All hops of one vector, each when its source has what it needs and both hosts' links are free."""

    def __init__(self, routes: tuple[Route, ...], chunks: int, sums: Sums, links: HostLinks) -> None:
        self._sums, self._links = sums, links
        self._bytes = sums.numel * sums.item_bytes / chunks
        self._routes = routes
        self._rows = [sums.rows(route) for route in routes]
        self._then: dict[Hop, list[Hop]] = {}
        self._needs: dict[Hop, int] = {}
        self._ready: list[tuple[float, int, bool, int, int]] = []
        for rank in range(sums.workers):
            waits: dict[int, list[Hop]] = {}
            for call in relay_steps(routes, chunks, rank):
                if call.arrives is not None and call.arrives.up:
                    waits.setdefault(call.arrives.chunk, []).append(call.arrives)
                for hop in call.leaves:
                    needs = waits.get(hop.chunk, []) if call.completes else [call.arrives]
                    self._needs[hop] = len(needs)
                    for need in needs:
                        assert need is not None
                        self._then.setdefault(need, []).append(hop)
                    if not needs:
                        self._push(0.0, hop)

    def _push(self, at_s: float, hop: Hop) -> None:
        heapq.heappush(self._ready, (at_s, hop.chunk, not hop.up, hop.source, hop.to))

    def end_s(self) -> float:
        """When the last hop has arrived."""
        free: dict[tuple[str, str], float] = {}
        came_s: dict[Hop, float] = {}
        end_s, hosts = 0.0, self._sums.hosts
        rates = {host: self._links.rates(host) for host in self._links.hosts}
        while self._ready:
            ready_s, chunk, down, source, to = heapq.heappop(self._ready)
            hop, here, there = Hop(chunk, not down, source, to), hosts[source], hosts[to]
            latency_s, rate = self._links.of(here, there)
            size = self._bytes * (1 if down else self._rows[chunk % len(self._routes)][source])
            uses = {(here, there): rate}
            if here != there:
                uses |= {(here, ""): rates[here][0], ("", there): rates[there][1]}
            for link, link_rate in uses.items():
                free[link] = max(ready_s, free.get(link, 0.0)) + size / link_rate
            arrives_s = max(free[link] for link in uses) + latency_s + HOP_S
            end_s = max(end_s, arrives_s)
            for then in self._then.get(hop, ()):
                self._needs[then] -= 1
                came_s[then] = max(came_s.get(then, 0.0), arrives_s)
                if not self._needs[then]:
                    self._push(came_s[then], then)
        return end_s


def candidate_topologies(sums: Sums, links: HostLinks) -> list[Topology]:
    """What is worth a look: the shapes by their names, and trees in which fast hosts come first."""
    ranks = sorted(range(sums.workers), key=lambda rank: (-round(min(links.rates(sums.hosts[rank])), -5), rank))
    trees: dict[str, tuple[int, ...]] = {
        "star": tuple(ranks[0] for _ in ranks),
        "tree": _ordered(ranks, [at & (at - 1) for at in range(len(ranks))]),
        "chain": _ordered(ranks, [max(0, at - 1) for at in range(len(ranks))]),
        "pairs": _ordered(ranks, [max(0, (at - 1) // 2) for at in range(len(ranks))]),
    }
    found = [Topology("ring"), Topology("tree"), Topology("binary_tree"), Topology("hierarchical")]
    found += [Topology("parents", parents) for parents in dict.fromkeys(trees.values())]
    size = sums.numel * sums.item_bytes
    kibs = sorted({max(LEAST_KIB, -(-size // (count << 10))) for count in CHUNKS})
    return [replace(topology, chunk_kib=kib) for topology in found for kib in kibs]


def _ordered(ranks: Sequence[int], parents: Sequence[int]) -> tuple[int, ...]:
    """The tree ``parents`` with ``ranks`` in its places."""
    found = dict(zip(ranks, (ranks[parent] for parent in parents), strict=True))
    return tuple(found[rank] for rank in range(len(ranks)))


def best_topology(sums: Sums, links: HostLinks, used: Topology) -> tuple[Topology, Mapping[str, float]]:
    """The topology to use from now on, and the modelled seconds of it, of ``used`` and of ``native``.

    ``used`` stays where no other promises enough; and so does ``native`` where nothing promises enough beside that.
    """
    native = Topology("native")
    times = {
        topology: topology_seconds(topology, sums, links)
        for topology in (native, used, *candidate_topologies(sums, links))
    }
    first = min(times, key=lambda topology: (times[topology], str(topology)))
    chosen = used if times[used] <= times[native] else native
    if times[first] < min(WORTHWHILE_RATIO * times[chosen], times[chosen] - LEAST_GAIN_S):
        chosen = first
    return chosen, {str(topology): times[topology] for topology in (chosen, used, native)}
