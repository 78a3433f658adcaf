"""The Cray seed's combined table: speed-ups of single techniques multiplied, predicted by the planner, and MEASURED.

Heye (Cray User Group 2018) multiplied what random search, data parallelism, model parallelism and a genetic search
bring each by itself, up to 56 times and 2,048 nodes, and left the tests to future work. Here, on MNIST with the split
CNN of ``splits.py``:

- **Measured** is the time until a search has found a configuration that reaches a target accuracy: from the start of
  its first training to the end of the first that reaches it, processes' starts and judging included. Searches are
  studies of elastune (``--until``) on up to 8 hosts with a worker each; single trainings are timed in the same run.
- **Hosts** are network namespaces of this machine, links shaped to 2 Gbit/s. **Compute is emulated**: products and
  convolutions of training are paced to 2 GFLOP/s a worker (``paced.py``), so that 8 workers do not wait for 2 cores (a
  column says how busy those were); judging is not paced. A training is ten steps of 64 images, whatever the mesh; the
  seed multiplied the batch by the nodes that data parallelism takes.
- **Trainings needed**: 96 configurations (rate, momentum, scale of the first weights) are trained once beforehand,
  unpaced; the target is what about 5 % of them reach. A random search tries none twice; a genetic one waits for its
  generations. A search's luck is some trainings more or less, and few seeds tell little of it: so errors are also told
  for the seconds of a run (time over trainings begun), and searches are replayed out of the table for many seeds.
- **Predicted** before anything is measured on hosts, by ``elastune.core.plan``: from short runs on this machine alone,
  the declared link, and how often a random configuration reaches the target.
- **Simulated and modelled**: the same rows at the seed's 1 to 128 and 2,048 nodes. Trainings until the target are
  simulated by replay, seconds of a training are the planner's.

A run that is cut keeps its rows in ``--out``, and the same command goes on from there.

    ELASTUNE_DATA=... python -m benchmarks.sources.combined --out benchmarks/results/combined.json  # 3 seeds, 60 min
    ... --minutes 34                # begins nothing that is not predicted to end by then
    ... --full                      # 10 seeds, however long they take
    python -m benchmarks.sources.combined --smoke                  # digits, 2 hosts, some seconds
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch.nn.functional as F
from benchmarks.common.kept import begun, ended, write
from benchmarks.programs.combined_train import BATCH, JUDGES, STEPS
from benchmarks.sources.combined_live import Hosts, table_of
from benchmarks.sources.combined_planned import Planner, means_of, planned
from benchmarks.sources.combined_rows import ALONE, Found, Row, combined, singles, table, target_of
from benchmarks.sources.combined_summary import PROGRAM, at_scale, say
from benchmarks.sources.genetic_mnist import RATES
from benchmarks.sources.genetic_replay import Search, Table, Training, replay

from elastune.core.mesh import Mesh
from elastune.recipes.datasets import digits, mnist

REPLAYS_S = 90.0  # what is left for them of ``--minutes``


@dataclass(frozen=True)
class Size:
    """What is searched, and where. ``populations``: of each of two demes, live and at scale; ``share``: of
    configurations that reach the target, about; ``most``: trainings of a search. ``scales``: width, data and tensor."""

    genes: Mapping[str, Sequence[float]]
    live: tuple[int, int, int]
    meshes: Sequence[Mesh]
    scales: Sequence[tuple[int, int, int]]
    populations: tuple[int, int] = (4, 8)
    share: float = 0.05
    flops_a_second: float = 2e9
    gbit: float = 2.0
    most: int = 64
    calibrate_s: float = 60.0
    replays: int = 40
    data: str = "mnist"

    @property
    def rows(self) -> tuple[Row, ...]:
        """That are measured."""
        return table(*self.live)

    def search(self, genetic: bool, at_scale: bool = False) -> Search:
        """Who proposes."""
        bred = f"demes=2,population={self.populations[at_scale]},{RATES}"
        return Search(bred, synchronous=True) if genetic else Search("")


SMALL = Size(
    {
        "lr": (1e-5, 1e-4, 3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2),
        "momentum": (0.0, 0.5, 0.8, 0.95),
        "gain": (0.3, 1.0, 3.0),
    },
    live=(2, 2, 2),
    meshes=(ALONE, Mesh(tensor=4), Mesh(data=4), Mesh(tensor=2), Mesh(data=2)),
    scales=((8, 4, 4), (16, 16, 8)),
)
SMOKE = Size(
    {"lr": (1e-3, 1e-2), "momentum": (0.9,), "gain": (1.0,)},
    live=(1, 2, 1),
    meshes=(ALONE, Mesh(data=2)),
    scales=((2, 2, 2),),
    populations=(2, 2),
    share=0.25,
    flops_a_second=5e10,
    most=2,
    calibrate_s=0.0,
    replays=1,
    data="digits",
)


@dataclass
class Kept:
    """What is known so far, and where it is kept."""

    settings: Found
    out: Path | None
    facts: Found = field(default_factory=dict)
    trained: list[Found] = field(default_factory=list)
    searched: list[Found] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)

    @classmethod
    def begun(cls, settings: Found, out: Path | None) -> Kept:
        """What an earlier run with these settings has left in ``out``, if any."""
        kept = cls(settings, out)
        if outcome := begun(out, settings):
            raw = outcome["raw"]
            kept.facts, kept.trained, kept.searched, kept.loads = (
                raw[name] for name in ("facts", "trained", "searched", "loads")
            )
        return kept

    def write(self, outcome: Found) -> None:
        """All of it, with what it comes to."""
        self.loads.append(round(os.getloadavg()[0], 2))
        raw = {"facts": self.facts, "trained": self.trained, "searched": self.searched, "loads": self.loads}
        write(self.out, self.settings, {**outcome, "raw": raw})


def images(name: str, folder: Path) -> Path:
    """A file with what trains and what judges: of MNIST's training and validation images the first ones."""
    cut, outcome = BATCH * STEPS, mnist() if name == "mnist" else digits()
    pairs = [part.tensors for part in (outcome.train, outcome.validation)]
    pixels, labels = ([pair[i][:most] for pair, most in zip(pairs, (cut, JUDGES), strict=True)] for i in (0, 1))
    if name != "mnist":
        pixels = [F.interpolate(each, size=(28, 28)) for each in pixels]
    results = {
        "pixels": np.concatenate([(each * 255).round().byte().numpy() for each in pixels]),
        "labels": np.concatenate([each.numpy() for each in labels]),
    }
    path = folder / "images.npz"
    np.savez(path, **results)
    return path


def learn(size: Size, kept: Kept, config: Mapping[str, Any]) -> Table:
    """Train every configuration once, choose the target, and predict: before anything is measured on hosts."""
    genes = Table(size.genes, {})
    if not kept.facts:
        unpaced = {name: value for name, value in config.items() if name != "flops_a_second"}
        known = table_of(PROGRAM, unpaced, genes, 2)
        accuracies = [each.accuracy for each in known.trainings.values()]
        target, reaching = target_of(accuracies, size.share)
        runs = (len(accuracies) + 1) / (reaching + 1)  # drawn without repetition, until the first
        planner = Planner(PROGRAM, dict(config), 8 / (size.gbit * 1e9), size.calibrate_s)
        alone = [Row("", False, 1, mesh) for mesh in size.meshes]
        live, large = (size.search(True, at_scale).generation for at_scale in (False, True))
        kept.facts = {
            "target": target,
            "reaching": reaching,
            "configurations": len(accuracies),
            "random_runs_expected": round(runs, 3),
            "probed": planner.probed,
            "refused": planner.refused,
            "beside_s": round(planner.beside_s, 4),
            "noise": round(planner.noise, 4),
            "predicted": planned(planner, (*size.rows, *alone), runs, live),
            "modelled": {
                "x".join(map(str, scale)): planned(planner, scaled(scale), runs, large) for scale in size.scales
            },
            "trainings": [[*key, each.accuracy] for key, each in sorted(known.trainings.items())],
        }
    rows = kept.facts["trainings"]
    return Table(size.genes, {tuple(row[:-1]): Training(row[-1], row[-1], 1.0) for row in rows})


def scaled(scale: tuple[int, int, int]) -> tuple[Row, ...]:
    """The rows of that size, and the single techniques in them."""
    _, data, tensor = scale
    alone = (Row("", False, 1, mesh) for mesh in (Mesh(data=data), Mesh(tensor=tensor)))
    return (*table(*scale), *alone)


def todo(size: Size, kept: Kept, seeds: int) -> Iterator[tuple[Row | Mesh, int]]:
    """What is still to be measured: of each seed, a round of single trainings and every row."""
    trained = {(each["mesh"], each["round"]) for each in kept.trained}
    searched = {(each["row"], each["seed"]) for each in kept.searched}
    rows = {row.key: row for row in size.rows}.values()  # at a small size some are the same
    for seed in range(seeds):
        yield from ((mesh, seed) for mesh in size.meshes if (str(mesh), seed) not in trained)
        yield from ((row, seed) for row in rows if (row.key, seed) not in searched)


def measure(size: Size, kept: Kept, config: Mapping[str, Any], known: Table, seeds: int, until: float) -> None:
    """All that is left, as far as it is predicted to end by ``until``. Each is written as it comes."""
    left = list(todo(size, kept, seeds))
    if not left:
        return
    predicted = kept.facts["predicted"]
    count, link = max(row.nodes for row in size.rows), f"{size.gbit:g}gbit"
    with tempfile.TemporaryDirectory() as folder, Hosts(count, link, Path(folder)) as hosts:
        hosts.single(PROGRAM, config, means_of(Mesh(data=count), BATCH, BATCH))  # the first on a host takes longer
        for what, seed in left:
            row = what if isinstance(what, Row) else Row("", False, 1, what)
            plan = predicted[row.key]
            trainings = length(size, known, kept.facts["target"], row, seed) if isinstance(what, Row) else 1.0
            if time.monotonic() + trainings * plan["training_s"] > until:
                if what in (size.rows[0], ALONE):
                    return  # what all else of this seed is compared with
                continue
            execution = means_of(row.mesh, BATCH, plan["micro"])
            if isinstance(what, Row):
                how = (size.search(row.genetic), known, kept.facts["target"], size.most)
                kept.searched.append(hosts.search(PROGRAM, config, execution, row, how, seed))
                print(f"seed {seed}, {row.key}: {told_of(kept.searched[-1])}", flush=True)
            else:
                kept.trained.append({"mesh": str(what), "round": seed, **hosts.single(PROGRAM, config, execution)})
                print(f"round {seed}, {what}: {kept.trained[-1]['seconds']:.1f} s", flush=True)
            kept.write(result(size, kept, known, replays=0))


def length(size: Size, known: Table, target: float, row: Row, seed: int) -> float:
    """Trainings that follow one another in a search, by replay: asked for nothing but whether there is time for it."""
    rounds = replay(known, size.search(row.genetic), row.width, seed, target, program=PROGRAM).seconds
    return min(rounds, size.most / row.width)


def told_of(search: Found) -> str:
    reached = "reached" if search["reached"] else "NOT reached"
    return f"{search['seconds']:.1f} s, {search['runs']} runs, {search['accuracy']:.1%}, target {reached}"


def result(size: Size, kept: Kept, known: Table, replays: int) -> Found:
    """What all of it comes to; ``replays``: seeds of searches that are simulated, 0: none are."""
    facts, rows = kept.facts, size.rows
    predicted = facts["predicted"]
    alone = {mesh: predicted[Row("", False, 1, mesh).key]["training_s"] for mesh in size.meshes}
    one = singles(kept.trained, {str(mesh): seconds for mesh, seconds in alone.items()})
    by_mesh = {row["mesh"]: row["speed_up"]["median"] for row in one}
    results: Found = {
        "labels": {
            "measured": "live: studies on namespaces with shaped links; compute paced, judging and sums real",
            "predicted": "modelled by elastune.core.plan before anything was measured on hosts",
            "simulated": "trainings until the target by replay out of the table; seconds of a training are modelled",
        },
        "single_techniques": one,
        "combined": combined(rows, kept.searched, by_mesh, predicted),
    }
    if replays:
        live, large = size.search(True), size.search(True, at_scale=True)
        target = facts["target"]
        results["replayed"] = at_scale(scaled(size.live), predicted, known, target, live, replays)
        results["at_scale"] = {
            name: at_scale(scaled(scale), facts["modelled"][name], known, target, large, replays)
            for scale, name in zip(size.scales, facts["modelled"], strict=True)
        }
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="digits, 2 hosts, 2 configurations, one seed")
    parser.add_argument("--full", action="store_true", help="10 seeds, however long they take")
    parser.add_argument("--seeds", type=int, default=3, help="searches of each row, and rounds of single trainings")
    parser.add_argument("--minutes", type=float, default=60.0, help="nothing is begun that would not end by then")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began, size = time.monotonic(), SMOKE if options.smoke else SMALL
    seeds, minutes = (10, math.inf) if options.full else (options.seeds, options.minutes)
    if options.smoke:
        seeds = 1
    settings = {
        "emulated": f"training paced to {size.flops_a_second:g} FLOP/s a worker; links of {size.gbit:g} Gbit/s",
        "batch": BATCH,
        "steps": STEPS,
        "judges": JUDGES,
        "data": size.data,
        "genes": dict(size.genes),
        "live": size.live,
        "populations": size.populations,
        "share": size.share,
        "most": size.most,
        "rates": RATES,
    }
    return ended(lambda: run(size, settings, seeds, began + 60 * minutes - REPLAYS_S, options.out))


def run(size: Size, settings: Found, seeds: int, until: float, out: Path | None) -> int:
    """All of it, as far as there is time; the exit code."""
    kept = Kept.begun(settings, out)
    with tempfile.TemporaryDirectory() as folder:
        pixels = images(size.data, Path(folder))
        config = {"images": str(pixels), "flops_a_second": size.flops_a_second}
        known = learn(size, kept, config)
        measure(size, kept, config, known, seeds, until)
    outcome = result(size, kept, known, size.replays)
    kept.write(outcome)
    say(outcome, kept.facts)
    return 0 if outcome["combined"] else 1


if __name__ == "__main__":
    sys.exit(main())
