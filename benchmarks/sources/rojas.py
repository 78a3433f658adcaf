"""What Rojas and Meneses asked, beside what was measured here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.sources.compared import NOT_GIVEN, Document, Ours, Row, Section

MECHANISMS = ("replicated", "zero", "sharded", "fsdp2", "deepspeed", "fairscale")
WORKERS = (1, 2, 4, 8)
BESIDE_DDP = ("replicated", "zero_fast", "zero_redundancy", "deepspeed", "fsdp2")


def throughput(result: Any) -> Sequence[Row]:
    """Samples a second of the CNN by mechanism and workers; compared: 8 workers over one replicated worker."""
    rate = {
        (row["mechanism"], row["workers"]): row["batch"] / row["measured_step_s"]
        for row in result["rows"]
        if row["model"] == "cnn" and row["mesh"].count("=") == 1 and not row["failed"]
    }
    alone = rate.get(("replicated", 1))
    rows = []
    for name in MECHANISMS:
        most = rate.get((name, 8))
        ours = Ours(most / alone, None, 1) if most and alone else None
        cells = tuple(f"{rate[name, n]:.0f}" if (name, n) in rate else "" for n in WORKERS)
        rows.append(Row(name, (NOT_GIVEN,), cells, None, ours, "emulated"))
    return [*rows, Row("horovod", (NOT_GIVEN,), ("",) * len(WORKERS), None, None, "measured")]


def beside_ddp(result: Any) -> Sequence[Row]:
    """Steps of models of 10 million parameters on 4 workers, over those of PyTorch's DDP."""
    rows = []
    for cell in result["cells"]:
        if cell["workers"] != 4 or "ddp" not in cell["variants"]:
            continue
        for name in BESIDE_DDP:
            over = cell["variants"].get(name, {}).get("over_ddp")
            if over:
                ours = Ours(over["median"], (over["low"], over["high"]), cell["rounds"])
                label = f"{cell['model']}: {name}"
                ms = f"{cell['variants'][name]['ms']:.0f}"
                rows.append(Row(label, (NOT_GIVEN,), (ms,), None, ours, "measured"))
    return rows


ROJAS = Document(
    "Rojas and Meneses",
    "How far does data-parallel training scale before accuracy drops, by mechanism, and can multi-objective tuning of "
    "the hyperparameters win it back? They show ResNet-50 under DDP on up to 240 GPUs.",
    "The figures of the curve are not given here: no text of the work was at hand.",
    (
        Section(
            "Accuracy against workers, by mechanism, before and after tuning",
            "ResNet-50 on up to 240 GPUs there; here it would be a CNN on MNIST.",
            "",
            "elastune frontier examples/mnist.py --workers 1,2,4,8,16",
        ),
        Section(
            "Throughput against workers, by mechanism",
            "Up to 240 GPUs there; here up to 8 paced workers in 4 network namespaces with links of 0.5 Gbit/s, a CNN, "
            "batches of 32, each cell once.",
            "prediction_here",
            "python -m benchmarks.parallel.prediction_here --minutes 40",
            "8 workers over 1 replicated",
            "none: each cell ran once",
            "runs",
            ("throughput",),
            tuple(f"samples/s, {n} workers" if n > 1 else "samples/s, 1 worker" for n in WORKERS),
            throughput,
            ("src/elastune/parallel", "src/elastune/core/plan", "benchmarks/parallel"),
        ),
        Section(
            "The same, steps beside PyTorch's DDP on one machine",
            "GPUs there; here 4 workers share two CPU cores. `zero_redundancy`, `deepspeed` and `fsdp2` are the other "
            "libraries' own loops.",
            "mechanisms",
            "python -m benchmarks.parallel.mechanisms",
            "step over DDP's",
            "least to most of paired rounds",
            "rounds",
            ("step",),
            ("ms a step",),
            beside_ddp,
            ("src/elastune/parallel", "src/elastune/train", "benchmarks/parallel"),
        ),
        Section(
            "Search against linear scaling of the learning rate, at equal budget",
            "`frontier` compares the two on one run; hypervolume and regret over five seeds are not measured.",
            "",
            "elastune frontier examples/digits.py --workers 1,2,4,8,16 --target 0.95 --budget auto",
        ),
    ),
)
