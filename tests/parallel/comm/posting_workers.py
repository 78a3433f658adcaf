"""What the worker processes of ``test_post.py`` do."""

from __future__ import annotations

import time

import torch

from elastune.parallel.comm.channel import Channel, ChannelMessage
from elastune.parallel.comm.group import CALLS_TAG, GroupBroken
from elastune.testing.worker_processes import Worker

COUNT = 50


def exchange(worker: Worker) -> None:
    """Everybody sends to everybody, then reads."""
    post = Channel(worker.form("post"))
    others = [peer for peer in range(worker.size) if peer != worker.rank]
    began = time.monotonic()
    for i in range(COUNT):
        for to in others:
            post.send(
                to, ChannelMessage((worker.rank, to, i), f"kind {i % 2}", torch.full((i * 7,), i, dtype=torch.uint8))
            )
    sent_s = time.monotonic() - began
    came: dict[int, list[int]] = {peer: [] for peer in others}
    for _ in range(COUNT * len(others)):
        first = post.next()
        assert first is not None
        source, message = first
        i = message.number[2]
        assert message.number == (source, worker.rank, i)
        assert message.text == f"kind {i % 2}"
        assert torch.equal(message.payload, torch.full((i * 7,), i, dtype=torch.uint8))
        came[source].append(i)
    assert all(order == list(range(COUNT)) for order in came.values())
    assert post.next(wait=False) is None
    worker.send("exchanged", sent_s)
    worker.receive()


def wait_for_mail(worker: Worker) -> None:
    """The last one is killed; the first gives the group up meanwhile, as a coordinator's news make it do."""
    group = worker.form("post")
    post = Channel(group)
    worker.send("waiting")
    if worker.rank == 0:
        worker.on_thread(lambda: (worker.receive(), group.abandon()))
    began = time.monotonic()
    try:
        post.next()
    except GroupBroken:
        worker.send("broken", time.monotonic() - began)
        try:
            post.send((worker.rank + 1) % worker.size, ChannelMessage((0, 0, 0), "", torch.empty(0, dtype=torch.uint8)))
        except GroupBroken:
            worker.send("refused")
    worker.receive()


def beside_an_exchange(worker: Worker) -> None:
    """Messages of named collectives, and bytes of state that moves, at one time between the same two."""
    group = worker.form("post")
    post, other = Channel(group, CALLS_TAG), 1 - worker.rank
    given, room = torch.full((1000,), worker.rank, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)
    for i in range(COUNT):
        post.send(other, ChannelMessage((worker.rank, 0, i), "call", torch.full((i,), i, dtype=torch.uint8)))
        group.exchange([(given, other)], [(room, other)]).wait()
        assert room.unique().tolist() == [other]
        room.zero_()
        first = post.next()
        assert first is not None
        assert (first[0], first[1].number, len(first[1].payload)) == (other, (other, 0, i), i)
    worker.send("exchanged")
    worker.receive()
