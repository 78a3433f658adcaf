"""Strategies that change while training goes on, beside every fixed one: speed in each phase, and accuracy at the end.

1. "size": 1, 2, 4, 8, 16 workers, back to 1 and up again, four to a host; policy ``sync_by_size`` beside all-reduce,
   averaging, local SGD and DiLoCo from the first step to the last.
2. "link": four hosts with a worker each; in the middle third another's traffic leaves one of them a part of its link.
   Policy ``sync_by_link`` beside the fixed ones.

Hosts are network namespaces of this machine with shaped links. Compute is emulated (a declared time a sample), since
the workers share this machine's cores; what is sent and waited for is real. A phase is what a run did from its
twentieth step or so as so many workers (or with such a link) to its last: steps that workers come or go in, or that a
policy takes to answer, belong to none, but are in the whole run's time. Every run takes the same steps of the same
batches of Fashion-MNIST; accuracy is that of the test set.

    python -m benchmarks.adaptive.switching [--smoke] [--only size,link] [--seeds 3] \\
        [--out benchmarks/results/switching.json]
    python -m benchmarks.adaptive.switching --out benchmarks/results/switching.json --minutes 9      # again and again

With --minutes no run is begun that would end later. A run that was cut keeps its rows in --out, and the same command
goes on from there. A seed's runs follow one another, so that what is compared is of one hour.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.adaptive.switching_verdict import cell, judge, words
from benchmarks.common.kept import Row, Rows, ended
from benchmarks.common.pauses import Tick, Ticks
from benchmarks.programs.workload import OWNER, SAMPLE_S
from tests.support.agent_runs import AgentRun
from tests.support.hosts import Network

PROGRAM = Path(__file__).parents[1] / "programs" / "switching_train.py"
BATCH, LEARNERS, EVERY = 256, 16, 10
PASS = 50  # batches of a pass over the data: whole rounds
BURST = "256k"
SETTLING = 2 * EVERY  # steps, in which a policy has answered
COMING = 75  # steps, those of settling with them
PHASE_LIMIT_S = 900.0  # `averaging` sends all parameters after each step: 0.6 s of 16 workers
APART = {
    "local": f"local:learners={LEARNERS},every={EVERY}",
    "diloco": f"diloco:learners={LEARNERS},every={EVERY},outer_lr=1,outer_momentum=0.3",
    "averaging": f"averaging:learners={LEARNERS},every={EVERY}",
}


@dataclass(frozen=True)
class Story:
    """What happens to a run. ``phases``: workers and steps of each; ``congested``: of which phase the link is slow.

    ``words``: of the command line, by the name of what is compared.
    """

    name: str
    hosts: int
    each: int
    link: str
    sample_s: float
    phases: tuple[tuple[int, int], ...]
    words: dict[str, tuple[str, ...]]
    congested: int | None = None
    slow_link: str = ""

    @property
    def steps(self) -> int:
        """Of the whole run, in passes of ``PASS``: those of the phases, and ``COMING`` a phase, since workers take a
        while to come; the last phase has what is left."""
        return math.ceil((sum(steps for _, steps in self.phases) + COMING * len(self.phases)) / PASS) * PASS


def by_size(small: bool) -> Story:
    """Up to 16 workers and back."""
    up = ((1, 5), (2, 10)) if small else ((1, 10), (2, 20), (4, 40), (8, 80), (16, 120))
    phases = (*up, *up[-2::-1], (up[-1][0], 0))
    above, strategy = (1 if small else 4), "local"
    policy = f"sync_by_size:above={above},strategy={strategy},learners={LEARNERS},every={EVERY}"
    words = {"sync_by_size": ("--policy", policy), "allreduce": ()}
    words |= {name: ("--sync", sync) for name, sync in APART.items() if not small}
    hosts, each = (2, 1) if small else (4, 4)
    return Story("size", hosts, each, "100mbit", 0.0005 if small else 0.002, phases, words)


def by_link() -> Story:
    """Four workers, of which one has little of its link for a while."""
    policy = f"sync_by_link:learners={LEARNERS},noise=0.01"
    words = {"sync_by_link": ("--policy", policy), "sync_by_link, auto": ("--policy", policy, "--topology", "auto")}
    words |= {"allreduce": ()} | {name: ("--sync", APART[name]) for name in ("averaging", "local")}
    return Story("link", 4, 1, "1gbit", 0.001, ((4, 120), (4, 160), (4, 0)), words, 1, "30mbit")


def told(story: Story, name: str, seed: int, smoke: bool) -> Row:
    """One run."""
    workers = [count for count, _ in story.phases]
    size = ["--workers", f"{min(workers)}:{max(workers)}", "--slots", str(LEARNERS), "--mode", "fast"]
    size += ["--seed", str(seed), "--checkpoint-every", "0"]
    chosen = {"samples": BATCH * PASS, "epochs": story.steps // PASS, "batch_size": BATCH, "data": "fashion_mnist"}
    if smoke:
        chosen |= {"samples": BATCH * 4, "epochs": story.steps // 2, "data": "digits"}
    with Network(story.hosts) as network, tempfile.TemporaryDirectory() as folder:
        for host in network.hosts:
            host.slow(story.link, BURST)
        noted = Path(folder) / "ticks"
        noted.mkdir()
        settings = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
        settings += ["--set", f"ticks={noted}"]
        run = AgentRun(network, Path(folder), "run", str(PROGRAM), *settings, *size, *story.words[name])
        ticks = Ticks(noted)
        try:
            run.until(run.token.exists)
            for at in range(story.hosts):
                run.agent(at, story.each)
            bounds = lived_through(story, network, ticks, run)
            if run.controller.wait(600) != 0:
                raise RuntimeError(run.said)
            result = json.loads(run.result)
        finally:
            run.close()
        ticks.refresh()
    line = ticks.rank_zero()
    phases = [pace([tick for tick in line if since <= tick.time_s <= until]) for since, until in bounds]
    whole = {"whole": pace(line), "seconds": line[-1].time_s - line[0].time_s}
    return {"name": name, "seed": seed, "phases": phases, **whole, **facts(result)}


def lived_through(story: Story, network: Network, ticks: Ticks, run: AgentRun) -> list[tuple[float, float]]:
    """Ask for the workers of each phase, and let the last host's link be slow in its one; when each began and ended.

    A phase begins when so many workers have settled, and has so many steps from there; the last one has all that are
    left. How long workers take to come is no part of it.
    """
    bounds = []
    stretch(ticks, run, 0.0, None, 0)
    for phase, (workers, steps) in enumerate(story.phases):
        asked = time.monotonic()
        if len({count for count, _ in story.phases}) > 1:
            run.resize(workers)
        if story.congested is not None and phase:
            network.hosts[-1].slow(story.slow_link if phase == story.congested else story.link, BURST)
        began, ended = stretch(ticks, run, asked, workers, steps)
        last = phase + 1 == len(story.phases)
        bounds.append((began, math.inf if last else ended))
    return bounds


def stretch(ticks: Ticks, run: AgentRun, since: float, workers: int | None, steps: int) -> tuple[float, float]:
    """From when to when so many workers (or any) did ``steps`` steps of their newest unbroken line after ``since``,
    behind its first ``SETTLING``; waits for it.

    Unbroken: a run may grow for a moment as its hosts come. A worker notes the steps of a round of learners when it is
    over, all at once: a stretch begins and ends there.
    """
    results: list[Tick] = []

    def there() -> bool:
        ticks.refresh()
        line = [tick for tick in ticks.rank_zero() if tick.time_s > since]
        others = [at for at, tick in enumerate(line) if workers not in (None, tick.world)]
        results[:] = line[others[-1] + 1 if others else 0 :]
        return bool(results) and results[-1].step >= results[0].step + SETTLING + steps

    def at(step: int) -> float:
        return next(tick.time_s for tick in results if tick.step >= results[0].step + step)

    run.until(there, PHASE_LIMIT_S)
    return at(SETTLING), at(SETTLING + steps)


def pace(line: list[Tick]) -> float:
    """Samples a second between the first of these steps and the last."""
    return BATCH * (line[-1].step - line[0].step) / (line[-1].time_s - line[0].time_s)


def facts(result: Row) -> Row:
    """Of what the command line tells."""
    changes = [change["why"] for change in result["sync_changes"]]
    return {"accuracy": result["metrics"]["accuracy"], "steps": result["steps"], "changes": changes}


def summary(story: Story, rows: list[Row]) -> Row:
    """What each came to, and the verdict on each policy, as ``switching_verdict`` has them."""
    own = {name: [row for row in rows if row["name"] == name] for name in story.words}
    cells = {name: cell(result, len(story.phases)) for name, result in own.items()}
    fixed = {name: each for name, each in cells.items() if not name.startswith("sync_by")}
    return {name: each if name in fixed else each | judge(each, fixed) for name, each in cells.items()}


def kept(rows: Rows, story: Story, name: str, seed: int, smoke: bool) -> Row:
    """As ``told``, with the load average before it, if ``rows`` has not got it. Raises ``OutOfTime``."""

    def measure() -> Row:
        os.environ |= {OWNER: str(os.getpid()), SAMPLE_S: str(story.sample_s), "OMP_NUM_THREADS": "1"}
        load = round(os.getloadavg()[0], 1)
        return {**told(story, name, seed, smoke), "load_average": load}

    result = rows.of(f"{story.name} {name} {seed}", measure)
    print(f"{story.name} {name:20} seed {seed}: {result}", flush=True)
    return result


def ran(story: Story, rows: Rows, seeds: int, smoke: bool) -> Row:
    """What all runs of ``story`` came to. Raises ``OutOfTime``."""
    asked = itertools.product(range(1, seeds + 1), story.words)
    runs = [kept(rows, story, name, seed, smoke) for seed, name in asked]
    result = summary(story, runs)
    judged = {name: each for name, each in result.items() if "met" in each}
    print("\n".join(words(name, each) for name, each in judged.items()), flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="up to 2 workers, the policy and all-reduce, on digits")
    parser.add_argument("--only", default="size,link")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run that would end later")
    args = parser.parse_args()
    return ended(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """The stories that were asked for; the exit code. Raises ``OutOfTime``."""
    stories = [by_size(True)] if args.smoke else [by_size(False), by_link()]
    rows = Rows(args.out, {story.name: asdict(story) for story in stories}, 60 * args.minutes)
    rows.told["emulated"] = "compute (a declared time a sample); hosts are namespaces with shaped links"
    for story in [each for each in stories if each.name in args.only.split(",")]:
        rows.told[story.name] = ran(story, rows, 1 if args.smoke else args.seeds, args.smoke)
        rows.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
