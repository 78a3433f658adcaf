"""A genetic search for a LeNet on MNIST, on 1 to 64 nodes: how many trainings and how much time to 98.6 %?

After Heye (Cray User Group 2018), as far as public: LeNet, Adam, batches of 100, mutation .05, crossover .33 a gene,
the best of a deme migrates every 5 generations, 2 demes of 32, generation after generation. A search ends when a
training reaches 98.6 % on validation data, or after 10 generations without a better one: every search here is a study
of elastune with ``--until "accuracy >= 0.986" --patience 10``.

Every configuration of the space is trained once, for real, by ``elastune.tune``; accuracies and durations make a table
and searches are replayed out of it by ``elastune simulate``'s loop (``genetic_replay.py``), synchronous (a generation
waits for the last) and asynchronous, for several seeds and any number of nodes. ``--live`` runs the same at a small
size (digits, 24 configurations) with real trainings, to the end of each search, beside the same searches replayed.

What differs from Cray's setting, so that all fits into 40 minutes on 2 cores:
- the space is a grid of 180 (lr 1e-4 to 1e-2, dropout .005 to .9, first kernel 2 to 8, second filters 16 or 32, first
  hidden layer 64 or 512; 8 first filters and a second kernel of 5 are fixed); ``--full``: 3,645, up to Cray's 128 and
  256 filters and 4,096 units, and all kernels;
- one pass over 55,000 images (``--full``: two); the last 5,000 training images validate, and the 10,000 test images are
  judge winners only;
- one training seed a configuration; a search never trains the same configuration twice, and neither does the random
  search that it is compared with;
- durations are the CPU seconds of one thread, so that what else the machine does is not in them; starting a training
  (about a second here) is left out;
- forward passes in bf16.

    ELASTUNE_DATA=... python -m benchmarks.sources.genetic_mnist --live     # results/genetic_mnist.json
    ... --live --table benchmarks/results/genetic_mnist.json        # with the trainings of that table
    ELASTUNE_DATA=... python -m benchmarks.sources.genetic_mnist --full --workers 16  # a GPU is used where there is one
    python -m benchmarks.sources.genetic_mnist --smoke                      # digits, 8 trainings; writes with --out

Trainings are kept in ``--folder``: stopped, it goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.common.result_file import conditions
from benchmarks.sources.genetic_replay import (
    PROGRAM,
    Effort,
    Found,
    Key,
    Search,
    Table,
    Training,
    chance,
    effort,
    found_by,
    replay,
    rules,
    speed_up,
)

from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import TrialFinished, TrialStarted
from elastune.core.run import ExecutionSettings
from elastune.runtime.job.run import machine_context
from elastune.runtime.placement import devices
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.results import Study
from elastune.tuning.study.run import tune

RESULT = Path(__file__).parents[1] / "results" / "genetic_mnist.json"
JOURNAL = "journal.jsonl"
TABLE_SEED = 0  # of the trainings in a table
MEASURED, REPLAYED = "measured", "simulated by replay"
DURATION = "cpu_seconds" if devices() == ("cpu",) else "wall_seconds"
RANDOM_SEEDS = 10  # random searches for each seed of a genetic one
RATES = "mutation=0.05,crossover=0.33,migration=5,tournament=4,step=0"


@dataclass(frozen=True)
class Size:
    """What is trained, and what is searched for. ``genes``: name -> levels; ``demes``: (how many, of which size) each.

    ``live_nodes``: how many are here, for searches with real trainings, one for each of ``live_seeds``.
    """

    genes: Mapping[str, Sequence[float]]
    config: Mapping[str, Any] = field(default_factory=dict)
    demes: Sequence[tuple[int, int]] = ((2, 8), (2, 32))
    nodes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    threshold: float = 0.986
    patience: int = 10
    live_nodes: Sequence[int] = ()
    live_seeds: Sequence[int] = ()


SMALL = Size(
    {
        "lr": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
        "dropout": (0.005, 0.45, 0.9),
        "kernel1": (2, 5, 8),
        "filters2": (16, 32),
        "fc": (64, 512),
    }
)
FULL = Size(
    {
        **SMALL.genes,
        "kernel2": (2, 5, 8),
        "filters1": (8, 32, 128),
        "filters2": (16, 64, 256),
        "fc": (64, 512, 4096),
    },
    {"epochs": 2},
)
SMOKE = Size(
    {"lr": (1e-3, 1e-2), "dropout": (0.005, 0.9), "fc": (16, 64)},
    {"data_set": "digits", "kernel1": 3, "kernel2": 2, "filters2": 8, "epochs": 4, "batch_size": 25},
    demes=((1, 2),),
    nodes=(1, 2),
    threshold=0.7,
    live_nodes=(1, 2),
    live_seeds=(0,),
)
LIVE = Size(
    {"lr": (1e-3, 3e-3, 1e-2, 3e-2), "dropout": (0.005, 0.45, 0.9), "kernel1": (2, 3)},
    {"data_set": "digits", "kernel2": 2, "filters2": 8, "fc": 64, "epochs": 6, "batch_size": 25},
    demes=((2, 2),),
    threshold=0.83,
    live_nodes=(1, 2),
    live_seeds=(0, 1),
)


def request(size: Size, out: Path, workers: int, **search: Any) -> StudyRequest:
    """A study of trainings of one worker each."""
    execution = ExecutionSettings(mode="fast", num_slots=1, precision="bf16", device="auto")
    return StudyRequest(
        PROGRAM,
        out,
        config=dict(size.config),
        workers=workers,
        execution=execution,
        resume=(out / JOURNAL).exists(),
        **search,
    )


def trained(genes: Mapping[str, Sequence[float]], out: Path) -> Table:
    """What the journal in ``out`` tells of trainings that have ended. A failed one reached nothing."""
    table = Table(genes, {})
    keys: dict[int, Key] = {}
    results: dict[Key, Training] = {}
    for entry in read(out / JOURNAL) if (out / JOURNAL).exists() else []:
        record = entry.record
        if isinstance(record, TrialStarted):
            keys[record.trial] = table.key(record.params)
        elif isinstance(record, TrialFinished):
            metrics = record.metrics
            results[keys[record.trial]] = Training(
                record.values.get("accuracy", 0.0),
                metrics.get("test_accuracy", 0.0),
                metrics.get(DURATION, record.seconds),
            )
    return Table(genes, results)


def tabulate(size: Size, out: Path, workers: int) -> Table:
    """Train what the journal in ``out`` does not have yet."""
    table = trained(size.genes, out)
    if len(table.trainings) < len(table.keys):
        tune(request(size, out, workers, sampler="grid", trials=len(table.keys)), space=table.space)
        table = trained(size.genes, out)
    missing = len(table.keys) - len(table.trainings)
    if missing:
        raise UserError("the table must be complete", f"{missing} trainings are missing", "run it again: it goes on")
    return table


def earlier(result: Path) -> tuple[Table, dict[str, Any]]:
    """The trainings in a result of this script, and the machine that they were measured on."""
    data = json.loads(result.read_text())
    genes = data["settings"]["genes"]
    rows = {tuple(row[: len(genes)]): Training(*row[len(genes) :]) for row in data["trainings"]["rows"]}
    return Table(genes, rows), data["trainings"].get("machine") or data["machine"]


def cell(found: Effort, random_one: Effort, random_same: Effort) -> dict[str, Any]:
    """One search on one number of nodes, compared with a random one on one node and on as many."""
    return {
        "label": REPLAYED,
        **{name: round(value, 4) for name, value in asdict(found).items()},
        "fewer_runs": round(speed_up(found, random_one).fewer_runs, 3),
        "fewer_seconds_per_run": round(speed_up(found, random_one).fewer_seconds, 3),
        "speed_up": round(speed_up(found, random_one).total, 3),
        "speed_up_over_random_on_as_many": round(speed_up(found, random_same).total, 3),
    }


def replays(table: Table, size: Size, seeds: int, processes: int) -> dict[str, dict[int, dict[str, Any]]]:
    """Search -> nodes -> what a success takes. Random searches cost nothing: there are more of them."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:

        def efforts(search: Search, patience: int | None, count: int) -> dict[int, Effort]:
            results = {}
            for nodes in size.nodes:
                one = partial(replay, table, search, nodes, threshold=size.threshold, patience=patience)
                results[nodes] = effort(list(pool.map(one, range(count), chunksize=5)))
            return results

        random = efforts(Search(""), None, seeds * RANDOM_SEEDS)
        rows = {"random": random}
        for demes, population in size.demes:
            for synchronous in (True, False):
                search = Search(f"demes={demes},population={population},{RATES}", synchronous)
                name = f"{demes} x {population}, {'synchronous' if synchronous else 'asynchronous'}"
                rows[name] = efforts(search, size.patience, seeds)
    return {
        name: {nodes: cell(each, random[size.nodes[0]], random[nodes]) for nodes, each in row.items()}
        for name, row in rows.items()
    }


def live(size: Size, folder: Path, workers: int) -> dict[str, Any]:
    """Searches of the size ``size`` with real trainings, to their end, and the same searches replayed on more nodes.

    A study's seed is that of its trainings, too, so only searches with the table's seed can be replayed out of it.
    ``same_as_tabulated``: how many of a search's real trainings reached exactly the accuracy that the table has for
    them. Every speed-up is over the row of the same label and seed on the first number of nodes.
    """
    table = tabulate(size, folder / "small", workers)
    ((demes, population),) = size.demes
    search = Search(f"demes={demes},population={population},{RATES}", synchronous=True)
    rows: list[dict[str, Any]] = []
    for seed in size.live_seeds:
        for nodes in size.live_nodes:
            out = folder / f"live-{nodes}-{seed}"
            how = rules(search, size.threshold, size.patience)
            kept = Study.load(out) if (out / JOURNAL).exists() else None
            plain_request = request(size, out, nodes, seed=seed, **how)
            study = kept if kept is not None and kept.ending else tune(plain_request, space=table.space)
            again = trained(size.genes, out).trainings
            same = sum(each.accuracy == table.trainings[key].accuracy for key, each in again.items())
            row = {"label": MEASURED, "nodes": nodes, "seed": seed, **rounded(found_by(study, search, size.threshold))}
            rows.append({**row, "ended": study.ending, "same_as_tabulated": same, "trainings": len(again)})
        for nodes in size.nodes if seed == TABLE_SEED else ():
            replayed = replay(table, search, nodes, seed, size.threshold, size.patience)
            rows.append({"label": REPLAYED, "nodes": nodes, "seed": seed, **rounded(replayed)})
    ones = {(row["seed"], row["label"]): row["seconds"] for row in rows if row["nodes"] == size.nodes[0]}
    print(
        f"{demes} x {population}, synchronous, digits: nodes seed runs generations seconds speed-up accuracy test label"
    )
    for row in rows:
        row["speed_up"] = round(ones[row["seed"], row["label"]] / row["seconds"], 3)
        print(
            f"{row['nodes']:5} {row['seed']:5} {row['runs']:5} {row['generations']:5} {row['seconds']:9.2f} "
            f"{row['speed_up']:7.2f} {100 * row['accuracy']:7.2f} {100 * row['test']:7.2f}  {row['label']}"
        )
    return {
        "search": search.sampler,
        "settings": asdict(size),
        "rows": rows,
        "trainings": {"columns": [*size.genes, "accuracy", "test", "seconds"], "rows": listed(table)},
    }


def listed(table: Table) -> list[list[float]]:
    """A row for each training."""
    return [[*key, t.accuracy, t.test, round(t.seconds, 3)] for key, t in sorted(table.trainings.items())]


def rounded(found: Found) -> dict[str, Any]:
    """As it is written down."""
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(found).items()}


def report(table: Table, size: Size, rows: Mapping[str, Mapping[int, Mapping[str, Any]]], seeds: int) -> dict[str, Any]:
    """Print the table; return what is printed of random configurations."""
    odds = chance([each.accuracy for each in table.trainings.values()], size.threshold)
    print(
        f"random configurations that reach {size.threshold:.1%}: {odds.reached} of {odds.tried} = {odds.share:.1%} "
        f"[{odds.low:.1%}, {odds.high:.1%}]; {odds.expected_runs:.1f} runs expected without repetition\n"
        f"a success, over {seeds} seeds, of random {seeds * RANDOM_SEEDS} ({REPLAYED}):\n"
        f"{'search':>24} nodes   reached   runs (95 %)  gen.  seconds  "
        "speed-up = fewer runs x seconds/run  accuracy  test (worst) %"
    )
    for name, row in rows.items():
        for nodes, c in row.items():
            product = f"{c['speed_up']:8.2f} = {c['fewer_runs']:9.2f} x {c['fewer_seconds_per_run']:<11.2f}"
            tests = f"{100 * c['accuracy']:8.2f}  {100 * c['test']:.2f} ({100 * c['worst_test']:.2f})"
            print(
                f"{name:>24} {nodes:5} {c['reached']:4}/{c['searches']:<4} {c['runs']:6.1f} +-{c['runs_ci']:4.1f} "
                f"{c['generations']:5.1f} {c['seconds']:8.1f}  {product}  {tests}"
            )
    return {**asdict(odds), "share": odds.share, "expected_runs_without_repetition": odds.expected_runs}


def run(size: Size, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train, replay, check; all that is written down."""
    if options.table is not None:
        table, machine = earlier(options.table)
    else:
        table, machine = tabulate(size, folder / "table", options.workers), machine_context()
    small = None
    if options.live:
        small = live(SMOKE if size is SMOKE else LIVE, folder, options.workers)
    rows = replays(table, size, options.seeds, options.workers)
    random = report(table, size, rows, options.seeds)
    return {
        "labels": {
            MEASURED: "real trainings, begun and ended by elastune tune",
            REPLAYED: "the same study on elastune simulate's clock; its trainings are those under trainings, measured",
        },
        "settings": {
            **asdict(size),
            "rates": RATES,
            "seeds": options.seeds,
            "random_seeds": options.seeds * RANDOM_SEEDS,
            "durations": DURATION,
        },
        "random_configurations": random,
        "searches": rows,
        "live": small,
        "trainings": {
            "machine": machine,
            "columns": [*size.genes, "accuracy", "test", "seconds"],
            "rows": listed(table),
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="digits, a few seconds; writes to --out alone")
    parser.add_argument("--full", action="store_true", help="3,645 trainings of two passes, larger networks")
    parser.add_argument("--live", action="store_true", help="small searches with real trainings, too")
    parser.add_argument("--table", type=Path, help="an earlier result, whose trainings to replay")
    parser.add_argument("--seeds", type=int, default=10, help="genetic searches of each kind")
    parser.add_argument("--workers", type=int, default=2, help="trainings at a time")
    parser.add_argument("--folder", type=Path, default=Path("elastune-out/genetic_mnist"), help="keeps trainings")
    parser.add_argument("--out", type=Path, help=f"default: {RESULT.name} among the results, but for --smoke")
    options = parser.parse_args()
    try:
        if options.smoke:
            options.seeds, options.live = 2, True
            with tempfile.TemporaryDirectory() as folder:
                result = run(SMOKE, Path(folder), options)
        else:
            options.out = options.out or RESULT
            result = run(FULL if options.full else SMALL, options.folder, options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(written({**conditions(), **result}))
    return 0


def written(found: Mapping[str, Any]) -> str:
    """JSON, with a line for each training; null for what is infinite or unknown."""
    found = json.loads(json.dumps(found), parse_constant=lambda _: None)
    rows = found["trainings"]["rows"]
    text = json.dumps({**found, "trainings": {**found["trainings"], "rows": ["ROWS"]}}, indent=1)
    return text.replace('"ROWS"', ",\n    ".join(json.dumps(row) for row in rows)) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
