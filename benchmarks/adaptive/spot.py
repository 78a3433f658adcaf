"""Spot machines: what a training costs on recorded offers, and whether kills and joins by such a trace leave its bits.

``simulated``: a job on windows of two recorded traces (``$ELASTUNE_DATA/spot_traces``, from uclasystem/bamboo, MIT),
at constant assumed prices: 3.06 on demand, 0.918 spot (the traces have none). Its work is a part of what all workers do
by the deadline, the window's end; speed is linear. The policy ``spot`` beside spot alone, on demand alone, the same
choices with all restarting at each change (20 s at a join, 74 s at a loss: elastic Ray Train, as measured by us once;
``hosts.py`` saw 22 s and 77 s, once), the published all-or-nothing policy with these restarts, and the
hindsight optimum. What changes cost elastune is taken from the live part of the same run. ``stable``: the window with
the fewest changes, where elasticity brings little.

``live``: the AWS trace, compressed in time and to four workers: each loss is a kill -9 without notice, each machine
that comes a worker that joins, while a small network trains on digits in ``exact`` mode. Hash and ledger against one
undisturbed worker's; pauses and times to join are measured.

    python -m benchmarks.adaptive.spot [--smoke] [--out benchmarks/results/spot.json]
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.adaptive.spot_live import Live, live
from benchmarks.common.result_file import write_result

from elastune.adapt.policies.library.spot import SpotRules
from elastune.core.cost import ON_DEMAND, SPOT, Prices
from elastune.core.plan.prices import Availability
from elastune.tuning.simulate.market import HINDSIGHT, POLICY, CostForecast, Market, MarketJob, Overheads, forecasts

HOUR = 3600.0
PRICES = Prices({SPOT: ((0.0, 0.918),), ON_DEMAND: ((0.0, 3.06),)})
PARTS = (0.5, 0.7, 0.8, 0.9, 0.95)
WINDOW_S = 4 * HOUR
ASSUMED = Live(join_s=0.1, loss_s=0.1, start_s=2.0)


def aws(folder: Path) -> Availability:
    """Nodes of a p3 cluster that came and went."""
    nodes: set[str] = set()
    steps: dict[float, int] = {}
    for at_ms, what, node in csv.reader((folder / "aws_p3.csv").read_text().splitlines()):
        (nodes.add if what == "add" else nodes.discard)(node)
        steps[int(at_ms) / 1e3] = len(nodes)
    return Availability(tuple(sorted(steps.items())))


def gcloud(folder: Path) -> Availability:
    """V100 that could be had, a line a minute. Where times go back, the later line is right."""
    steps: list[tuple[float, int]] = []
    for line in (folder / "gcloud_v100_east1c.txt").read_text().splitlines():
        day, clock, number = line.split(", ")
        at = datetime.fromisoformat(f"{day} {clock}+00:00").timestamp()
        steps = [step for step in steps if step[0] < at] if steps and steps[-1][0] >= at else steps
        steps.append((at, int(number)))
    changes = [step for i, step in enumerate(steps) if i in (0, len(steps) - 1) or step[1] != steps[i - 1][1]]
    return Availability(tuple(changes)).from_zero()


def window(offer: Availability, begin_s: float, seconds: float) -> Availability:
    """What was on offer in that time, begun at second 0."""
    inside = tuple((at - begin_s, n) for at, n in offer.steps if begin_s < at < begin_s + seconds)
    return Availability(((0.0, offer.at(begin_s)), *inside, (seconds, offer.at(begin_s + seconds))))


def windows(offer: Availability, count: int) -> list[Availability]:
    """``count`` of them, evenly spread."""
    room = offer.end_s - WINDOW_S
    return [window(offer, room * i / max(1, count - 1), WINDOW_S) for i in range(count)]


def calmest(offers: Iterable[Availability]) -> Availability:
    return min(offers, key=lambda offer: len(offer.steps))


def cell(offers: Sequence[Availability], most: int, part: float, own: Overheads) -> dict[str, Any]:
    """All windows with jobs of that part of the most that can be done in them."""
    results = []
    for offer in offers:
        rules = SpotRules(offer.end_s, most)
        results.append(forecasts(MarketJob(part * most * offer.end_s), Market(offer, PRICES), rules, own))
    ways = {each.name: [one for several in results for one in several if one.name == each.name] for each in results[0]}
    deadline_s = offers[0].end_s
    return {name: told(several, ways[HINDSIGHT], deadline_s) for name, several in ways.items() if name != HINDSIGHT}


def told(several: Sequence[CostForecast], best: Sequence[CostForecast], deadline_s: float) -> dict[str, Any]:
    """Medians and worst cases over windows. Costs of jobs that were not done say nothing and are left out."""
    done = [
        one.cost / least.cost
        for one, least in zip(several, best, strict=True)
        if one.replay is not None and one.replay.done_s is not None and one.cost and least.cost
    ]
    goodputs = [one.replay.goodput for one in several if one.replay is not None]
    return {
        "over_optimum": {"median": _round(statistics.median(done)), "most": _round(max(done))} if done else None,
        "in_time": sum(one.in_time(deadline_s) for one in several),
        "of": len(several),
        "goodput": {"median": _round(statistics.median(goodputs)), "least": _round(min(goodputs))},
    }


def _round(value: float) -> float:
    return round(value, 4)


def simulated(folder: Path, own: Overheads, parts: Sequence[float], count: int) -> list[dict[str, Any]]:
    """A cell for each trace and part, and one for the calmest window."""
    cells = []
    for name, offer in (("aws_p3", aws(folder)), ("gcloud_v100", gcloud(folder))):
        most, several = max(n for _, n in offer.steps), windows(offer, count)
        whole = [window(offer, 0.0, offer.end_s)]
        for part in parts:
            for what, offers in (("whole trace", whole), (f"{count} windows of 4 h", several)):
                cells.append({"trace": name, "offers": what, "part": part, "ways": cell(offers, most, part, own)})
        stable = calmest(several)
        ways = cell([stable], most, parts[-1], own)
        cells.append(
            {"trace": name, "offers": f"stable, {len(stable.steps) - 2} changes", "part": parts[-1], "ways": ways}
        )
    return cells


def show(cells: Sequence[dict[str, Any]]) -> None:
    print(f"{'simulated':24} {'part':>5}  cost over the optimum (median, most), in time, goodput (least)")
    for one in cells:
        print(f"{one['trace']}, {one['offers']}, {one['part']:.0%} of what all workers could do")
        for name, way in one["ways"].items():
            over = way["over_optimum"]
            cost = f"{over['median']:.3f} {over['most']:.3f}" if over else "not done"
            print(f"  {name:38} {cost:>14}  {way['in_time']}/{way['of']}  {way['goodput']['least']:.4f}")


def missed(cells: Sequence[dict[str, Any]]) -> list[str]:
    """What the policy falls short of: deadlines, 10 % over the optimum, goodput of 99 %."""
    results = []
    for one in cells:
        way, where = one["ways"][POLICY], f"{one['trace']}, {one['offers']}, part {one['part']}"
        results += [f"{where}: {way['of'] - way['in_time']} too late"] * (way["in_time"] < way["of"])
        results += [f"{where}: {way['over_optimum']} over the optimum"] * (way["over_optimum"]["most"] > 1.1)
        results += [f"{where}: goodput {way['goodput']}"] * (way["goodput"]["least"] < 0.99)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="two windows, a short live part; fails where it must not")
    parser.add_argument("--no-live", action="store_true", help="simulate alone, at assumed costs of changes")
    parser.add_argument("--seconds", type=float, default=150.0, help="that the live part compresses the trace to")
    parser.add_argument("--windows", type=int, default=20, help="of 4 h, of each trace")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = Path(os.environ.get("ELASTUNE_DATA", "data")) / "spot_traces"
    if not folder.is_dir():
        print(f"no {folder}: name the folder of data sets in ELASTUNE_DATA", file=sys.stderr)
        return 2
    seen = ASSUMED
    if not args.no_live:
        trace = aws(folder)
        seen = live(window(trace, 0.0, 1.5 * HOUR) if args.smoke else trace, 6.0 if args.smoke else args.seconds)
        print(json.dumps(seen.data, indent=1), flush=True)
    own = Overheads(seen.start_s, seen.join_s, seen.loss_s)
    cells = simulated(folder, own, PARTS[-2:-1] if args.smoke else PARTS, 2 if args.smoke else args.windows)
    show(cells)
    short = missed(cells)
    print("\n".join(["short of a goal:", *short] if short else ["all goals met"]))
    if args.out:
        data = {
            "prices_assumed": {"spot": 0.918, "on-demand": 3.06},
            "overheads_s": {"start": seen.start_s, "join": seen.join_s, "loss": seen.loss_s},
            "restart_overheads_s": {"join": 20.0, "loss": 74.0},
            "live": seen.data,
            "simulated": cells,
            "short_of_goals": short,
        }
        write_result(args.out, data)
    return int(bool(seen.wrong))


if __name__ == "__main__":
    raise SystemExit(main())
