"""A small training run whose groups break at named stages, and whose survivors go on: what test_regroup.py runs."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from elastune.core.run import ExecutionSettings
from elastune.core.slots import BatchSlice, Mode, contributors, shares
from elastune.parallel.comm import reducer as reducers
from elastune.parallel.comm.backends import GlooFactory
from elastune.parallel.comm.group import Group, GroupBroken, Work, drop
from elastune.parallel.comm.process_groups import replicated
from elastune.parallel.sync.base import Sync
from elastune.parallel.sync.registry import prepare
from elastune.testing.worker_processes import Worker

SLOTS, BATCH, STEPS, FAULT_STEP = 6, 25, 6, 3
STAGES = ("between shares", "launch", "all_to_all", "all_gather")


class Net(nn.Module):
    def __init__(self, drifts: bool) -> None:
        super().__init__()
        self.body = nn.Linear(6, 40)
        self.norm = nn.BatchNorm1d(40) if drifts else nn.Identity()
        self.rare = nn.Linear(6, 40)
        self.never = nn.Linear(6, 3)
        self.head = nn.Linear(40, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.norm(torch.tanh(self.body(x)))
        chosen = x[:, :1] > 1.5
        if bool(chosen.any()):  # by few of the passes
            result = result + chosen * self.rare(x)
        result = result if isinstance(self.norm, nn.Identity) else F.dropout(result, 0.2)
        return self.head(result)


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 2, generator=generator)


def one_step(sync: Sync, plan: list[BatchSlice], step: int, between: Callable[[int], None]) -> None:
    x, y = data(step)
    sync.control = [1.0, float(step), 0.0, float(sync.group.rank)]
    for i, share in enumerate(plan):
        between(i)
        torch.manual_seed(1000 * step + share.slot)
        sync.begin(share, starts_step=i == 0)
        samples = slice(share.samples.start, share.samples.stop)
        sync.backward(F.mse_loss(sync.replica.model(x[samples]), y[samples]), share)


def finish_step(sync: Sync, optimizer: torch.optim.Optimizer) -> None:
    """As a user would: gradients are clipped in place, which must not show in what is held."""
    torch.nn.utils.clip_grad_norm_(sync.replica.params, 0.5)
    optimizer.step()
    optimizer.zero_grad()


def build(mode: Mode, group: Group) -> tuple[Sync, torch.optim.Optimizer]:
    reducers.FIRST_BUCKET_BYTES, reducers.BUCKET_BYTES = 200, 600  # several buckets
    torch.manual_seed(0)
    model = Net(drifts=mode == "exact")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    execution = ExecutionSettings(workers=group.size, mode=mode, num_slots=SLOTS)
    return prepare(model, optimizer, execution, replicated(group), control=4, elastic=True), optimizer


def plan_for(mode: Mode, group: Group) -> list[BatchSlice]:
    return shares(BATCH, SLOTS, group.size, group.rank, mode, 3)


def state_of(sync: Sync) -> list[torch.Tensor]:
    return [t.detach().clone() for t in sync.replica.module.state_dict().values()]


def digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def alone(mode: Mode) -> list[torch.Tensor]:
    """The undisturbed run, of one worker."""
    sync, optimizer = build(mode, Group())
    for step in range(STEPS):
        one_step(sync, plan_for(mode, sync.group), step, lambda i: None)
        assert sync.totals[:2] == [1.0, float(step)]
        finish_step(sync, optimizer)
    return state_of(sync)


def arm(stage: str, group: Group, act: Callable[[], None]) -> None:
    """Have ``act`` happen when ``group`` comes to ``stage``."""
    inner: dict[str, Any] = {name: getattr(group, name) for name in ("all_to_all", "all_gather", "all_reduce")}
    name = {"launch": ("all_to_all", "all_reduce"), "all_to_all": ("all_gather",), "all_gather": ()}.get(stage, ())

    def before(kind: str) -> Callable[..., Work]:
        def outer(*args: Any) -> Work:
            act()
            return inner[kind](*args)

        return outer

    for kind in name:
        setattr(group, kind, before(kind))
    if stage == "all_gather":

        def late(*args: Any) -> Work:
            work = inner["all_gather"](*args)
            act()
            return work

        group.all_gather = late  # type: ignore[method-assign]


def disturbed(worker: Worker, mode: Mode, stage: str) -> None:
    """Three workers; the last one kills itself at ``stage`` of a step. The others go on, and say how it ended."""
    group = worker.form("first")
    sync, optimizer = build(mode, group)
    watch = dist.TCPStore("127.0.0.1", worker.port, is_master=False)

    def die() -> None:
        watch.set("dead", "yes")
        os.kill(os.getpid(), signal.SIGKILL)

    def abandon_after_death() -> None:
        watch.wait(["dead"])
        time.sleep(0.05)
        first.abandon()

    first, completed, redone = group, 0, 0
    if worker.rank != 2:
        worker.on_thread(abandon_after_death)
    while completed < STEPS:
        if completed == FAULT_STEP and worker.rank == 2:
            arm(stage, group, die)
        doomed = completed == FAULT_STEP and worker.rank == 2 and stage == "between shares"
        try:
            one_step(
                sync,
                plan_for(mode, group),
                completed,
                lambda i: die() if doomed and i == 1 else None,  # noqa: B023
            )
        except GroupBroken:
            redone += 1
            group.abandon()
            group.drain()
            drop(group)
            group = GlooFactory("lo", 60).form(worker.store, "second", worker.rank, 2)
            counts = [int(row[0]) for row in group.gather_floats([float(completed)])]
            if completed == max(counts):
                if min(counts) < completed:
                    for tensor in sync.last_result():
                        group.send(tensor, 1 - worker.rank)
                sync.abandon()
                assert all(p.grad is None for p in sync.replica.params)
                sync.regroup(replicated(group))
                continue
            result = sync.result_room()
            for tensor in result:
                group.receive(tensor, 1 - worker.rank)
            sync.adopt_result(result)
            sync.regroup(replicated(group))
        assert sync.totals[:2] == [c * contributors(BATCH, SLOTS, round(sync.totals[0]), mode) for c in (1, completed)]
        finish_step(sync, optimizer)
        completed += 1
    worker.send("ended", redone, digest(state_of(sync)), [t.tolist() for t in state_of(sync)])
    worker.receive()


def break_the_end(sync: Sync, worker: Worker) -> Callable[[], None]:
    """Its next reduction breaks here once everything was sent; returns what makes the next ones whole."""
    reducer: Any = sync._reducer
    finish, group = reducer.finish, sync.group

    def breaking() -> list[torch.Tensor]:
        for bucket in reducer._buckets:
            if not bucket.launched:
                bucket.launch()
        for bucket in reducer._buckets:
            bucket.combine()
        worker.meet("all is sent")
        group.abandon()
        raise GroupBroken("injected")

    def restore() -> None:
        reducer.finish = finish

    reducer.finish = breaking
    return restore


def one_breaks(worker: Worker, mode: Mode) -> None:
    """The reduction of a step succeeds everywhere but at rank 1, which takes the result that rank 0 holds."""
    group = worker.form("first")
    sync, optimizer = build(mode, group)
    for step in range(STEPS):
        try:
            if step == FAULT_STEP and worker.rank == 1:
                restore = break_the_end(sync, worker)
            one_step(sync, plan_for(mode, group), step, lambda i: None)
            if step == FAULT_STEP:
                worker.meet("all is sent")
        except GroupBroken:
            restore()
        before = [b.clone() for b in sync.replica.module.buffers()]
        if step == FAULT_STEP:
            finish_step(sync, optimizer) if worker.rank != 1 else None
            held = worker.form("held")
            if worker.rank == 0:
                for tensor in sync.last_result():
                    held.send(tensor, 1)
            if worker.rank == 1:
                result = sync.result_room()
                for tensor in result:
                    held.receive(tensor, 0)
                sync.adopt_result(result)
            held.gather_floats([0.0])
            group.abandon()
            sync.regroup(replicated(held))
            group = held
        assert len(before) == len(list(sync.replica.module.buffers()))
        assert sync.totals[0] == group.size
        if step != FAULT_STEP or worker.rank == 1:
            finish_step(sync, optimizer)
    worker.send("ended", digest(state_of(sync)[:2]), [t.tolist() for t in state_of(sync)])
    worker.receive()


def bad_hook(worker: Worker, mode: Mode) -> None:
    """A group that is broken when a hook of autograd comes to it; the step is done again on another."""
    group = worker.form("first")
    sync, optimizer = build(mode, group)
    for step in range(STEPS):
        if step == FAULT_STEP:
            group.abandon()
            start = [b.clone() for b in sync.replica.module.buffers()]
            try:
                one_step(sync, plan_for(mode, group), step, lambda i: None)
                raise AssertionError("a step on a group that is no more")
            except GroupBroken:
                sync.abandon()
            assert all(torch.equal(a, b) for a, b in zip(start, sync.replica.module.buffers(), strict=True))
            assert all(p.grad is None for p in sync.replica.params)
            drop(group)
            group = worker.form("second")
            sync.regroup(replicated(group))
        one_step(sync, plan_for(mode, group), step, lambda i: None)
        finish_step(sync, optimizer)
    worker.send("ended", 1, digest(state_of(sync)), [t.tolist() for t in state_of(sync)])
    worker.receive()
