"""What hosts that come and die, and a controller that dies, cost the others: elastune beside torchrun and Ray Train.

Four hosts are network namespaces of this machine with two workers each, links shaped to 1 Gbit/s. Compute is emulated:
a worker sleeps for each sample, since eight of them share this machine's cores; what is sent and waited for is real.
All train the same network on the same samples. A pause is the longest gap between two steps less the median step of as
many workers: of any survivor (elastune), of whoever is rank 0 (the others, who replace every process). "Adopted" is the
time from the command line of ``elastune run --resume`` until its journal says so, after kill -9 of the controller.

    python -m benchmarks.elastic.hosts [--smoke] [--only elastune,torchrun,ray] [--out benchmarks/results/hosts.json]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.pauses import Ticks, irregular, reached, survivors_pause_s
from benchmarks.common.result_file import write_result
from benchmarks.elastic.elastic_peers import by_event
from benchmarks.elastic.hosts_peers import BATCH, EACH, HOSTS, LINK_BURST, PEERS, SIZE, peer_rows
from benchmarks.programs.workload import OWNER, SAMPLE_S
from tests.support.agent_runs import ELASTUNE, LIMIT_S, AgentRun
from tests.support.hosts import Network

from elastune.core.journal.files import read
from elastune.core.journal.records import Adopted, Regrouped
from elastune.recipes.datasets import cache_folder
from elastune.report.sample_ledger import ledger

PROGRAM = Path(__file__).parents[1] / "programs" / "elastic_train.py"
LINK = "1gbit"
GRACE_S = 60
LONG_S = 1.0
GOALS = {"join": 60.0, "join_cold": 60.0, "lost": 150.0, "adopted_ms": 2000.0}
RATIO = 50.0


@dataclass(frozen=True)
class Shape:
    """How many hosts, workers on each, and how often each event.

    ``slots``: equal shares for all workers, and for those without the last host. ``sample_s``: of the emulated device.
    ``settled``, ``after``: steps before an event, and after its effect.
    """

    hosts: int = HOSTS
    each: int = EACH
    rounds: int = 5
    slots: int = 24
    sample_s: float = 0.003
    settled: int = 30
    after: int = 15

    @property
    def most(self) -> int:
        """Workers on all hosts."""
        return self.hosts * self.each

    @property
    def fewer(self) -> int:
        """Workers without the last host."""
        return self.most - self.each


SMALL = Shape(2, 1, 1, slots=4, sample_s=0.0005, settled=8, after=5)


class Measured:
    """A run of elastune on the hosts of ``network``, and the steps that its workers note."""

    def __init__(self, network: Network, folder: Path, shape: Shape) -> None:
        self.shape = shape
        noted = folder / "ticks"
        noted.mkdir()
        self.ticks = Ticks(noted)
        bounds = ["--workers", f"{shape.fewer}:{shape.most}", "--slots", str(shape.slots), "--seed", "3"]
        self.run = AgentRun(
            network, folder, "run", str(PROGRAM), *settings(noted), *bounds, "--grace", f"{GRACE_S}s",
        )  # fmt: skip
        self.run.until(self.run.token.exists)

    @property
    def step(self) -> int:
        """The newest."""
        self.ticks.refresh()
        newest = self.ticks.newest()
        return newest.step if newest else 0

    def settle(self, steps: int) -> None:
        """Let so many steps pass, with a controller or without."""
        wanted, until = self.step + steps, time.monotonic() + LIMIT_S
        while self.step < wanted:
            if time.monotonic() > until:
                raise AssertionError(f"no step {wanted}: {self.run.said}")
            time.sleep(0.02)

    def event(self, name: str, world: int, act: Callable[[], object]) -> dict[str, Any]:
        """What ``act``, after which there are ``world`` workers, costs those who stay."""
        self.settle(self.shape.settled)
        since = time.monotonic()
        act()
        until = self._reached(since, world, self.shape.after)
        self.settle(self.shape.after)
        pause = survivors_pause_s(self.ticks, since, until)
        assert pause is not None
        if pause > LONG_S:  # what the controller said may tell why
            print(
                "\n".join(self.run.said.splitlines()[-8:] + [repr(view) for view in self.run.records(Regrouped)[-3:]])
            )
        began = self._reached(since, world, 0)
        return {"event": name, "pause_ms": pause * 1e3, "until_effect_ms": (began - since) * 1e3}

    def _reached(self, since: float, world: int, steps: int) -> float:
        results: list[float] = []

        def there() -> bool:
            self.ticks.refresh()
            results[:] = [at for at in [reached(self.ticks, since, lambda tick: tick.world == world, steps)] if at]
            return bool(results)

        self.run.until(there)
        return results[0]

    def adoption(self) -> dict[str, Any]:
        """kill -9 of the controller; how long the next one takes to have its workers."""
        self.settle(self.shape.settled)
        self.run.controller.kill()
        self.run.controller.wait()
        self.settle(self.shape.after)
        before = len(self.run.records(Adopted))
        began, step = time.time(), self.step
        self.run.begin("--resume")
        self.run.until(lambda: len(self.run.records(Adopted)) > before)
        status = Path(f"/proc/{self.run.controller.pid}/stat").read_text().rpartition(")")[2].split()
        cpu_ms = (int(status[11]) + int(status[12])) * 1e3 / os.sysconf("SC_CLK_TCK")
        at, adopted = self.run.entries(Adopted)[-1]
        self.settle(self.shape.after)
        assert len(adopted.workers) == self.shape.most, adopted
        took = {"adopted_ms": (at - began) * 1e3, "controllers_cpu_ms": cpu_ms}
        return {"event": "adopted", **took, "steps_meanwhile": adopted.step - step}

    def end(self) -> dict[str, Any]:
        """Stop it at the next step, and hold it against one worker alone that nothing happens to."""
        self.run.controller.send_signal(signal.SIGINT)
        self.run.controller.wait(LIMIT_S)
        result = json.loads(self.run.result)
        seen = ledger(read(self.run.out / "journal.jsonl"))
        alone = undisturbed(result["steps"], self.shape.slots)
        same = {"steps": result["steps"], "equal": result["sha256"] == alone["sha256"], "exact_ledger": seen.exact}
        return {**same, **irregular(self.ticks)}


def settings(noted: Path) -> list[str]:
    """Of the program; it writes no checkpoint."""
    chosen = [f"size={SIZE}", f"batch_size={BATCH}", f"ticks={noted}"]
    return [*(word for setting in chosen for word in ("--set", setting)), "--checkpoint-every", "0"]


def undisturbed(steps: int, slots: int) -> dict[str, Any]:
    """What one worker comes to in as many steps, on no emulated device."""
    with tempfile.TemporaryDirectory() as folder:
        size = ["--workers", "1", "--slots", str(slots), "--seed", "3", "--max-steps", str(steps)]
        words = ["run", str(PROGRAM), *settings(Path(folder)), *size, "--json", "--out", f"{folder}/run"]
        environment = {**os.environ, SAMPLE_S: "0"}
        done = subprocess.run([*ELASTUNE, *words], env=environment, check=True, stdout=subprocess.PIPE)
    data: dict[str, Any] = json.loads(done.stdout)
    return data


def elastune_rows(shape: Shape) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Every event in turn; and how the run ended."""
    last = shape.hosts - 1
    rows = []
    with Network(shape.hosts) as network, tempfile.TemporaryDirectory() as folder:
        for host in network.hosts:
            host.slow(LINK, LINK_BURST)
        here = Measured(network, Path(folder), shape)
        run = here.run

        def measure(name: str, world: int, act: Callable[[], object]) -> None:
            rows.append(here.event(name, world, act))
            say("elastune", rows[-1])

        try:
            for at in range(last):
                run.agent(at, shape.each)
            run.until(lambda: here.step > 0)
            for _ in range(shape.rounds):
                # A new agent's imports take this machine's cores from those who train.
                measure("join_cold", shape.most, lambda: run.agent(last, shape.each))
                measure("none", shape.most, lambda: None)
                measure("leave", shape.fewer, lambda: run.resize(shape.fewer))
                measure("join", shape.most, lambda: run.resize(shape.most))
                measure("lost", shape.fewer, lambda: run.lose(last))
            measure("join_cold", shape.most, lambda: run.agent(last, shape.each))
            for _ in range(shape.rounds):
                rows.append(here.adoption())
                say("elastune", rows[-1])
            return rows, here.end()
        finally:
            run.close()


def say(who: str, row: dict[str, Any]) -> None:
    result = "  ".join(f"{name} {value:.0f}" for name, value in row.items() if name != "event")
    print(f"{who:9} {row['event']:12} {result}", flush=True)


def verdicts(cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The goals beside what was found, and how many times elastune's pause every other one's is."""
    ours = cells.get("elastune", {})
    results = {
        name: figures["adopted_ms" if name == "adopted_ms" else "pause_ms"]["median"]
        for name in GOALS
        if (figures := ours.get("adopted" if name == "adopted_ms" else name))
    }
    goals = {name: {"goal_ms": GOALS[name], "median_ms": ms, "met": ms <= GOALS[name]} for name, ms in results.items()}
    ratios = {
        who: {
            event: round(theirs[event]["pause_ms"]["median"] / ours[event]["pause_ms"]["median"], 1)
            for event in ("join", "lost")
            if event in theirs and event in ours
        }
        for who, theirs in cells.items()
        if who != "elastune"
    }
    return {"goals": goals, "over_elastune": ratios, "goal_over_elastune": RATIO}


def write(out: Path, shape: Shape, data: dict[str, Any]) -> None:
    """The result; each cell has the load average of its last 5 minutes."""
    result = {
        "emulated": f"compute, {shape.sample_s:g} s a sample; hosts are namespaces, links shaped to {LINK}",
        "hosts": HOSTS, "workers_a_host": EACH, "batch": BATCH, "slots": shape.slots, **data,
    }  # fmt: skip
    write_result(out, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="elastune alone, each event once, two hosts of one worker")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-rounds", type=int, default=3)
    parser.add_argument("--only", default="elastune,torchrun,ray")
    parser.add_argument("--peers-dir", type=Path, default=cache_folder() / "benchmark-peers")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shape = SMALL if args.smoke else Shape(rounds=args.rounds)
    os.environ.update({OWNER: str(os.getpid()), SAMPLE_S: str(shape.sample_s), "OMP_NUM_THREADS": "1"})
    only = ["elastune"] if args.smoke else args.only.split(",")
    cells: dict[str, dict[str, Any]] = {}
    ended: dict[str, Any] = {}
    for who in [who for who in ("elastune", *PEERS) if who in only]:
        if who == "elastune":
            rows, ended = elastune_rows(shape)
            print(f"elastune  {ended}", flush=True)
        else:
            rows = peer_rows(who, args.peer_rounds, args.peers_dir, LINK, lambda row, w=who: say(w, row))
        cells[who] = {**by_event(rows), "load_average": round(os.getloadavg()[1], 2)}
        results = {"cells": cells, "run": ended, **verdicts(cells)}
        if args.out:  # after each: the slowest comes last
            write(args.out, shape, results)
    print(json.dumps({name: value for name, value in results.items() if name != "cells"}, indent=1))
    if ended and not (ended["equal"] and ended["exact_ledger"] and not ended["skipped"] and not ended["repeated"]):
        sys.exit("a step was lost or done twice, or the weights are not those of an undisturbed run")


if __name__ == "__main__":
    main()
