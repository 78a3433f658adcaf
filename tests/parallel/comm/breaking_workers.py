"""What the workers of test_gloo.py do."""

from __future__ import annotations

import itertools
import os
import threading
import time

import torch
import torch.distributed as dist

from elastune.parallel.comm import backends, sockets
from elastune.parallel.comm.backends import GlooFactory
from elastune.parallel.comm.group import Group, GroupBroken, drop
from elastune.parallel.comm.network_probe import measure_link
from elastune.parallel.comm.sockets import SocketRef, borrowed, connections
from elastune.testing.worker_processes import Worker, until

NUMBERS = 12 * 170_000


def open_things() -> tuple[int, int]:
    """File descriptors and threads of this process."""
    return len(os.listdir("/dev/fd")), len(os.listdir("/proc/self/task"))


def start(group: Group, kind: str, data: torch.Tensor, out: torch.Tensor) -> object:
    if kind == "all_reduce":
        return group.all_reduce(data)
    if kind == "exchange":
        others = [rank for rank in range(group.size) if rank != group.rank]
        sent, result = (of.view(torch.uint8).chunk(group.size) for of in (data, out))
        return group.exchange([(sent[rank], rank) for rank in others], [(result[rank], rank) for rank in others])
    part = [NUMBERS // group.size] * group.size
    return group.all_to_all(out, data, part, part)


def interrupted(worker: Worker, kind: str, others: list[int]) -> None:
    """Collectives without end, until one breaks. Then those of ``others`` go on by themselves."""
    group = worker.form("first")
    abandoned = threading.Event()
    at = [0.0]

    def abandon_when_told() -> None:
        worker.receive()
        at[0] = time.monotonic()
        abandoned.set()
        group.abandon()

    worker.on_thread(abandon_when_told)
    buffers = [torch.ones(NUMBERS) for _ in range(4)]
    why = ""
    for count in range(1_000_000):
        try:
            works = [start(group, kind, buffers[0], buffers[1]), start(group, kind, buffers[2], buffers[3])]
            if count == 3:
                worker.send("busy")
            for work in works:
                work.wait()
            [b.fill_(1.0) for b in buffers]
        except GroupBroken as error:
            why = str(error)
            break
    raised = time.monotonic()
    if worker.rank in others:
        assert abandoned.wait(60)  # a neighbour of a dead one hears of it before it is told
        assert group.broken
        group.drain()
        sums = [float(b.sum()) for b in buffers]
        worker.send("raised", max(0.0, raised - at[0]), why)
        worker.receive()  # the frozen one has woken up
        assert [float(b.sum()) for b in buffers] == sums
        drop(group)
        group = GlooFactory("lo", 60).form(worker.store, "next", others.index(worker.rank), len(others))
        data = torch.full((5,), float(worker.rank))
        group.all_reduce(data).wait()
        worker.send("sum", float(data[0]))
        worker.receive()
    else:
        worker.send("woken", why)
        worker.receive()


def exchange(worker: Worker) -> None:
    """Rank 0 sends rank 1 three tensors and rank 2 one, rank 2 sends rank 1 one: over gloo itself, and through buffers
    as other libraries want it.
    """
    group = worker.form("exchange")
    buffered = Group(group.rank, group.size, group._pg, "nccl", torch.device("cpu"))
    letters = {(0, 1): (1, 3_000_000, 0), (0, 2): (7,), (2, 1): (50_000,), (1, 0): ()}
    made = {
        (ends, at): torch.arange(size).add(5 * at + ends[0]).to(torch.uint8)
        for ends, sizes in letters.items()
        for at, size in enumerate(sizes)
    }
    right = True
    for way in (group, buffered, group):
        sends = [(tensor, ends[1]) for (ends, _), tensor in made.items() if ends[0] == worker.rank]
        rooms = {key: torch.zeros_like(made[key]) for key in made if key[0][1] == worker.rank}
        way.exchange(sends, [(room, key[0][0]) for key, room in rooms.items()]).wait()
        right &= all(torch.equal(room, made[key]) for key, room in rooms.items())
        way.gather_floats([0.0])
    worker.send("right", right)


def cycles(worker: Worker, count: int) -> None:
    """Form, use, give up in the middle of something, let go."""
    seen = []
    for at in range(count):
        group = worker.form(f"group {at}", timeout_s=10)  # what gloo forgets to wake ends by that
        data = torch.ones(1000)
        group.all_reduce(data).wait()
        assert float(data[0]) == worker.size
        worker.meet(f"reduced {at}")
        if at % 2:
            group.all_reduce(torch.ones(200_000))
            group.abandon()
            group.drain()
        worker.meet(f"used {at}")
        drop(group)
        if at in (10, count - 1):
            until(lambda: not any(t.name == "drop group" for t in threading.enumerate()))
            worker.meet(f"dropped {at}")
            seen.append(open_things())
    worker.send("seen", *seen)


def superseded(worker: Worker, partly: bool) -> None:
    """Rank 2 never comes, or freezes once it has told where it listens."""
    worker.form("warm").all_reduce(torch.ones(1)).wait()
    before = open_things()
    if worker.rank == 2:
        if partly:
            seen = dist.TCPStore("127.0.0.1", worker.port, is_master=False)  # one that the other thread does not block
            worker.on_thread(lambda: worker.form("half"))
            seen.wait(["half/at/2"])
        worker.send("ready")
        worker.receive()
        return
    gone = threading.Event()
    worker.receive()
    worker.on_thread(lambda: (time.sleep(0.3), gone.set()))
    try:
        worker.form("half", superseded=gone.is_set)
        worker.send("formed")
        return
    except GroupBroken:
        late_s = 0.0
    worker.send("superseded", gone.is_set(), until(lambda: open_things() <= before, 20), before, open_things(), late_s)
    worker.receive()


def talk(worker: Worker) -> None:
    """Tensors from one to another, in order."""
    group = worker.form("pairs")
    tensors = [torch.full((size,), float(size)) for size in (1, 100_000, 3)]
    tensors += [torch.arange(5), torch.zeros(0), torch.tensor([1, 2], dtype=torch.bfloat16)]
    right = True
    if worker.rank == 0:
        for tensor in tensors:
            group.send(tensor, 1)
    else:
        for tensor in tensors:
            result = torch.empty_like(tensor)
            group.receive(result, 0)
            right &= torch.equal(result, tensor)
    group.all_reduce(torch.ones(1)).wait()
    right &= group.gather_floats([float(worker.rank)]) == [[0.0], [1.0]]
    right &= measure_link(group).latency_s > 0
    worker.send("right", right)
    if worker.rank == 0:
        worker.receive()
        return
    worker.on_thread(lambda: (worker.receive(), group.abandon()))
    try:
        group.receive(torch.empty(10), 0)
        worker.send("received")
    except GroupBroken:
        worker.send("broken")


def drop_beside_a_frozen_one(worker: Worker) -> None:
    """Letting go must not stop this process's other threads."""
    group = worker.form("first")
    group.all_reduce(torch.ones(1)).wait()
    worker.send("ready")
    if worker.rank == 1:
        time.sleep(60)
        return
    worker.receive()
    group.all_reduce(torch.ones(NUMBERS))
    started, beats = time.monotonic(), [time.monotonic()]
    drop(group)
    called = time.monotonic() - started
    while time.monotonic() < started + 30 and any(t.name == "drop group" for t in threading.enumerate()):
        time.sleep(0.002)
        beats.append(time.monotonic())
    pause = max((b - a for a, b in itertools.pairwise(beats)), default=0.0)
    worker.send("dropped", called, beats[-1] - started, pause)


def forming_again(worker: Worker, count: int, wary: bool) -> None:
    """Form a group, use it, let go of it, many times. ``wary``: strangers have been seen about."""
    for at in range(count):
        begun = time.monotonic()
        if wary:
            backends._STRANGERS.set()
        group = worker.form(f"group {at}")
        formed_s = time.monotonic() - begun
        data, out = torch.full((worker.size,), float(worker.rank)), torch.empty(worker.size)
        group.all_to_all(out, data, [1] * worker.size, [1] * worker.size).wait()
        worker.send("used", formed_s, out.tolist())
        worker.meet(f"used {at}")
        drop(group)


def forming_at_late_doors(worker: Worker, count: int) -> None:
    """As ``forming_again``; strangers are in before the first listener of each group is shut."""
    refuse_connections, late = sockets.refuse_connections, [True]

    def shut_late(listener: SocketRef) -> None:
        if late[0]:
            late[0] = False
            with borrowed(listener) as sock:
                assert sock is not None
                own = sock.getsockname()
            assert until(lambda: len(connections(own, [])) > 20), "all that strangers say"
        refuse_connections(listener)

    sockets.refuse_connections = shut_late
    for at in range(count):
        late[0] = True
        group = worker.form(f"group {at}")
        assert backends._STRANGERS.is_set()
        worker.send("sum", [value for (value,) in group.gather_floats([float(worker.rank)])])
        drop(group)
