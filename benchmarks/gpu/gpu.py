"""On one GPU, with no network: are weights equal over workers that share it, and what does that cost?

1. ``--tests``: all tests marked ``gpu``.
2. Exactness, by the product (``elastune run``): ResNet-50 and a GPT of 124 million parameters on made data, fp32 and
   bf16, by 1, 2 and 4 workers on the one GPU, in bf16 also by 3 of which one is killed, and by mechanism ``zero``: one
   SHA-256 of weights, buffers and optimizer state. It fails (exit code 1) where they differ.
3. Step time, paired in the same processes (``gpu_cells.py``): plain PyTorch (one worker; also with torch's
   deterministic kernels) or DistributedDataParallel over gloo (2 and 4), ``fast``, ``exact`` with one slot a worker,
   and with four by one worker; peak memory of each.
4. What it costs to monitor the gradient noise scale at every step and at every tenth.

The global batch stays what it is, however many workers there are: they share one GPU, so more of them are no faster.
Without a GPU it says so and runs small models on the CPU, where nothing is said of memory.

    python -m benchmarks.gpu.gpu [--smoke] [--tests] [--out benchmarks/results/gpu.json]     # make gpu: all of it
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.common.result_file import CONDITIONS, command, write_result
from benchmarks.gpu.gpu_cells import DETERMINISTIC, FAST, PLAIN, exact, measure, shown

from elastune.runtime.job.run import machine_context
from elastune.runtime.placement import devices

HERE = Path(__file__).parents[1]
PROGRAM = HERE / "programs" / "gpu_train.py"
TESTS = HERE.parent / "tests"
SLOTS = 4
LIMIT_S = 300.0
MODELS = ("resnet", "gpt")
_DEVICE = """
import json, torch
p = torch.cuda.get_device_properties(0)
print(json.dumps({"gpu": p.name, "gpu_memory_gib": round(p.total_memory / 2**30, 1), "cuda": torch.version.cuda,
    "cudnn": torch.backends.cudnn.version(), "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32, "matmul_precision": torch.get_float32_matmul_precision()}))
"""


class Failed(Exception):
    """A run ended otherwise than it should."""


def machine(gpu: bool) -> dict[str, Any]:
    """The GPU is asked in a process of its own: here it must not be initialised."""
    results: dict[str, Any] = {"gpu": None}
    if gpu:
        results = json.loads(subprocess.run([sys.executable, "-c", _DEVICE], capture_output=True, check=True).stdout)
    return {**machine_context(), **results}


def tests() -> dict[str, Any]:
    """All tests marked ``gpu``, in six processes where pytest-xdist is there."""
    files = [str(path) for path in sorted(TESTS.rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    with tempfile.TemporaryDirectory() as folder:
        report = f"{folder}/tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", "-p", "no:cacheprovider"]
        if importlib.util.find_spec("xdist"):
            command += ["-n", "6", "--dist", "load"]  # most of a test is the start of CUDA in its workers
        done = subprocess.run([*command, "--durations=5", *files], cwd=HERE.parent, check=False)
        cases = [*ElementTree.parse(report).iter("testcase")]
    names = {kind: [c.get("name") for c in cases if c.find(kind) is not None] for kind in ("failure", "error")}
    skipped = {str(c.get("name")): result.get("message") for c in cases if (result := c.find("skipped")) is not None}
    bad = [*names["failure"], *names["error"]]
    passed = len(cases) - len(skipped) - len(bad)
    return {"exit_code": done.returncode, "passed": passed, "failed": bad, "skipped": skipped}


def train(case: dict[str, Any], size: str, steps: int) -> str:
    """The SHA-256 that a run ends with."""
    settings = {"model": case["model"], "size": size, "parts": 4, "pace_s": 0.3 if case["faults"] else 0.0}
    options = ["--workers", case["workers"], "--slots", SLOTS, "--precision", case["precision"], "--max-steps", steps]
    options += ["--checkpoint-every", 0, "--mechanism", case["mechanism"]]
    options += ["--chaos", "kill@step:2"] if case["faults"] else []
    for name, value in settings.items():
        options += ["--set", f"{name}={value}"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "elastune", "run", str(PROGRAM), "--json", "--out", f"{folder}/run"]
        run = subprocess.run(
            [*command, *map(str, options)], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    if run.returncode:
        raise Failed(f"{case}: exit code {run.returncode}: {run.stderr[-2000:]}")
    result = json.loads(run.stdout)
    if bool(result.get("chaos", {}).get("faults")) != case["faults"]:
        raise Failed(f"{case}: nobody was killed")
    return str(result["sha256"])


def exactness(size: str, steps: int, cases: list[dict[str, Any]], at_once: int) -> list[dict[str, Any]]:
    """One row for each model and precision: what weights its runs have ended with."""
    with ThreadPoolExecutor(at_once) as pool:
        hashes = [*pool.map(lambda case: train(case, size, steps), cases)]
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for case, sha256 in zip(cases, hashes, strict=True):
        model, precision = case["model"], case["precision"]
        fresh = {"model": model, "precision": precision, "steps": steps, "slots": SLOTS, "runs": {}}
        killed = ", one killed" if case["faults"] else ""
        row = rows.setdefault((model, precision), fresh)
        row["runs"][f"{case['mechanism']}, {case['workers']} workers{killed}"] = sha256
    for row in rows.values():
        row["equal"] = len(set(row["runs"].values())) == 1
        print(
            f"{row['model']:6} {row['precision']}  {'equal' if row['equal'] else 'DIFFERENT'}: {len(row['runs'])} runs"
        )
    return [*rows.values()]


PLAINLY = [("replicated", 1, False), ("replicated", 2, False), ("replicated", 4, False)]
OTHERWISE = [("replicated", 3, True), ("zero", 4, False)]
SMALL = [("replicated", 1, False), ("zero", 2, False)]
"""Mechanism, workers, whether one of them is killed: ways to train that must end with the same bits."""


def trainings(ways: dict[str, Sequence[tuple[str, int, bool]]]) -> list[dict[str, Any]]:
    """``ways``: by precision."""
    return [
        {"model": model, "precision": precision, "mechanism": mechanism, "workers": workers, "faults": killed}
        for model in MODELS
        for precision, those in ways.items()
        for mechanism, workers, killed in those
    ]


def timed(models: Sequence[str], settings: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    """The cells of step time and memory, against plain PyTorch and DDP."""
    alone = {"plain": PLAIN, "plain_deterministic": DETERMINISTIC, "fast": FAST, "exact": exact(1)}
    cells = []
    for model in models:
        for workers, precision in settings:
            variants_here = {"ddp": PLAIN, "fast": FAST, "exact": exact(workers)}
            variants = {**alone, "exact_4_slots": exact(SLOTS)} if workers == 1 else variants_here
            cells.append({"model": model, "workers": workers, "precision": precision, "variants": variants})
    return cells


def monitored(models: Sequence[str]) -> list[dict[str, Any]]:
    """The cells of what the noise scale costs, of one worker's four slots; ``again``: how far two equal ones differ."""
    watched = {f"every_{n}": exact(SLOTS, f"noise_scale:every={n}") for n in (1, 10)}
    variants = {"off": exact(SLOTS), "again": exact(SLOTS), **watched}
    return [{"model": name, "workers": 1, "precision": "bf16", "variants": variants, "steps": 10} for name in models]


def measured(cells: list[dict[str, Any]], device: str, size: str, budget_s: float) -> list[dict[str, Any]]:
    results = []
    for cell in cells:
        results.append(measure({"steps": None, "device": device, "size": size, "budget_s": budget_s, **cell}))
        print(shown(results[-1]), flush=True)
    return results


def bits(with_tests: bool, size: str, steps: int, cases: list[dict[str, Any]], at_once: int) -> dict[str, Any]:
    """What asks for equal bits, not for time, runs side by side."""
    with ThreadPoolExecutor(1) as beside:
        tested = beside.submit(tests) if with_tests else None
        results: dict[str, Any] = {"exactness": exactness(size, steps, cases, at_once)}
        if tested is not None:
            results["tests"] = tested.result()
    return results


def wrong(result: dict[str, Any]) -> list[str]:
    """What is not as it must be, in words."""
    rows = result.get("bits", {})
    results = [
        f"{row['model']} in {row['precision']} shows its workers"
        for row in rows.get("exactness", ())
        if not row["equal"]
    ]
    return [*results, *(["tests failed"] if rows.get("tests", {}).get("exit_code") else [])]


PARTS = ("bits", "step_time", "monitoring")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small models and few rounds, within a minute")
    parser.add_argument("--tests", action="store_true", help="run the tests marked gpu, too")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="these; --out keeps its others")
    parser.add_argument("--budget-s", type=float, default=8.0, help="seconds of turns of a timed cell")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # of all variants: as elastune's workers have it
    gpu = devices() != ("cpu",)
    device, size = ("cuda:0" if gpu else "cpu"), ("full" if gpu and not args.smoke else "small")
    if args.smoke:
        budget_s, steps = 0.0, 3
        cases, cells = trainings({"fp32": SMALL}), timed(("gpt",), [(1, "bf16"), (2, "bf16")])
        watched = monitored(("gpt",))
    else:
        budget_s, steps = args.budget_s, 6
        cases = trainings({"fp32": PLAINLY, "bf16": [*PLAINLY, *OTHERWISE]})
        cells, watched = timed(MODELS, [(1, "bf16"), (1, "fp32"), (2, "bf16"), (4, "bf16")]), monitored(MODELS)
    if not gpu:
        print("no GPU here: small models on the CPU; nothing is said of a GPU's bits, times or memory", flush=True)
    result: dict[str, Any] = {}
    if args.out and args.out.exists() and [*args.parts] != [*PARTS]:
        result = json.loads(args.out.read_text())
    result |= {"machine": machine(gpu), "device": device, "size": size}
    parts: dict[str, Callable[[], Any]] = {
        "bits": lambda: bits(args.tests, size, steps, cases, 6 if gpu else 2),
        "step_time": lambda: {"cells": measured(cells, device, size, budget_s)},
        "monitoring": lambda: {"cells": measured(watched, device, size, budget_s)},
    }
    for name in args.parts:
        started = time.monotonic()
        outcome = parts[name]()
        result[name] = {"command": command(), "seconds": round(time.monotonic() - started, 1), **outcome}
        if args.out:
            write_result(
                args.out, {**{k: v for k, v in result.items() if k not in CONDITIONS}, "machine": machine(gpu)}
            )
    seconds = sum(result[name]["seconds"] for name in args.parts)
    print("; ".join(wrong(result)) or "ok", f"({seconds:.0f} s, {result['machine']['gpu'] or 'CPU'})")
    return 1 if wrong(result) else 0


if __name__ == "__main__":
    sys.exit(main())
