"""Workers that reduce random tensors over gloo and compare with sums written out."""

from __future__ import annotations

import functools
import math
import random
from typing import Any

import torch

from elastune.core.communication import Topology, routes_of
from elastune.core.mesh import Mesh
from elastune.core.run import Place
from elastune.core.slots import cut
from elastune.parallel.comm import reducer as reducers
from elastune.parallel.comm.backends import GlooFactory
from elastune.parallel.comm.exact import ExactReducer
from elastune.parallel.comm.group import Group, GroupBroken
from elastune.parallel.comm.network_probe import measure_link, probe_links
from elastune.parallel.comm.process_groups import form_comms, join
from elastune.parallel.comm.reducer import FlatReducer
from elastune.testing.worker_processes import LIMIT_S, Worker

_ALIVE: list[object] = []  # see comm.group.join

LIKE = [
    torch.empty(7, 3),
    torch.empty(()),
    torch.empty(13, dtype=torch.float64),
    torch.empty(1, dtype=torch.float64),
    torch.empty(0),
    torch.empty(5, 5, dtype=torch.bfloat16),
    torch.empty(2, 2, 2, 2),
    torch.empty(3, dtype=torch.float16),
    torch.empty(101),
]


@functools.cache
def value(seed: int, slot: int, index: int) -> torch.Tensor | None:
    """What ``slot`` contributes to tensor ``index``: numbers of very different sizes; None now and then."""
    generator = torch.Generator().manual_seed(seed * 10_000 + slot * 100 + index)
    if int(torch.randint(6, (1,), generator=generator)) == 0:
        return None
    like = LIKE[index]
    scale = 10.0 ** int(torch.randint(-3, 4, (1,), generator=generator))
    return (torch.randn(like.shape, generator=generator, dtype=torch.float64) * scale).to(like.dtype)


def tree(values: list[torch.Tensor]) -> torch.Tensor:
    """The canonical sum: the left half has the largest power of two below the number of slots."""
    if len(values) == 1:
        return values[0]
    left = 1
    while left * 2 < len(values):
        left *= 2
    return tree(values[:left]) + tree(values[left:])


def expected(seed: int, slots: int, empty: list[int]) -> list[torch.Tensor]:
    def term(slot: int, index: int) -> torch.Tensor:
        result = None if slot in empty else value(seed, slot, index)
        return torch.zeros_like(LIKE[index]) if result is None else result

    return [tree([term(slot, index) for slot in range(slots)]) for index in range(len(LIKE))]


def one_step(reducer: ExactReducer, group: Group, seed: int, slots: int, empty: list[int]) -> list[torch.Tensor]:
    run = [slot for slot in cut(slots, group.size)[group.rank] if slot not in empty]
    reducer.begin()
    for slot in run:
        reducer.begin_slot(slot, last=slot == run[-1])
        order = list(range(len(LIKE)))
        random.Random(f"{seed} {group.rank} {slot}").shuffle(order)  # gradients come in another order everywhere
        for index in order:
            reducer.put(index, value(seed, slot, index))
    return reducer.finish()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def wrong_sums(group: Group, first_bytes: int, bucket_bytes: int) -> list[str]:
    """Whatever differs from the explicit sum, in words."""
    reducers.FIRST_BUCKET_BYTES, reducers.BUCKET_BYTES = first_bytes, bucket_bytes
    wrong = []
    for slots in (group.size, 5, 8, 13):
        reducer = ExactReducer(LIKE, slots, group)
        lone = cut(slots, group.size)[-1]
        for step, empty in enumerate(([], [0], [slots - 1], list(lone), list(range(1, slots)), [])):
            seed = slots * 10 + step
            result = one_step(reducer, group, seed, slots, empty)
            for index, (sum_, wanted) in enumerate(zip(result, expected(seed, slots, empty), strict=True)):
                if not same_bits(sum_, wanted):
                    wrong.append(f"{slots} slots without {empty}, tensor {index}: {sum_} is not {wanted}")
    return wrong


def reduce(worker: Worker) -> None:
    group = worker.form("sums")
    wrong: list[str] = []
    for first_bytes, bucket_bytes in ((1, 1), (64, 200)):
        wrong += wrong_sums(group, first_bytes, bucket_bytes)
    worker.send(wrong)
    worker.receive()


def climb(worker: Worker, hosts: str) -> None:
    """As ``reduce``, by the levels of two hosts; when the whole group is given up, so are they."""
    form = functools.partial(form_comms, GlooFactory("lo", LIMIT_S), worker.store)
    comms = form("whole", worker.rank, Mesh(data=worker.size), hosts, climbs=True)
    wrong = [] if [level.size for level in comms.everyone.levels] == [2, 2] else ["no levels"]
    for first_bytes, bucket_bytes in ((1, 1), (64, 200)):
        wrong += wrong_sums(comms.everyone, first_bytes, bucket_bytes)
    worker.send(wrong)
    worker.receive()
    comms.abandon()
    try:
        one_step(ExactReducer(LIKE, 4, comms.everyone), comms.everyone, 1, 4, [])
    except GroupBroken:
        worker.send("broken")
    worker.receive()


ROWS: list[list[float]] = [[math.nan, math.inf, -0.0, 1.5], [], [-math.inf, 0.1, -2.0, 1e308, 5e-324]]


def same(a: Any, b: Any) -> bool:
    return repr(a) == repr(b)  # NaN is not equal to itself


def gather(worker: Worker, rendezvous: str) -> None:
    """In a static group, as torchrun's workers form it."""
    group = join(Place(rank=worker.rank, world=worker.size, rendezvous=rendezvous))
    _ALIVE.append(group)
    rows = ROWS[: group.size]
    right = same(group.gather_floats(rows[group.rank]), rows)
    right &= group.gather_floats([]) == [[]] * group.size
    mine = torch.full((3,), float(group.rank))
    group.broadcast(mine, source=1)
    right &= mine.tolist() == [1.0] * 3
    link = measure_link(group)
    right &= link.workers == group.size and link.latency_s > 0 and link.seconds_per_byte >= 0
    right &= not wrong_sums(group, 64, 200)
    worker.send([] if right else ["wrong"])
    worker.receive()


def by_routes(worker: Worker, topologies: list[str], hosts: str) -> None:
    """As ``reduce``, on one group whose routes change between steps; and in any order, to tolerance."""
    group, wrong = worker.form("routed"), []
    reducers.FIRST_BUCKET_BYTES, reducers.BUCKET_BYTES = 64, 200
    flat_like = [torch.empty(1000), torch.empty(3, dtype=torch.float64), torch.empty(777)]
    exact = {slots: ExactReducer(LIKE, slots, group, hold=True) for slots in (worker.size, 13)}
    flat = FlatReducer(flat_like, group, hold=True)
    for step, text in enumerate(topologies):
        topology = Topology.parse(text)
        group.routes, group.chunk_kib = routes_of(topology, worker.size, hosts), topology.chunk_kib
        for reducer in (*exact.values(), flat):
            reducer.regroup(group)
        for slots, reducer in exact.items():
            for seed, empty in ((step, []), (step + 50, [slots - 1])):
                result = one_step(reducer, group, seed, slots, empty)
                pairs = zip(result, expected(seed, slots, empty), strict=True)
                wrong += [f"{text}, {slots} slots, tensor {i}" for i, (a, b) in enumerate(pairs) if not same_bits(a, b)]
        for turn in range(2):
            flat.begin()
            flat.begin_slot(0, last=True)
            for index, like in enumerate(flat_like):
                flat.put(index, None if worker.rank == index else torch.full_like(like, 1.0 + worker.rank + turn))
            for index, total in enumerate(flat.finish()):
                wanted = sum(1.0 + rank + turn for rank in range(worker.size) if rank != index)
                wrong += [] if torch.equal(total, torch.full_like(total, wanted)) else [f"{text}: fast, {index}"]
    worker.send(wrong)
    worker.receive()


def break_on_a_route(worker: Worker, text: str) -> None:
    """The last rank never comes: the others are stuck until somebody gives the group up, and then no memory changes."""
    group = worker.form("routed")
    group.routes = routes_of(Topology.parse(text), worker.size)
    reducer = ExactReducer(LIKE, worker.size, group, hold=True)
    one_step(reducer, group, 1, worker.size, [])
    if worker.rank == worker.size - 1:
        worker.send("stays away")
        worker.receive()
        return
    worker.on_thread(lambda: (worker.receive(), group.abandon("it is over")))
    worker.send("goes on")
    try:
        one_step(reducer, group, 2, worker.size, [])
    except GroupBroken:
        reducer.drain()
        kept = [t.clone() for t in reducer.last_result()]
        reducer.begin()
        reducer.adopt(kept)
        worker.send("freed")
    worker.receive()


def probe(worker: Worker, hosts: str) -> None:
    """Measure the links of emulated hosts, which are all this machine."""
    worker.send(probe_links(worker.form("links"), hosts))
