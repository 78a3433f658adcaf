"""Sums over slots in canonical order: the same bits for any number of workers, at the bandwidth of a ring.

Every worker adds up its slots along the canonical tree. Of each bucket, chunk c of every worker's subtree sums goes to
worker c (all-to-all), which adds them in tree order and returns the result to all (all-gather): 2(W-1)/W of the data,
as a ring all-reduce moves, but in ONE order of additions. Buckets leave while the backward pass still runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from elastune.comm.group import Group, Work
from elastune.core.slots import Fold, cut, subtrees, tree_sum

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 16 << 20


def _add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.add_(b)


class _Bucket:
    """Some of the summed tensors as one flat vector, padded to a multiple of the worker count."""

    def __init__(self, members: list[int], like: Sequence[torch.Tensor], num_slots: int, group: Group) -> None:
        self.members = members
        self._group = group
        self._num_slots = num_slots
        self._shapes = [like[i].shape for i in members]
        self._sizes = [like[i].numel() for i in members]
        self._dtype, self._device = like[members[0]].dtype, like[members[0]].device
        runs = cut(num_slots, group.size)
        self._run = runs[group.rank]
        self._nodes = [node for run in runs for node in subtrees(run, num_slots)]
        self._chunk = -(-sum(self._sizes) // group.size)
        self._parts_of = [len(subtrees(run, num_slots)) for run in runs]
        self._pool: list[torch.Tensor] = []
        self._staged = group.size > 1 and self._device != group.wire
        if group.size > 1:
            self._received = torch.empty(len(self._nodes), self._chunk, dtype=self._dtype, device=group.wire)
            self._whole = torch.empty(self._chunk * group.size, dtype=self._dtype, device=group.wire)
        self._result: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None
        self._work: Work = None
        self.begin()

    def begin(self) -> None:
        """Forget the last step."""
        if self._result is not None and self._group.size == 1:
            self._pool.append(self._result)
        self._result = None
        self._fold: Fold[torch.Tensor] = Fold(self._run, self._num_slots, self._merge)
        self._next_slot = self._run.start
        self._leaf: torch.Tensor | None = None
        self._missing = set(self.members)
        self._views: dict[int, torch.Tensor] = {}
        self.launched = False

    def _blank(self) -> torch.Tensor:
        if self._pool:
            return self._pool.pop()
        return torch.zeros(self._chunk * self._group.size, dtype=self._dtype, device=self._device)

    def _merge(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self._pool.append(b)
        return a.add_(b)

    def put(self, index: int, value: torch.Tensor | None) -> bool:
        """Member ``index`` of the current slot (None: zero). True once the slot is complete here."""
        if self._leaf is None:
            self._leaf = self._blank()
            self._views = self._cut(self._leaf)
        self._missing.remove(index)
        if value is None:
            self._views[index].zero_()
        else:
            self._views[index].copy_(value)
        return not self._missing

    def _cut(self, flat: torch.Tensor) -> dict[int, torch.Tensor]:
        pieces = torch.split(flat[: sum(self._sizes)], self._sizes)
        return {i: piece.view(shape) for i, piece, shape in zip(self.members, pieces, self._shapes, strict=True)}

    def end_slot(self, slot: int) -> None:
        """Add the completed slot to the sum."""
        assert self._leaf is not None
        assert not self._missing
        self._skip_to(slot)
        self._fold.push(slot, self._leaf)
        self._next_slot = slot + 1
        self._leaf = None
        self._missing = set(self.members)

    def _skip_to(self, slot: int) -> None:
        """Slots without samples count as zero."""
        for empty in range(self._next_slot, slot):
            self._fold.push(empty, self._blank().zero_())
            self._next_slot = empty + 1

    def launch(self) -> None:
        """All slots of this worker are in: send every chunk to the worker that adds it up."""
        self._skip_to(self._run.stop)
        self.launched = True
        size = self._group.size
        parts = [value for _, value in self._fold.parts]
        if size == 1:
            self._result = parts[0]
            return
        sent = parts[0] if len(parts) == 1 else torch.stack([p.view(size, -1) for p in parts], dim=1).view(-1)
        self._sent = sent.to(self._group.wire)
        self._work = self._group.all_to_all(
            self._received.view(-1),
            self._sent,
            [count * self._chunk for count in self._parts_of],
            [len(parts) * self._chunk] * size,
        )
        self._pool.extend(parts[1:] if sent is parts[0] else parts)
        self._keep = parts[0] if sent is parts[0] else None

    def combine(self) -> None:
        """Add this worker's chunk in tree order and start returning it to all."""
        if self._group.size == 1:
            return
        if self._work is not None:
            self._work.wait()
        if self._keep is not None:
            self._pool.append(self._keep)
        rows = zip(self._nodes, self._received.unbind(0), strict=True)
        total = tree_sum(list(rows), self._num_slots, _add)
        self._work = self._group.all_gather(self._whole, total)

    def results(self) -> dict[int, torch.Tensor]:
        """The sums, as views that live until the next ``begin``."""
        if self._group.size > 1:
            if self._work is not None:
                self._work.wait()
            self._result = self._whole.to(self._device) if self._staged else self._whole
        assert self._result is not None
        return self._cut(self._result)


class ExactReducer:
    """Sums a list of tensors over the slots of all workers.

    A step: ``begin``; for each slot of this worker ``put`` every tensor once, then ``end_slot``; at last ``finish``.
    Slots without samples are left out: they count as zero. ``like`` gives shapes, dtypes and devices; tensors should
    come in about the order in which ``put`` will bring them.
    """

    def __init__(self, like: Sequence[torch.Tensor], num_slots: int, group: Group) -> None:
        self._buckets = [_Bucket(members, like, num_slots, group) for members in _plan(like)]
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.members}
        self._count = len(like)
        self._slot, self._last = 0, False
        self.wait_s = 0.0

    def begin_slot(self, slot: int, *, last: bool) -> None:
        """The next ``put`` calls belong to ``slot``; ``last``: this worker's last slot of the step."""
        self._slot, self._last = slot, last

    def put(self, index: int, value: torch.Tensor | None) -> None:
        """Tensor ``index`` of the current slot; it is copied. Starts the reduction of whatever became complete."""
        bucket = self._bucket_of[index]
        if bucket.put(index, value):
            bucket.end_slot(self._slot)
            if self._last:
                self._launch_in_order(bucket)

    def _launch_in_order(self, ready: _Bucket) -> None:
        """Every worker must start its collectives in the same order, whatever order its gradients came in."""
        self._ready.add(id(ready))
        for bucket in self._buckets:
            if not bucket.launched:
                if id(bucket) not in self._ready:
                    return
                bucket.launch()

    def begin(self) -> None:
        """Start a step."""
        self._ready: set[int] = set()
        for bucket in self._buckets:
            bucket.begin()

    def finish(self) -> list[torch.Tensor]:
        """The sums over all slots of all workers, on every worker. The views live until the next ``begin``."""
        started = time.perf_counter()
        for bucket in self._buckets:
            if not bucket.launched:
                bucket.launch()
        for bucket in self._buckets:
            bucket.combine()
        sums = {i: view for bucket in self._buckets for i, view in bucket.results().items()}
        self.wait_s = time.perf_counter() - started
        return [sums[i] for i in range(self._count)]


def _plan(like: Sequence[torch.Tensor]) -> list[list[int]]:
    """Members of each bucket: runs of equal dtype and device, the first small so that sending starts early."""
    buckets: list[list[int]] = []
    room = 0
    for i, tensor in enumerate(like):
        first = like[buckets[-1][0]] if buckets else None
        if first is None or room <= 0 or (first.dtype, first.device) != (tensor.dtype, tensor.device):
            room = BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES
            buckets.append([])
        buckets[-1].append(i)
        room -= tensor.numel() * tensor.element_size()
    return buckets
