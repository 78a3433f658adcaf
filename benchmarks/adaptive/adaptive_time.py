"""The declared time model of ``adaptive.py``: what a step of any batch takes on W workers, from what is measured here.

On one CPU large batches are not faster, so the time of W workers must be modelled: the largest share's gradient (a line
through measured steps of one worker on one thread) and then a ring all-reduce (latency and seconds a byte as measured
between two processes). ``elastune.core.plan.data_parallel`` has the formulas. Nothing overlaps; evaluation is not
counted.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.adaptive.adaptive_trial import MICRO_BATCH, MOMENTUM, cnn
from benchmarks.common.forked import on_workers
from tests.support.sessions import lone_session
from torch.utils.data import TensorDataset

from elastune.core.journal.records import LinkMeasured
from elastune.core.plan.data_parallel import DataParallelStep, fit_parts
from elastune.core.run import ExecutionSettings, Place
from elastune.parallel.comm.network_probe import measure_link
from elastune.parallel.comm.process_groups import join
from elastune.runtime.job.run import machine_context

SHARES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BLOCK = 10  # steps


def calibrate(rounds: int) -> dict[str, Any]:
    """Measure steps and link on this machine, fit the model. Blocks of all shares take turns, ``rounds`` times.

    The quietest block and reduction count: others on the machine only ever add time.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measured = _gradients(Path(folder), rounds)
        link = _link(folder, rounds, size_bytes := sum(4 * p.numel() for p in cnn().parameters()))
    quiet = [(share, min(times)) for share, times in measured.items()]
    model = fit_parts(quiet, size_bytes, [link]).model
    return {
        "model": asdict(model),
        "link": asdict(link),
        "steps_ms": {
            share: {
                "quietest_block": 1e3 * min(times),
                "median": 1e3 * statistics.median(times),
                "fitted": 1e3 * model.gradient_s(share, 1),
            }
            for share, times in measured.items()
        },
        "rounds": rounds,
        "machine": machine_context(),
    }


def read(path: Path) -> DataParallelStep:
    """The model that a calibration left."""
    return DataParallelStep(**json.loads(path.read_text())["model"])


def _gradients(out: Path, rounds: int) -> dict[int, list[float]]:
    """Seconds of a whole step of one worker (data, both passes, optimizer), by share: the mean of each block."""
    steps = {share: _steps(out, share) for share in SHARES}
    for stream in steps.values():
        next(itertools.islice(stream, BLOCK, None))
    times: dict[int, list[float]] = {share: [] for share in SHARES}
    for _ in range(rounds):
        for share, stream in steps.items():
            started = time.perf_counter()
            next(itertools.islice(stream, BLOCK - 1, None))
            times[share].append((time.perf_counter() - started) / BLOCK)
    return times


def _steps(out: Path, share: int) -> Iterator[None]:
    """Yields after each step."""
    data = TensorDataset(torch.randn(4096, 1, 28, 28), torch.randint(0, 10, (4096,)))
    session = lone_session(out, execution=ExecutionSettings(mode="fast", micro_batch=MICRO_BATCH))
    model = cnn()
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=MOMENTUM))
    for _ in session.epochs(10**9):
        for x, y in session.batches(data, batch_size=share, drop_last=True):
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            yield


def _link(folder: str, rounds: int, size_bytes: int) -> LinkMeasured:
    """Of repeated measurements between two processes over the loopback interface, the quietest for ``size_bytes``."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    out = f"{folder}/link.json"
    on_workers(_reduce, 2, f"file://{folder}/rendezvous", rounds, out)
    links = [LinkMeasured(2, *row) for row in json.loads(Path(out).read_text())]
    return min(links, key=lambda link: link.latency_s + size_bytes * link.seconds_per_byte)


def _reduce(rank: int, rendezvous: str, rounds: int, out: str) -> None:
    torch.set_num_threads(1)
    group = join(Place(rank=rank, world=2, rendezvous=rendezvous))
    links = [measure_link(group) for _ in range(rounds)]
    if rank == 0:
        Path(out).write_text(json.dumps([(link.latency_s, link.seconds_per_byte) for link in links]))
    os._exit(0)  # as elastune's workers end: see comm.group.join
