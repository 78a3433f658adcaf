"""Exact sums over thousands of workers: one worker's part of a step, beside a group that only answers.

No test starts so many processes. What the other workers send follows from their numbers, so the group's answers are
computed: the arithmetic, the memory and the messages of this worker are those of the real thing.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from elastune.core.slots import MOST_EXACT_WORKERS, cut, tree_sum
from elastune.parallel.comm.exact import ExactReducer
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.reducer import SLACK

NUMBERS = 300


class Done:
    """An operation that is complete."""

    def wait(self, *_: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Answers:
    """The process group of worker ``rank``: it answers as all other workers with ``rows``, by slot, would.

    ``sums`` is the result that workers gather from one another in the end.
    """

    def __init__(self, rank: int, size: int, rows: torch.Tensor, sums: torch.Tensor) -> None:
        self.rank, self.size, self._rows, self._sums = rank, size, rows, sums
        self.calls: list[int] = []

    def alltoall_base(
        self, out: torch.Tensor, data: torch.Tensor, out_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Done:
        self.calls.append(self.size - 1)  # messages to the others
        if sizes:
            piece = sizes[0]
            padded = torch.nn.functional.pad(self._rows, (0, piece * self.size - self._rows.shape[1]))
            out.copy_(padded[:, self.rank * piece : (self.rank + 1) * piece].reshape(-1))
        else:
            mine = data[: data.numel() // self.size]
            length = mine.numel() * self.size
            out.copy_(torch.nn.functional.pad(self._sums, (0, length - len(self._sums))))
            own = slice(self.rank * mine.numel(), (self.rank + 1) * mine.numel())
            assert torch.equal(out[own], mine), "the piece that this worker has added up"
        return Done()


@pytest.mark.parametrize("workers", [1_024, 1_025, 2_048, MOST_EXACT_WORKERS])
def test_one_step_of_thousands_of_workers_has_the_bits_of_one(workers: int) -> None:
    rows = torch.randn(workers, NUMBERS, generator=torch.Generator().manual_seed(workers))
    alone = ExactReducer([rows[0]], workers, Group())
    alone.begin_with({slot: [row] for slot, row in enumerate(rows)})
    (sums,) = alone.finish()
    slots = [(range(slot, slot + 1), row.clone()) for slot, row in enumerate(rows)]
    assert torch.equal(sums, tree_sum(slots, workers, torch.add))
    for rank in (0, workers // 3, workers - 1):
        answers = Answers(rank, workers, rows, sums)
        group = Group(rank, workers, answers, "gloo")
        reducer = ExactReducer([rows[0]], workers, group)
        reducer.begin_with({rank: [rows[rank]]})
        (total,) = reducer.finish()
        assert torch.equal(total, sums)
        assert answers.calls == [workers - 1, workers - 1], "two exchanges, whatever the number of workers"
        length = -(-NUMBERS // workers) * workers
        assert group.sent_bytes == 2 * (workers - 1) * (length // workers) * 4, "the bandwidth of a ring"


def test_the_memory_of_a_bucket_does_not_grow_with_the_workers() -> None:
    """One vector for the slot, one for the sums, one for the pieces that arrive: each of the bucket and its slack."""
    rows = torch.zeros(MOST_EXACT_WORKERS, NUMBERS)
    answers = Answers(7, MOST_EXACT_WORKERS, rows, rows[0])
    reducer = ExactReducer([rows[0]], MOST_EXACT_WORKERS, Group(7, MOST_EXACT_WORKERS, answers, "gloo"))
    reducer.begin_with({7: [rows[7]]})
    reducer.finish()
    (bucket,) = reducer._buckets
    vectors = [*bucket._sets, bucket._buffer, *bucket._slots._in_use, *bucket._slots._pool]
    assert sum(each.numel() for each in vectors) <= 3 * (NUMBERS + SLACK)


def test_more_workers_are_refused() -> None:
    most = MOST_EXACT_WORKERS + 1
    with pytest.raises(ValueError, match="at most 4096 workers"):
        ExactReducer([torch.zeros(3)], most, Group(0, most, object(), "gloo"))


def test_workers_of_several_slots_and_of_uneven_runs() -> None:
    """5,000 slots on 4,096 workers: some have two slots, whose sum may be no node of the tree."""
    workers, num_slots = MOST_EXACT_WORKERS, 5_000
    rows = torch.randn(num_slots, 3, generator=torch.Generator().manual_seed(1))
    alone = ExactReducer([rows[0]], num_slots, Group())
    alone.begin_with({slot: [row] for slot, row in enumerate(rows)})
    (sums,) = alone.finish()
    run = cut(num_slots, workers)[0]
    reducer = ExactReducer([rows[0]], num_slots, Group(0, workers, Nodes(workers, rows, sums), "gloo"))
    reducer.begin_with({slot: [rows[slot]] for slot in run})
    (total,) = reducer.finish()
    assert torch.equal(total, sums)


class Nodes(Answers):
    """As ``Answers``, of workers with several slots each: they bring the sums of their nodes of the tree."""

    def __init__(self, workers: int, rows: torch.Tensor, sums: torch.Tensor) -> None:
        from elastune.core.slots import subtrees

        num_slots = len(rows)
        nodes = [node for run in cut(num_slots, workers) for node in subtrees(run, num_slots)]
        brought = [rows[node.start] if len(node) == 1 else rows[node.start] + rows[node.stop - 1] for node in nodes]
        super().__init__(0, workers, torch.stack(brought), sums)
