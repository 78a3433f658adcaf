"""How long a pipeline's stages stand idle, beside what the sources say: GPipe, 1F1B, interleaved, zero bubble.

Each worker is one stage of a real run (``elastune.Session``) of a row of equal layers. Compute is paced (``paced.py``),
since four stages share two cores here: step times are emulated; messages and waiting are real. A stage's idle part is
what is left of its step when its emulated compute is taken away: waiting, and all that elastune itself does between two
passes. The formulas (``idle_part``; sources: ``mechanisms.pipeline.schedules``) know stages of equal cost, free
transfers, and passes of equal length, which is what is built here:

    GPipe and 1F1B   (S-1) / (M+S-1)          S stages, M micro-batches
    interleaved      (S-1) / (v M+S-1)        v chunks of layers on each worker, here 2
    zero bubble      (S-1) / (3 M+S-1)        ZB-H1

    python -m benchmarks.parallel.bubble [--smoke] [--out benchmarks/results/bubble.json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from benchmarks.common.forked import on_workers
from benchmarks.common.paced import Paced
from benchmarks.common.result_file import write_result
from torch import nn
from torch.utils.data import TensorDataset

from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, Place, Program, RunSpec, Schedule
from elastune.elastic.worker.group import WorkerGroup
from elastune.parallel.comm.process_groups import join, stand
from elastune.parallel.mechanisms.pipeline.pipeline_parallel import CHUNKS, Pipeline
from elastune.train.session import Session

FLOPS_A_SECOND = 2.5e8  # of the emulated device: 8.4 ms for a matrix product
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zero-bubble")
STAGES, MICRO_BATCHES = (2, 4), (4, 8, 16)
LAYERS, WIDTH, ROWS = 8, 256, 16  # of the model, of a layer, of a micro-batch
PASS_S = 3 * LAYERS * 2 * ROWS * WIDTH**2 / FLOPS_A_SECOND
"""A micro-batch, forward and backward, through all layers."""


def idle_part(schedule: Schedule, workers: int, batches: int) -> float:
    """The share of a step in which a worker is idle, by the sources' formulas. *Modelled*.

    They assume stages of equal cost, free transfers, and equal length of forward pass, gradient of inputs and gradient
    of weights. ``batches`` is a multiple of ``workers`` for the interleaved schedule.
    """
    bubble = {"gpipe": 3.0, "1f1b": 3.0, "interleaved": 3.0 / CHUNKS, "zero-bubble": 1.0}[schedule] * (workers - 1)
    return bubble / (bubble + 3.0 * batches)


def network() -> nn.Sequential:
    """Equal layers behind one that costs nothing and has parameters, so that the first one's input has gradients."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(10, WIDTH), *(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    )


def worker(rank: int, stages: int, rendezvous: str, schedule: Schedule, batches: int, steps: int, out: str) -> None:
    torch.set_num_threads(1)
    place = Place(rank=rank, world=stages, rendezvous=rendezvous)
    execution = ExecutionSettings(
        mechanism="pipeline", mesh=Mesh(pipeline=stages), num_slots=batches, schedule=schedule
    )
    group = join(place)
    workers = WorkerGroup(group, stand(group, place, execution.first_mesh))
    spec = RunSpec(Program(Path(__file__)), Path(tempfile.gettempdir()), execution=execution, checkpoint_every_steps=0)
    session = Session(
        spec, workers, torch.device("cpu"), config={}, send=lambda record: None, stop_requested=lambda: False
    )
    model = network()
    cuts = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)][1:]
    plan = Pipeline(cuts=tuple(cuts), costs=(1.0,) * LAYERS)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), plan=plan)
    rows = ROWS * batches
    data = TensorDataset(torch.arange(rows) % 10, torch.arange(rows) % WIDTH)
    source = (xy for _ in session.epochs(10**9) for xy in session.batches(data, batch_size=rows))
    results: list[float] = []
    paced = Paced(FLOPS_A_SECOND)
    started, counted = time.perf_counter(), 0.0
    with paced:
        for x, y in source:
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if session.ends_step:
                now = time.perf_counter()
                results += [now - started, (paced.flops - counted) / FLOPS_A_SECOND]
                started, counted = now, paced.flops
                if len(results) == 2 * steps:
                    break
    rows_of_all = workers.gather(results, "the times of all stages")
    if rank == 0:
        Path(out).write_text(json.dumps(rows_of_all))
    workers.gather([0.0], "the end")
    os._exit(0)  # as elastune's workers end: see comm.group.join


def measured(stages: int, schedule: Schedule, batches: int, steps: int) -> list[tuple[float, float]]:
    """By stage: a step's time and the emulated compute in it; medians over the steps after the first."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        on_workers(worker, stages, stages, f"file://{folder}/meet", schedule, batches, steps, str(out))
        data = json.loads(out.read_text())
    return [(statistics.median(row[2::2]), statistics.median(row[3::2])) for row in data]


def row_of(stages: int, schedule: Schedule, batches: int, rounds: list[list[tuple[float, float]]]) -> dict[str, Any]:
    """What the rounds of one cell have shown, beside the formula."""
    formula = idle_part(schedule, stages, batches)
    steps = sorted(max(step for step, _ in run) for run in rounds)
    idle = [sorted(1 - run[stage][1] / run[stage][0] for run in rounds) for stage in range(stages)]
    ideal = batches * PASS_S / stages / (1 - formula)
    return {
        "schedule": schedule, "stages": stages, "micro_batches": batches,
        "step_ms": round(1e3 * statistics.median(steps), 1),
        "step_ms_lowest_highest": [round(1e3 * steps[0], 1), round(1e3 * steps[-1], 1)],
        "modelled_step_ms": round(1e3 * ideal, 1), "over_modelled": round(statistics.median(steps) / ideal, 3),
        "idle_by_stage": [round(statistics.median(values), 3) for values in idle],
        "idle_lowest_highest": [round(min(v[0] for v in idle), 3), round(max(v[-1] for v in idle), 3)],
        "formula": round(formula, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="two schedules of 2 stages, few steps, a few seconds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a cell in each round; the first does not count")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    cells = list(itertools.product(STAGES, MICRO_BATCHES, SCHEDULES))
    rounds, steps = args.rounds, args.steps
    if args.smoke:
        cells, rounds, steps = [(2, 4, name) for name in SCHEDULES[1:4:2]], 1, 3
    assert set(SCHEDULES) == set(get_args(Schedule))
    results: dict[Any, list[list[tuple[float, float]]]] = {cell: [] for cell in cells}
    for _, (stages, batches, schedule) in itertools.product(range(rounds), cells):
        results[stages, batches, schedule].append(measured(stages, schedule, batches, steps))
    rows = [row_of(stages, schedule, batches, runs) for (stages, batches, schedule), runs in results.items()]
    for row in rows:
        idle = " ".join(f"{100 * share:4.1f}" for share in row["idle_by_stage"])
        print(
            f"{row['stages']} stages {row['micro_batches']:2} micro-batches {row['schedule']:11} "
            f"{row['step_ms']:7.1f} ms ({row['over_modelled']:.3f} x modelled)  "
            f"idle {idle} %, formula {100 * row['formula']:.1f} %",
            flush=True,
        )
    if args.out:
        result = {
            "rounds": rounds, "steps": steps,
            "emulated": f"compute paced to {FLOPS_A_SECOND:g} FLOP/s a worker", "rows": rows,
        }  # fmt: skip
        write_result(args.out, result)


if __name__ == "__main__":
    main()
