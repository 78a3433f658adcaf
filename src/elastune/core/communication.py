"""How gradients travel between workers: the topology, its routes, and compression.

A sum is cut into chunks. A chunk goes *up* from worker to worker, each adding its own part, until the root of its route
has the total. Then it goes *down* to all workers. Chunks follow each other, so that the links of different workers are
busy at the same time. A topology is a list of routes that chunks take in turn: a tree is one route, a ring has one
route for each worker.

Workers cannot deadlock. Each hop has a time stamp: the start of its chunk, and the number of hops before it. Every
worker waits for messages in the order of stamps, and the stamp of a hop is above those of all hops that it needs.

The topology never changes a result in ``exact`` mode. Compression is lossy, so it does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import groupby
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, get_args

from elastune.core.errors import UserError
from elastune.core.options import Range, check, parse, split

# Topologies as texts: "tree", "ring", "parents=[0,0,1,0]", each perhaps with ":chunk_kib=256".

Shape = Literal["auto", "native", "ring", "tree", "binary_tree", "star", "hierarchical", "parents"]
DEFAULT_CHUNK_KIB = 512
MOST_CHUNK_KIB = 1 << 20
MOST_PARENTS = 1_024
_EXAMPLE = 'such as "tree", "tree:chunk_kib=256" or "parents=[0,0,1,0]"'
_PARENTS = re.compile(r"parents=\[\s*(\d{1,6}(?:\s*,\s*\d{1,6})*)\s*\]")


@dataclass(frozen=True)
class Topology:
    """The routes by which sums travel: an execution setting, so in ``exact`` mode it never changes a result.

    Args:
        shape: One of:
            ``auto``: the fastest shape by the measured links; ``native`` if no other shape is faster;
            ``native``: the backend's own routes in ``fast`` mode; in ``exact`` mode from every worker to every other
                (by hosts, where that is cheaper);
            ``ring``: each chunk goes once around;
            ``star``: to rank 0 and back;
            ``tree``: a tree of doubling reach, like the canonical tree over slots;
            ``binary_tree``: each rank has two children;
            ``hierarchical``: within each host, then between hosts;
            ``parents``: the tree that ``parents`` describes.
        parents: The rank to which each rank sends its sums; the root names itself.
        chunk_kib: The size of a chunk of a sum, in KiB.

    Raises:
        UserError: For an unknown shape, parents that are no tree, or an impossible chunk.

    Example:
        >>> Topology.parse("parents=[0,0,1,0]").parents
        (0, 0, 1, 0)
    """

    shape: Shape = "native"
    parents: tuple[int, ...] = ()
    chunk_kib: int = DEFAULT_CHUNK_KIB

    def __post_init__(self) -> None:
        if self.shape not in get_args(Shape):
            names = ", ".join(get_args(Shape)[:-1])
            raise UserError(f"a topology is one of {names}, or a list of parents", repr(self.shape)[:100], _EXAMPLE)
        kib = self.chunk_kib
        if isinstance(kib, bool) or not isinstance(kib, int) or not 1 <= kib <= MOST_CHUNK_KIB:
            raise UserError(f"a chunk has from 1 to {MOST_CHUNK_KIB:,} KiB", repr(kib)[:100], "such as chunk_kib=256")
        if (self.shape == "parents") != bool(self.parents):
            value = "no parents" if self.shape == "parents" else f"{self.shape} with parents"
            raise UserError("parents need the shape parents", value, _EXAMPLE)
        _check_tree(self.parents)

    @classmethod
    def of_parents(cls, parents: Sequence[int]) -> Topology:
        """Return the tree in which rank r sends its sums to ``parents[r]``. Raises ``UserError`` for an impossible
        tree.
        """
        is_list = isinstance(parents, Sequence) and not isinstance(parents, str)
        if not is_list:
            raise UserError("parents are a list of ranks", repr(parents)[:100], "such as [0, 0, 1, 0]")
        return cls("parents", tuple(parents))

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Return the topology that ``text`` names; ``str`` of a topology is such a text. Raises ``UserError``."""
        is_text = isinstance(text, str)
        if not is_text:
            raise UserError("a topology is a text", repr(text)[:100], _EXAMPLE)
        shape, _, setting = (part.strip() for part in text.strip().partition(":"))
        kib = DEFAULT_CHUNK_KIB
        if setting or ":" in text:
            match = re.fullmatch(r"chunk_kib\s*=\s*(\d{1,9})", setting)
            if match is None:
                raise UserError("a topology has the setting chunk_kib, a whole number", setting[:100], _EXAMPLE)
            kib = int(match[1])
        if not shape.startswith("parents"):
            return cls(shape, chunk_kib=kib)  # type: ignore[arg-type]  # checked there
        listed = _PARENTS.fullmatch(shape)
        if listed is None:
            rule = "parents are a list of ranks in brackets"
            raise UserError(rule, shape[:100], _EXAMPLE)
        return cls("parents", tuple(int(rank) for rank in listed[1].split(",")), kib)

    def __str__(self) -> str:
        shape = f"parents=[{','.join(map(str, self.parents))}]" if self.parents else self.shape
        return shape if self.chunk_kib == DEFAULT_CHUNK_KIB else f"{shape}:chunk_kib={self.chunk_kib}"

    @cached_property
    def routed(self) -> bool:
        """Whether sums travel by elastune's routes, not by the backend's own."""
        return self.shape not in ("auto", "native")

    def fits(self, workers: int) -> bool:
        """Return whether the topology has a place for exactly ``workers`` workers."""
        return not self.parents or len(self.parents) == workers

    def check(self, workers: int, mechanism: str) -> None:
        """Raise ``UserError`` where the topology does not fit the number of workers or their mechanism."""
        if not self.fits(workers):
            value = f"{len(self.parents)} parents, {workers} workers"
            raise UserError("there must be a parent for every rank", value, "name as many, or use a shape by its name")
        if self.routed and mechanism != "replicated":
            fix = "leave the topology out, or use --mechanism replicated"
            raise UserError("a topology needs workers that hold whole replicas", f"{self} with {mechanism}", fix)


def _check_tree(parents: Sequence[int]) -> None:
    """Raise ``UserError`` unless ``parents`` are empty or describe one tree: every path ends at the same root."""
    count = len(parents)
    if count > MOST_PARENTS:
        raise UserError(f"a tree has at most {MOST_PARENTS:,} ranks", count, "use a shape by its name")
    for rank, parent in enumerate(parents):
        if isinstance(parent, bool) or not isinstance(parent, int) or not 0 <= parent < count:
            value = f"parent {str(parent)[:20]} of rank {rank}"
            raise UserError(f"parents of {count} ranks are from 0 to {count - 1}", value, "name a rank that there is")
    roots = [rank for rank, parent in enumerate(parents) if parent == rank]
    if count and len(roots) != 1:
        value = f"ranks {', '.join(map(str, roots[:8]))}" if roots else "none"
        raise UserError("a tree has one root, the rank that is its own parent", value, "let one rank name itself")
    reaches = set(roots)
    for rank in range(count):
        path: list[int] = []
        while rank not in reaches:
            if rank in path:
                circle = [*path[path.index(rank) :], rank]
                value = " to ".join(map(str, circle[:9]))
                raise UserError("a tree has no circle", f"rank {value}", "give every rank a path that ends at the root")
            path.append(rank)
            rank = parents[rank]
        reaches.update(path)


# The routes of a topology, and the steps of one worker for each chunk.

MOST_CHUNKS = 1_024


@dataclass(frozen=True)
class Route:
    """One tree up and one tree down, by rank.

    Attributes:
        up: The rank to which each rank sends its sums.
        down: The rank from which each rank receives the total. The root names itself in both.
    """

    up: tuple[int, ...]
    down: tuple[int, ...]

    @property
    def root(self) -> int:
        """The rank that has the total first."""
        return next(rank for rank, parent in enumerate(self.up) if parent == rank)

    def children(self, rank: int) -> tuple[int, ...]:
        """The ranks that send their sums to ``rank``."""
        return tuple(other for other, parent in enumerate(self.up) if parent == rank != other)

    def below(self, rank: int) -> frozenset[int]:
        """The ranks whose numbers are part of what ``rank`` sends up, itself included."""
        ranks, more = {rank}, [rank]
        while more:
            more = [child for at in more for child in self.children(at)]
            ranks.update(more)
        return frozenset(ranks)


@dataclass(frozen=True)
class Hop:
    """One chunk on one link. ``up``: it carries a part of the sum; else it carries the total."""

    chunk: int
    up: bool
    source: int
    to: int


@dataclass(frozen=True)
class RelayStep:
    """What one worker waits for, and what it sends then. ``arrives`` is None for hops that it can send at once."""

    arrives: Hop | None
    leaves: tuple[Hop, ...]

    @property
    def completes(self) -> bool:
        """Whether all parts of the chunk's sum have arrived with this message, so that they can be added."""
        return bool(self.leaves) and (self.arrives is None or self.arrives.up)


def routes_of(topology: Topology, workers: int, hosts: Sequence[str] = ()) -> tuple[Route, ...]:
    """Return the routes of ``topology`` among ``workers``; none where the backend's own routes are used.

    ``hosts``: the host of each worker, by rank; empty for one machine, or where hosts are not known. Parents that do
    not fit the number of workers have no routes.
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
    """Each rank has two children with consecutive ranks. Neighbouring ranks have neighbouring slots, so their sums
    merge early.
    """
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
    """Sums go to one worker of each host, and from there to one worker of all. Chunks take turns in which worker that
    is.
    """
    ranks: dict[str, list[int]] = {}
    for host, of_host in groupby(range(len(hosts)), key=lambda rank: hosts[rank]):
        ranks.setdefault(host, []).extend(of_host)
    each = list(ranks.values())
    routes = []
    for turn in range(max(map(len, each)) * len(each)):
        at, top = divmod(turn, len(each))
        gathers = [members[at % len(members)] for members in each]
        root = gathers[top]
        parents = [0] * len(hosts)
        for members, first in zip(each, gathers, strict=True):
            for rank in members:
                parents[rank] = root if rank == first else first
        routes.append(Route(tuple(parents), tuple(parents)))
    return tuple(routes)


def chunks_of(numel: int, item_bytes: int, routes: int, chunk_kib: int) -> int:
    """Return the number of chunks of a vector of ``numel`` numbers: a whole number of turns through all routes."""
    wanted = -(-numel * item_bytes // (chunk_kib << 10))
    turns = max(1, -(-wanted // routes))
    return max(1, min(turns * routes, MOST_CHUNKS, numel))


@lru_cache(maxsize=256)
def relay_steps(routes: tuple[Route, ...], chunks: int, rank: int) -> tuple[RelayStep, ...]:
    """Return the steps of ``rank`` for ``chunks`` chunks, in order. Chunk c takes route c modulo their number."""
    views = [_RouteView(route, rank) for route in routes[: min(chunks, len(routes))]]
    at_once: list[RelayStep] = []  # hops that need nothing are sent before the first wait
    later: list[tuple[int, int, bool, int, RelayStep]] = []
    for chunk in range(chunks):
        start, view = chunk // len(routes), views[chunk % len(routes)]
        for stamp, stop in view.stops(chunk):
            if stop.arrives is None:
                at_once.append(stop)
            else:
                later.append((start + stamp, chunk, not stop.arrives.up, stop.arrives.source, stop))
    return (*at_once, *(stop for *_, stop in sorted(later, key=lambda row: row[:-1])))


class _RouteView:
    """One route as one of its workers sees it: the ranks before and behind it, and their distance in hops."""

    def __init__(self, route: Route, rank: int) -> None:
        self._route, self._rank = route, rank
        heights = _heights(route.up)
        self._givers = sorted((heights[giver] + 1, giver) for giver in route.children(rank))
        self._takers = [other for other, source in enumerate(route.down) if source == rank != other]
        depth, at = 0, rank
        while route.down[at] != at:
            depth, at = depth + 1, route.down[at]
        self._result_at = heights[route.root] + depth

    def stops(self, chunk: int) -> list[tuple[int, RelayStep]]:
        """The steps for one chunk, each with the stamp of the message that arrives."""
        rank, route = self._rank, self._route
        is_root = route.root == rank
        down = tuple(Hop(chunk, False, rank, taker) for taker in self._takers)
        up = down if is_root else (Hop(chunk, True, rank, route.up[rank]),)
        if not self._givers:
            steps = [(0, RelayStep(None, up))]
        else:
            *others, (last, giver) = self._givers
            steps = [(stamp, RelayStep(Hop(chunk, True, other, rank), ())) for stamp, other in others]
            steps.append((last, RelayStep(Hop(chunk, True, giver, rank), up)))
        if not is_root:
            steps.append((self._result_at, RelayStep(Hop(chunk, False, route.down[rank], rank), down)))
        return steps


def _heights(up: Sequence[int]) -> list[int]:
    """How many hops come before what each rank sends, on the longest path to it."""
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


# How gradients are compressed before they travel: "bf16", "int8", "powersgd:rank=4", "topk:ratio=0.01".

NONE = "none"


@dataclass(frozen=True)
class Compression:
    """Sends fewer bytes of each gradient. It is lossy, so it changes the result.

    Attributes:
        name: Its name in a text such as "powersgd:rank=4".
        keeps_residual: Each worker keeps what it has not sent and adds it to its next gradient (error feedback).
    """

    name: ClassVar[str]
    keeps_residual: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check(self.name, self)

    def __str__(self) -> str:
        settings = ",".join(f"{option.name}={getattr(self, option.name):g}" for option in fields(self))
        return f"{self.name}:{settings}" if settings else self.name

    @staticmethod
    def parse(text: str) -> Compression | None:
        """Return the compression that ``text`` names; None for "none". Raises ``UserError`` for anything else.

        Example:
            >>> str(Compression.parse("powersgd"))
            'powersgd:rank=4'
        """
        name, options = split(text, "a compression", '"int8" or "powersgd:rank=4"')
        if name == NONE and not options:
            return None
        if name not in COMPRESSIONS:
            known = ", ".join([NONE, *COMPRESSIONS])
            raise UserError("a compression must be known", name[:40], f"use one of {known}")
        return parse(name, options, COMPRESSIONS[name])


@dataclass(frozen=True)
class BFloat16(Compression):
    """Sends two bytes a number, with the range of single precision and 8 bits of it."""

    name: ClassVar[str] = "bf16"


@dataclass(frozen=True)
class Float16(Compression):
    """Sends two bytes a number, with 11 bits. Numbers beyond 65,504 become infinite, those below 6e-8 become zero."""

    name: ClassVar[str] = "fp16"


@dataclass(frozen=True)
class Int8(Compression):
    """Sends one byte a number, and four bytes for the scale of each block."""

    name: ClassVar[str] = "int8"


@dataclass(frozen=True)
class PowerSgd(Compression):
    """Sends matrices as products of two narrow ones (Vogels et al., NeurIPS 2019, arXiv 1905.13727).

    Args:
        rank: Columns of the narrow matrices.
    """

    name: ClassVar[str] = "powersgd"
    keeps_residual: ClassVar[bool] = True
    rank: Annotated[int, Range(1, 256)] = 4


@dataclass(frozen=True)
class TopK(Compression):
    """Sends only the largest numbers, with their places.

    Sources: Aji and Heafield, EMNLP 2017, arXiv 1704.05021; Stich et al., NeurIPS 2018, arXiv 1809.07599.

    Args:
        ratio: The part of all numbers that each worker sends.
    """

    name: ClassVar[str] = "topk"
    keeps_residual: ClassVar[bool] = True
    ratio: Annotated[float, Range(0, 1, open_low=True)] = 0.01


COMPRESSIONS: Mapping[str, type[Compression]] = MappingProxyType(
    {kind.name: kind for kind in (BFloat16, Float16, Int8, PowerSgd, TopK)}
)
"""By their names."""
