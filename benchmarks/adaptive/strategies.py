"""What it costs to meet seldom: accuracy, bytes and time to a target of every synchronisation strategy.

A CNN on Fashion-MNIST and a character GRU on text that comes with CPython, on a part of their training sets. A learner
is meaning, so one worker that carries all 8 or 16 shows the accuracy of as many workers. Every strategy takes the same
number of samples in the same global batches, and gets the same tuning as synchronous SGD: four learning rates on one
seed; the best on validation data is trained on three fresh seeds and judged on test data. (Lengths of rounds, what
numbers are rounded to and DiLoCo's outer momentum were set by hand before.) The target is one point of validation
accuracy below what synchronous SGD ends with.

Links: the same training on four hosts, network namespaces of this machine whose links are shaped: some dozens of
steps, bytes as the collectives count them, and as they come in by the host's interface. Time to the target is then the
steps of the accuracy runs times the measured time of a step. "whole": runs to the target, measured from end to end.

    python -m benchmarks.adaptive.strategies --only accuracy [--minutes 30]  # kept in build/strategies_trainings.json
    python -m benchmarks.adaptive.strategies --only accuracy --rows cnn:parameter_server:8    # others stay as they are
    python -m benchmarks.adaptive.strategies --only links,whole                # takes root and a quiet machine
    python -m benchmarks.adaptive.strategies --smoke                           # seconds, digits, writes nothing
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from benchmarks.adaptive.strategies_hosts import HOSTS, on_hosts, paces
from benchmarks.adaptive.strategies_summary import SLOWEST, goals, times_to_target
from benchmarks.adaptive.strategies_task import CNN, CNN_LONG, GRU, GRU_LONG, SMOKE, TASKS, Task, text_sha256
from benchmarks.adaptive.strategies_trial import Course, Tuned, mean_of, tuned
from benchmarks.common.kept import OutOfTime, Row, Rows, ended
from benchmarks.common.result_file import conditions, write_result

from elastune.core.errors import UserError
from elastune.core.sync_plan import SyncPlan

RESULTS = Path(__file__).parents[1] / "results" / "strategies.json"
SEEDS = (1, 2, 3)
SELDOM = ("local", "diloco")
ROUNDED = tuple(f"{name}_rounded" for name in SELDOM)
MIXING = ("averaging", "gossip", "pair_averaging")
STALE = "parameter_server"
STRATEGIES = ("allreduce", *SELDOM, *ROUNDED, *MIXING, STALE)
ROUND = 5
"""Global batches of a round whose numbers travel rounded: a pass and a look have a whole number of them."""
PARTS = ("accuracy", "links", "whole")
LINKS = (SLOWEST, "200mbit", "1gbit")
BELOW = 0.01
# What matters most comes first: the time may be up before the end.
CELLS: tuple[tuple[Task, int, tuple[str, ...]], ...] = (
    (CNN_LONG, 8, ("allreduce", *SELDOM, *ROUNDED)),
    (GRU, 8, ("allreduce", *SELDOM, *ROUNDED)),
    (CNN, 8, STRATEGIES),
    (CNN, 16, SELDOM),
    (GRU, 8, MIXING),
    (GRU, 16, SELDOM),
    (GRU_LONG, 8, ("allreduce", *SELDOM, *ROUNDED)),
    (GRU, 8, (STALE,)),
    (CNN, 16, (*MIXING, STALE)),
    (GRU, 16, (*MIXING, STALE)),
)


def plan_of(strategy: str, learners: int, task: Task) -> SyncPlan:
    """Momenta begin anew with each round, so that a round sends what one step of ``allreduce`` sends, or an eighth of
    that, rounded, in rounds of a fifth. An outer momentum takes their place in ``diloco``: the larger, the shorter the
    rounds.
    """
    every = task.every
    if strategy == "allreduce":
        return SyncPlan()
    if strategy in ROUNDED:
        every = min(ROUND, every)
        outer = ",outer_momentum=0.7" if strategy.startswith("diloco") else ""
        shorter = f"learners={learners},every={every},moments=fresh,send=int4{outer}"
        return SyncPlan.parse(f"{strategy.partition('_')[0]}:{shorter}")
    own = {"local": "", "diloco": ",outer_momentum=0.5", STALE: ",staleness=2"}.get(
        strategy, f",mix={max(1, every // 5)}"
    )
    return SyncPlan.parse(f"{strategy}:learners={learners},every={every},moments=fresh{own}")


# -- accuracy ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Baseline:
    """What synchronous SGD came to, in the same training: of this command, or of a row that was kept.

    ``test``: mean and half-width over seeds; ``by_seed``: one each.
    """

    test: tuple[float, float]
    by_seed: tuple[float, ...]
    target: float

    @classmethod
    def of(cls, row: Row) -> Baseline:
        """``row``: of ``allreduce``, no seed of which was lost."""
        return cls((row["test"], row["test_ci"]), tuple(row["by_seed"]), row["target"])


Cells = tuple[tuple[Task, int, tuple[str, ...]], ...]


def accuracies(trainings: Rows, cells: Cells, kept: Sequence[Row] = ()) -> list[Row]:
    """A row for each task, strategy and number of learners that is complete, beside ``kept`` ones of ``allreduce``."""
    rows: list[Row] = []
    known = [row for row in kept if row["strategy"] == "allreduce" and not row["lost"]]
    baselines = {row["task"]: Baseline.of(row) for row in known}
    for task, learners, strategies in cells:
        for strategy in strategies:
            result = None
            try:
                result = tuned(trainings, task, plan_of(strategy, learners, task), SEEDS)
            except OutOfTime as cut:
                print(cut, flush=True)
            if result is None:
                print(f"{task.name} {strategy} {learners}: not complete", flush=True)
                continue
            if strategy == "allreduce" and not result.lost:
                baselines[task.name] = baseline_of(result)
            if task.name in baselines:
                rows.append(accuracy_row(strategy, result, baselines[task.name]))
                print(accuracy_line(rows[-1]), flush=True)
    return rows


def known_trainings(cache: Path, minutes: float) -> Rows:
    """Those that were run before, of this version's form, and so many minutes for others."""
    return Rows(cache, {"course": [each.name for each in fields(Course)]}, 60 * minutes)


def baseline_of(found: Tuned) -> Baseline:
    """Of synchronous SGD, tuned; none of its seeds was lost."""
    (mean, half), score = found.test, found.score
    assert mean is not None
    assert half is not None
    assert score is not None
    return Baseline((mean, half), tuple(course.test or 0.0 for course in found.courses), score - BELOW)


def merged(kept: Sequence[Row], new: Sequence[Row], result: Row) -> list[Row]:
    """``kept`` rows but those that are ``new``; these say by which command they came (``told``)."""

    def key(row: Row) -> tuple[Any, ...]:
        return row["task"], row["strategy"], row["learners"]

    came = {key(row): row | result for row in new}
    return [came.pop(key(row), row) for row in kept] + list(came.values())


def accuracy_row(strategy: str, found: Tuned, baseline: Baseline) -> Row:
    """``equal``: its mean is no lower than the lower end of the baseline's interval, and no seed was lost."""
    mean, half = found.test
    (base, base_half), target = baseline.test, baseline.target
    gaps = [c.test - own for c, own in zip(found.courses, baseline.by_seed, strict=True) if c.test is not None]
    return {
        "task": found.task.name,
        "strategy": strategy,
        "sync": str(found.plan),
        "learners": found.plan.learners,
        "steps": found.task.steps,
        "lr": found.lr,
        "tried": [[lr, score if score >= 0 else None] for lr, score in found.tried],
        "test": mean,
        "test_ci": half,
        "by_seed": [course.test for course in found.courses],
        "gap": mean_of(gaps),
        "lost": found.lost,
        "equal": mean is not None and not found.lost and mean >= base - base_half,
        "target": target,
        "steps_to_target": found.steps_to(target),
        "cpu_s": round(sum(course.cpu_s for course in found.courses), 1),
    }


def accuracy_line(row: Row) -> str:
    lost = f"  {row['lost']} LOST" if row["lost"] else ""
    test, half = ("none" if value is None else f"{100 * value:.2f}" for value in (row["test"], row["test_ci"]))
    return (
        f"{row['task']:9} {row['sync']:62} lr {row['lr']:<6g} {test} ± {half} %  "
        f"steps to {100 * row['target']:.1f} %: {row['steps_to_target']}{lost}"
    )


# -- four hosts -------------------------------------------------------------------------------------------------------


def links(task: Task, link: str, rounds: int, steps: int, learners: int = 8) -> list[Row]:
    """Pace and bytes of every strategy, in turns in one set of processes."""
    plans = [plan_of(strategy, learners, task) for strategy in STRATEGIES]
    lr = task.lrs[0]
    lengths = [rounds * plan.every if plan.in_rounds else steps for plan in plans]
    orders = [{"sync": str(p), "lr": lr, "seed": 1, "steps": n} for p, n in zip(plans, lengths, strict=True)]
    rows = [paces(row) for row in on_hosts(task.name, link, orders)]
    for row in rows:
        row.update(
            task=task.name,
            link=link,
            learners=learners,
            fewer_bytes=round(rows[0]["sent_bytes_a_step"] / row["sent_bytes_a_step"], 2),
        )
        print(
            f"{task.name} {link:8} {row['sync']:62} {row['step_ms']:7.1f} ms a step "
            f"[{row['quartiles_ms'][0]:.1f}-{row['quartiles_ms'][1]:.1f}]  {row['sent_bytes_a_step']:>9,} bytes sent, "
            f"{row['received_bytes_a_step']:,} received; {row['fewer_bytes']} x fewer",
            flush=True,
        )
    return rows


def until_target(rows: list[Row], strategy: str, task: str, link: str) -> Row:
    """One run of ``strategy`` on four hosts, up to the step where one worker reached the target, of the first seed that
    did there."""
    first = next(
        (r for r in rows if (r["task"], r["strategy"]) == (task, strategy) and r["learners"] in (1, 8)),
        {"steps_to_target": [None] * len(SEEDS)},
    )
    reached = [(seed, step) for seed, step in zip(SEEDS, first["steps_to_target"], strict=True) if step is not None]
    if not reached:
        raise UserError(
            "a whole run needs a seed that reached the target", f"{strategy} on {task}", "--only accuracy first"
        )
    seed, steps = reached[0]
    order = {"sync": first["sync"], "lr": first["lr"], "seed": seed, "steps": steps, "looks": True}
    (done,) = on_hosts(task, link, [order])
    step, seconds, value = done["looks"][-1]
    row = {
        **order,
        "task": task,
        "link": link,
        "seconds": round(seconds, 1),
        "validation": value,
        "target": first["target"],
    }
    assert step == order["steps"]
    print(f"{strategy}: {value:.4f} (target {first['target']:.4f}) after {step} steps and {seconds:.1f} s", flush=True)
    return row


def keep(out: Path, result: Row) -> None:
    """What is known, with what follows from all of it."""
    result["times"] = times_to_target(result)
    result["goals"] = goals(result, (*SELDOM, *ROUNDED))
    write_result(out, result)


def context() -> Row:
    """Of a part of the results: parts may come of several commands."""
    return conditions()


def smoke() -> None:
    """Every strategy once on embedded digits, and some steps on four hosts where that is allowed."""
    rows = accuracies(Rows(None), ((SMOKE, 4, STRATEGIES),))
    assert len(rows) == len(STRATEGIES), "a strategy came to nothing"
    if os.geteuid() == 0:
        links(SMOKE, LINKS[-1], rounds=2, steps=4)
    else:
        print("no root: without hosts")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few seconds; writes nothing")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, help="others stay in the results as they are"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no training that would end later")
    parser.add_argument(
        "--rows", nargs="+", type=cell_of, default=(), metavar="TASK:STRATEGY:LEARNERS", help="of accuracy"
    )
    parser.add_argument("--learners", type=int, choices=(8, 16), default=8, help="of links")
    parser.add_argument("--links", nargs="+", choices=LINKS, default=LINKS)
    parser.add_argument("--tasks", nargs="+", choices=("cnn", "gru"), default=("cnn", "gru"), help="on hosts")
    parser.add_argument("--whole", choices=TASKS, default="cnn_long", help="the task of whole runs")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=("allreduce", "diloco"), help="of them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=36, help="of allreduce on hosts")
    parser.add_argument("--cache", type=Path, default=Path("build") / "strategies_trainings.json")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if min(args.rounds, args.steps) < 2:
        raise UserError("a pace is that between meetings, of at least two", min(args.rounds, args.steps), "--rounds 5")
    if args.cache.resolve() == args.out.resolve():
        raise UserError("trainings are kept beside the results", f"--cache and --out {args.out}", "use two files")
    torch.set_num_threads(1)
    if args.smoke:
        smoke()
        return 0
    result: Row = json.loads(args.out.read_text()) if args.out.exists() else {}
    if "accuracy" in args.only:
        load, before = context(), result.get("accuracy", {})
        if before.get("text_sha256", text_sha256()) != text_sha256():
            raise UserError(
                "rows that are kept are of the same text", "another CPython's", f"another --out than {args.out}"
            )
        cells = tuple((TASKS[task], learners, (name,)) for task, name, learners in args.rows) or CELLS
        kept = before.get("rows", [])
        rows = merged(kept, accuracies(known_trainings(args.cache, args.minutes), cells, kept), load)
        whence = f"of the commands that rows name, or of the one here; trainings are kept in {args.cache.name}"
        facts = {"trainings": whence, "text_sha256": text_sha256(), "tasks": sizes(), "rows": rows}
        result["accuracy"] = {**load, **before, **facts}
        keep(args.out, result)
    for name in args.tasks if "links" in args.only else []:
        for link in args.links:
            load = context()
            of = f"{name} {link}" + (f" {args.learners} learners" if args.learners != 8 else "")
            result.setdefault("links", {})[of] = {**load, "hosts": HOSTS, "emulated": "links shaped (tbf)"}
            result["links"][of]["rows"] = links(TASKS[name], link, args.rounds, args.steps, args.learners)
            keep(args.out, result)
    if "whole" in args.only:
        rows = result.get("accuracy", {}).get("rows", [])
        for strategy in args.strategies:
            load = context()
            row = until_target(rows, strategy, args.whole, LINKS[0])
            result.setdefault("whole", {})[f"{args.whole} {strategy}"] = {**load, **row}
            keep(args.out, result)
    print("\n".join(result.get("goals", [])))
    return 0


def cell_of(text: str) -> tuple[str, str, int]:
    """Of "cnn:parameter_server:8". Raises ``ValueError``, which argparse tells."""
    task, strategy, learners = text.split(":")
    if task not in TASKS or strategy not in STRATEGIES:
        raise ValueError(text)
    return task, strategy, int(learners)


def sizes() -> Row:
    """Each task's numbers."""
    return {
        task.name: {
            "batch": task.batch, "training_samples": task.samples, "steps": task.steps, "every": task.every,
            "learning_rates": task.lrs, "parameters": sum(p.numel() for p in task.model().parameters()),
        }
        for task in TASKS.values()
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(ended(main))
