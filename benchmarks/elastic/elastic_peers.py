"""What faults and joiners cost the survivors in torchrun's elastic mode and in torchft, on the workload of elastic.py.

torchrun runs in this interpreter; torchft is installed into a virtual environment of its own below ``--peers-dir``,
which sees this interpreter's torch.
Both as their documentation says, torchft also with short timeouts. Pauses are the longest gap between two steps less
the median step: of any survivor (torchft), of whoever is rank 0 (torchrun, where every process is replaced).

    python -m benchmarks.elastic.elastic_peers [--smoke] [--only torchrun,torchft] \\
        [--out benchmarks/results/elastic_peers.json]
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.pauses import Ticks, pause_s, reached, summary, survivors_pause_s, usual_gaps
from benchmarks.common.result_file import write_result
from benchmarks.elastic.peer_processes import SETTLED_STEPS, Processes, Stalled, job, peer_python

from elastune.recipes.datasets import cache_folder

PROGRAMS = Path(__file__).parents[1] / "programs"
BATCH = 64  # of all workers together
CHECKPOINT_EVERY = 50
EVENTS = ("grow", "shrink", "kill", "kill_rank_0", "freeze")
TORCHFT = "torchft-nightly"  # 0.2.0, the newest release, crashes survivors under DDP on gloo


@dataclass(frozen=True)
class Timeouts:
    """torchft's own knobs: lighthouse heartbeat, how long it waits for stragglers, its tick; the collectives' limit."""

    name: str
    heartbeat_ms: int
    join_ms: int
    tick_ms: int
    collective_s: float


DEFAULTS = Timeouts("defaults", 5000, 60000, 100, 60.0)
# A shorter wait for stragglers than a slow step makes healthy replicas fall out and heal at every step.
TUNED = Timeouts("tuned", 500, 5000, 20, 5.0)


# -- torchrun ---------------------------------------------------------------------------------------------------------


def torchrun_agent(job: Processes, name: str, size: str, *options: str) -> subprocess.Popen[str]:
    # Without this, restarted workers of torch 2.13 find the addresses of those before them in the agent's store, and
    # fail to connect until the restarts are used up.
    job.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    program = [PROGRAMS / "torchrun_train.py", size, BATCH, job.folder, CHECKPOINT_EVERY]
    return job.start(name, sys.executable, "-m", "torch.distributed.run", *options, *program)


def torchrun_row(job: Processes, event: str, since: float, effect: Callable[[], float | None]) -> dict[str, Any]:
    """Wait for the ``effect`` of an event at ``since``, then tell what it cost."""
    until = job.until(effect, f"torchrun after {event}")
    new, again, best = [], 0, 0
    for tick in (line := job.ticks.rank_zero()):
        if tick.step > best:
            best = tick.step
            new.append(tick)
        else:
            again += tick.time_s > since
    usual = usual_gaps(job.ticks.of.values())
    return {
        "event": event,
        "pause_ms": (pause_s(line, since, until, usual) or 0.0) * 1e3,
        "until_new_step_ms": (pause_s(new, since, until, usual) or 0.0) * 1e3,  # what was lost is done again
        "steps_again": again,
    }


def torchrun_faults(workers: int, size: str, repeats: int, events: Sequence[str]) -> list[dict[str, Any]]:
    """kill -9 of the last rank and of rank 0, in turn."""
    rows = []
    with job() as here:
        torchrun_agent(
            here, "agent", size, "--standalone", f"--nproc-per-node={workers}", f"--max-restarts={4 * repeats}"
        )
        here.until_world(workers, 0.0, "torchrun's start")
        for turn in range(repeats):
            for event in events:
                here.until_steps(between_checkpoints(turn, repeats))
                pids = set(here.ticks.of)
                since = time.monotonic()
                best = here.ticks.newest()
                os.kill(here.ticks.pids()[0 if event == "kill_rank_0" else -1], signal.SIGKILL)

                def effect(pids: set[int] = pids, step: int = best.step if best else 0) -> float | None:
                    new = [t for pid, line in here.ticks.of.items() if pid not in pids for t in line if t.rank == 0]
                    return min((t.time_s for t in new if t.step > step + 5), default=None)

                rows.append(torchrun_row(here, event, since, effect))
                say("torchrun", workers, size, rows[-1])
        rows.append(undisturbed(here.ticks, workers))
    return rows


def torchrun_members(workers: int, size: str, repeats: int, events: Sequence[str]) -> list[dict[str, Any]]:
    """A further agent joins, and leaves at SIGTERM; one worker an agent, ``workers`` of them stay.

    Rendezvous waits 1 s for more to come, instead of the default 30.
    """
    rows = []
    with job() as here:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        options = (
            f"--nnodes={workers}:{workers + 1}", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=members",
            f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=last_call_timeout=1", f"--max-restarts={4 * repeats}",
            "--local-addr=127.0.0.1",
        )  # fmt: skip
        for number in range(workers):
            torchrun_agent(here, f"agent-{number}", size, *options)
        here.until_world(workers, 0.0, "torchrun's start")
        for turn in range(repeats):
            joiner = None
            for event in ("grow", "shrink"):
                here.until_steps(between_checkpoints(turn, repeats))
                world = workers + (event == "grow")
                since = time.monotonic()
                if joiner is None:
                    joiner = torchrun_agent(here, f"joiner-{turn}", size, *options)
                else:
                    joiner.send_signal(signal.SIGTERM)

                def effect(since: float = since, world: int = world) -> float | None:
                    changed = lambda tick: tick.world == world and tick.rank == 0  # noqa: E731
                    return reached(here.ticks, since, changed, CHECKPOINT_EVERY + 5)

                line = torchrun_row(here, event, since, effect)
                if event in events:
                    rows.append(line)
                    say("torchrun", workers, size, line)
    return rows


def between_checkpoints(turn: int, repeats: int) -> int:
    """Steps to wait before an event: events are spread evenly over the time between two checkpoints."""
    return SETTLED_STEPS + (turn * CHECKPOINT_EVERY) // repeats


# -- torchft ----------------------------------------------------------------------------------------------------------


def torchft_faults(
    folder: Path, workers: int, size: str, repeats: int, timeouts: Timeouts, events: Sequence[str]
) -> list[dict[str, Any]]:
    """In turn: a replica joins, and leaves at SIGTERM; one is killed, one frozen (and killed later), both replaced."""
    rows: list[dict[str, Any]] = []
    python = peer_python(folder, "torchft", TORCHFT)
    with job() as here:
        knobs = (timeouts.heartbeat_ms, timeouts.join_ms, timeouts.tick_ms)
        pipes = {"stdout": subprocess.PIPE, "stdin": subprocess.PIPE}
        lighthouse = here.start("lighthouse", python, PROGRAMS / "torchft_lighthouse.py", *knobs, **pipes)
        address = lighthouse.stdout.readline().strip() if lighthouse.stdout else ""
        replicas: list[subprocess.Popen[str]] = []

        def join() -> None:
            arguments = (size, BATCH // workers, here.folder, address, timeouts.collective_s)
            replicas.append(here.start("replica", python, PROGRAMS / "torchft_train.py", *arguments))

        for _ in range(workers):
            join()
        here.until_world(workers, 0.0, "torchft's start")

        def measure(event: str, world: int, act: Callable[[], object]) -> None:
            discarded, since = discards(here.ticks), time.monotonic()
            act()
            until = here.until_world(world, since, f"torchft after {event}", 5)
            here.until_world(world, since, "steps after it")
            rows.append(torchft_row(here.ticks, event, since, until, discarded))
            say("torchft", workers, size, rows[-1])

        for turn in range(repeats):
            if "grow" in events or "shrink" in events:
                measure("grow", workers + 1, join)
                measure("shrink", workers, replicas.pop().terminate)
            # With the default limit of a minute for a collective, one freeze is enough.
            for event in ("kill", "freeze") if turn == 0 or timeouts.collective_s < 10 else ("kill",):
                if event in events:
                    victim = next(p for p in replicas if p.pid == here.ticks.pids()[-1 if turn % 2 else 0])
                    fault = signal.SIGKILL if event == "kill" else signal.SIGSTOP
                    measure(event, workers - 1, lambda p=victim, s=fault: p.send_signal(s))
                    victim.kill()
                    victim.wait()
                    replicas.remove(victim)
                    measure(f"replaced_after_{event}", workers, join)
        rows.append(undisturbed(here.ticks, workers))
    return [row for row in rows if row["event"].removeprefix("replaced_after_") in ("none", *events)]


def discards(ticks: Ticks) -> dict[int, int]:
    return {pid: line[-1].discarded for pid, line in ticks.of.items()}


def torchft_row(ticks: Ticks, event: str, since: float, until: float, before: dict[int, int]) -> dict[str, Any]:
    pause = survivors_pause_s(ticks, since, until)
    now = discards(ticks)
    return {
        "event": event,
        "pause_ms": (pause or 0.0) * 1e3,
        "until_effect_ms": (until - since) * 1e3,
        "steps_discarded": max((now[pid] - count for pid, count in before.items()), default=0),
    }


def undisturbed(ticks: Ticks, workers: int) -> dict[str, Any]:
    return {"event": "none", "step_ms": usual_gaps(ticks.of.values()).get(workers, 0.0) * 1e3}


# -- all --------------------------------------------------------------------------------------------------------------


def say(who: str, workers: int, size: str, row: dict[str, Any]) -> None:
    result = "  ".join(f"{name} {value:.0f}" for name, value in row.items() if name != "event")
    print(f"{who:9} {workers} workers  {size:6} {row['event']:12} {result}", flush=True)


def by_event(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All rows of one job, by event and figure."""
    events: dict[str, Any] = {}
    for name in dict.fromkeys(row["event"] for row in rows):
        own = [row for row in rows if row["event"] == name]
        figures = [figure for figure in own[0] if figure != "event"]
        events[name] = {figure: summary([float(row[figure]) for row in own]) for figure in figures}
    return events


def peers(
    only: Sequence[str], folder: Path, repeats: int, sizes: Sequence[tuple[int, str]], events: Sequence[str] = EVENTS
) -> list[dict[str, Any]]:
    """Every cell of the asked peers. One that fails, or cannot be installed, is told: the others still count."""
    jobs: list[tuple[str, int, str, dict[str, Any], Callable[[], list[dict[str, Any]]]]] = []
    faults = [event for event in events if event in ("kill", "kill_rank_0")]
    for workers, size in sizes:
        if "torchrun" in only and faults:
            note: dict[str, Any] = {"checkpoint_every": CHECKPOINT_EVERY}
            jobs.append(("torchrun", workers, size, note, partial(torchrun_faults, workers, size, repeats, faults)))
        if "torchrun" in only and ("grow" in events or "shrink" in events):
            note = {"checkpoint_every": CHECKPOINT_EVERY, "last_call_timeout_s": 1}
            jobs.append(("torchrun", workers, size, note, partial(torchrun_members, workers, size, repeats, events)))
        if "torchft" in only:
            # With its defaults a fault costs torchft a timeout, which is the same every time: once is enough.
            for knobs, times in ((TUNED, repeats), (DEFAULTS, 1)):
                work = partial(torchft_faults, folder, workers, size, times, knobs, events)
                jobs.append(("torchft", workers, size, {"timeouts": vars(knobs)}, work))
    cells = []
    for who, workers, size, note, work in jobs:
        results = {"who": who, "workers": workers, "size": size, **note}
        try:
            cells.append({**results, "events": by_event(work())})
        except (Stalled, subprocess.CalledProcessError) as failure:
            print(f"{who} {workers} {size}: not run: {failure}", flush=True)
            cells.append({**results, "failed": f"not run: {failure}"})
    return cells


def over_elastune(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times elastune's median pause every peer's is, of the same event, size and number of workers."""
    rows = []
    for ours in (cell for cell in cells if cell["who"] == "elastune" and "events" in cell):
        same = [c for c in cells if c.get("workers") == ours["workers"] and c.get("size") == ours["size"]]
        for theirs in (cell for cell in same if cell is not ours and "events" in cell):
            pauses = {
                event: (figures["pause_ms"]["median"], ours["events"][event]["pause_ms"]["median"])
                for event, figures in theirs["events"].items()
                if "pause_ms" in figures and "pause_ms" in ours["events"].get(event, {})
            }
            named = {name: theirs[name] for name in ("who", "workers", "size", "timeouts") if name in theirs}
            rows.append({**named, "ratio": {event: round(peer / own, 1) for event, (peer, own) in pauses.items()}})
    return rows


def write(out: Path, cells: Sequence[dict[str, Any]]) -> None:
    """The result."""
    result: dict[str, Any] = {
        "cells": cells,
    }
    if ratios := over_elastune(cells):
        result["over_elastune"] = ratios
    write_result(out, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one of torchrun's workers killed, once, at 2 workers")
    parser.add_argument("--only", default="torchrun,torchft")
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--sizes", default="small,large")
    parser.add_argument("--events", default=",".join(EVENTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers-dir", type=Path, default=cache_folder() / "benchmark-peers")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.smoke:
        cells = peers(["torchrun"], args.peers_dir, 1, [(2, "small")], ("kill",))
    else:
        sizes = [(int(workers), size) for workers in args.workers.split(",") for size in args.sizes.split(",")]
        cells = peers(args.only.split(","), args.peers_dir, args.repeats, sizes, args.events.split(","))
    if args.out:
        write(args.out, cells)
    if any("failed" in cell for cell in cells):
        sys.exit(1)


if __name__ == "__main__":
    main()
