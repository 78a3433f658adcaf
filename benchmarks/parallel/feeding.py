"""Samples a second that a training is fed with, beside plain WebDataset and torchdata; and a joiner in mid-epoch.

``tars``: tar files, read by WebDataset; plain is its loop under torchrun, with ``split_by_node``. ``decoded``: a
map-style set whose samples take half a millisecond to decode; plain is torchdata's ``StatefulDataLoader`` with a
``DistributedSampler``. All variants train one small model, plain under DistributedDataParallel, elastune in ``fast``
and in ``exact`` mode, one slot a worker. They take turns in the same processes, which have torchrun's environment.
Ratios are of samples a second, and of samples a second of CPU time (of the process, in rank 0): the latter do not see
how busy the machine is.

``join``: a stream of a million samples (without a state: of a tenth), of which half are used. A worker of an elastic
run joins there; the figure is how long its first batch takes from the state that it was sent, with a stream that seeks,
and with one that does not.

    python -m benchmarks.parallel.feeding [--smoke] [--out benchmarks/results/feeding.json]
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import statistics
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.common.forked import on_workers
from benchmarks.common.result_file import write_result
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from elastune.core.run import ExecutionSettings, Place, Position, Program, RunSpec
from elastune.core.slots import Mode
from elastune.elastic.worker.group import WorkerGroup
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import join
from elastune.train.data.divided import DividedSource, StreamPositions
from elastune.train.data.loading import LoaderOptions
from elastune.train.data.parts import Division, division_of
from elastune.train.session import Session

BATCH, FILES, IN_FILE = 64, 8, 256  # of one worker; tar files, and samples in each
DECODE_S = 0.5e-3
MODES: tuple[Mode, ...] = ("fast", "exact")
Stepper = Callable[[int], None]


def write_tars(folder: Path) -> None:
    """Images of 32 x 32 in three colours, and their classes."""
    colours = np.random.default_rng(0)
    for file in range(FILES):
        with tarfile.open(folder / f"{file}.tar", "w") as tar:
            for number in range(IN_FILE):
                image = colours.integers(0, 256, (3, 32, 32), np.uint8).tobytes()
                for name, data in (("img", image), ("cls", str(number % 10).encode())):
                    member = tarfile.TarInfo(f"{file}-{number:04}.{name}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def decoded(sample: Any) -> tuple[torch.Tensor, int]:
    image = torch.frombuffer(bytearray(sample["img"]), dtype=torch.uint8).float() / 255
    return image, int(sample["cls"])


class Decoded(Dataset[Any]):
    """Samples that are compressed, and take as long as ``DECODE_S`` at least."""

    def __init__(self) -> None:
        colours = np.random.default_rng(0)
        self.samples = [zlib.compress(colours.integers(0, 256, 3072, np.uint8).tobytes()) for _ in range(2048)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        until = time.perf_counter() + DECODE_S
        image = torch.frombuffer(bytearray(zlib.decompress(self.samples[index])), dtype=torch.uint8).float() / 255
        while time.perf_counter() < until:
            pass
        return image, index % 10


def plain_batches(kind: str, folder: str, group: Group) -> Iterator[Any]:
    if kind == "tars":
        import webdataset

        urls = sorted(map(str, Path(folder).glob("*.tar")))
        split = webdataset.WebDataset(urls, nodesplitter=webdataset.split_by_node, shardshuffle=False).map(decoded)
        loader: Any = webdataset.WebLoader(split.batched(BATCH, partial=False), batch_size=None, num_workers=0)
    else:
        from torchdata.stateful_dataloader import StatefulDataLoader

        data = Decoded()
        sampler: DistributedSampler[Any] = DistributedSampler(data, group.size, group.rank, drop_last=True)
        loader = StatefulDataLoader(data, BATCH, sampler=sampler, drop_last=True)
    while True:
        yield from loader


def steps_of(batches: Iterator[Any], model: nn.Module, backward: Callable[[torch.Tensor], None], sgd: Any) -> Stepper:
    def step(count: int) -> None:
        for x, y in itertools.islice(batches, count):
            backward(F.cross_entropy(model(x), torch.as_tensor(y)))
            sgd.step()
            sgd.zero_grad()

    return step


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3072, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def plain(kind: str, folder: str, group: Group) -> Stepper:
    model, sgd = build()
    wrapped = DistributedDataParallel(model) if group.size > 1 else model
    return steps_of(plain_batches(kind, folder, group), wrapped, lambda loss: loss.backward(), sgd)


def ours(kind: str, folder: str, group: Group, mode: Mode) -> Stepper:
    execution = ExecutionSettings(workers=group.size, num_slots=group.size, mode=mode)
    spec = RunSpec(Program(Path(__file__)), Path(folder), execution=execution, checkpoint_every_steps=0)
    session = Session(
        spec, WorkerGroup(group), torch.device("cpu"), config={}, send=lambda record: None, stop_requested=lambda: False
    )
    model, sgd = session.prepare(*build())
    if kind == "tars":
        import webdataset

        urls = sorted(map(str, Path(folder).glob("*.tar")))
        data: Any = webdataset.WebDataset(urls, nodesplitter=None, shardshuffle=False).map(decoded)
    else:
        data = Decoded()
    loader = DataLoader(data, BATCH * group.size, shuffle=kind != "tars" or None, drop_last=True)
    batches = (batch for _ in session.epochs(10**9) for batch in session.batches(loader))
    return steps_of(batches, model, session.backward, sgd)


def worker(rank: int, world: int, rendezvous: str, kind: str, folder: str, rounds: int, steps: int, out: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}  # as under torchrun
    group = join(Place(rank=rank, world=world, rendezvous=rendezvous))
    variants = {"plain": plain(kind, folder, group)} | {mode: ours(kind, folder, group, mode) for mode in MODES}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for step in variants.values():
        step(3)
    for turn in range(rounds):
        for name in list(variants)[:: 1 if turn % 2 else -1]:
            group.gather_floats([0.0])  # start together
            started, used = time.perf_counter(), time.process_time()
            variants[name](steps)
            group.gather_floats([0.0])
            seconds = time.perf_counter() - started, time.process_time() - used
            times[name].append((seconds[0] / steps, seconds[1] / steps))
    if rank == 0:
        Path(out).write_text(json.dumps(times))
    os._exit(0)


def measure(kind: str, world: int, rounds: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        write_tars(Path(folder))
        out = f"{folder}/times.json"
        on_workers(worker, world, world, f"file://{folder}/rendezvous", kind, folder, rounds, steps, out)
        times: dict[str, list[tuple[float, float]]] = json.loads(Path(out).read_text())
    cell: dict[str, Any] = {"kind": kind, "workers": world, "rounds": rounds, "steps": steps}
    walls, cpus = ({name: statistics.median(row[at] for row in of) for name, of in times.items()} for at in (0, 1))
    cell["samples_per_s"] = {name: BATCH * world / seconds for name, seconds in walls.items()}
    cell["cpu_ms_a_step"] = {name: 1000 * seconds for name, seconds in cpus.items()}
    print(f"{kind:8} {world} workers: plain {cell['samples_per_s']['plain']:7.0f} samples/s")
    for mode in MODES:
        pairs = list(zip(times["plain"], times[mode], strict=True))
        for at, of in enumerate(("time", "cpu")):
            ratios = sorted(theirs[at] / mine[at] for theirs, mine in pairs)
            low, middle, high = (ratios[int(q * (len(ratios) - 1))] for q in (0.25, 0.5, 0.75))
            cell[f"{mode}_over_plain_by_{of}"] = {"median": middle, "quartiles": [low, high]}
            print(f"    {mode:5} over plain by {of:4} {middle:.3f} [{low:.3f}-{high:.3f}]")
    return cell


# --- a joiner in mid-epoch ---


@dataclass
class Numbers(IterableDataset[torch.Tensor]):
    """A part of a million numbers, read one by one; ``seeks``: it has a state."""

    numbers: range
    next: int = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.next < len(self.numbers):
            self.next += 1
            yield torch.full((16,), float(self.numbers[self.next - 1]))

    def shard(self, index: int, count: int) -> Numbers:
        return type(self)(self.numbers[index::count])


class Seekable(Numbers):
    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


@dataclass
class Passed:
    """Stands for a run's progress."""

    position: Position


def joined(kind: type[Numbers], samples: int, slots: int, batch: int) -> dict[str, Any]:
    """The seconds that a joiner takes to its first batch, half-way through the epoch."""
    at = Passed(Position())
    stream = kind(range(samples))
    division = division_of(stream, slots)
    assert isinstance(division, Division)

    def source(positions: StreamPositions) -> DividedSource:
        return DividedSource(stream, division.open_part, positions, 0, 0, drop_last=False, loading=LoaderOptions())

    def positions() -> StreamPositions:
        return StreamPositions(WorkerGroup(Group()), slots, at, lambda record: None, lambda: None)

    first = positions()
    begun = source(first)
    for places, _ in zip(*read_from(begun, batch), strict=False):
        at.position = Position(offset=places.stop)
        if places.stop >= samples // 2:
            break
    state = json.dumps(first.state_dict())
    started = time.perf_counter()
    second = positions()
    second.load_state_dict(json.loads(state))
    late = source(second)
    next(late.fetch(late.batches(at.position.offset, batch)))
    seconds = time.perf_counter() - started
    print(
        f"join     {kind.__name__:8} at {at.position.offset} of {samples}: {seconds:.3f} s, {len(state)} bytes of state"
    )
    cell = {"kind": "join", "stream": kind.__name__, "samples": samples, "at": at.position.offset, "slots": slots}
    return {**cell, "first_batch_s": seconds, "state_bytes": len(state)}


def read_from(begun: DividedSource, batch: int) -> tuple[Iterator[range], Iterator[Any]]:
    """The places of each batch, and the batch."""
    places, ahead = itertools.tee(begun.batches(0, batch))
    return places, begun.fetch(ahead)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="two small cells, a few seconds")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    worlds, rounds, steps = ((2,), 3, 2) if args.smoke else ((1, 2, 4), args.rounds, 6)
    cells = [measure(kind, world, rounds, steps) for kind in ("tars", "decoded") for world in worlds]
    reads = partial(joined, slots=4, batch=256)
    most = 20_000 if args.smoke else 1_000_000
    cells += [reads(Seekable, samples=most), reads(Numbers, samples=most // 10)]
    if args.out:
        write_result(args.out, {"cells": cells})


if __name__ == "__main__":
    main()
