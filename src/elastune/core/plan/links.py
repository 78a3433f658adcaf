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

# The links within a host and between hosts.

FloatOrArray = float | NDArray[np.float64]


class RingLink(NamedTuple):
    """A link: the seconds of one message of any size, and of each byte."""

    latency_s: float = 0.0
    seconds_per_byte: float = 0.0

    def to_record(self) -> LinkFitted:
        """The serialised form."""
        return LinkFitted(self.latency_s, self.seconds_per_byte)


def ring_allreduce_s(
    link: tuple[FloatOrArray, FloatOrArray], size_bytes: FloatOrArray, workers: FloatOrArray
) -> FloatOrArray:
    """Return the seconds of a ring all-reduce, or of many, as arrays; 0 for a lone worker. ``link``: as in
    ``RingLink``.
    """
    hop_s, seconds_per_byte = link
    return 2 * (workers - 1) * (hop_s + size_bytes * seconds_per_byte / workers)


def allreduce_s(
    within: tuple[FloatOrArray, FloatOrArray],
    across: tuple[FloatOrArray, FloatOrArray],
    size_bytes: FloatOrArray,
    workers: FloatOrArray,
    hosts: FloatOrArray,
) -> FloatOrArray:
    """Return the seconds of a ring all-reduce ``within`` the fullest of the ``hosts``, then one ``across`` them."""
    return ring_allreduce_s(within, size_bytes, np.ceil(workers / hosts)) + ring_allreduce_s(across, size_bytes, hosts)


@dataclass(frozen=True)
class Hosts:
    """Several hosts: the link between them, and the number of workers that fit each."""

    link: RingLink
    workers_each: int

    def __post_init__(self) -> None:
        if self.workers_each < 1:
            raise ValueError(f"a host has room for at least one worker, not {self.workers_each}")

    def needed(self, workers: int) -> int:
        """Return the least number of hosts for so many workers."""
        return -(-workers // self.workers_each)


def fit_link(measured: Sequence[LinkMeasured]) -> RingLink | None:
    """Return the median over measured all-reduces, each divided by the ring's share of it; None without
    measurements.

    A lone worker measures no link, so its measurement is left out.
    """
    links = [link for link in measured if link.workers > 1]
    if not links:
        return None
    latency_s = median(max(0.0, link.latency_s) / (2 * (link.workers - 1)) for link in links)
    per_byte = median(max(0.0, link.seconds_per_byte) * link.workers / (2 * (link.workers - 1)) for link in links)
    return RingLink(latency_s, per_byte)


def fit_links(measured: Sequence[LinkMeasured], workers_each: int | None = None) -> tuple[RingLink, Hosts | None]:
    """Return the link within a host and, where several hosts with ``workers_each`` were measured, the link between
    them.

    An unmeasured link counts as equal to the other one. Without any measurement, reductions are free.
    """
    within = fit_link([link for link in measured if link.hosts <= 1])
    across = fit_link([link for link in measured if link.hosts > 1])
    hosts = None if across is None or workers_each is None else Hosts(across, workers_each)
    return within or across or RingLink(), hosts


# The model of a topology.

WITHIN_S, WITHIN_BYTES_S = 5e-5, 2e9  # of two workers on one host: assumed, not measured; it hardly ever decides
HOP_S = 2e-4  # that a worker spends on each hop, whatever its size
CHUNKS = (8, 16, 32)  # that a vector may be cut into
LEAST_KIB = 64  # of a chunk
LEAST_GAIN_S = 0.002
ALIKE = 2.5  # rates that differ by less than this factor may be one
WORTHWHILE_RATIO = 0.85  # another topology must promise no more than so much of the time that the one in use takes


@dataclass(frozen=True)
class HostLinks:
    """The measured links between ``hosts``, which are in order of their first ranks.

    ``latency_s``, ``bytes_s``: from host i (first index) to host j.
    """

    hosts: tuple[str, ...]
    latency_s: tuple[tuple[float, ...], ...]
    bytes_s: tuple[tuple[float, ...], ...]

    def of(self, source: str, to: str) -> tuple[float, float]:
        """Return latency and rate from one host to another, or within one."""
        if source == to:
            return WITHIN_S, WITHIN_BYTES_S
        i, j = self.hosts.index(source), self.hosts.index(to)
        return self.latency_s[i][j], self.bytes_s[i][j]

    def rates(self, host: str) -> tuple[float, float]:
        """Return the rates of ``host``'s own link, out and in: those of its best pairs."""
        i = self.hosts.index(host)
        others = [j for j in range(len(self.hosts)) if j != i]
        return max(self.bytes_s[i][j] for j in others), max(self.bytes_s[j][i] for j in others)

    @classmethod
    def steadied(
        cls, hosts: tuple[str, ...], latency_s: Sequence[Sequence[float]], bytes_s: Sequence[Sequence[float]]
    ) -> HostLinks:
        """Return the links without noise: a busy machine makes some of many equal links look slower.

        A host's link has the rate of its best pair. Links that differ by less than ``ALIKE`` count as equal, and so
        does a pair and what its hosts' links allow. Every pair has the median latency.
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
    """Each rate, or the median of similar rates, the fastest first."""
    medians, left = list(rates), sorted(range(len(rates)), key=lambda i: -rates[i])
    while left:
        near = [i for i in left if rates[i] * ALIKE >= rates[left[0]]]
        for i in near:
            medians[i] = median(rates[j] for j in near)
        left = left[len(near) :]
    return medians


@dataclass(frozen=True)
class Sums:
    """A sum: ``numel`` numbers of ``item_bytes`` each, by workers on ``hosts``, by rank.

    ``num_slots``: in the order of the canonical tree over so many slots; 0: in order of arrival.
    """

    numel: int
    item_bytes: int
    hosts: tuple[str, ...]
    num_slots: int = 0

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.hosts)

    def rows(self, route: Route) -> list[int]:
        """Return the number of partial sums that each rank sends on."""
        if not self.num_slots:
            return [1] * self.workers
        runs = cut(self.num_slots, self.workers)
        below = [{slot for other in route.below(rank) for slot in runs[other]} for rank in range(self.workers)]
        return [len(subtrees(slots, self.num_slots)) for slots in below]


def topology_seconds(topology: Topology, sums: Sums, links: HostLinks) -> float:
    """Return the modelled seconds of a sum by ``topology``; ``native`` counts as the routes that it resembles most."""
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
    """All hops of one vector. Each begins when its source has what it needs and both hosts' links are free."""

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
        """Return when the last hop has arrived."""
        free: dict[tuple[str, str], float] = {}
        came_s: dict[Hop, float] = {}
        end_s, hosts = 0.0, self._sums.hosts
        rates = {host: self._links.rates(host) for host in self._links.hosts}
        while self._ready:
            ready_s, chunk, down, source, to = heapq.heappop(self._ready)
            hop, source_host, target_host = Hop(chunk, not down, source, to), hosts[source], hosts[to]
            latency_s, rate = self._links.of(source_host, target_host)
            size = self._bytes * (1 if down else self._rows[chunk % len(self._routes)][source])
            uses = {(source_host, target_host): rate}
            if source_host != target_host:
                uses |= {(source_host, ""): rates[source_host][0], ("", target_host): rates[target_host][1]}
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
    """Return the topologies to compare: the shapes by their names, and trees in which fast hosts come first."""
    ranks = sorted(range(sums.workers), key=lambda rank: (-round(min(links.rates(sums.hosts[rank])), -5), rank))
    trees: dict[str, tuple[int, ...]] = {
        "star": tuple(ranks[0] for _ in ranks),
        "tree": _ordered(ranks, [at & (at - 1) for at in range(len(ranks))]),
        "chain": _ordered(ranks, [max(0, at - 1) for at in range(len(ranks))]),
        "pairs": _ordered(ranks, [max(0, (at - 1) // 2) for at in range(len(ranks))]),
    }
    topologies = [Topology("ring"), Topology("tree"), Topology("binary_tree"), Topology("hierarchical")]
    topologies += [Topology("parents", parents) for parents in dict.fromkeys(trees.values())]
    size = sums.numel * sums.item_bytes
    kibs = sorted({max(LEAST_KIB, -(-size // (count << 10))) for count in CHUNKS})
    return [replace(topology, chunk_kib=kib) for topology in topologies for kib in kibs]


def _ordered(ranks: Sequence[int], parents: Sequence[int]) -> tuple[int, ...]:
    """The tree ``parents`` with ``ranks`` in its places."""
    parent_of = dict(zip(ranks, (ranks[parent] for parent in parents), strict=True))
    return tuple(parent_of[rank] for rank in range(len(ranks)))


def best_topology(sums: Sums, links: HostLinks, used: Topology) -> tuple[Topology, Mapping[str, float]]:
    """Return the topology to use from now on, and the modelled seconds of it, of ``used`` and of ``native``.

    ``used`` stays unless another topology promises enough. ``native`` likewise stays unless another one promises
    enough.
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
