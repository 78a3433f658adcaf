"""The end of a step's reduction: what all workers must know of it, and that everything has arrived."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import torch

from elastune.comm.group import Group
from elastune.core.leaves import UNIT, Split
from elastune.core.mesh import Mesh
from elastune.core.ownership import Segment, buckets
from elastune.core.slots import Deal, Fold, cut, subtrees, tree_sum


class Gate:
    """What every worker tells every other one of a step, once all that it adds up or holds a copy of has come.

    So whoever comes through knows that each sum lies with all its holders: the step is committed. A worker tells its
    control numbers, the statistics of its slots, which leaves it has used, and the squares of the units that it adds
    up. ``result`` has the same of the whole step: a vector of a fixed length, whatever the mesh, equal on all workers.
    """

    def __init__(self, split: Split, control: int, statistics: int, num_slots: int | None, deal: Deal = cut) -> None:
        self._split, self._deal = split, deal
        self._widths = control, statistics, len(split.trained), sum(split.leaves[i].units for i in split.trained)
        self._slots = num_slots
        starts = [0, *accumulate(split.leaves[i].units for i in split.trained)]
        self._first_unit = dict(zip(split.trained, starts, strict=False))
        self._place = {leaf: place for place, leaf in enumerate(split.trained)}
        self.result = torch.zeros(sum(self._widths), dtype=torch.float64)

    def regroup(self, everyone: Group, mesh: Mesh) -> None:
        """Meet these workers from the next step on."""
        self._group, self._mesh = everyone, mesh
        self.num_slots = self._slots or mesh.batch
        runs = self._deal(self.num_slots, mesh.batch)
        self._nodes = [subtrees(run, self.num_slots) for run in runs]
        self.run = runs[mesh.batch_rank(everyone.rank)]
        plans = {}
        self._units, self._lengths = [], []
        control, statistics, flags, _ = self._widths
        for rank in range(mesh.workers):
            computed = self._split.computed(mesh, rank)
            if computed not in plans:
                plans[computed] = buckets(self._split, computed, mesh.batch)
            parts = [plan.parts[mesh.batch_rank(rank)] for plan in plans[computed]]
            units = [self._units_of(segment) for part in parts for segment in part]
            self._units.append(torch.cat([torch.zeros(0, dtype=torch.int64), *units]))
            told = len(self._nodes[mesh.batch_rank(rank)]) * statistics
            self._lengths.append(control + told + flags + len(self._units[-1]))

    def _units_of(self, segment: Segment) -> torch.Tensor:
        first = self._first_unit[segment.leaf]
        return torch.arange(first + segment.start // UNIT, first - (-segment.stop // UNIT))

    def pass_through(
        self,
        control: Sequence[float],
        statistics: Mapping[int, torch.Tensor],
        used: Iterable[int],
        squares: torch.Tensor,
    ) -> None:
        """Tell, and wait until all have told.

        Args:
            control: This worker's numbers.
            statistics: By slot, flat; slots that are left out count as zero.
            used: The leaves that this worker's passes have given gradients.
            squares: As ``OwnedReducer.squares`` gives them.
        """
        zero = torch.zeros(self._widths[1])
        fold: Fold[torch.Tensor] = Fold(self.run, self.num_slots, torch.add)
        for slot in self.run:
            fold.push(slot, statistics.get(slot, zero))
        flags = torch.zeros(self._widths[2], dtype=torch.float64)
        flags[[self._place[leaf] for leaf in used]] = 1.0
        sums = [value.double() for _, value in fold.parts]
        mine = torch.cat([torch.tensor(control, dtype=torch.float64), *sums, flags, squares])
        self.result = self._assembled(self._gathered(mine))

    def _gathered(self, mine: torch.Tensor) -> list[torch.Tensor]:
        group = self._group
        if group.size == 1:
            return [mine]
        out = torch.empty(sum(self._lengths), dtype=torch.float64, device=group.wire)
        copies = mine.to(group.wire).repeat(group.size)
        group.all_to_all(out, copies, self._lengths, [len(mine)] * group.size).wait()
        return list(out.cpu().split(self._lengths))

    def _assembled(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole step's, from all workers'."""
        control, width, flags, _ = self._widths
        found = torch.zeros(sum(self._widths), dtype=torch.float64)
        whole, used, squares = found[:control], found[control + width :][:flags], found[control + width + flags :]
        parts: list[tuple[range, torch.Tensor]] = []
        for rank, row in enumerate(rows):
            nodes = self._nodes[self._mesh.batch_rank(rank)]
            own, told, theirs, rest = row.split([control, len(nodes) * width, flags, len(self._units[rank])])
            whole += own
            torch.maximum(used, theirs, out=used)
            squares[self._units[rank]] = rest
            if self._mesh.speaks(rank):
                parts += zip(nodes, told.float().view(-1, width), strict=True)
        found[control : control + width] = tree_sum(parts, self.num_slots, torch.add)
        return found

    @property
    def control(self) -> list[float]:
        """The sums over workers."""
        return self._result_part(0).tolist()

    @property
    def statistics(self) -> list[float]:
        """The sums over slots."""
        return self._result_part(1).tolist()

    @property
    def used(self) -> frozenset[int]:
        """The leaves that any worker's passes have given gradients."""
        flags = self._result_part(2).tolist()
        return frozenset(leaf for leaf, flag in zip(self._split.trained, flags, strict=True) if flag)

    @property
    def squares(self) -> torch.Tensor:
        """Of every unit of every trained leaf, in order."""
        return self._result_part(3)

    def _result_part(self, place: int) -> torch.Tensor:
        start = sum(self._widths[:place])
        return self.result[start : start + self._widths[place]]
