"""How much of what workers tell each other is hidden behind their computing, where training goes on meanwhile.

Three things, each on 4 hosts of one worker: named collectives (``session.allreduce("name", tensor)``), begun before a
step's computing and waited for after it; fragments of DiLoCo, which leave in one step and are adopted two steps later;
and pair averaging beside a worker that is twice as slow, in step (``exact``) and asynchronous (``fast``).

Hosts are network namespaces of this machine whose links are shaped to a declared rate, and computing is a rest of so
many milliseconds: both are emulated, and what overlapping costs a processor that computes is not in the figures. Hidden
is 1 - (time with both - computing alone) / communication alone, each a median over rounds of the slowest worker.

    python -m benchmarks.parallel.overlap [--smoke] [--out benchmarks/results/overlap.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.common.forked import on_workers
from benchmarks.common.result_file import write_result
from benchmarks.parallel.topologies import HOSTS, LIMIT_S, network
from tests.support.hosts import INTERFACE, enter
from torch.distributed import TCPStore

from elastune.core.sync_plan import SyncPlan, fragments_of, send_schedule
from elastune.parallel.comm.backends import GlooFactory
from elastune.parallel.comm.channel import Channel
from elastune.parallel.comm.exact import ExactReducer
from elastune.parallel.comm.group import CALLS_TAG, Group, GroupBroken
from elastune.parallel.sync.local_sgd import Local, StreamingDiLoCo
from elastune.parallel.sync.peer_averaging import AsyncPairAveraging, PairAveraging
from elastune.train.collectives import NamedCollectives

RATES = ("50mbit", "200mbit", "1gbit")
TENSORS = 16
SPARE = 1.25  # computing takes so much longer than what is to be hidden behind it
PLAN = SyncPlan("diloco", HOSTS, 24, fragments=4, cycles=2)
PAIRS = SyncPlan("pair_averaging", HOSTS, 12)
SLOW = HOSTS - 1


@dataclass
class FixedWorkers:
    """What named collectives ask of a worker's group."""

    group: Group
    synchronised: bool = True

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(range(self.group.size))

    @property
    def worker(self) -> int:
        return self.group.rank


class Bench:
    """One worker of the group, which times what all of them do at once."""

    def __init__(self, rank: int, store: tuple[str, int]) -> None:
        there = TCPStore(*store, is_master=False)
        self.group = GlooFactory(INTERFACE, LIMIT_S).form(there, "all", rank, HOSTS)

    def slowest(self, act: Callable[[], object]) -> float:
        """Seconds that ``act`` takes from when all begin it to when the last one has done it."""
        self.group.all_reduce(torch.zeros(1)).wait()
        began = time.perf_counter()
        act()
        own = time.perf_counter() - began
        return max(row[0] for row in self.group.gather_row([own]))

    def hidden(
        self, rounds: int, alone: Callable[[], object], both: Callable[[float], float], parts: int
    ) -> dict[str, float]:
        """Shares of ``alone`` that are hidden in ``both``, which rests for as long as a part of ``alone`` and a quarter
        takes, ``parts`` of which there are, and returns how long it has rested in all.
        """
        alone()
        alone_s = statistics.median(self.slowest(alone) for _ in range(rounds))
        rest_s, shares, rested = SPARE * alone_s / parts, [], []
        for turn in range(rounds + 1):
            both_s = self.slowest(lambda: rested.append(both(rest_s)))
            if turn:  # the first one opens what is kept open then
                shares.append(1 - (both_s - max(row[0] for row in self.group.gather_row(rested[-1:]))) / alone_s)
            else:
                self.group.gather_row(rested[-1:])
        shares.sort()
        return {
            "alone_ms": 1e3 * alone_s,
            "hidden": statistics.median(shares),
            "lowest": shares[0],
            "highest": shares[-1],
        }


def rest(seconds: float) -> float:
    """Compute for so long; what it took."""
    began = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - began


def named(bench: Bench, numbers: int, rounds: int) -> dict[str, float]:
    """A named all-reduce, and a step's computing between its begin and its end."""

    def lost(error: GroupBroken) -> object:
        raise error

    calls = NamedCollectives(FixedWorkers(bench.group), lambda: 1, lost, lambda group: Channel(group, CALLS_TAG))
    tensor = torch.ones(numbers)

    def alone() -> None:
        calls.wait(calls.start("allreduce", "hits", tensor))

    def both(rest_s: float) -> float:
        call = calls.start("allreduce", "hits", tensor)
        rested = rest(rest_s)
        calls.wait(call)
        return rested

    return bench.hidden(rounds, alone, both, 1)


def fragments(bench: Bench, numbers: int, rounds: int) -> dict[str, float]:
    """A round's fragments, one after another, and steps in which they travel."""
    like = [torch.randn(numbers // TENSORS) for _ in range(TENSORS)]
    strategy, learners = StreamingDiLoCo(PLAN, like, bench.group), {bench.group.rank: [t.clone() for t in like]}
    places = fragments_of([tensor.nbytes for tensor in like], PLAN.fragments)
    reducers = [ExactReducer([like[i] for i in own], HOSTS, bench.group) for own in places]
    leaving = send_schedule(PLAN.every, PLAN.fragments, PLAN.cycles)

    def alone() -> None:
        for fragment in leaving.values():
            reducer = reducers[fragment]
            reducer.begin()
            reducer.begin_slot(bench.group.rank, last=True)
            for index, place in enumerate(places[fragment]):
                reducer.put(index, like[place])
            reducer.finish()

    def both(rest_s: float) -> float:
        strategy.begin(like)
        rested = 0.0
        for step in range(PLAN.every):
            if step:
                strategy.mix(learners, step - 1)
            rested += rest(rest_s)
        strategy.finish()
        return rested

    return bench.hidden(rounds, alone, both, len(leaving) * PLAN.delay)


def beside_a_slow_one(bench: Bench, numbers: int, rounds: int, rest_s: float) -> dict[str, float]:
    """Milliseconds a step of those that are not slow, within a round, and how old what they took was, in steps."""
    like, result = [torch.randn(numbers // TENSORS) for _ in range(TENSORS)], {}
    ways: dict[str, type[Local]] = {"in_step": PairAveraging, "asynchronous": AsyncPairAveraging}
    for way, kind in ways.items():
        strategy, learners = kind(PAIRS, like, bench.group), {bench.group.rank: [t.clone() for t in like]}
        times, ages = [], []
        for turn in range(rounds + 1):
            strategy.begin(like)
            bench.group.all_reduce(torch.zeros(1)).wait()
            began = time.perf_counter()
            for step in range(PAIRS.every):
                if step:
                    strategy.mix(learners, step - 1)
                rest(rest_s * (2 if bench.group.rank == SLOW else 1))
            seconds = time.perf_counter() - began
            rows = bench.group.gather_row([seconds / PAIRS.every, strategy.taken, strategy.taken_age])
            strategy.finish()
            strategy.rounds += 1
            if turn:
                times.append(max(row[0] for rank, row in enumerate(rows) if rank != SLOW))
                ages.append(sum(row[2] for row in rows) / max(1.0, sum(row[1] for row in rows)))
        result[f"{way}_ms"] = 1e3 * statistics.median(times)
        result["age_steps"] = statistics.median(ages)
    return {"computing_ms": 1e3 * rest_s, **result}


def work(
    rank: int, spaces: list[str], names: list[str], store: tuple[str, int], case: str, args: Any, out: str
) -> None:
    """One case on this worker; the first one writes what came of it."""
    torch.set_num_threads(1)
    enter(spaces[rank])
    bench = Bench(rank, store)
    numbers, rounds, rest_s = args
    if case == "named":
        result = named(bench, numbers, rounds)
    elif case == "fragments":
        result = fragments(bench, numbers, rounds)
    else:
        result = beside_a_slow_one(bench, numbers, rounds, rest_s)
    bench.group.all_reduce(torch.zeros(1)).wait()  # nobody ends while another one still talks to it
    if rank == 0:
        Path(out).write_text(json.dumps(result))


def measured(case: str, rate: str, args: Sequence[Any]) -> dict[str, Any]:
    """A row."""
    with network((rate,) * HOSTS) as (_, given, _, folder):
        on_workers(work, HOSTS, *given, case, tuple(args), str(folder / "found"))
        data = json.loads((folder / "found").read_text())
    rounded = {name: round(value, 3) for name, value in data.items()}
    return {"what": case, "links": rate or "not shaped", **rounded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one rate, few rounds")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=1 << 20, help="float32 numbers of a model, and of a named tensor")
    parser.add_argument("--rest", type=float, default=0.05, help="seconds of computing a step, beside a slow worker")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    size, rounds = (1 << 16, 2) if args.smoke else (args.size, args.rounds)
    rest_s = 0.02 if args.smoke else args.rest
    rows = []
    for case, rates in {"named": RATES, "fragments": RATES, "pairs": ("",)}.items():
        for rate in rates[1:2] if args.smoke and len(rates) > 1 else rates:
            rows.append(measured(case, rate, (size, rounds, rest_s)))
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if args.out:
        result = {
            "rounds": rounds,
            "bytes": 4 * size, "plan": str(PLAN), "pairs": str(PAIRS),
            "emulated": "links shaped (tbf) between namespaces, computing is a rest", "rows": rows,
        }  # fmt: skip
        write_result(args.out, result)


if __name__ == "__main__":
    main()
