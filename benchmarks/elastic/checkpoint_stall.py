"""How long does training stand still for a checkpoint, against a copy of its state in memory?

One worker trains a chain of linear layers under AdamW, with a state of 100 MB and of 1 GB. In each round it measures,
in an order that rotates: ``copy`` (a copy of all tensors of the state into memory that exists), ``elastune``
(``session.save(wait=False)``, until it returns), ``async_save`` (of ``torch.distributed.checkpoint``, as its
documentation has it: until it returns) and ``async_save, staged`` (with a ``DefaultStager`` that is used again, which
keeps its memory, too: until its staging is complete). Each waits until its files are written before the next one
begins, so that no two write at one time. ``written``: seconds until elastune's files were on the disk. The first round
is left out: there all of them take new memory. The figures are medians, and medians of the ratios to the copy of the
same round.

    python -m benchmarks.elastic.checkpoint_stall [--smoke] [--out benchmarks/results/checkpoint_stall.json]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.common.result_file import write_result
from torch import nn

from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.elastic.worker.group import WorkerGroup
from elastune.parallel.comm.group import Group
from elastune.train.session import Session

SIZES_MB = (100, 1000)
SMOKE_MB = (4,)
LAYERS = 24
GOAL = 1.2
STATES = 3  # numbers that AdamW's training has for each parameter: itself and two moments
METHODS = ("copy", "elastune", "async_save", "async_save, staged")


def width_of(megabytes: int) -> int:
    """The width of a layer, so that the state of all has so many megabytes."""
    return max(8, round((megabytes * 1e6 / (4 * STATES * LAYERS)) ** 0.5))


def trained(megabytes: int, rounds: int, folder: Path) -> dict[str, Any]:
    """What ``measured`` finds for a state of so many megabytes, in this process: elastune's workers refuse torch's
    process group, which ``async_save`` needs."""
    width = width_of(megabytes)
    spec = RunSpec(Program(Path(__file__)), folder / "run", execution=ExecutionSettings(workers=1, num_slots=1))
    session = Session(
        spec, WorkerGroup(Group()), torch.device("cpu"), config={}, send=lambda _: None, stop_requested=lambda: False
    )
    model: Any = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    rows = torch.utils.data.TensorDataset(torch.randn(4, width))
    for _ in session.epochs(1):
        for (x,) in session.batches(rows, batch_size=4):
            session.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return measured(session, model, optimizer, rounds, folder)
    raise AssertionError("an epoch")


def measured(
    session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, rounds: int, folder: Path
) -> dict[str, Any]:
    """The seconds of each method, by round, and the bytes of the state."""
    import torch.distributed as dist
    from torch.distributed.checkpoint import FileSystemWriter, async_save
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    tensors = [*model.state_dict().values()]
    tensors += [each for of in optimizer.state_dict()["state"].values() for each in of.values()]
    copies = [torch.zeros_like(each) for each in tensors]
    written_s: list[float] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )

    def copy() -> tuple[float, Callable[[], object]]:
        began = time.perf_counter()
        for target, source in zip(copies, tensors, strict=True):
            target.copy_(source)
        return time.perf_counter() - began, lambda: None

    def ours() -> tuple[float, Callable[[], object]]:
        began = time.perf_counter()
        session.save(wait=False)
        stall_s = time.perf_counter() - began

        def end() -> None:
            session.state.settle()
            written_s.append(time.perf_counter() - began)

        return stall_s, end

    def theirs(**options: Any) -> tuple[float, Callable[[], object]]:
        at = folder / "dcp"
        shutil.rmtree(at, ignore_errors=True)
        began = time.perf_counter()
        answer: Any = async_save(state, storage_writer=FileSystemWriter(at), **options)
        future = getattr(answer, "upload_completion", answer)
        if (staged := getattr(answer, "staging_completion", None)) is not None:
            staged.result()
        return time.perf_counter() - began, future.result

    methods = dict(zip(METHODS, (copy, ours, theirs, lambda: theirs(async_stager=stager)), strict=True))
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    for nth in range(rounds + 1):
        for i in range(len(METHODS)):
            name = METHODS[(nth + i) % len(METHODS)]
            stall_s, end = methods[name]()
            end()
            seconds[name].append(stall_s)
    dist.destroy_process_group()
    return {"bytes": sum(each.nbytes for each in tensors), "seconds": seconds, "written_s": written_s}


def measure(megabytes: int, rounds: int) -> dict[str, Any]:
    """The row of one size of the state."""
    with tempfile.TemporaryDirectory(prefix="stall-") as at:
        found = trained(megabytes, rounds, Path(at))
    kept = {name: values[1:] for name, values in found["seconds"].items()}
    row: dict[str, Any] = {"megabytes": round(found["bytes"] / 1e6, 1), "rounds": rounds}
    for name in METHODS:
        ratios = [value / base for value, base in zip(kept[name], kept["copy"], strict=True)]
        row[name] = {
            "ms": round(1000 * statistics.median(kept[name]), 2),
            "of_a_copy": round(statistics.median(ratios), 2),
            "ms_of_rounds": [round(1000 * value, 2) for value in kept[name]],
            "first_ms": round(1000 * found["seconds"][name][0], 2),
        }
    return {**row, "written_s": round(statistics.median(found["written_s"][1:]), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a state of 4 MB, two rounds; nothing is judged")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=None)
    asked = parser.parse_args()
    rows = [measure(size, 2 if asked.smoke else asked.rounds) for size in (SMOKE_MB if asked.smoke else SIZES_MB)]
    for row in rows:
        print(f"{row['megabytes']:.0f} MB, written in {row['written_s']} s")
        for name in METHODS:
            print(f"  {name:20} {row[name]['ms']:9.2f} ms  {row[name]['of_a_copy']:5.2f} x a copy")
    if asked.out is not None:
        write_result(asked.out, {"goal": f"at most {GOAL} x a copy", "states": rows})


if __name__ == "__main__":
    main()
