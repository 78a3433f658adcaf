"""Sums to those that hold a state for others: workers that are not in the batch group which adds up its gradient.

Where a replica is alone along the batch, nobody else computes with a block or a stage; its second holder is a worker
that computes with another one. It is sent the sum, no values, and no sooner than all of it is added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from elastune.comm.group import Group, Work
from elastune.core.leaves import Split
from elastune.core.ownership import Segment, Ward, by_leaf

Sums = Sequence[tuple[Segment, torch.Tensor]]
"""Segments of leaves, each with its flat sum."""


class WardSums:
    """What ``wards`` say travels over ``group``, to lie on ``device``; it is made anew for each mesh.

    Where ``exchange`` raises ``GroupBroken`` there must be a ``drain`` before the next one.
    """

    def __init__(self, wards: Sequence[Ward], split: Split, group: Group, device: torch.device) -> None:
        by_type: dict[str, list[Ward]] = {}
        for ward in wards:
            leaf = split.leaves[ward.segment.leaf]
            if leaf.trained:
                by_type.setdefault(leaf.dtype, []).append(ward)
        self._group = group
        self._lines = [_Line(by_type[name], getattr(torch, name), group, device) for name in sorted(by_type)]

    def exchange(self, sums: Sums) -> None:
        """Send what of ``sums``, this worker's, others hold as well; return once all that it holds for them is here."""
        found = by_leaf(sums) if self._lines else {}
        under_way = [(line, *line.start(found)) for line in self._lines]
        for line, work, _ in under_way:
            line.finish(work)

    def sums(self) -> list[tuple[Segment, torch.Tensor]]:
        """What has come; it stays as it is until the next ``exchange``."""
        return [each for line in self._lines for each in line.sums()]

    @property
    def held(self) -> list[torch.Tensor]:
        """The memory of ``sums``."""
        return [line.held for line in self._lines]

    def drain(self) -> None:
        """See that nothing of an exchange that broke changes any memory any more."""
        if self._lines and not self._group.drain():
            for line in self._lines:
                line.renew()


class _Line:
    """What travels of one dtype, as one collective."""

    def __init__(self, wards: Sequence[Ward], dtype: torch.dtype, group: Group, device: torch.device) -> None:
        self._group = group
        ranks = range(group.size)
        self._sent = [[w.segment for w in wards if (w.source, w.holder) == (group.rank, to)] for to in ranks]
        came = [[w.segment for w in wards if (w.source, w.holder) == (source, group.rank)] for source in ranks]
        self._sizes, self._out_sizes = list(map(_size, self._sent)), list(map(_size, came))
        self._came = [segment for each in came for segment in each]
        self._room = torch.zeros(sum(self._out_sizes), dtype=dtype, device=group.wire)
        self.held = self._room.to(device)

    def start(self, sums: Mapping[int, Sums]) -> tuple[Work, torch.Tensor]:
        """The work, and what is kept as long as it may be read."""
        parts = [part for each in self._sent for segment in each for part in _parts(sums[segment.leaf], segment)]
        sent = torch.cat([self._room[:0], *(part.to(self._group.wire) for part in parts)])
        return self._group.all_to_all(self._room, sent, self._out_sizes, self._sizes), sent

    def finish(self, work: Work) -> None:
        work.wait()
        if self.held is not self._room:
            self.held.copy_(self._room)

    def sums(self) -> Iterable[tuple[Segment, torch.Tensor]]:
        return zip(self._came, self.held.split([segment.size for segment in self._came]), strict=True)

    def renew(self) -> None:
        self.held, self._room = self.held.clone(), torch.zeros_like(self._room)


def _size(segments: Sequence[Segment]) -> int:
    return sum(segment.size for segment in segments)


def _parts(sums: Sums, wanted: Segment) -> Iterator[torch.Tensor]:
    """The elements of ``wanted``, in order; all of them are in its leaf's ``sums``."""
    for segment, values in sorted(sums, key=lambda each: each[0].start):
        first, last = max(segment.start, wanted.start), min(segment.stop, wanted.stop)
        if first < last:
            yield values[first - segment.start : last - segment.start]
