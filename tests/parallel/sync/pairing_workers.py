"""What the worker processes of ``test_async_pairs.py`` do."""

from __future__ import annotations

import time

import torch
from syncs_made import make_pair_averaging_fast

from elastune.parallel.comm.channel import AsyncValues
from elastune.testing.kits.sync import Run
from elastune.testing.worker_processes import LIMIT_S, Worker

BYTES = torch.arange(5, dtype=torch.uint8)


def offer(worker: Worker) -> None:
    """The first of two offers to the other twice, and once more when the first was taken."""
    group = worker.form("offers")
    offers = AsyncValues.of(group)
    assert AsyncValues.of(group) is offers
    if worker.rank == 0:
        before = group.sent_bytes
        assert offers.make(1, (0, 0, 7), BYTES)
        assert not offers.make(1, (0, 0, 8), BYTES), "the first one is not taken yet"
        assert group.sent_bytes - before == BYTES.nbytes
        assert offers.make(1, (0, 1, 5), BYTES), "another receiver there"
        deadline = time.monotonic() + LIMIT_S
        while not offers.make(1, (0, 0, 9), BYTES):
            assert time.monotonic() < deadline
            assert offers.take() == []
            time.sleep(0.001)
    results = []
    while worker.rank == 1 and len(results) < 3:
        results += offers.take()
    assert all(torch.equal(each.values, BYTES) for each in results)
    worker.send("numbers", [each.number for each in results])
    worker.receive()


def slow_partner(worker: Worker) -> None:
    """The second one begins its round when the first one is through with its own; it then waits for what was offered
    to it, so that it surely takes some of it."""
    run = Run(make_pair_averaging_fast, worker.form("pairs"))
    group = run.sync.group
    run.sync.control = [1.0, 0.0, 0.0]
    if worker.rank == 1:
        worker.meet("the first is through")

        def wait_for_offers(*_: object) -> None:
            deadline = time.monotonic() + LIMIT_S
            while "offers" in group.kept and not something_came() and time.monotonic() < deadline:
                time.sleep(0.001)

        def something_came() -> bool:
            return bool(run.sync._strategy.taken) or not AsyncValues.of(group)._channel._arrived.empty()

        run.sync.replica.module.register_forward_pre_hook(wait_for_offers)
    run.passes(0)
    run._update()
    if worker.rank == 0:
        worker.meet("the first is through")
    run.sync.after_step()
    worker.send("round", run.result()[0], run.sync.statistics.staleness, group.sent_bytes, run.sync._strategy.taken)
    worker.receive()
