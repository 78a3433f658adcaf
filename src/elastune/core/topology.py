"""The routes by which sums travel between workers: "tree", "ring", "parents=[0,0,1,0]", perhaps ":chunk_kib=256"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from elastune.core.errors import UserError

Shape = Literal["auto", "native", "ring", "tree", "binary_tree", "star", "hierarchical", "parents"]
DEFAULT_CHUNK_KIB = 512
MOST_CHUNK_KIB = 1 << 20
MOST_PARENTS = 1_024
_EXAMPLE = 'such as "tree", "tree:chunk_kib=256" or "parents=[0,0,1,0]"'
_PARENTS = re.compile(r"parents=\[\s*(\d{1,6}(?:\s*,\s*\d{1,6})*)\s*\]")


@dataclass(frozen=True)
class Topology:
    """The routes by which sums travel. They are means: in ``exact`` mode no bit of a result depends on them.

    Args:
        shape: One of:
            ``auto``: what suits the measured links, and ``native`` where nothing else does;
            ``native``: the backend's own routes in ``fast`` mode, and from every worker to every other (by hosts, where
            that saves) in ``exact`` mode;
            ``ring``: each chunk goes once around;
            ``star``: to rank 0 and back;
            ``tree``: a tree of doubling reach, as the canonical tree over slots;
            ``binary_tree``: two children each;
            ``hierarchical``: within each host, then between hosts;
            ``parents``: the tree of ``parents``.
        parents: The rank to which each rank sends its sums; the root names itself.
        chunk_kib: Sums travel in chunks of about so many KiB, one behind the other.

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
            told = "no parents" if self.shape == "parents" else f"{self.shape} with parents"
            raise UserError("parents belong to the shape of that name", told, _EXAMPLE)
        _check_tree(self.parents)

    @classmethod
    def of_parents(cls, parents: Sequence[int]) -> Topology:
        """Return the tree in which rank r sends its sums to ``parents[r]``. Raises ``UserError`` for what is none."""
        is_list = isinstance(parents, Sequence) and not isinstance(parents, str)
        if not is_list:
            raise UserError("parents are a list of ranks", repr(parents)[:100], "such as [0, 0, 1, 0]")
        return cls("parents", tuple(parents))

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Return the topology that ``text`` names, in the words of ``str`` or of a user. Raises ``UserError``."""
        is_text = isinstance(text, str)
        if not is_text:
            raise UserError("a topology is a text", repr(text)[:100], _EXAMPLE)
        shape, _, setting = (part.strip() for part in text.strip().partition(":"))
        kib = DEFAULT_CHUNK_KIB
        if setting or ":" in text:
            found = re.fullmatch(r"chunk_kib\s*=\s*(\d{1,9})", setting)
            if found is None:
                raise UserError("a topology has the setting chunk_kib, a whole number", setting[:100], _EXAMPLE)
            kib = int(found[1])
        if not shape.startswith("parents"):
            return cls(shape, chunk_kib=kib)  # type: ignore[arg-type]  # checked there
        listed = _PARENTS.fullmatch(shape)
        if listed is None:
            rule = "parents are a list of ranks in brackets"
            raise UserError(rule, shape[:100], _EXAMPLE)
        return cls("parents", tuple(int(rank) for rank in listed[1].split(",")), kib)

    def __str__(self) -> str:
        told = f"parents=[{','.join(map(str, self.parents))}]" if self.parents else self.shape
        return told if self.chunk_kib == DEFAULT_CHUNK_KIB else f"{told}:chunk_kib={self.chunk_kib}"

    @property
    def routed(self) -> bool:
        """Whether sums travel by elastune's routes, not by the backend's own."""
        return self.shape not in ("auto", "native")

    def fits(self, workers: int) -> bool:
        """Return whether so many workers can have it."""
        return not self.parents or len(self.parents) == workers

    def check(self, workers: int, mechanism: str) -> None:
        """Raise ``UserError`` where so many workers, or their mechanism, cannot have it."""
        if not self.fits(workers):
            told = f"{len(self.parents)} parents, {workers} workers"
            raise UserError("there must be a parent for every rank", told, "name as many, or use a shape by its name")
        if self.routed and mechanism != "replicated":
            fix = "leave the topology out, or use --mechanism replicated"
            raise UserError("a topology is that of sums of whole replicas", f"{self} with {mechanism}", fix)


def _check_tree(parents: Sequence[int]) -> None:
    """Whether ``parents``, if there are any, are one tree: every rank's way up ends at one root."""
    count = len(parents)
    if count > MOST_PARENTS:
        raise UserError(f"a tree has at most {MOST_PARENTS:,} ranks", count, "use a shape by its name")
    for rank, parent in enumerate(parents):
        if isinstance(parent, bool) or not isinstance(parent, int) or not 0 <= parent < count:
            told = f"parent {str(parent)[:20]} of rank {rank}"
            raise UserError(f"parents of {count} ranks are from 0 to {count - 1}", told, "name a rank that there is")
    roots = [rank for rank, parent in enumerate(parents) if parent == rank]
    if count and len(roots) != 1:
        told = f"ranks {', '.join(map(str, roots[:8]))}" if roots else "none"
        raise UserError("a tree has one root, the rank that is its own parent", told, "let one rank name itself")
    reaches = set(roots)
    for rank in range(count):
        way: list[int] = []
        while rank not in reaches:
            if rank in way:
                circle = [*way[way.index(rank) :], rank]
                told = " to ".join(map(str, circle[:9]))
                raise UserError("a tree has no circle", f"rank {told}", "let every rank's way up end at the root")
            way.append(rank)
            rank = parents[rank]
        reaches.update(way)
