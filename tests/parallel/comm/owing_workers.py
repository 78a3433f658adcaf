"""Workers that send parts of random gradients, and count what they owe: what test_residuals.py runs."""

from __future__ import annotations

import math

import torch
from torch import nn

from elastune.core.communication import Compression
from elastune.core.run import ExecutionSettings
from elastune.core.slots import shares
from elastune.parallel.comm import reducer as reducers
from elastune.parallel.comm.backends import GlooFactory
from elastune.parallel.comm.compressed import CompressedReducer
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import replicated
from elastune.parallel.mechanisms.base import Replicated
from elastune.parallel.sync.allreduce import CompressedAllReduce
from elastune.testing.worker_processes import Worker

LIKE = [torch.empty(30, 20), torch.empty(20), torch.empty(0, 3), torch.empty(4, 5, 6), torch.empty(()), torch.empty(40)]
GRADIENTS, STEPS = 5, 6


def gradients(rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(like.shape, generator=generator) for like in LIKE]


def made(group: Group, text: str) -> CompressedReducer:
    reducers.FIRST_BUCKET_BYTES, reducers.BUCKET_BYTES = 2000, 600  # several buckets
    compression = Compression.parse(text)
    assert compression is not None
    return CompressedReducer(LIKE, group, GRADIENTS, compression, hold=True)


def step(reducer: CompressedReducer, values: list[torch.Tensor], *, loses: bool = False) -> list[torch.Tensor]:
    reducer.begin()
    reducer.begin_slot(reducer.group.rank, last=True)
    for place, value in enumerate(values):
        reducer.put(place, value)
    if loses:  # all that is under way ends, and nobody reads it
        for bucket in reducer._buckets:
            bucket.combine()
            bucket.wait()
        return []
    return [total.clone() for total in reducer.finish()]


def all_is_sent_or_owed(worker: Worker, text: str) -> None:
    """Over some steps, one of them lost; says how far sums and debts are from what was put, and what one was sent."""
    group = worker.form("first")
    reducer = made(group, text)
    put, given = torch.zeros(20, 30), torch.zeros(20, 30)  # of the first tensor, transposed: no view of it
    for at in range(STEPS):
        values = gradients(worker.rank, at)
        if at == 2:
            step(reducer, gradients(worker.rank, 77), loses=True)
        sums = step(reducer, values)
        put, given = put + values[0].T, given + sums[0].T
        whole = [sum(gradients(rank, at)[GRADIENTS] for rank in range(worker.size))]
        torch.testing.assert_close([sums[GRADIENTS]], whole)  # what rides along is as it was
    owed = reducer.owed[0][: put.numel()].view(30, 20).T
    table = torch.stack([put, owed]).contiguous()
    group.all_reduce(table).wait()
    worker.send(
        "ended", (table[0] - table[1] - given).abs().max().item(), owed.abs().max().item(), given, group.sent_bytes
    )
    worker.receive()


def nothing_finite_once(worker: Worker, text: str) -> None:
    """One worker has a NaN in one step; says whether later sums are finite, and which one was not."""
    reducer = made(worker.form("first"), text)
    finite = []
    for at in range(4):
        values = gradients(worker.rank, at)
        if at == 1 and worker.rank == 0:
            values[0][3, 3] = math.nan
        finite.append(all(bool(total.isfinite().all()) for total in step(reducer, values)))
    worker.send("ended", finite)
    worker.receive()


def nothing_in_a_bucket(worker: Worker, text: str) -> None:
    """The second bucket has nothing but a tensor without numbers; says the sums of two steps."""
    reducers.FIRST_BUCKET_BYTES, reducers.BUCKET_BYTES = 8, 8
    compression = Compression.parse(text)
    assert compression is not None
    like = [torch.empty(8, 4), torch.empty(0, 3), torch.empty(1)]
    reducer = CompressedReducer(like, worker.form("first"), 2, compression, hold=True)
    assert [bucket.members for bucket in reducer._buckets] == [[0], [1], [2]]
    worker.send("ended", [step(reducer, [torch.full_like(each, 1.0 + at) for each in like]) for at in range(2)])
    worker.receive()


def one_leaves(worker: Worker, text: str) -> None:
    """Of three workers two leave, one after the other; says what is owed, together, before and after each."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    compression = Compression.parse(text)
    assert compression is not None
    group = worker.form("first")
    comms = replicated(group)
    replica = Replicated().attach(model, optimizer, comms, ExecutionSettings(mode="fast"))
    sync = CompressedAllReduce(replica, comms, compression, elastic=True)

    def train(seed: int) -> None:
        x = torch.randn(12, 16, generator=torch.Generator().manual_seed(seed))
        slices = shares(12, 12, sync.group.size, sync.group.rank, "fast", None)
        for i, share in enumerate(slices):
            sync.begin(share, starts_step=i == 0)
            part = slice(share.samples.start, share.samples.stop)
            sync.backward(model(x[part]).square().mean(), share)

    def debts() -> torch.Tensor:
        return torch.cat(sync._compressed.owed) if sync._compressed else torch.empty(0)

    result, over = [], group
    for size in (2, 1):
        optimizer.zero_grad()
        train(size)
        optimizer.zero_grad()
        result.append(debts())
        if worker.rank >= size:
            sync.hand_over(over, size)
            break
        smaller = GlooFactory("lo", 60).form(worker.store, f"of {size}", worker.rank, size)
        sync.regroup(replicated(smaller), over)
        result.append(debts())
        over = smaller
    if worker.rank == 0:
        train(9)
        alone = [p.grad.clone() for p in replica.params if p.grad is not None]
        optimizer.zero_grad()
        result.append(debts())
        train(9)
        own = [p.grad.clone() for p in replica.params if p.grad is not None]
        result.append(torch.cat([(a - b).view(-1) for a, b in zip(reversed(alone), reversed(own), strict=True)]))
    worker.send("ended", result)
    worker.receive()
