"""What members that come, go, die and freeze cost the survivors; and what being elastic costs every step.

One long run a cell: events are apart by at least forty steps, every worker notes when each of its steps was done, and
a pause is the longest gap of any survivor around the event, less the median step of as many workers. "none" is the same
figure where nothing happened: the machine's noise. Peers (see elastic_peers.py) train the same on the same machine.

    python -m benchmarks.elastic.elastic [--smoke] [--peers] [--out benchmarks/results/elastic.json]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.pauses import irregular, reached, step_end, summary, survivors_pause_s, usual_gaps
from benchmarks.elastic.driving import START_S, Run, Stalled, running
from benchmarks.elastic.elastic_peers import peers, write

from elastune.core.journal.records import ChangeTimed, Regrouped
from elastune.core.run import Elastic, ExecutionSettings, Program, RunSpec
from elastune.recipes.datasets import cache_folder
from elastune.runtime.clusters.local import LocalCluster

PROGRAMS = Path(__file__).parents[1] / "programs"
EVENTS = ("none", "grow", "shrink", "kill", "kill_rank_0", "freeze")
SETTLED_STEPS = 40
AFTER_STEPS = 5  # of a window, beyond the first step with the new number of workers
HEARTBEAT_S = 1.0
BATCH = 64  # of all workers together
# Milliseconds that the medians shall not exceed, "small" | "large" (100 MB of state).
GOALS = {
    "grow": (20.0, 300.0),
    "shrink": (20.0, 300.0),
    "kill": (80.0, 300.0),
    "kill_rank_0": (80.0, 300.0),
    "freeze": (HEARTBEAT_S * 1e3 + 150.0, HEARTBEAT_S * 1e3 + 300.0),
}
OVERHEAD_GOAL = 1.05


def spec_of(program: str, out: Path, workers: int, high: int, mode: Any, config: dict[str, Any]) -> RunSpec:
    return RunSpec(
        program=Program(PROGRAMS / program),
        out=out,
        config=config,
        execution=ExecutionSettings(workers=workers, mode=mode, num_slots=8),
        checkpoint_every_steps=0,
        elastic=Elastic(low=1, high=high, heartbeat_s=HEARTBEAT_S),
    )


def cause(run: Run, event: str, workers: int) -> int:
    """Make ``event`` happen. Returns the number of workers that it leads to."""
    if event in ("grow", "shrink"):
        target = workers + (event == "grow")
        run.handle.resize(target)
        return target
    pids = run.ticks.pids()
    victim = pids[0] if event == "kill_rank_0" else pids[-1]
    os.kill(victim, signal.SIGSTOP if event == "freeze" else signal.SIGKILL)
    return workers - 1


def measure(run: Run, event: str, workers: int) -> list[dict[str, Any]]:
    """One event, and whatever it takes until ``workers`` (after a grow, one more) train undisturbed again."""
    since = time.monotonic()
    if event == "none":
        run.until_steps(SETTLED_STEPS)
        return [row(run, event, since, since + (time.monotonic() - since) / 2, workers)]
    target, lost = cause(run, event, workers), event not in ("grow", "shrink")
    until = run.until_world(target, since, 0 if lost else AFTER_STEPS)
    windows = [(event, since, until, target)]
    if lost:  # a replacement comes, soon
        back = run.until_world(workers, until, AFTER_STEPS)
        windows.append((f"replaced_after_{event}", until, back, workers))
        target = workers
    run.until_world(target, windows[-1][2], SETTLED_STEPS)
    return [row(run, name, begin, step_end(run.ticks, end), world) for name, begin, end, world in windows]


def row(run: Run, event: str, since: float, until: float, world: int) -> dict[str, Any]:
    """``switch_ms`` is the part of the pause that is not the company of a worker that starts: from the last step
    without it on."""
    changed = reached(run.ticks, since, lambda tick: tick.world == world)
    pauses = {"pause_ms": since, "switch_ms": since if changed is None else max(since, changed - 0.001)}
    figures = {name: (survivors_pause_s(run.ticks, begin, until) or 0.0) * 1e3 for name, begin in pauses.items()}
    return {"event": event, **figures, "until_effect_ms": ((changed or until) - since) * 1e3}


def pauses_cell(workers: int, size: str, mode: str, repeats: int, events: tuple[str, ...]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {"who": "elastune", "workers": workers, "size": size, "mode": mode}
    with tempfile.TemporaryDirectory() as folder, LocalCluster(workers + 1) as cluster:
        ticks = Path(folder) / "ticks"
        ticks.mkdir()
        config = {"size": size, "batch_size": BATCH, "ticks": str(ticks)}
        spec = spec_of("elastic_train.py", Path(folder) / "run", workers, workers + 1, mode, config)
        with running(cluster, spec, ticks) as run:
            try:
                run.until_world(workers, 0.0, SETTLED_STEPS)
                for _ in range(repeats):
                    for event in events:
                        for line in measure(run, event, workers):
                            rows.append(line)
                            say(results, line)
                run.stop()
            except Stalled as stalled:
                results["failed"] = str(stalled)
                print(f"elastune {workers} {size}: {stalled}", flush=True)
                if logs := os.environ.get("ELASTUNE_BENCHMARK_KEEP"):
                    keep(Path(folder), Path(logs))
            results |= facts(run, workers)
    for name in dict.fromkeys(line["event"] for line in rows):
        own = [line for line in rows if line["event"] == name]
        figures = {figure: summary([line[figure] for line in own]) for figure in own[0] if figure != "event"}
        results.setdefault("events", {})[name] = figures
        if name in GOALS:
            figures["goal_ms"] = GOALS[name][size == "large"]
    return results


def facts(run: Run, workers: int) -> dict[str, Any]:
    """What the whole run tells: its steps, what was lost of them, and the pauses that it measured itself."""
    regrouped = [record for record in run.records if isinstance(record, Regrouped)]
    timed = [record for record in run.records if isinstance(record, ChangeTimed)]
    return {
        "step_ms": round(usual_gaps(run.ticks.of.values()).get(workers, 0.0) * 1e3, 2),
        "steps": run.step,
        "steps_in_survivors": irregular(run.ticks),
        "discarded": sum(record.discarded for record in regrouped),
        "own_pauses_ms": {
            kind: summary([record.pause_s * 1e3 for record in regrouped if record.planned is planned])
            for kind, planned in (("planned", True), ("forced", False))
        },
        "parts_ms": {
            kind: parts(timed, {record.version for record in regrouped if record.planned is planned})
            for kind, planned in (("planned", True), ("forced", False))
        },
    }


def parts(timed: list[ChangeTimed], versions: set[int]) -> dict[str, dict[str, Any]]:
    """What the slowest worker of each change did in its pause, by part."""
    slowest: dict[int, ChangeTimed] = {}
    for record in timed:
        before = slowest.get(record.version)
        if record.version in versions and (before is None or total_ms(before) < total_ms(record)):
            slowest[record.version] = record
    names = dict.fromkeys(name for record in slowest.values() for name in record.parts_ms)
    return {name: summary([record.parts_ms.get(name, 0.0) for record in slowest.values()], 2) for name in names}


def total_ms(record: ChangeTimed) -> float:
    return sum(record.parts_ms.values())


def keep(folder: Path, where: Path) -> None:
    """For whoever looks into a failure: the run's journal, logs and ticks."""
    where.mkdir(parents=True, exist_ok=True)
    for file in folder.rglob("*"):
        if file.is_file() and file.suffix in (".log", ".jsonl", ".ticks"):
            (where / file.name).write_bytes(file.read_bytes())


def overhead_cell(workers: int, mode: str, rounds: int, steps: int) -> dict[str, Any]:
    """Step time of an elastic run over plain DDP: blocks of both take turns in the same processes."""
    with tempfile.TemporaryDirectory() as folder, LocalCluster(workers) as cluster:
        config: dict[str, Any] = {
            "batch_size": BATCH * workers // 2,
            "folder": folder,
            "rounds": rounds,
            "steps": steps,
        }
        spec = spec_of("elastic_overhead.py", Path(folder) / "run", workers, workers, mode, config)
        with running(cluster, spec, Path(folder)) as run:
            run.finish(START_S + 60.0 + rounds * steps * workers)
        times: dict[str, list[float]] = json.loads((Path(folder) / "times.json").read_text())
    ratios = [ours / plain for ours, plain in zip(times["elastic"], times["ddp"], strict=True)]
    return {
        "who": "overhead", "workers": workers, "mode": mode, "over_ddp": summary(ratios, 3), "goal": OVERHEAD_GOAL,
        "ms": {name: summary([value * 1e3 for value in values], 2) for name, values in times.items()},
    }  # fmt: skip


def say(cell: dict[str, Any], line: dict[str, Any]) -> None:
    figures = "  ".join(f"{name} {value:7.1f}" for name, value in line.items() if name != "event")
    who = f"elastune  {cell['workers']} workers  {cell['size']:6} {cell['mode']:5}"
    print(f"{who} {line['event']:26} {figures}", flush=True)


def conclude(cells: list[dict[str, Any]]) -> None:
    """The medians beside their goals."""
    print()
    for cell in cells:
        if "failed" in cell:
            print(f"{cell['who']} {cell.get('workers', '')} {cell.get('size', '')}: FAILED: {cell['failed']}")
        if "over_ddp" in cell:
            ratio = cell["over_ddp"]
            verdict = "ok" if ratio["median"] <= cell["goal"] else "MISSED"
            figures = f"{ratio['median']} {ratio['quartiles']}"
            print(f"{cell['workers']} workers {cell['mode']:5} step over DDP's {figures} {verdict}")
        for event, figures in cell.get("events", {}).items():
            if "pause_ms" not in figures:
                continue
            pause = figures["pause_ms"]
            goal = figures.get("goal_ms")
            verdict = "" if goal is None else f"goal {goal:g}: {'ok' if pause['median'] <= goal else 'MISSED'}"
            print(
                f"{cell['who']:9} {cell['workers']} workers {cell['size']:6} {event:26} "
                f"{pause['median']:8.1f} ms {pause['quartiles']} most {pause['most']} of {pause['count']}  {verdict}"
            )


def attempt(job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A cell, or how it failed: the others still count."""
    try:
        return job()
    except Stalled as stalled:
        return {"who": "elastune", "failed": str(stalled)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one kill, one growth and a few steps; half a minute")
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--sizes", default="small,large")
    parser.add_argument("--mode", default="fast", choices=("fast", "exact"))
    parser.add_argument("--events", default=",".join(EVENTS))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--no-overhead", action="store_true")
    parser.add_argument("--peers", action="store_true", help="measure torchrun and torchft too (20 minutes)")
    parser.add_argument("--peer-repeats", type=int, default=3)
    parser.add_argument("--peers-dir", type=Path, default=cache_folder() / "benchmark-peers")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sizes = [(int(workers), size) for workers in args.workers.split(",") for size in args.sizes.split(",")]
    events, repeats = tuple(args.events.split(",")), args.repeats
    rounds, steps = 40, 10
    if args.smoke:
        sizes, events, repeats, rounds, steps = [(2, "small")], ("none", "grow", "shrink", "kill"), 1, 4, 5
    jobs: list[Callable[[], dict[str, Any]]] = [
        lambda w=workers, s=size: pauses_cell(w, s, args.mode, repeats, events) for workers, size in sizes
    ]
    if not args.no_overhead:
        jobs += [
            lambda w=workers: overhead_cell(w, args.mode, rounds, steps) for workers in sorted({w for w, _ in sizes})
        ]
    cells = [attempt(job) for job in jobs]
    if args.peers:
        cells += peers(["torchrun", "torchft"], args.peers_dir, args.peer_repeats, sizes, events)
    conclude(cells)
    if args.out:
        write(args.out, cells)
    if any("failed" in cell for cell in cells):
        sys.exit(1)


if __name__ == "__main__":
    main()
