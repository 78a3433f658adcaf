"""What faults and joiners cost the survivors in torchrun's elastic mode and in torchft, on the workload of elastic.py.

torchrun runs in this interpreter; torchft is installed into a virtual environment of its own below ``--peers-dir``.
Both as their documentation says, torchft also with short timeouts. Pauses are the longest gap between two steps less
the median step: of any survivor (torchft), of whoever is rank 0 (torchrun, where every process is replaced).

    python benchmarks/elastic_peers.py [--smoke] [--only torchrun,torchft] [--out benchmarks/results/elastic_peers.json]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pauses import Ticks, pause_s, reached, summary, survivors_pause_s, usual_gaps
from programs.workload import OWNER

from elastune.job.machine import machine_context
from elastune.recipes.datasets import cache_folder

PROGRAMS = Path(__file__).parent / "programs"
BATCH = 64  # of all workers together
CHECKPOINT_EVERY = 50
SETTLED_STEPS = 40  # between two events
LIMIT_S = 300.0  # for any event to show its effect
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


class Stalled(Exception):
    """What had to happen did not within its limit."""


class Processes:
    """The processes of one job; none outlives the ``with`` block."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self.folder = folder
        self.ticks = Ticks(folder)
        self.environment = {**os.environ, OWNER: str(os.getpid()), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

    def start(self, name: str, *command: object, **options: Any) -> subprocess.Popen[str]:
        log = self._stack.enter_context((self.folder / f"{name}.log").open("a"))
        process = subprocess.Popen(
            [str(part) for part in command],
            **{"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL, "text": True, **options},
            env=self.environment,
            start_new_session=True,
        )
        self._stack.callback(end, process)
        return process

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """``condition()`` once it is neither None nor False, looked at a hundred times a second."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            self.ticks.refresh()
            if (found := condition()) is not None and found is not False:
                return found
            time.sleep(0.01)
        tails = [f"{log.name}: {log.read_text()[-300:]}" for log in self.folder.glob("*.log")]
        raise Stalled(f"{what} did not come within {LIMIT_S:g} s; {' | '.join(tails)}")

    def until_world(self, world: int, since: float, what: str, steps: int = SETTLED_STEPS) -> float:
        return float(
            self.until(lambda: reached(self.ticks, since, lambda tick: tick.world == world, steps), f"{what}: {world}")
        )


def end(process: subprocess.Popen[str]) -> None:
    """Kill ``process`` and its session: torchrun's workers are in sessions of their own, and end with their agent."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.stdin:
        process.stdin.close()


@contextmanager
def job() -> Iterator[Processes]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        yield Processes(stack, Path(folder))


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
    line = job.ticks.rank_zero()
    best = max(tick.step for tick in line if tick.time_s <= since)
    again = [tick for tick in line if tick.time_s > since and tick.step <= best]
    beyond = next(tick.time_s for tick in line if tick.step > best and tick.time_s > since)
    usual = usual_gaps(job.ticks.of.values())
    pause = pause_s(line, since, until, usual)
    return {
        "event": event,
        "pause_ms": (pause or 0.0) * 1e3,
        "until_new_step_ms": (beyond - since) * 1e3,
        "steps_again": len(again),
    }


def torchrun_faults(workers: int, size: str, repeats: int) -> list[dict[str, Any]]:
    """kill -9 of the last rank and of rank 0, in turn."""
    rows = []
    with job() as here:
        torchrun_agent(
            here, "agent", size, "--standalone", f"--nproc-per-node={workers}", f"--max-restarts={4 * repeats}"
        )
        here.until_world(workers, 0.0, "torchrun's start")
        for turn in range(repeats):
            for event, rank in (("kill", -1), ("kill_rank_0", 0)):
                # Faults hit anywhere between two checkpoints: these are spread evenly over the time between them.
                wait = (turn * CHECKPOINT_EVERY) // repeats
                newest = here.ticks.newest()
                target = (newest.step if newest else 0) + SETTLED_STEPS + wait
                here.until(lambda target=target: (t := here.ticks.newest()) is not None and t.step >= target, "steps")
                pids = set(here.ticks.of)
                since = time.monotonic()
                best = here.ticks.newest()
                os.kill(here.ticks.pids()[rank], signal.SIGKILL)

                def effect(pids: set[int] = pids, step: int = best.step if best else 0) -> float | None:
                    new = [t for pid, line in here.ticks.of.items() if pid not in pids for t in line if t.rank == 0]
                    return min((t.time_s for t in new if t.step > step + 5), default=None)

                rows.append(torchrun_row(here, event, since, effect))
                say("torchrun", workers, size, rows[-1])
        rows.append(undisturbed(here.ticks, workers))
    return rows


def torchrun_grow(workers: int, size: str, repeats: int) -> list[dict[str, Any]]:
    """A further agent joins; one worker an agent. Rendezvous waits 1 s for more to come, instead of the default 30."""
    rows = []
    for _ in range(repeats):
        with job() as here:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            options = (
                f"--nnodes={workers}:{workers + 1}", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=grow",
                f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=last_call_timeout=1", "--max-restarts=9",
                "--local-addr=127.0.0.1",
            )  # fmt: skip
            for number in range(workers):
                torchrun_agent(here, f"agent-{number}", size, *options)
            here.until_world(workers, 0.0, "torchrun's start")
            since = time.monotonic()
            torchrun_agent(here, "joiner", size, *options)

            def effect(since: float = since, here: Processes = here) -> float | None:
                grown = lambda tick: tick.world == workers + 1 and tick.rank == 0  # noqa: E731
                return reached(here.ticks, since, grown, CHECKPOINT_EVERY + 5)

            rows.append(torchrun_row(here, "grow", since, effect))
            say("torchrun", workers, size, rows[-1])
    return rows


# -- torchft ----------------------------------------------------------------------------------------------------------


def torchft_python(folder: Path) -> Path:
    """The interpreter of the virtual environment that has torchft and this interpreter's version of torch."""
    python = folder / "torchft" / "bin" / "python"
    if not (folder / "torchft" / "installed").exists():
        print(f"installing {TORCHFT} into {folder / 'torchft'}", flush=True)
        venv.create(folder / "torchft", with_pip=True, clear=True)
        torch = version("torch").partition("+")[0]
        subprocess.run([python, "-m", "pip", "install", "-q", f"torch=={torch}", "numpy", TORCHFT], check=True)
        (folder / "torchft" / "installed").touch()
    return python


def torchft_faults(python: Path, workers: int, size: str, repeats: int, timeouts: Timeouts) -> list[dict[str, Any]]:
    """In turn: a replica is killed, a new one joins, one is frozen (and killed later), a new one joins."""
    rows: list[dict[str, Any]] = []
    with job() as here:
        knobs = (timeouts.heartbeat_ms, timeouts.join_ms, timeouts.tick_ms)
        pipes = {"stdout": subprocess.PIPE, "stdin": subprocess.PIPE}
        lighthouse = here.start("lighthouse", python, PROGRAMS / "torchft_lighthouse.py", *knobs, **pipes)
        address = lighthouse.stdout.readline().strip() if lighthouse.stdout else ""
        share, replicas = BATCH // workers, []

        def replica() -> subprocess.Popen[str]:
            arguments = (size, share, here.folder, address, timeouts.collective_s)
            return here.start(f"replica-{len(replicas)}", python, PROGRAMS / "torchft_train.py", *arguments)

        for _ in range(workers):
            replicas.append(replica())
        here.until_world(workers, 0.0, "torchft's start")
        for turn in range(repeats):
            # With the default limit of a minute for a collective, one freeze is enough.
            for event in ("kill", "freeze") if turn == 0 or timeouts.collective_s < 10 else ("kill",):
                victim = next(p for p in replicas if p.pid == here.ticks.pids()[-1 if turn % 2 else 0])
                discarded = discards(here.ticks)
                since = time.monotonic()
                victim.send_signal(signal.SIGKILL if event == "kill" else signal.SIGSTOP)
                until = here.until_world(workers - 1, since, f"torchft after {event}", 5)
                victim.kill()
                victim.wait()
                here.until_world(workers - 1, since, "steps of the survivors")
                rows.append(torchft_row(here.ticks, event, since, until, discarded))
                say("torchft", workers, size, rows[-1])
                since, discarded = time.monotonic(), discards(here.ticks)
                replicas.append(replica())
                until = here.until_world(workers, since, "torchft's joiner", 5)
                here.until_world(workers, since, "steps after the join")
                rows.append(torchft_row(here.ticks, "grow", since, until, discarded))
                say("torchft", workers, size, rows[-1])
        rows.append(undisturbed(here.ticks, workers))
    return rows


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
    told = "  ".join(f"{name} {value:.0f}" for name, value in row.items() if name != "event")
    print(f"{who:9} {workers} workers  {size:6} {row['event']:12} {told}", flush=True)


def cell(who: str, workers: int, size: str, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """All rows of one job, by event and figure."""
    events: dict[str, Any] = {}
    for name in dict.fromkeys(row["event"] for row in rows):
        own = [row for row in rows if row["event"] == name]
        figures = [figure for figure in own[0] if figure != "event"]
        events[name] = {figure: summary([float(row[figure]) for row in own]) for figure in figures}
    return {"who": who, "workers": workers, "size": size, **more, "events": events}


def peers(only: list[str], folder: Path, repeats: int, sizes: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """Every cell of the asked peers. One that fails is told as such: the others still count."""
    python = torchft_python(folder) if "torchft" in only else Path()
    jobs: list[tuple[str, int, str, dict[str, Any], Callable[[], list[dict[str, Any]]]]] = []
    for workers, size in sizes:
        if "torchrun" in only:
            note = {"checkpoint_every": CHECKPOINT_EVERY}
            jobs.append(("torchrun", workers, size, note, lambda w=workers, s=size: torchrun_faults(w, s, repeats)))
            note = {**note, "last_call_timeout_s": 1}
            jobs.append(("torchrun", workers, size, note, lambda w=workers, s=size: torchrun_grow(w, s, repeats)))
        if "torchft" in only:
            for knobs in (DEFAULTS, TUNED):
                jobs.append((
                    "torchft", workers, size, {"timeouts": vars(knobs)},
                    lambda w=workers, s=size, k=knobs: torchft_faults(python, w, s, repeats, k),
                ))  # fmt: skip
    cells = []
    for who, workers, size, note, work in jobs:
        try:
            cells.append(cell(who, workers, size, work(), **note))
        except Stalled as stalled:
            print(f"{who} {workers} {size}: {stalled}", flush=True)
            cells.append({"who": who, "workers": workers, "size": size, **note, "failed": str(stalled)})
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="torchrun's faults, once, at 2 workers")
    parser.add_argument("--only", default="torchrun,torchft")
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--sizes", default="small,large")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers-dir", type=Path, default=cache_folder() / "benchmark-peers")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.smoke:
        cells = [cell("torchrun", 2, "small", torchrun_faults(2, "small", 1))]
    else:
        sizes = [(int(workers), size) for workers in args.workers.split(",") for size in args.sizes.split(",")]
        cells = peers(args.only.split(","), args.peers_dir, args.repeats, sizes)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"command": "python " + " ".join(sys.argv), "machine": machine_context(), "cells": cells}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
