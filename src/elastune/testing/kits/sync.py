"""Tests that every sync strategy must pass, for inheritance.

class TestMine(SyncKit):
    make = staticmethod(make_mine)  # of a module that worker processes can import
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, Literal

import pytest
import torch
import torch.nn.functional as F

from elastune.core.run import ExecutionSettings
from elastune.core.slots import shares, slices_of_round
from elastune.parallel.comm.group import Group, GroupBroken, Work
from elastune.parallel.comm.process_groups import Comms, replicated
from elastune.parallel.mechanisms.base import Replica, Replicated
from elastune.parallel.sync.base import Sync
from elastune.testing.kits.mechanism import BATCH, SLOTS, data, network, optimizer_of
from elastune.testing.worker_processes import Worker, processes

ROUNDS, EVENT_ROUND, CONTROL = 4, 2, 3
Event = Literal["nothing", "abandon", "reload", "break"]
Make = Callable[[Replica, Comms], Sync]
Result = tuple[dict[str, torch.Tensor], list[float]]


class Run:
    """One worker's training."""

    def __init__(self, make: Make, group: Group) -> None:
        model = network()
        comms = replicated(group)
        self._make = make
        self.sync = make(Replicated().attach(model, optimizer_of(model), comms, ExecutionSettings()), comms)

    def round(self, at: int, on_break: Callable[[], None]) -> None:
        """Train round ``at``; ``on_break`` completes its exchange if that fails on this worker."""
        sync = self.sync
        sync.control = [1.0, float(at), float(sync.group.rank)]
        try:
            self.passes(at)
        except GroupBroken:
            on_break()
        self._update()
        try:
            sync.after_step()
        except GroupBroken:
            on_break()

    def passes(self, at: int, most: int | None = None) -> None:
        """The forward and backward passes of round ``at``, or the first of them, and learners' own steps in it."""
        sync, plan = self.sync, self.sync.plan
        x, y = map(torch.cat, zip(*(data(at * plan.every + i) for i in range(plan.every)), strict=True))
        mode: Literal["exact", "fast"] = "exact" if sync.exact else "fast"
        if plan.in_rounds:
            carried = plan.carried(sync.group.size, sync.group.rank)
            slices = slices_of_round([BATCH] * plan.every, SLOTS, plan.learners, carried, mode, 2)
        else:
            slices = shares(BATCH, SLOTS, sync.group.size, sync.group.rank, mode, 2)
        sync.parts = slices
        for i, share in enumerate(slices[:most]):
            sync.begin(share, starts_step=i == 0)
            part = slice(share.samples.start, share.samples.stop)
            sync.backward(F.cross_entropy(sync.replica.model(x[part]), y[part]), share)
            if share.ends_update and not share.ends_step:
                self._update()

    def _update(self) -> None:
        self.sync.replica.optimizer.step()
        self.sync.replica.optimizer.zero_grad()

    def reload(self) -> None:
        """Replace the strategy by a new object that loads its state."""
        state = self.sync.state_dict()
        self.sync = self._make(self.sync.replica, self.sync.replica.comms)
        self.sync.load_state_dict(state)

    def result(self) -> Result:
        """Return the parameters, and the totals that the newest round carried."""
        return dict(self.sync.replica.module.named_parameters()), self.sync.totals


class Breaking:
    """Counts the waits of this worker, and breaks wait number ``breaks_at``, when its result is complete."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits, self.breaks_at = 0, -1
        wait = Work.wait

        def counted(work: Work) -> None:
            wait(work)
            self.waits += 1
            if self.waits == self.breaks_at:
                raise GroupBroken("injected")

        monkeypatch.setattr(Work, "wait", counted)


def work(worker: Worker, make: Make, event: Event) -> None:
    """The training of each process."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        breaking = Breaking(monkeypatch)
        run = Run(make, worker.form("first"))
        for at in range(ROUNDS):
            breaks = event == "break" and at == EVENT_ROUND
            in_a_round, breaking.waits = breaking.waits, 0
            breaking.breaks_at = in_a_round if breaks and worker.rank == 1 else -1
            if event == "reload" and at == EVENT_ROUND:
                run.reload()
            if event == "abandon" and at == EVENT_ROUND:
                run.passes(at, 1)
                run.sync.abandon()
                assert all(p.grad is None for p in run.sync.replica.params), "no gradient is left"
            broken: list[Group] = []
            run.round(at, lambda: broken.append(adopt(worker, run)))  # noqa: B023 - called at once
            if breaks:
                assert len(broken) == (worker.rank == 1), "the break came where it was to come"
                run.sync.regroup(replicated(broken[0] if broken else give(worker, run)))
        worker.send("result", *run.result())
        worker.receive()


def adopt(worker: Worker, run: Run) -> Group:
    """Complete the round with the result of rank 0."""
    group = worker.form("second")
    result = run.sync.result_room()
    for tensor in result:
        group.receive(tensor, 0)
    run.sync.adopt_result(result)
    return group


def give(worker: Worker, run: Run) -> Group:
    """Send the result of the round that ``adopt`` receives."""
    group = worker.form("second")
    if worker.rank == 0:
        for tensor in run.sync.last_result():
            group.send(tensor, 1)
    return group


@cache
def trained(make: Make, workers: int, event: Event = "nothing") -> list[Result]:
    """The results by worker, kept for later calls with the same arguments."""
    with processes(workers, work, make, event) as them:
        return [them.receive(rank)[1:] for rank in range(workers)]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Assert that both states are equal to the bit."""
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


class SyncKit:
    """A strategy keeps replicas equal, also if a round is abandoned or breaks."""

    make: ClassVar[Any]

    @pytest.mark.parametrize("workers", [2, 3])
    def test_replicas_are_equal_after_a_round(self, workers: int) -> None:
        """Also, the control values of the round reach every worker."""
        results = trained(self.make, workers)
        for state, totals in results:
            same(state, results[0][0])
            assert totals[0] == workers
            assert totals[2] == sum(range(workers))

    def test_workers_do_not_show_where_it_promises_that(self) -> None:
        """One, two and three workers reach the same bits, if the strategy is exact."""
        alone = Run(self.make, Group())
        if not alone.sync.exact:
            return
        for at in range(ROUNDS):
            alone.round(at, lambda: None)
        for workers in (2, 3):
            same(trained(self.make, workers)[0][0], alone.result()[0])

    @pytest.mark.parametrize("event", ["abandon", "reload"])
    def test_nothing_shows_of(self, event: Event) -> None:
        """Neither an abandoned step nor a new object with the same ``state_dict`` changes the result."""
        same(trained(self.make, 2, event)[1][0], trained(self.make, 2)[1][0])

    def test_a_result_of_another_worker_is_as_good_as_ones_own(self) -> None:
        """One worker's exchange breaks after its contribution; it adopts the result of another worker."""
        results, undisturbed = trained(self.make, 3, "break"), trained(self.make, 3)
        for (state, totals), (wanted, _) in zip(results, undisturbed, strict=True):
            same(state, wanted)
            assert totals[0] == 3
